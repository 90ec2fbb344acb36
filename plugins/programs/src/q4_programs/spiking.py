"""The reference of operations of spiking networks, in plain torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from q4_programs.ops import WORD, Op
from q4_programs.sparse import add_in_order
from q4core.extension import LayerHandle, find_refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4_programs.program import Step

    Tensors = Sequence[torch.Tensor]

__all__ = ["pack_bits", "spiking_part", "unpack_bits"]

_RESET_SUBTRACT, _RESET_VALUE = 1, 2


def pack_bits(ones: torch.Tensor) -> torch.Tensor:
    """Return bools [..., C] as int64 words [..., ceil(C / 64)]: column c is bit c mod 64 of word c // 64."""
    padded = torch.nn.functional.pad(ones.to(torch.int64), (0, -ones.shape[-1] % WORD)).unflatten(-1, (-1, WORD))
    words: torch.Tensor = (padded << torch.arange(WORD, device=ones.device)).sum(-1)
    return words


def unpack_bits(words: torch.Tensor, columns: int) -> torch.Tensor:
    """Return int64 words [..., W] as bools [..., columns]."""
    bits = words[..., None] >> torch.arange(WORD, device=words.device) & 1
    return bits.flatten(-2)[..., :columns].to(torch.bool)


def spiking_part(step: Step, inputs: Tensors, outputs: Tensors, module: Any) -> Callable[[], object] | None:
    """Return what runs a step; None for an operation of another kind.

    Args:
        step: The step.
        inputs: A tensor for each of its views.
        outputs: Likewise.
        module: The packed layer of SPIKES, the ``SparseWeight`` of SEND.
    """
    run = _PARTS.get(step.op)
    if run is None:
        return None
    return functools.partial(run, step.numbers, inputs, outputs, *(() if module is None else (module,)))


def _slot(ring: torch.Tensor, clock: torch.Tensor, rows: int, lag: float = 0) -> torch.Tensor:
    """Return the slot [rows, columns] of a round."""
    slots: torch.Tensor = ring.unflatten(0, (-1, rows))
    return slots[(int(clock) - int(lag)) % len(slots)]


def _integrate(numbers: Sequence[float], inputs: Tensors, outputs: Tensors) -> None:
    del numbers
    x, current, beta, *more = inputs
    total = beta * x + (more[0] * current if more else current)
    outputs[0].copy_(total + more[1] if len(more) > 1 else total)


def _fire(numbers: Sequence[float], inputs: Tensors, outputs: Tensors) -> None:
    mem, threshold, vector, clock, *refractory = inputs
    fired = mem >= threshold if numbers[1] else mem > threshold
    if refractory:
        count, before, steps = refractory
        held = count > 0
        fired = fired & ~held
        mem.copy_(torch.where(held, before, mem))
        count.copy_(torch.where(fired, steps, (count - 1).clamp(min=0)))
    if numbers[0] == _RESET_SUBTRACT:
        mem.sub_(vector * fired.to(mem.dtype))
    elif numbers[0] == _RESET_VALUE:
        mem.copy_(torch.where(fired, vector, mem))
    _slot(outputs[0], clock, len(mem)).copy_(pack_bits(fired))


def _spikes(numbers: Sequence[float], inputs: Tensors, outputs: Tensors, layer: Any) -> None:
    out = outputs[0]
    words = _slot(inputs[0], inputs[1], len(out), *numbers)
    ones = unpack_bits(
        torch.nn.functional.pad(words, (0, -(-layer.in_features // WORD) - words.shape[1])), layer.in_features
    )
    handle = LayerHandle(layer)
    backend: Any = handle.backend
    if find_refusal(backend, "spikes", out.device, ("spikes", "spike_limit")) is None:
        current = torch.empty_like(out, memory_format=torch.contiguous_format)
        bias = None if layer.bias is None else layer.bias.detach().contiguous()
        backend.spikes(handle.prepared, ones, current, bias=bias)
    else:
        current = layer(ones.to(torch.float32))
    out.copy_(current)


def _send(numbers: Sequence[float], inputs: Tensors, outputs: Tensors, synapses: Any) -> None:
    lag, rows = (int(number) for number in numbers)
    ring, before = outputs[0], int(inputs[1]) - lag
    slots, stride = len(ring) // rows, ring.stride(0)
    flat = ring.as_strided(((len(ring) - 1) * stride + ring.shape[1],), (1,))
    ones = unpack_bits(_slot(inputs[0], inputs[1], rows, lag), synapses.sources)
    for row, fired in enumerate(ones):
        _, target, weight, delay = synapses.with_places(fired.nonzero()[:, 0])
        # One addition after the other, by the order of sources, then synapses.
        add_in_order(flat, ((delay + before) % slots * rows + row) * stride + target, weight)


def _take(numbers: Sequence[float], inputs: Tensors, outputs: Tensors) -> None:
    del numbers
    slot = _slot(inputs[0], inputs[1], len(outputs[0]))
    outputs[0].copy_(slot)
    slot.zero_()


def _row(numbers: Sequence[float], inputs: Tensors, outputs: Tensors) -> None:
    outputs[0].copy_(_slot(inputs[0], inputs[1], len(outputs[0]), *numbers))


def _store_row(numbers: Sequence[float], inputs: Tensors, outputs: Tensors) -> None:
    del numbers
    _slot(outputs[0], inputs[1], len(inputs[0])).copy_(inputs[0])


def _pack(numbers: Sequence[float], inputs: Tensors, outputs: Tensors) -> None:
    del numbers
    x, clock = inputs
    for words, ones in zip(outputs, (x != 0, (x != 0) & (x != 1)), strict=True):
        _slot(words, clock, len(x)).copy_(pack_bits(ones))


def _unpack(numbers: Sequence[float], inputs: Tensors, outputs: Tensors) -> None:
    rows, columns = outputs[0].shape
    outputs[0].copy_(unpack_bits(_slot(inputs[0], inputs[1], rows, *numbers), columns))


_PARTS: dict[Op, Callable[..., None]] = {
    Op.INTEGRATE: _integrate,
    Op.FIRE: _fire,
    Op.SPIKES: _spikes,
    Op.SEND: _send,
    Op.TAKE: _take,
    Op.ROW: _row,
    Op.STORE_ROW: _store_row,
    Op.PACK: _pack,
    Op.UNPACK: _unpack,
}
