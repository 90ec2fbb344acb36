"""``Operations``: the buffers, steps and packed layers that the modules of a network emit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch

from q4_programs.cache_rows import CACHE_DTYPES
from q4_programs.ops import Op
from q4_programs.program import Buffer, Step, View
from q4core import Q4Error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from q4core import Q4Linear

__all__ = ["EmissionError", "Operations", "Value"]


class EmissionError(Q4Error, ValueError, code="emission"):
    """A module has no operations to emit; it runs as a module."""


@attrs.frozen
class Value:
    """An input or a result of a module, while a program is made.

    Args:
        view: Where it is: [rows, columns]; [1, all] for numbers.
        shape: The shape of the tensor that it stands for: rows are all sizes but the last, in their order.
        is_index: Whether it holds int64 numbers.
    """

    view: View
    shape: tuple[int, ...]
    is_index: bool = False

    @property
    def is_dense(self) -> bool:
        """Whether its rows follow one another without gaps."""
        return self.view.rows == 1 or self.view.stride == self.view.columns


class Operations:
    """Collects buffers, operations and layers; ``ProgramBuilder`` adds what modules emit.

    Args:
        device: Where all of it is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.most_tokens = 1
        """How many tokens the steps are of, each with its own position."""
        self.layers: list[Q4Linear] = []
        """The packed layers."""
        self._label = ""
        self._buffers: list[Buffer] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._known: dict[int, View] = {}
        self._indices: dict[int, int] = {}
        self._constants: dict[Any, torch.Tensor] = {}
        self._steps: list[Step] = []

    # -- memory

    def _buffer(self, name: str, size: int, dtype: torch.dtype, tensor: torch.Tensor | None = None) -> int:
        self._buffers.append(Buffer(name, size, dtype, is_bound=tensor is not None))
        if tensor is not None:
            self._tensors[len(self._buffers) - 1] = tensor
        return len(self._buffers) - 1

    def scratch(self, shape: Sequence[int], *, is_index: bool = False) -> Value:
        """Return a value to be written, of a shape of at least one size."""
        shape = tuple(shape)
        rows, columns = (1, math.prod(shape)) if is_index else (math.prod(shape[:-1]), shape[-1])
        dtype = torch.int64 if is_index else torch.float32
        buffer = self._buffer(f"{self._label} {len(self._buffers)}".strip(), rows * columns, dtype)
        return Value(View(buffer, rows, columns), shape, is_index)

    def bound(self, tensor: torch.Tensor, name: str = "") -> Value:
        """Return a tensor as a value: a parameter, a cache, an input, whose later changes are seen.

        Args:
            tensor: float32 or int64 (of a cache float16 or int8, too), contiguous, on the program's device, of at least
                one size.
            name: For messages.

        Raises:
            EmissionError: It is something else.
        """
        is_index = tensor.dtype is torch.int64
        facts = tensor.device, is_index or tensor.dtype in CACHE_DTYPES, tensor.is_contiguous(), tensor.numel() > 0
        if facts != (self.device, True, True, True) or tensor.dim() < 1:
            self.refuse(f"{name or 'a parameter'} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}")
        view = self._known.get(id(tensor))
        if view is None:
            buffer = self._buffer(f"{self._label} {name}".strip(), tensor.numel(), tensor.dtype, tensor)
            columns = tensor.numel() if is_index else tensor.shape[-1]
            view = self._known[id(tensor)] = View(buffer, tensor.numel() // columns, columns)
        return Value(view, tuple(tensor.shape), is_index)

    def constant(self, key: object, make: Callable[[], torch.Tensor]) -> Value:
        """Return what ``make`` gives as a value, made once for each key; the builder keeps both."""
        if key not in self._constants:
            self._constants[key] = make().to(self.device).contiguous()
        return self.bound(self._constants[key], "constant")

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Return the same numbers in another shape, where their rows follow one another."""
        shape = tuple(shape)
        if not value.is_dense or math.prod(shape) != math.prod(value.shape):
            self.refuse(f"{list(value.shape)} can't be seen as {list(shape)}")
        view = View(value.view.buffer, math.prod(shape[:-1]), shape[-1], value.view.offset)
        return Value(view, shape)

    def columns(self, value: Value, start: int, count: int) -> Value:
        """Return some columns of a value."""
        view = attrs.evolve(value.view, offset=value.view.offset + start, columns=count, stride=value.view.stride)
        return Value(view, (*value.shape[:-1], count))

    def rows(self, value: Value, start: int, count: int, step: int = 1) -> Value:
        """Return ``count`` rows of a value, each ``step`` after the one before: [count, columns]."""
        stride = value.view.columns if value.view.rows == 1 else value.view.stride
        view = View(value.view.buffer, count, value.view.columns, value.view.offset + start * stride, step * stride)
        return Value(view, (count, value.shape[-1]))

    def joined_rows(self, first: Value, second: Value) -> Value | None:
        """Return two values of as many columns as one, where the second's rows follow the first's; else None."""
        one, two = first.view, second.view
        if one.buffer != two.buffer or one.end != two.offset or not (first.is_dense and second.is_dense):
            return None
        return Value(View(one.buffer, one.rows + two.rows, one.columns, one.offset), (one.rows + two.rows, one.columns))

    def number(self, value: Value, index: int, count: int = 1) -> Value:
        """Return some of the numbers of a value, one by default: int64 [count]."""
        return Value(View(value.view.buffer, 1, count, value.view.offset + index), (count,), is_index=True)

    def dense(self, value: Value) -> Value:
        """Return a value whose rows follow one another: itself, or a copy."""
        return value if value.is_dense else self.step(Op.COPY, value, out=self.scratch(value.shape))

    # -- operations

    def step(  # the parts of a step
        self,
        op: Op,
        *inputs: Value,
        out: Value | None = None,
        shape: Sequence[int] | None = None,
        numbers: Sequence[float] = (),
        layer: Q4Linear | None = None,
    ) -> Value:
        """Add an operation and return its result.

        Args:
            op: What it computes.
            *inputs: As the operation takes them.
            out: What it writes. Defaults to a new value.
            shape: Of what it writes. Defaults to the first input's.
            numbers: Options.
            layer: The packed layer, for LINEAR and EMBEDDING.
        """
        if out is None:
            out = self.scratch(inputs[0].shape if shape is None else shape, is_index=op is Op.ARGMAX)
        index = None
        if layer is not None:
            index = self._indices.setdefault(id(layer), len(self.layers))
            if index == len(self.layers):
                self.layers.append(layer)
        views = [item.view for item in inputs]
        self._steps.append(Step(op, views, [out.view], index, numbers, self._label))
        return out

    def emit(self, module: nn.Module, *values: Any, **options: Any) -> Any:
        """Make a module emit its operations, and return its result, as ``ProgramBuilder`` does."""
        raise NotImplementedError

    def refuse(self, why: str) -> NoReturn:
        """Refuse a program, as the current module emits nothing.

        Raises:
            EmissionError: Always.
        """
        raise EmissionError(f"{self._label or 'the network'}: {why}")
