"""Convolution and recurrent layers over packed weights: their products are those of 4-bit linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_nn.programs.emitters import emit_recurrent
from q4core.programs import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4_nn.programs.builder import ProgramBuilder, Value

__all__ = ["FilledLinear", "Q4Conv2d", "Q4Recurrent"]


def _filled(x: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return x with zeros up to a layer's in-features, which its weight was filled up to."""
    missing = layer.in_features - x.shape[-1]
    return nn.functional.pad(x, (0, missing)) if missing else x


def _emit_filled(builder: ProgramBuilder, x: Value, layer: Any) -> Value:
    """Emit what ``_filled`` computes: a copy into zeros."""
    if layer.in_features == x.shape[-1]:
        return x
    shape = (*x.shape[:-1], layer.in_features)
    filled = builder.constant((id(layer), len(builder.modules)), lambda: torch.zeros(shape))
    builder.step(Op.COPY, x, out=builder.columns(filled, 0, x.shape[-1]))
    return filled


class FilledLinear(nn.Module):
    """A 4-bit layer whose x is filled up with zeros to whole blocks, as its weight was.

    Args:
        layer: ``Q4Linear`` of more in-features.
        in_features: K of x.
    """

    def __init__(self, layer: nn.Module, in_features: int) -> None:
        super().__init__()
        self.layer = layer
        self.in_features = in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., N] from [..., K]."""
        y: torch.Tensor = self.layer(_filled(x, self.layer))
        return y

    def emit_program(self, builder: ProgramBuilder, x: Value) -> Value:
        """Emit the product, and what fills x up."""
        y: Value = builder.emit(self.layer, _emit_filled(builder, x, self.layer))
        return y


class Q4Conv2d(nn.Module):
    """A convolution whose kernels are the rows of a 4-bit layer; patches are gathered and multiplied at once.

    Gathering takes memory: kernel height · width times that of x, and no less than a row of whole blocks.

    Args:
        layer: ``Q4Linear``: out_channels × (in_channels · height · width, filled up to whole blocks).
        like: The layer of torch's that it computes as, padded with zeros; its sizes are taken, not its parameters.
    """

    def __init__(self, layer: nn.Module, like: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer
        self.kernel_size, self.stride, self.dilation = like.kernel_size, like.stride, like.dilation
        self.padding: Any = like.padding  # numbers: STEConv2d takes no words

    def extra_repr(self) -> str:
        """Return what torch prints beside the layer."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, out_channels, H', W'] from [B, in_channels, H, W]."""
        batch, _, *sizes = x.shape
        taken = zip(sizes, self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        height, width = (
            (size + 2 * pad - wide * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, wide in taken
        )
        patches = nn.functional.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)
        y: torch.Tensor = self.layer(_filled(patches.transpose(1, 2), self.layer))
        return y.transpose(1, 2).reshape(batch, -1, height, width)


class Q4Recurrent(nn.Module):
    """An RNN, LSTM or GRU over 4-bit layers: x meets its weights in one call, the state in one call per position.

    Args:
        cells: For each layer and direction, in torch's order, the 4-bit layers of x and of the state, with biases.
        like: The layer of torch's that it computes as; its sizes and options are taken, not its parameters.
    """

    def __init__(self, cells: Sequence[tuple[nn.Module, nn.Module]], like: nn.RNNBase) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(cell[0] for cell in cells)
        self.states = nn.ModuleList(cell[1] for cell in cells)
        self.mode = like.mode
        self.hidden_size = like.hidden_size
        self.num_layers = like.num_layers
        self.batch_first = like.batch_first
        self.directions = 2 if like.bidirectional else 1
        self.dropout = like.dropout

    @property
    def ends(self) -> list[str]:
        """Ends of the names that torch gives each cell's parameters, such as ``_l0`` and ``_l0_reverse``."""
        sides = ("", "_reverse")[: self.directions]
        return [f"_l{level}{side}" for level in range(self.num_layers) for side in sides]

    def extra_repr(self) -> str:
        """Return what torch prints beside the layers."""
        return f"{self.mode}, hidden_size={self.hidden_size}, num_layers={self.num_layers}"

    def forward(self, x: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Return (y, state) as torch's layer does.

        Args:
            x: [B, T, K] with ``batch_first``, else [T, B, K].
            state: [layers · directions, B, hidden], or a pair of such for an LSTM; zeros unless told.
        """
        x = x.transpose(0, 1) if self.batch_first else x
        if state is None:
            zeros = x.new_zeros(self.num_layers * self.directions, x.shape[1], self.hidden_size)
            state = (zeros, zeros) if self.mode == "LSTM" else zeros
        states = torch.stack(state) if self.mode == "LSTM" else state[None]
        last: list[torch.Tensor] = []
        for level in range(self.num_layers):
            sides = []
            for side in range(self.directions):
                cell = level * self.directions + side
                y, end = self._run(cell, x.flip(0) if side else x, states[:, cell])
                sides.append(y.flip(0) if side else y)
                last.append(end)
            x = torch.cat(sides, -1)
            if self.dropout and level + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout, self.training)
        ends = torch.stack(last, 1)
        y = x.transpose(0, 1) if self.batch_first else x
        return y, (tuple(ends) if self.mode == "LSTM" else ends[0])

    def emit_program(self, builder: ProgramBuilder, x: Value, state: Any = None) -> tuple[Value, Any]:
        """Emit every position."""

        def product(kind: str, cell: int, given: Value) -> Value:
            layer = (self.inputs if kind == "i" else self.states)[cell]
            y: Value = builder.emit(layer, _emit_filled(builder, given, layer))
            return y

        return emit_recurrent(self, builder, x, state, product)

    def _run(self, cell: int, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y [T, B, hidden] and the last state [1 or 2, B, hidden] of one cell."""
        taken: torch.Tensor = self.inputs[cell](_filled(x, self.inputs[cell]))
        hidden, memory = state[0], state[-1]
        ys = []
        for given in taken:
            kept = self.states[cell](_filled(hidden, self.states[cell]))
            if self.mode == "LSTM":
                into, forget, value, out = (given + kept).chunk(4, -1)
                memory = forget.sigmoid() * memory + into.sigmoid() * value.tanh()
                hidden = out.sigmoid() * memory.tanh()
            elif self.mode == "GRU":
                (reset, update, value), kept = given.chunk(3, -1), kept.chunk(3, -1)
                reset, update = (reset + kept[0]).sigmoid(), (update + kept[1]).sigmoid()
                value = (value + reset * kept[2]).tanh()
                hidden = value + update * (hidden - value)
            else:
                total = given + kept
                hidden = total.tanh() if self.mode == "RNN_TANH" else total.relu()
            ys.append(hidden)
        end = torch.stack((hidden, memory)) if self.mode == "LSTM" else hidden[None]
        return torch.stack(ys), end
