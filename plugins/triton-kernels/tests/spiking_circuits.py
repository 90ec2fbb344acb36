"""Programs of spiking networks for the tests, and their buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4_programs import REFERENCE, BoundLayer, Buffer, Op, Program, SparseWeight, Step, View
from q4_triton_kernels.spiking import SpikingRunner
from q4_triton_kernels.target import machine_facts

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Maker", "circuit", "run_both", "synapses_of"]


def synapses_of(neurons: int, count: int, *, seed: int = 0, delays: int = 15, scale: float = 0.5) -> SparseWeight:
    """Return random synapses, some of which share source, target and delay; a third inhibits."""
    draw = torch.Generator().manual_seed(seed)
    source, target = (torch.randint(neurons, (count,), generator=draw) for _ in range(2))
    delay = torch.randint(1, delays + 1, (count,), generator=draw)
    twice = count // 10  # the same places once more, with other weights
    source, target, delay = (torch.cat([item, item[:twice]]) for item in (source, target, delay))
    weight = scale * torch.rand(len(source), generator=draw)
    weight[torch.rand(len(source), generator=draw) < 1 / 3] *= -1.5
    return SparseWeight.of(source, target, weight, delay, sources=neurons, targets=neurons)


class Maker:
    """Collects buffers, with their first contents, and steps."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.tensors: list[torch.Tensor] = []
        self.steps: list[Step] = []
        self.clock = self.add("clock", torch.zeros(1, 1, dtype=torch.int64))

    def add(self, name: str, tensor: torch.Tensor) -> View:
        """Return a view of a tensor [rows, columns] as a buffer."""
        self.buffers.append(Buffer(name, tensor.numel(), tensor.dtype, is_bound=True))
        self.tensors.append(tensor)
        return View(len(self.buffers) - 1, *tensor.shape)

    def step(self, op: Op, inputs: Sequence[View], outputs: Sequence[View], **more: Any) -> None:
        """Add a step."""
        self.steps.append(Step(op, inputs, outputs, **more))

    def program(self, layers: Sequence[SparseWeight] = ()) -> Program:
        """Return the program, whose clock is the first buffer."""
        sizes = [(item.targets, item.sources) for item in layers]
        return Program(self.buffers, self.steps, sizes, self.clock.buffer)


def circuit(synapses: SparseWeight, *, rows: int, rounds: int, reset: int, inclusive: int, **options: Any) -> Maker:
    """Return a recurrent circuit, which stores its spikes of so many rounds.

    Args:
        synapses: Between all neurons.
        rows: Samples.
        rounds: Slots of the ring of spikes.
        reset: As of FIRE.
        inclusive: As of FIRE.
        **options: ``vectors`` for parameters of each neuron's own, ``leak``, ``refractory`` steps.
    """
    made, size, draw = Maker(), synapses.targets, torch.Generator().manual_seed(3)

    def vector(value: float) -> torch.Tensor:
        return value * (0.9 + 0.2 * torch.rand(1, size if options.get("vectors") else 1, generator=draw))

    words = -(-size // 64)
    bits = made.add("bits", torch.zeros((rounds + 1) * rows, words, dtype=torch.int64))
    ring = made.add("ring", torch.zeros((synapses.longest + 1) * rows, size))
    mem = made.add("mem", torch.rand(rows, size, generator=draw))
    current = made.add("current", torch.zeros(rows, size))
    drive = made.add("drive", 0.4 * torch.rand(1, size, generator=draw))
    beta, gain, leak = (made.add(name, vector(value)) for name, value in (("beta", 0.9), ("gain", 1.1), ("leak", 0.01)))
    threshold, fall = made.add("threshold", vector(1.0)), made.add("fall", vector(0.3))
    made.step(Op.SEND, [bits, made.clock, ring], [ring], layer=0, numbers=[1, rows])
    made.step(Op.TAKE, [ring, made.clock], [current, ring])
    made.step(Op.ADD, [current, drive], [current])
    more: list[View] = []
    if options.get("refractory"):
        count, before = (made.add(name, torch.zeros(rows, size)) for name in ("count", "before"))
        more = [count, before, made.add("wait", torch.full((1, 1), float(options["refractory"])))]
        made.step(Op.COPY, [mem], [before])
    made.step(Op.INTEGRATE, [mem, current, beta, *([gain, leak] if options.get("leak") else [])], [mem])
    inputs = [mem, threshold, fall, made.clock, *more]
    made.step(Op.FIRE, inputs, [bits, mem, *more[:1]], numbers=[reset, inclusive])
    return made


def run_both(
    made: Maker, layers: Sequence[SparseWeight], rounds: Sequence[int], device: str = "cpu"
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return all buffers after some calls: the kernels', and the reference's on the CPU."""
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", torch.cuda.current_device())
    program, target = made.program(layers), machine_facts().target(place)
    results = []
    for kind in ("kernels", "reference"):
        where = place if kind == "kernels" else torch.device("cpu")
        buffers = [item.clone().to(where).view(-1) for item in made.tensors]
        moved = [
            SparseWeight(item.sources, item.targets, *(part.to(where) for part in item.tensors())) for item in layers
        ]
        bound = [BoundLayer(item, None, (), item) for item in moved]
        runner: Any = REFERENCE.bind_program(program, buffers, bound)
        if kind == "kernels":
            given: Any = target
            runner = SpikingRunner(program, buffers, bound, given, lambda *_: None)
        for count in rounds:
            runner(count)
        results.append([item.cpu() for item in buffers])
    return results[0], results[1]
