"""Linear layers that share their x."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from q4_programs import emit_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from q4_programs import ProgramBuilder, Value

__all__ = ["JoinedLinear", "emit_project", "project"]


class JoinedLinear(nn.Module):
    """Several linear layers over one x (q, k and v; gate and up), in as few calls as their formats allow.

    A call costs a small model about as much as a third of the rows that it computes, and with several threads each one
    ends with all of them waiting for the last.

    Args:
        layers: Linear layers of the same in-features.
        parts: For each layer, the out-features of the parts whose rows it holds.
    """

    def __init__(self, layers: Sequence[nn.Module], parts: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.parts = tuple(parts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return [..., N] of each part, from x [..., K]; parts of one layer are views of its result."""
        results = zip(self.layers, self.parts, strict=True)
        return tuple(part for layer, sizes in results for part in layer(x).split(sizes, -1))

    def emit_program(self, builder: ProgramBuilder, x: Value) -> list[Value]:
        """Emit a product for each layer."""
        return emit_parts(builder, x, [*self.layers], self.parts)


def project(module: Any, joined: str, x: torch.Tensor, memory: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
    """Return what a module's layers that share their x give: of the joined one where there is one, else of each.

    Args:
        module: Has ``joins``, from the joined layer's name to those of its parts.
        joined: That name.
        x: [..., K] for the first part.
        memory: [..., K] for the others. Defaults to x. A joined layer computes all parts of both, then.
    """
    memory = x if memory is None else memory
    layer = getattr(module, joined)
    if layer is None:
        first, *others = (getattr(module, name) for name in module.joins[joined])
        return [first(x), *(other(memory) for other in others)]
    parts: tuple[torch.Tensor, ...] = layer(x)
    return parts if memory is x else (parts[0], *layer(memory)[1:])


def emit_project(module: Any, joined: str, builder: ProgramBuilder, x: Value) -> Sequence[Value]:
    """Emit what ``project`` computes."""
    layer = getattr(module, joined)
    if layer is not None:
        parts: Sequence[Value] = builder.emit(layer, x)
        return parts
    layers = [getattr(module, name) for name in module.joins[joined]]
    return emit_parts(builder, x, layers, [(layer.out_features,) for layer in layers])
