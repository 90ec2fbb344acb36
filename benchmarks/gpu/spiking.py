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
from q4_programs import BoundProgram, Buffer, Op, Program, SparseWeight, Step, View, bind, pack_bits, unpack_bits
from q4_snn import LIF

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.gpu.deadline import Deadline
    from benchmarks.gpu.place import Place

__all__ = ["measure"]

_SIZES, _TINY_SIZES = (2_000, 6_000), (40,)
_RATES = (0.01, 0.03, 0.1, 0.3)
_LAYER, _TINY_LAYER = 2048, 128
_STEPS, _TINY_STEPS = 100, 2
"""Steps of one call."""
_SUBTRACT, _VALUE = 1, 2


class _Network:
    """Neurons as a program on the device: what they get, their membranes, and the spikes of so many rounds."""

    def __init__(self, size: int, beta: float, *, reset: int, rounds: int, place: Place) -> None:
        self._buffers: list[Buffer] = []
        self.tensors: list[torch.Tensor] = []
        self._steps: list[Step] = []
        self._place = place
        cells = LIF.from_beta(beta, dt=spiking_circuit.STEP_S)
        self.clock = self.add(torch.zeros(1, 1, dtype=torch.int64))
        self.bits = self.add(torch.zeros(rounds + 1, -(-size // 64), dtype=torch.int64))
        self.mem, self.current = self.add(torch.zeros(1, size)), self.add(torch.zeros(1, size))
        self._beta, self._one = self.add(torch.tensor([[float(cells.beta)]])), self.add(torch.ones(1, 1))
        self._vector, self._reset = self._one if reset == _SUBTRACT else self.add(torch.zeros(1, 1)), reset

    def add(self, tensor: torch.Tensor) -> View:
        """Return a view of a tensor [rows, columns] as a buffer of the program."""
        self.tensors.append(tensor.to(self._place.device))
        self._buffers.append(Buffer(f"buffer {len(self._buffers)}", tensor.numel(), tensor.dtype, is_bound=True))
        return View(len(self._buffers) - 1, *tensor.shape)

    def step(self, op: Op, inputs: Sequence[View], outputs: Sequence[View], **more: Any) -> None:
        """Add a step."""
        self._steps.append(Step(op, inputs, outputs, **more))

    def bound(self, layer: Any, sizes: tuple[int, int]) -> BoundProgram:
        """Return the program: the steps so far, then those of leaky neurons that fire above 1."""
        self.step(Op.INTEGRATE, [self.mem, self.current, self._beta], [self.mem])
        inputs = [self.mem, self._one, self._vector, self.clock]
        self.step(Op.FIRE, inputs, [self.bits, self.mem], numbers=[self._reset, 0])
        program = Program(self._buffers, self._steps, [sizes], self.clock.buffer)
        return bind(program, self.tensors, [layer], registry=ours.registry())

    def spikes(self, rounds: int, size: int) -> torch.Tensor:
        """Return the spikes of the first rounds, bool [rounds, size]."""
        return unpack_bits(self.tensors[self.bits.buffer][:rounds].cpu(), size)


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
    made = _Network(neurons, spiking_circuit.BETA, reset=_VALUE, rounds=compared + (rounds + 1) * steps, place=place)
    weight = synapses.weight
    ring, given = made.add(torch.zeros(weight.longest + 1, neurons)), made.add(drive.view(1, -1))
    made.tensors[made.mem.buffer].copy_(torch.from_numpy(arrays["start"]))
    made.step(Op.SEND, [made.bits, made.clock, ring], [ring], layer=0, numbers=[1, 1])
    made.step(Op.TAKE, [ring, made.clock], [made.current, ring])
    made.step(Op.ADD, [made.current, given], [made.current])
    moved = SparseWeight(neurons, neurons, *(item.to(place.device) for item in weight.tensors()))
    circuit = made.bound(moved, (neurons, neurons))
    circuit(compared)
    found = made.spikes(compared, neurons)
    same = bool(torch.equal(found, expected)), bool(torch.equal(made.tensors[made.mem.buffer][0].cpu(), mem))
    own = _timed(functools.partial(circuit, steps), steps, rounds, place)
    calls = {"a step": own, "torch on the CPU": record.summary([cpu_us])}
    backend, count = circuit.record.backend, int(expected.sum())
    facts = {"neurons": neurons, "events_per_step": events, "spikes": count, "backend": backend}
    verdict = "equal" if all(same) else "NOT EQUAL"
    name = f"circuit of {neurons:,} neurons, {count:,} spikes {verdict}, {backend}"
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
    made = _Network(size, 0.9, reset=_SUBTRACT, rounds=(rounds + 2) * steps, place=place)
    given = made.add(pack_bits(x.bool()))
    made.step(Op.SPIKES, [given, made.clock], [made.current], layer=0, numbers=[0])
    program = made.bound(layer, (size, size))
    program(steps)
    differing = float((made.spikes(steps, size) != torch.stack(wanted)).float().mean())
    calls = {"a step": _timed(functools.partial(program, steps), steps, rounds, place)}
    name = f"layer of {size} × {size}, {rate:.0%} of inputs, {differing:.2%} of spikes differ"
    return {"name": name, "rate": rate, "differing_share": differing, "backend": program.record.backend, "calls": calls}


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
