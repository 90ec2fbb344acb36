"""``ProgramBuilder``: collects the operations that the modules of a network emit."""

from __future__ import annotations

import contextlib
import math
import operator
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from q4_nn.layer_type import layer_types, options_of
from q4_nn.programs.emitters import EMITTERS
from q4core import Q4Error, Q4Linear
from q4core.plugin_api import describe_exception
from q4core.programs import BoundProgram, Buffer, Op, Program, Step, View, bind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["EmissionError", "ProgramBuilder", "Value", "Watch", "flat"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class EmissionError(Q4Error, ValueError, code="emission"):
    """A module has no operations to emit; it runs as a module."""


@attrs.frozen
class Value:
    """What a module takes or gives, while a program is made.

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


class ProgramBuilder:
    """Collects buffers, operations and layers.

    A module emits by its method ``emit_program(builder, *values)``, by the ``emit`` of its layer type, or by what is
    known of its class. Each takes values as ``forward`` takes tensors, and returns a value or a tuple of them.

    Args:
        model: The network, in eval mode.
        device: Where all of it is.
        name: For reports.
    """

    def __init__(self, model: nn.Module, device: torch.device, name: str) -> None:
        self.device = device
        self.name = name
        self.modules: list[nn.Module] = []
        """Those that have emitted, in order."""
        self.layers: list[Q4Linear] = []
        """The packed layers."""
        self._labels = {id(module): label for label, module in model.named_modules()}
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
            tensor: float32 or int64, contiguous, on the program's device, of at least one size.
            name: For messages.

        Raises:
            EmissionError: It is something else.
        """
        is_index = tensor.dtype is torch.int64
        facts = tensor.device, is_index or tensor.dtype is torch.float32, tensor.is_contiguous(), tensor.numel() > 0
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
        """Return ``count`` rows of a value, each ``step`` behind the one before: [count, columns]."""
        stride = value.view.columns if value.view.rows == 1 else value.view.stride
        view = View(value.view.buffer, count, value.view.columns, value.view.offset + start * stride, step * stride)
        return Value(view, (count, value.shape[-1]))

    def beside(self, first: Value, second: Value) -> Value | None:
        """Return two values of as many columns as one, where the second's rows follow the first's; else None."""
        one, two = first.view, second.view
        if one.buffer != two.buffer or one.end != two.offset or not (first.is_dense and second.is_dense):
            return None
        return Value(View(one.buffer, one.rows + two.rows, one.columns, one.offset), (one.rows + two.rows, one.columns))

    def number(self, value: Value, index: int) -> Value:
        """Return one of the numbers of a value: int64 [1]."""
        return Value(View(value.view.buffer, 1, 1, value.view.offset + index), (1,), is_index=True)

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
            out: What it writes; made unless told.
            shape: Of what it writes; the first input's unless told.
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
        """Let a module emit its operations, and return what it gives.

        Args:
            module: In eval mode, without hooks.
            *values: What its ``forward`` would take.
            **options: Of its own emitter.

        Raises:
            EmissionError: It emits nothing.
        """
        label, self._label = self._label, self._labels.get(id(module), self._label)
        try:
            emitter = self._emitter(module)
            self.modules.append(module)
            given = emitter(module, self, *values, **options)
            if not all(isinstance(item, Value) for item in flat(given)):
                self.refuse(f"its emitter gave {type(given).__name__}")
        except Q4Error:
            raise
        except Exception as error:  # noqa: BLE001  # a third party's emitter
            is_ours = str(getattr(emitter, "__module__", "")).startswith("q4_nn.")
            if is_ours and not all(isinstance(item, Value) for item in values):
                self.refuse("it takes tensors, not tuples of them")
            self.refuse(f"its emitter raised {describe_exception(error)}")
        finally:
            self._label = label
        return given

    def _emitter(self, module: nn.Module) -> Callable[..., Any]:
        kind = type(module)
        if hook := _hook_of(module):
            self.refuse(f"it has a hook ({hook})")
        if "forward" in vars(module):
            self.refuse("its forward was replaced")
        if module.training:
            self.refuse("it is in training mode")
        options = options_of(module)
        named = layer_types().get(options["type"]) if options else None
        if named is not None and named.emit is not None:
            return named.emit
        if kind in EMITTERS:
            return EMITTERS[kind]
        # A class that changes forward alone has another result than what its parent emits.
        defines = next((item for item in kind.__mro__ if {"emit_program", "forward"} & vars(item).keys()), None)
        if defines is None or "emit_program" not in vars(defines):
            self.refuse(f"{kind.__name__} emits nothing")
        own: Callable[..., Any] = kind.emit_program  # type: ignore[attr-defined]  # looked up above
        return own

    def refuse(self, why: str) -> NoReturn:
        """Say that the module whose turn it is emits nothing.

        Raises:
            EmissionError: Always.
        """
        raise EmissionError(f"{self._label or 'the network'}: {why}")

    # -- the whole

    def keep(self, value: Value) -> Value:
        """Return a value that the caller reads behind a run: in memory of its own."""
        view, tensors = value.view, self._tensors
        whole = value.is_dense and view.rows * view.columns == self._buffers[view.buffer].size
        if view.buffer in tensors or not whole:
            value = self.step(Op.COPY, value, out=self.scratch(value.shape))
        buffer = self._buffers[value.view.buffer]
        tensors[value.view.buffer] = torch.zeros(value.shape, dtype=buffer.dtype, device=self.device)
        self._buffers[value.view.buffer] = attrs.evolve(buffer, is_bound=True)
        return value

    def tensor(self, value: Value) -> torch.Tensor:
        """Return the tensor behind a bound value."""
        return self._tensors[value.view.buffer]

    def bind(self) -> BoundProgram:
        """Bind what was emitted.

        Raises:
            InputError, LifecycleError, BackendUnavailableError: As ``q4core.programs.bind``.
        """
        sizes = [(layer.out_features, layer.in_features) for layer in self.layers]
        program = Program(self._buffers, self._steps, sizes)
        return bind(program, [self._tensors[index] for index in sorted(self._tensors)], self.layers, name=self.name)


class Watch:
    """Notices when a network is no more what it was when its program was made.

    Args:
        modules: Those that emitted.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        lists = [child for module in modules for child in module.children() if isinstance(child, nn.ModuleList)]
        modules = self._modules = (*modules, *lists)  # lists emit nothing, but hold what does
        self._states = [vars(module) for module in modules]
        held = [(vars(module), module._parameters, module._modules) for module in modules]  # noqa: SLF001  # as below
        self._holders = [holder for holders in held for holder in holders]
        self._count = sum(map(len, self._holders))
        self._hooks = -1
        parts: list[tuple[Any, str, Any]] = [
            (parts, name, part)
            for module in modules
            for parts in (module._parameters, module._modules)  # noqa: SLF001  # torch has no other way to ask
            for name, part in parts.items()
        ]
        self._dicts, self._names, self._parts = ([part[column] for part in parts] for column in range(3))

    def change(self) -> str | None:
        """Return what has changed, or None."""
        if self._hooks != RemovableHandle.next_id:  # torch counts every hook that anybody registers
            for module in self._modules:
                if hook := _hook_of(module):
                    return f"{type(module).__name__} has a hook ({hook})"
            self._hooks = RemovableHandle.next_id
        if any(map(operator.itemgetter("training"), self._states)):
            return "training mode"
        if sum(map(len, self._holders)) != self._count:
            return "a module, a parameter or an attribute was added or removed"
        with contextlib.suppress(KeyError):
            if all(map(operator.is_, map(operator.getitem, self._dicts, self._names), self._parts)):
                return None
        return "a module or parameter was replaced"


def _hook_of(module: nn.Module) -> str | None:
    """Return the name of a hook that a call of a module would run, or None."""
    names = [*(vars(module).get(name) for name in _HOOKS)]
    every = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks  # noqa: SLF001  # as above
    return next((str(hook) for hooks in (*names, *every) if hooks for hook in hooks.values()), None)


def flat(given: Any) -> list[Any]:
    """Return what nested tuples hold, in order."""
    return [leaf for item in given for leaf in flat(item)] if isinstance(given, (tuple, list)) else [given]
