"""Convolution and recurrent layers over packed weights: their products are those of 4-bit linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from q4_programs import Op, emit_recurrent
from q4core import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4_programs import ProgramBuilder, Value

__all__ = ["FilledLinear", "Q4Conv2d", "Q4Recurrent"]


def _require(  # noqa: PLR0913  # the facts of one layer
    label: str, x: object, layer: Any, shape: str, *, ranks: Sequence[int] = (), at: int = -1, size: int
) -> None:
    """Refuse an x that torch's layer refuses; once it is filled up, the 4-bit layer can't see that it does not fit.

    Raises:
        InputError: x is no dense tensor of the layer's dtype, its rank is none of ``ranks``, or its extent at ``at`` is
            not ``size``.
    """
    if not isinstance(x, torch.Tensor):
        raise InputError(label, name="x", rule="a tensor", value=type(x).__name__, hint="Use torch.as_tensor(x).")
    if x.layout is not torch.strided:
        raise InputError(label, name="x", rule="a strided tensor", value=x.layout, hint="Use x.to_dense().")
    if x.dim() < -at or (ranks and x.dim() not in ranks) or x.shape[at] != size:
        raise InputError(label, name="x", rule=f"of shape {shape}", value=list(x.shape))
    is_cast = x.is_floating_point() and torch.is_autocast_enabled(x.device.type)
    if x.dtype is not layer.dtype and not is_cast:
        raise InputError(label, name="x", rule=f"of dtype {layer.dtype}", value=x.dtype)


def _filled(x: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return x with zeros up to a layer's in-features, which its weight was filled up to."""
    missing = layer.in_features - x.shape[-1]
    return nn.functional.pad(x, (0, missing)) if missing else x


def _emit_filled(builder: ProgramBuilder, x: Value, layer: Any, size: int) -> Value:
    """Emit what ``_filled`` computes of an x of so many features: a copy into zeros."""
    if x.shape[-1] != size:
        builder.refuse(f"x has the shape {list(x.shape)}, not {size} features")
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
        """Return [..., N] from [..., K].

        Raises:
            InputError: x has the wrong shape, dtype or device.
        """
        layer: Any = self.layer
        _require(f"layer {layer.name!r}", x, layer, f"[..., {self.in_features}]", size=self.in_features)
        y: torch.Tensor = layer(_filled(x, layer))
        return y

    def emit_program(self, builder: ProgramBuilder, x: Value) -> Value:
        """Emit the product, and what fills x up."""
        y: Value = builder.emit(self.layer, _emit_filled(builder, x, self.layer, self.in_features))
        return y


