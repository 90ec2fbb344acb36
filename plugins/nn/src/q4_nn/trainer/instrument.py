"""``instrument``: the cost of each layer of a model, as a table."""

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

__all__ = ["Costs", "LayerCost", "instrument"]


@attrs.define
class LayerCost:
    """The cost of one layer so far.

    Args:
        name: Its name in the model.
        kind: Its class.
        weight_bytes: Of its own parameters and buffers.
        forward_calls: How often it ran.
        forward_seconds: Wall-clock seconds of these, layers inside included; on a GPU without what is still queued.
        backward_calls: How often gradients came to its first result.
        backward_seconds: Wall-clock seconds from there to its input's gradients, where these are asked for.
        output_bytes: Of all its results.
        new_tensors: Number of these that were no view of an input.
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
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if any(True for _ in module.children()):
                continue  # its time is that of what is inside
            held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            self._costs[name] = LayerCost(name, type(module).__name__, sum(map(_bytes_of, held)))
            self._handles += _watch_forward(self._costs[name], module)

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
        """Remove the hooks; the numbers stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Costs:  # noqa: PYI034  # Self needs Python 3.11
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
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


def _watch_forward(cost: LayerCost, module: nn.Module) -> list[Any]:
    """Count calls and results by hooks, and return the handles of these."""
    starts: list[float] = []

    def begin(*_: object) -> None:
        starts.append(time.perf_counter())

    def end(_: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
        cost.forward_seconds += time.perf_counter() - starts.pop()
        cost.forward_calls += 1
        taken, given = [*_tensors(inputs)], [*_tensors(outputs)]
        known = {tensor.untyped_storage().data_ptr() for tensor in taken}
        cost.output_bytes += sum(map(_bytes_of, given))
        cost.new_tensors += sum(tensor.untyped_storage().data_ptr() not in known for tensor in given)
        _watch_backward(cost, taken, given)

    return [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]


def _watch_backward(cost: LayerCost, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Count gradients by hooks of tensors: hooks of modules fail where a result is written in place."""
    starts: list[float] = []

    def begin(_: torch.Tensor) -> None:
        cost.backward_calls += 1
        starts.append(time.perf_counter())

    def end(_: torch.Tensor) -> None:
        if starts:
            cost.backward_seconds += time.perf_counter() - starts.pop()

    result = next((tensor for tensor in outputs if tensor.requires_grad), None)
    asking = next((tensor for tensor in inputs if tensor.requires_grad), None)
    if result is not None:
        result.register_hook(begin)
        if asking is not None:
            asking.register_hook(end)


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
