"""``ProgramBuilder``: a program of the operations that the modules of a network emit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_programs.binding import BoundProgram, bind
from q4_programs.emitters import EMITTERS
from q4_programs.operations import Operations, Value
from q4_programs.ops import Op
from q4_programs.program import Program
from q4_programs.watch import hook_of
from q4core import Q4Error, default_registry
from q4core.plugin_api import describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["ProgramBuilder", "flat"]


class ProgramBuilder(Operations):
    """Collects what modules emit, and binds it.

    A module emits by the ``emit`` of its layer type, by its method ``emit_program(builder, *values)``, or by what is
    known of its class. Each takes values as ``forward`` takes tensors, and returns a value or a tuple of them. A layer
    type is an item of the hook ``q4_layers``; a module of one holds its options, with the type's name as ``"type"``, in
    the attribute ``q4_layer``.

    Args:
        model: The network, in eval mode.
        device: Where all of it is.
        name: For reports.
    """

    def __init__(self, model: nn.Module, device: torch.device, name: str) -> None:
        super().__init__(device)
        self.name = name
        self.modules: list[nn.Module] = []
        """Those that have emitted, in order."""
        self._labels = {id(module): label for label, module in model.named_modules()}
        self._tokens: tuple[Value, int] | None = None

    def emit(self, module: nn.Module, *values: Any, **options: Any) -> Any:
        """Make a module emit its operations, and return its result.

        Args:
            module: In eval mode, without hooks.
            *values: What its ``forward`` would take.
            **options: Of its own emitter.

        Raises:
            EmissionError: It emits nothing.
        """
        label, self._label = self._label, self._labels.get(id(module), self._label)
        emitter = None
        try:
            emitter = self._emitter(module)
            self.modules.append(module)
            given = emitter(module, self, *values, **options)
            if not all(isinstance(item, Value) for item in flat(given)):
                self.refuse(f"its emitter gave {type(given).__name__}")
        except Q4Error:
            raise
        except Exception as error:  # noqa: BLE001  # a third party's emitter
            given_tuples = not all(isinstance(item, Value) for item in values)
            if given_tuples and emitter in EMITTERS.values():
                self.refuse("it takes tensors, not tuples of them")
            where = " for tuples of tensors" if given_tuples else ""
            self.refuse(f"its emitter raised {describe_exception(error)}{where}")
        finally:
            self._label = label
        return given

    def _emitter(self, module: nn.Module) -> Callable[..., Any]:
        kind = type(module)
        if hook := hook_of(module):
            self.refuse(f"it has a hook ({hook})")
        if "forward" in vars(module):
            self.refuse("its forward was replaced")
        if module.training:
            self.refuse("it is in training mode")
        options = vars(module).get("q4_layer")
        if isinstance(options, dict):
            named: Any = default_registry().items("q4_layers").get(str(options.get("type")))
            if named is not None and named.emit is not None:
                return named.emit  # type: ignore[no-any-return]  # a layer type's
        if kind in EMITTERS:
            return EMITTERS[kind]
        # A class that changes forward alone has another result than what its parent emits.
        defines = next((item for item in kind.__mro__ if {"emit_program", "forward"} & vars(item).keys()), None)
        if defines is None or "emit_program" not in vars(defines):
            self.refuse(f"{kind.__name__} emits nothing")
        own: Callable[..., Any] = kind.emit_program  # type: ignore[attr-defined]  # looked up above
        return own

    def of_tokens(self, count: Value, most: int) -> None:
        """Make the steps those of several tokens.

        Args:
            count: A bound int64 of one number: how many there are in a run.
            most: At most, 2 or more, of which the values are.
        """
        self._tokens, self.most_tokens = (count, most), most

    def keep(self, value: Value) -> Value:
        """Return a value that the caller reads after a run: in memory of its own."""
        view, tensors = value.view, self._tensors
        whole = value.is_dense and view.rows * view.columns == self._buffers[view.buffer].size
        if view.buffer in tensors or not whole:
            value = self.step(Op.COPY, value, out=self.scratch(value.shape))
        buffer = self._buffers[value.view.buffer]
        tensors[value.view.buffer] = torch.zeros(value.shape, dtype=buffer.dtype, device=self.device)
        self._buffers[value.view.buffer] = attrs.evolve(buffer, is_bound=True)
        return value

    def tensor(self, value: Value) -> torch.Tensor:
        """Return the tensor of a bound value."""
        return self._tensors[value.view.buffer]

    def bind(self) -> BoundProgram:
        """Bind what was emitted.

        Raises:
            InputError, LifecycleError, BackendUnavailableError: As ``bind``.
        """
        sizes = [(layer.out_features, layer.in_features) for layer in self.layers]
        tokens = None if self._tokens is None else (self._tokens[0].view.buffer, self._tokens[1])
        program = Program(self._buffers, self._steps, sizes, tokens=tokens)
        return bind(program, [self._tensors[index] for index in sorted(self._tensors)], self.layers, name=self.name)


def flat(given: Any) -> list[Any]:
    """Return what nested tuples hold, in order."""
    return [leaf for item in given for leaf in flat(item)] if isinstance(given, (tuple, list)) else [given]
