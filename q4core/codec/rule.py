"""What a quantisation rule gives for some blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs
import torch


@attrs.frozen
class Coded:
    """Codes and numbers of some blocks.

    Args:
        codes: uint8 [..., block], one code per byte.
        scale: [...], in the dtype that it is stored with.
        offset: [...], for formats with an offset.
        zero: uint8 [...], for INTEGER formats that are not symmetric.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None
    zero: torch.Tensor | None = None

    @classmethod
    def join(cls, codes: torch.Tensor, parts: Sequence[Coded], dim: int) -> Coded:
        """Return the numbers of several parts joined along ``dim``, with ``codes`` in place of theirs."""
        offsets = [part.offset for part in parts if part.offset is not None]
        zeros = [part.zero for part in parts if part.zero is not None]
        kind = parts[0].scale.dtype
        scales = [part.scale.view(torch.uint8) if kind.itemsize == 1 else part.scale for part in parts]
        return cls(
            codes,
            torch.cat(scales, dim).view(kind),  # float8 can't be joined on every device; its bytes can
            offset=torch.cat(offsets, dim) if offsets else None,
            zero=torch.cat(zeros, dim) if zeros else None,
        )


Rule: TypeAlias = Callable[[torch.Tensor], Coded]
"""Turns float32 blocks [..., block] into codes and numbers."""


def quotient(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return ``values / divisor``, each rounded once.

    On CUDA torch multiplies by the reciprocal of a Python number, which rounds twice; a tensor it divides by.
    """
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)
