"""``make_program``: a network for inputs of fixed shapes, run by one call."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_programs.builder import ProgramBuilder, flat
from q4_programs.records import ProgramRecord, refuse
from q4_programs.watch import Watch
from q4core import InputError, Q4Error, Q4Linear
from q4core.plugin_api import is_plain_call

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_programs.binding import BoundProgram

__all__ = ["NetworkProgram", "layers_of", "make_program"]


def layers_of(model: nn.Module) -> list[Q4Linear]:
    """Return the packed layers of a network."""
    return [module for module in model.modules() if isinstance(module, Q4Linear)]


class NetworkProgram:
    """A network that runs by one call where it can, and as modules where it can't; from ``make_program``.

    ``record`` has the backend that runs it, the number of runs, and every reason for running modules instead.
    """

    def __init__(self, model: nn.Module, examples: tuple[Any, ...], name: str) -> None:
        self.model = model
        self.record = ProgramRecord(name)
        self._bound: BoundProgram | None = None
        tensors = [item for item in flat(examples) if isinstance(item, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device("cpu")
        builder = ProgramBuilder(model, device, name)
        try:
            with torch.inference_mode(False):  # noqa: FBT003  # torch's signature; runs may be outside it
                values = _mapped(examples, lambda item: builder.bound(_empty_like(item), "input"))
                self._inputs = [builder.tensor(value) for value in flat(values)]
                results = _mapped(builder.emit(model, *values), builder.keep)
                self._results = _mapped(results, builder.tensor)
                self._bound = builder.bind()
            self.record = self._bound.record
            self._watch = Watch(builder.modules)
            self._trained = [part for module in builder.modules for part in module.parameters(recurse=False)]
        except Q4Error as error:
            self.record = refuse(name, layers_of(model), error.summary)

    @torch.no_grad()
    def _run(self, bound: BoundProgram, tensors: list[torch.Tensor]) -> Any:
        with bound.lock:  # no other thread's inputs between, and no other one's results
            for own, given in zip(self._inputs, tensors, strict=True):
                own.copy_(given)
            bound()
            return _mapped(self._results, torch.clone)

    def __call__(self, *inputs: Any) -> Any:
        """Return what the network gives.

        Args:
            *inputs: As the network takes them. Of the shapes, dtypes and device of the examples, and where no gradient
                is recorded, they run as a program; else the modules run one by one, and ``record`` says why.

        Raises:
            InputError: A token is out of range.
            LifecycleError: A parameter's memory was moved or resized since, or a layer closed: make the program again.
        """
        tensors = [*flat(inputs)]
        if self._bound is None or (reason := self._refusal(tensors)) is not None:
            if self._bound is not None:
                note = f"modules ran instead: {reason}"
                if note not in self.record.reasons:
                    self.record.reasons += (note,)
            return self.model(*inputs)
        return self._run(self._bound, tensors)

    def _refusal(self, tensors: list[Any]) -> str | None:
        """Return why these inputs don't run as a program, or None."""
        if not is_plain_call():
            return "inside a trace, a transform, a mode or autocast"
        if change := self._watch.change():
            return change
        if len(tensors) != len(self._inputs):
            return "other inputs than the examples"
        for own, given in zip(self._inputs, tensors, strict=True):
            if not isinstance(given, torch.Tensor) or _facts(given) != _facts(own):
                return "other shapes, dtypes or devices than the examples'"
        if torch.is_grad_enabled() and any(item.requires_grad for item in (*tensors, *self._trained)):
            return "gradients are recorded"
        return None


def make_program(model: nn.Module, *examples: Any, name: str | None = None) -> NetworkProgram:
    """Make a program of a network for inputs of fixed shapes: an MLP, a recurrent network, layers that emit operations.

    A hook, a layer that emits nothing, training mode, gradients, or another dtype than float32 mean that the modules
    run one by one; the reports of the packed layers, and ``record``, say why.

    Args:
        model: In eval mode.
        *examples: Tensors, or tuples of them, as the network takes them: float32, or int64 for tokens. Only their
            shapes, dtypes and device count.
        name: For reports. Defaults to the class of the network.

    Returns:
        What takes the inputs as the network does, and gives its results to rounding.

    Raises:
        InputError: ``model`` is no module, or its ``forward`` does not take such examples.
    """
    if not isinstance(model, nn.Module):
        raise InputError("make_program", name="model", rule="a torch module", value=type(model).__name__)
    for item in flat(examples):
        if not isinstance(item, torch.Tensor):
            rule = "tensors, or tuples of them"
            raise InputError("make_program", name="examples", rule=rule, value=type(item).__name__)
    try:
        inspect.signature(model.forward).bind(*examples)
    except TypeError as error:
        rule = f"what {type(model).__name__}.forward takes ({error})"
        raise InputError("make_program", name="examples", rule=rule, value=f"{len(examples)} of them") from None
    return NetworkProgram(model, examples, name or type(model).__name__)


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return contiguous zeros of a tensor's shape, dtype and device."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _mapped(given: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples of what a function gives for each leaf."""
    if isinstance(given, (tuple, list)):
        return tuple(_mapped(item, change) for item in given)
    return change(given)
