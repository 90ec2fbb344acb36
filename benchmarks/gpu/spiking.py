"""Steps of spiking networks on the GPU, in graphs: circuits of sparse synapses and a dense layer, spikes compared."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from benchmarks import record, spiking_circuit
from benchmarks.gpu import ours
from benchmarks.gpu.timing import elapsed_us, synchronize
from q4_snn import LIF
from q4_triton_kernels import machine_facts
from q4_triton_kernels.spiking import Neurons, Spiking, SynapseTable, word_count
from q4core.extension import LayerHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.deadline import Deadline
    from benchmarks.gpu.place import Place
    from q4_snn import SparseProjection

__all__ = ["measure"]

_SIZES, _TINY_SIZES = (2_000, 6_000), (40,)
_RATES = (0.01, 0.03, 0.1, 0.3)
_LAYER, _TINY_LAYER = 2048, 128
_STEPS, _TINY_STEPS = 100, 2
"""Steps in one graph."""


class _Circuit:
    """A circuit on the device, which runs by graphs of some steps."""

    def __init__(self, synapses: SparseProjection, arrays: dict[str, Any], place: Place, steps: int, most: int) -> None:
        device, neurons = place.device, int(arrays["neurons"])
        self.spikes = torch.zeros(most + 1, 1, word_count(neurons), dtype=torch.int64, device=device)
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        spiking = _spiking(place)
        mem = torch.from_numpy(arrays["start"]).to(device).view(1, -1).clone()
        self.state = _neurons(mem, spiking_circuit.BETA, self.spikes, place, reset="value")
        fired = torch.zeros(1, neurons, dtype=torch.int32, device=device)
        count = torch.zeros(1, dtype=torch.int32, device=device)
        ring = torch.zeros(len(synapses.ring), 1, neurons, device=device)
        drive = torch.from_numpy(arrays["drive"]).to(device)
        table = SynapseTable.of(synapses.weight, device)
        launches = [
            spiking.list_fired(self.spikes, self.clock, fired, count, delay=1, tick=True),
            spiking.send(table, self.clock, fired, count, ring, delay=1),
            spiking.advance(self.state, self.clock, given=drive, ring=ring),
        ]
        self._tensors = fired, count, ring, drive, table  # what the graph reads
        self.run = spiking.captured(launches, steps)
        self.parts = table.parts


def _spiking(place: Place) -> Spiking:
    target = machine_facts().target(place.device)
    if isinstance(target, tuple):
        raise q4.BackendUnavailableError("spiking kernels", rejections=[*map(str, target)])
    return Spiking(target, place.device)


def _neurons(mem: torch.Tensor, beta: float, spikes: torch.Tensor, place: Place, *, reset: str) -> Neurons:
    """Return leaky neurons that fire above 1."""
    cells = LIF.from_beta(beta, dt=spiking_circuit.STEP_S)
    own, threshold, zero = (torch.tensor([float(item)], device=place.device) for item in (cells.beta, 1.0, 0.0))
    return Neurons(mem=mem, beta=own, threshold=threshold, bits=spikes, reset=reset, v_reset=zero)


def _bits(words: torch.Tensor, neurons: int) -> torch.Tensor:
    bits = words.cpu()[..., None] >> torch.arange(64) & 1
    return bits.flatten(-2)[..., :neurons].bool()


def _timed(run: Callable[[], object], steps: int, rounds: int, place: Place) -> dict[str, Any]:
    """Return microseconds of a step, of some runs of one graph each."""
    run()
    synchronize(place)
    return record.summary([elapsed_us(run, 1, place) / steps for _ in range(rounds)])


def _circuit(neurons: int, place: Place) -> dict[str, Any]:
    """Measure a circuit, whose spikes must be the CPU's."""
    steps, rounds = (_STEPS, 20) if place.is_cuda else (_TINY_STEPS, 2)
    compared = 10 * steps
    arrays, synapses = spiking_circuit.problem(neurons, [compared]), spiking_circuit.join(neurons)
    cells = LIF.from_beta(spiking_circuit.BETA, reset="value", dt=spiking_circuit.STEP_S)
    drive, mem = torch.from_numpy(arrays["drive"]), torch.from_numpy(arrays["start"])
    wanted, started = [], time.perf_counter()
    for _ in range(compared):
        fired, mem = cells(synapses.advance().add_(drive), mem)
        synapses.deliver(fired.nonzero()[:, 0])
        wanted.append(fired.bool())
    cpu_us = (time.perf_counter() - started) / compared * 1e6
    events, expected = synapses.events / compared, torch.stack(wanted)
    circuit = _Circuit(synapses, arrays, place, steps, compared + (rounds + 1) * steps)
    for _ in range(compared // steps):
        circuit.run()
    found = _bits(circuit.spikes[1 : compared + 1, 0], neurons)
    same = bool(torch.equal(found, expected)), bool(torch.equal(circuit.state.mem[0].cpu(), mem))
    calls = {"a step": _timed(circuit.run, steps, rounds, place), "torch on the CPU": record.summary([cpu_us])}
    facts = {"neurons": neurons, "events_per_step": events, "spikes": int(expected.sum()), "parts": circuit.parts}
    name = f"circuit of {neurons:,} neurons, {int(expected.sum()):,} spikes {'equal' if all(same) else 'NOT EQUAL'}"
    return {"name": name, **facts, "same_spikes": same[0], "same_membranes": same[1], "calls": calls}


def _layer(rate: float, place: Place) -> dict[str, Any]:
    """Measure a dense layer in NF4; sums have another order than on the CPU, so a few spikes may differ."""
    size, steps, rounds = (_LAYER, _STEPS, 20) if place.is_cuda else (_TINY_LAYER, _TINY_STEPS, 2)
    draw = torch.Generator().manual_seed(1)
    weight = q4.quantize(torch.randn(size, size, generator=draw) * (4 / size**0.5), "nf4", block_size=64)
    x = (torch.rand(steps, size, generator=draw) < rate).float()
    session = q4.Session(q4.SessionConfig(device=str(place.device), backend="nf4-cuda", compute_dtype=torch.float32))
    layer, cells = session.linear(weight), LIF.from_beta(0.9, dt=spiking_circuit.STEP_S)
    exact, mem, wanted = q4.dequantize(weight, torch.float32), torch.zeros(1, size), []
    for row in x:
        fired, mem = cells(row[None] @ exact.T, mem)
        wanted.append(fired[0].bool())
    handle, given = LayerHandle(layer), x.to(place.device)
    path = handle.segments[0].path.name
    spikes = torch.zeros(1, 1, word_count(size), dtype=torch.int64, device=place.device).repeat(steps + 1, 1, 1)
    clock, out = torch.zeros(1, dtype=torch.int64, device=place.device), torch.empty(1, size, device=place.device)
    state = _neurons(torch.zeros(1, size, device=place.device), 0.9, spikes, place, reset="subtract")
    spiking = _spiking(place)
    advance = spiking.advance(state, clock, given=out)
    launches: list[Callable[[], object]] = [functools.partial(clock.fill_, 0)]
    for row in range(steps):
        product = functools.partial(handle.backend.linear, handle.prepared, given[row : row + 1], out)
        launches += [functools.partial(clock.add_, 1), functools.partial(product, bias=None, path=path), advance]
    run = spiking.captured(launches, 1)
    run()
    differing = float((_bits(spikes[1:, 0], size) != torch.stack(wanted)).float().mean())
    calls = {"a step": _timed(run, steps, rounds, place)}
    name = f"layer of {size} × {size}, {rate:.0%} of inputs, {differing:.2%} of spikes differ"
    return {"name": name, "rate": rate, "differing_share": differing, "calls": calls}


def measure(place: Place, deadline: Deadline) -> dict[str, Any]:
    """Return microseconds of a step of each network, and whether its spikes are the CPU's."""
    found: dict[str, Any] = {"layers": [], "refused": {}, "left_out": []}
    parts: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        (f"circuit of {size:,}", functools.partial(_circuit, size, place))
        for size in (_SIZES if place.is_cuda else _TINY_SIZES)
    ]
    if "nf4-cuda" in ours.backends():
        rates = _RATES if place.is_cuda else _RATES[-1:]
        parts += [(f"layer, {rate:.0%}", functools.partial(_layer, rate, place)) for rate in rates]
    with torch.no_grad():
        for name, part in parts:
            if deadline.is_over():
                found["left_out"].append(name)
                continue
            try:
                found["layers"].append(part())
            except q4.Q4Error as error:
                found["refused"][name] = str(error)
    return found
