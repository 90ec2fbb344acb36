"""Hooks: layer types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4core import hookimpl

if TYPE_CHECKING:
    from q4_nn.layer_type import LayerType

__all__ = ["q4_layers"]


@hookimpl
def q4_layers() -> list[LayerType]:
    """Return the layer types that come with q4-nn."""
    from q4_nn.registry.builtin import LAYER_TYPES  # noqa: PLC0415  # not before it is needed

    return [*LAYER_TYPES]