class Q4Conv2d(nn.Module):
    """A convolution whose kernels are the rows of a 4-bit layer; patches are gathered and multiplied at once.

    Gathering takes memory: kernel height · width times that of x, and no less than a row of whole blocks.

    Args:
        layer: ``Q4Linear``: out_channels × (in_channels · height · width, filled up to whole blocks).
        like: The layer of torch's that it computes as, padded with zeros; its sizes are used, not its parameters.
    """

    def __init__(self, layer: nn.Module, like: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer
        self.in_channels = like.in_channels
        self.kernel_size, self.stride, self.dilation = like.kernel_size, like.stride, like.dilation
        self.padding: Any = like.padding  # numbers: STEConv2d takes no words

    def extra_repr(self) -> str:
        """Return the options that torch prints before the layer."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, out_channels, H', W'] from [B, in_channels, H, W], or both without B.

        Raises:
            InputError: x has the wrong shape, dtype or device, or is smaller than the kernel.
        """
        layer: Any = self.layer
        label = f"layer {layer.name!r}"
        shape = f"[{self.in_channels}, height, width] or [batch, {self.in_channels}, height, width]"
        _require(label, x, layer, shape, ranks=(3, 4), at=-3, size=self.in_channels)
        images = x if x.dim() == 4 else x[None]  # noqa: PLR2004  # with a batch
        sides = zip(images.shape[2:], self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        height, width = (
            (size + 2 * pad - wide * (kernel - 1) - 1) // step + 1 if size else 0
            for size, kernel, step, pad, wide in sides
        )
        if min(height, width) < 1:
            rule = f"no smaller than the kernel of {list(self.kernel_size)}, padding included"
            raise InputError(label, name="x", rule=rule, value=list(x.shape))
        patches = nn.functional.unfold(images, self.kernel_size, self.dilation, self.padding, self.stride)
        y: torch.Tensor = layer(_filled(patches.transpose(1, 2), layer))
        y = y.transpose(1, 2).reshape(len(images), layer.out_features, height, width)
        return y if x.dim() == 4 else y[0]  # noqa: PLR2004  # as above


class Q4Recurrent(nn.Module):
    """An RNN, LSTM or GRU over 4-bit layers: x meets its weights in one call, the state in one call per position.

    Args:
        cells: For each layer and direction, in torch's order, the 4-bit layers of x and of the state, with biases.
        like: The layer of torch's that it computes as; its sizes and options are used, not its parameters.
    """

    def __init__(self, cells: Sequence[tuple[nn.Module, nn.Module]], like: nn.RNNBase) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(cell[0] for cell in cells)
        self.states = nn.ModuleList(cell[1] for cell in cells)
        self.mode = like.mode
        self.input_size = like.input_size
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
        """Return the options that torch prints before the layers."""
        return f"{self.mode}, hidden_size={self.hidden_size}, num_layers={self.num_layers}"

    def forward(self, x: torch.Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """Return (y, state) as torch's layer does.

        Args:
            x: [B, T, K] with ``batch_first``, else [T, B, K]; [T, K] of one sequence; or a ``PackedSequence``.
            hx: [layers · directions, B, hidden], without B for one sequence, or a pair of such for an LSTM. Defaults to
                zeros.

        Raises:
            InputError: x or hx has the wrong shape, dtype or device, or x has no position.
        """
        if isinstance(x, PackedSequence):
            self._require(x.data, f"[rows, {self.input_size}] in a PackedSequence", ranks=(2,))
            y, ends = self._layers(x.data, x.batch_sizes.tolist(), self._states(hx, x.data, int(x.batch_sizes[0]), x))
            if x.unsorted_indices is not None:
                ends = ends.index_select(2, x.unsorted_indices)
            return PackedSequence(y, x.batch_sizes, x.sorted_indices, x.unsorted_indices), self._state(ends)
        batched = "batch, positions" if self.batch_first else "positions, batch"
        self._require(x, f"[positions, {self.input_size}] or [{batched}, {self.input_size}]", ranks=(2, 3))
        is_one = x.dim() == 2  # noqa: PLR2004  # without a batch
        steps = x.unsqueeze(1) if is_one else x.transpose(0, 1) if self.batch_first else x
        count, batch = steps.shape[:2]
        if not count:
            raise InputError(self._label, name="x", rule="of at least one position", value=list(x.shape))
        y, ends = self._layers(steps.flatten(0, 1), [batch] * count, self._states(hx, x, None if is_one else batch))
        if is_one:
            return y, self._state(ends.squeeze(2))
        y = y.unflatten(0, (count, batch))
        return y.transpose(0, 1) if self.batch_first else y, self._state(ends)

    def emit_program(self, builder: ProgramBuilder, x: Value, state: Any = None) -> tuple[Value, Any]:
        """Emit every position."""

        def product(kind: str, cell: int, given: Value) -> Value:
            layer = (self.inputs if kind == "i" else self.states)[cell]
            size = self.hidden_size
            if kind == "i":
                size = self.input_size if cell < self.directions else size * self.directions
            y: Value = builder.emit(layer, _emit_filled(builder, given, layer, size))
            return y

        return emit_recurrent(self, builder, x, state, product)

    @property
    def _label(self) -> str:
        layer: Any = self.inputs[0]
        return f"layer {layer.name.rpartition('.')[0]!r}"

    def _require(self, x: object, shape: str, *, ranks: tuple[int, ...]) -> None:
        _require(self._label, x, self.inputs[0], shape, ranks=ranks, size=self.input_size)

    def _states(
        self, hx: Any, x: torch.Tensor, batch: int | None, packed: PackedSequence | None = None
    ) -> torch.Tensor:
        """Return the states before the first position, [1 or 2, cells, B, hidden]; B is 1 where there is no batch."""
        kinds, cells = 2 if self.mode == "LSTM" else 1, len(self.inputs)
        layer: Any = self.inputs[0]
        shape = [cells, self.hidden_size] if batch is None else [cells, batch, self.hidden_size]
        if hx is None:
            return x.new_zeros(kinds, cells, 1 if batch is None else batch, self.hidden_size, dtype=layer.dtype)
        given = hx if kinds == 2 else (hx,)  # noqa: PLR2004  # an LSTM's
        if not isinstance(given, (tuple, list)) or len(given) != kinds:
            raise InputError(self._label, name="hx", rule="a pair of tensors", value=type(hx).__name__)
        for item in given:
            value, is_fit = type(item).__name__, False
            if isinstance(item, torch.Tensor):
                value = f"{item.dtype} {list(item.shape)} on {item.device}"
                is_cast = torch.is_autocast_enabled(x.device.type) and item.is_floating_point()
                is_fit = (item.dtype is layer.dtype or is_cast) and item.device == x.device
                is_fit = is_fit and list(item.shape) == shape
            if not is_fit:
                rule = f"{layer.dtype} {shape} on {x.device}"
                raise InputError(self._label, name="hx", rule=rule, value=value)
        states = torch.stack([*given])
        if packed is not None and packed.sorted_indices is not None:
            return states.index_select(2, packed.sorted_indices)
        return states.unsqueeze(2) if batch is None else states

    def _state(self, ends: torch.Tensor) -> Any:
        return tuple(ends) if self.mode == "LSTM" else ends[0]

    def _layers(self, x: torch.Tensor, sizes: list[int], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y [rows, directions · hidden] and the last states; of x, ``sizes[t]`` rows are of position t."""
        last: list[torch.Tensor] = []
        for level in range(self.num_layers):
            sides = []
            for side in range(self.directions):
                cell = level * self.directions + side
                y, end = self._run(cell, x, sizes, states[:, cell])
                sides.append(y)
                last.append(end)
            x = torch.cat(sides, -1)
            if self.dropout and level + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout, self.training)
        return x, torch.stack(last, 1)

    def _run(
        self, cell: int, x: torch.Tensor, sizes: list[int], state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y [rows, hidden] and the last state [1 or 2, B, hidden] of one cell.

        Sequences are sorted by their lengths: those that continue at a position are the first ones.
        """
        taken = self.inputs[cell](_filled(x, self.inputs[cell])).split(sizes)
        now = tuple(state)
        ys: list[torch.Tensor] = []
        backwards = cell % self.directions == 1
        for given in reversed(taken) if backwards else taken:
            count = len(given)
            if count == state.shape[1]:
                now = self._step(cell, given, *now)
            else:
                moved = self._step(cell, given, *(item[:count] for item in now))
                now = tuple(torch.cat((one, item[count:])) for one, item in zip(moved, now, strict=True))
            ys.append(now[0][:count])
        return torch.cat(ys[::-1] if backwards else ys), torch.stack(now)

    def _step(self, cell: int, given: torch.Tensor, hidden: torch.Tensor, *memory: torch.Tensor) -> tuple[Any, ...]:
        """Return the state after one position; ``given`` is the product of its x and the input weights."""
        recurrent: Any = self.states[cell](_filled(hidden, self.states[cell]))
        if self.mode == "LSTM":
            into, forget, value, out = (given + recurrent).chunk(4, -1)
            cells = forget.sigmoid() * memory[0] + into.sigmoid() * value.tanh()
            return out.sigmoid() * cells.tanh(), cells
        if self.mode == "GRU":
            (reset, update, value), recurrent = given.chunk(3, -1), recurrent.chunk(3, -1)
            reset, update = (reset + recurrent[0]).sigmoid(), (update + recurrent[1]).sigmoid()
            value = (value + reset * recurrent[2]).tanh()
            return (value + update * (hidden - value),)
        total = given + recurrent
        return (total.tanh() if self.mode == "RNN_TANH" else total.relu(),)
