"""``instrument``: what each layer of a model costs, as a table."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from q4core import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

__all__ = ["Costs", "LayerCost", "instrument"]


@attrs.define
class LayerCost:
    """What one layer cost so far.

    Args:
        name: Its name in the model.
        kind: Its class.
        weight_bytes: Of its own parameters and buffers.
        forward_calls: How often it ran.
        forward_seconds: Wall-clock seconds of these, layers inside included; on a GPU without what is still queued.
        backward_calls: How often gradients came to its first result.
        backward_seconds: Wall-clock seconds from there to its input's gradients, where these are asked for.
        output_bytes: Of all its results.
        new_tensors: How many of these were no view of what it was given.
    """

    name: str
    kind: str
    weight_bytes: int
    forward_calls: int = 0
    forward_seconds: float = 0.0
    backward_calls: int = 0
    backward_seconds: float = 0.0
    output_bytes: int = 0
    new_tensors: int = 0


class Costs:
    """The costs of a model's layers; ``instrument`` makes it. Use it with ``with``, or call ``close``.

    It is a table: ``print(costs)``, ``costs.to_dict()``, ``costs["layers.0.mlp"]``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._costs: dict[str, LayerCost] = {}
        self._starts: dict[str, list[float]] = {}
        self._handles = []
        for name, module in model.named_modules():
            if any(True for _ in module.children()):
                continue  # its time is that of what is inside
            self._costs[name] = LayerCost(name, type(module).__name__, _weight_bytes(module))
            self._starts[name] = []
            self._handles += [
                module.register_forward_pre_hook(self._before(name)),
                module.register_forward_hook(self._behind(name)),
            ]

    def _before(self, name: str) -> Any:
        starts = self._starts[name]
        return lambda *_: starts.append(time.perf_counter())

    def _behind(self, name: str) -> Any:
        cost, starts = self._costs[name], self._starts[name]

        def hook(_: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
            cost.forward_seconds += time.perf_counter() - starts.pop()
            cost.forward_calls += 1
            given = {tensor.untyped_storage().data_ptr() for tensor in _tensors(inputs)}
            for tensor in _tensors(outputs):
                cost.output_bytes += tensor.numel() * tensor.element_size()
                cost.new_tensors += tensor.untyped_storage().data_ptr() not in given
            _watch_backward(cost, [*_tensors(inputs)], [*_tensors(outputs)])

        return hook

    def __getitem__(self, name: str) -> LayerCost:
        """Return one layer's costs."""
        return self._costs[name]

    def __iter__(self) -> Iterator[LayerCost]:
        """Iterate over the layers in the model's order."""
        return iter(self._costs.values())

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._costs)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return plain values, ready for JSON."""
        return [attrs.asdict(cost) for cost in self]

    def __str__(self) -> str:
        """Return the table."""
        columns = ("layer", "kind", "weights", "forward", "ms", "backward", "ms", "results", "new tensors")
        table = Table(*columns, box=None, pad_edge=False)
        for cost in self:
            table.add_row(
                *(cost.name, cost.kind, f"{cost.weight_bytes:,}"),
                *(f"{cost.forward_calls} ×", f"{1e3 * cost.forward_seconds:.2f}"),
                *(f"{cost.backward_calls} ×", f"{1e3 * cost.backward_seconds:.2f}"),
                *(f"{cost.output_bytes:,}", f"{cost.new_tensors:,}"),
            )
        text = io.StringIO()
        Console(file=text, width=160, highlight=False).print(table)
        return text.getvalue()

    def close(self) -> None:
        """Take the hooks away; the numbers stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Costs:  # noqa: PYI034  # Self needs Python 3.11
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the hooks away."""
        self.close()


def instrument(model: nn.Module) -> Costs:
    """Count calls, time, bytes and allocations of each innermost layer of a model, forward and backward.

    Counting costs some 10 µs a call; hooks make a decoder's token go through its modules one by one.

    Args:
        model: Any module.

    Raises:
        InputError: It is no module.
    """
    if not isinstance(model, nn.Module):
        raise InputError("instrument", name="model", rule="an nn.Module", value=type(model).__name__)
    return Costs(model)


def _watch_backward(cost: LayerCost, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Count gradients by hooks of tensors: those of modules don't bear what is written in place."""
    results = [tensor for tensor in outputs if tensor.requires_grad]
    if not results:
        return
    starts: list[float] = []

    def begin(_: torch.Tensor) -> None:
        cost.backward_calls += 1
        starts.append(time.perf_counter())

    def end(_: torch.Tensor) -> None:
        if starts:
            cost.backward_seconds += time.perf_counter() - starts.pop()

    results[0].register_hook(begin)
    asking = [tensor for tensor in inputs if tensor.requires_grad]
    if asking:
        asking[0].register_hook(end)


def _weight_bytes(module: nn.Module) -> int:
    held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
