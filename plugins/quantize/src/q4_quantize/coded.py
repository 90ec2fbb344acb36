"""``Coded``: codes of some blocks, with their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from q4core.plugin_api import cat_stored

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Coded"]


@attrs.frozen
class Coded:
    """Codes of some blocks, uint8 [..., block], one per byte, and their numbers [...] as they are stored."""

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    nested_scale: torch.Tensor | None = None
    nested_offset: torch.Tensor | None = None

    @classmethod
    def join(cls, codes: torch.Tensor, parts: Sequence[Coded], dim: int) -> Coded:
        """Return the numbers of several parts joined along ``dim``, with ``codes`` in place of theirs."""
        others = {}
        for name in ("offset", "zero", "nested_scale", "nested_offset"):
            found = [tensor for part in parts if (tensor := getattr(part, name)) is not None]
            others[name] = torch.cat(found, dim) if found else None
        return cls(codes, cat_stored([part.scale for part in parts], dim), **others)
