"""Scenes of spiking networks: each operation alone, and a recurrent circuit over several rounds, with exact results."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance.oracle.spiking import exact_spiking, synapses_of
from q4_conformance.subjects.scenes import CANARY, Op, Scene, draw
from q4_programs import SparseWeight, View

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from q4_conformance.oracle.spiking import Synapses

__all__ = ["Alone", "Circuit", "Op", "Scene", "alone", "circuit", "packed_bits", "sends"]

_FAR = (1 << 40) + 7
"""A round beyond 32 bits, of no power of two of any number of slots."""
CELLS, INPUTS, ROUNDS = 201, 70, 40
_START = _FAR // ROUNDS * ROUNDS


@attrs.frozen(eq=False)
class Alone:
    """One operation over values of its own.

    Args:
        op: The operation.
        inputs: Tensors [rows, columns]; int64 of one number is the clock.
        outputs: Tensors that are written, with what they hold before; or the number of the input that is changed.
        numbers: Options.
        synapses: Those of SEND.
    """

    op: Op
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor | int]
    numbers: Sequence[float] = ()
    synapses: SparseWeight | None = None

    def __str__(self) -> str:
        """Return what distinguishes it."""
        shapes = [[*tensor.shape] if tensor.numel() > 1 else tensor.item() for tensor in self.inputs]
        return f"{self.op.value} of {shapes}, numbers {[*self.numbers]}"

    def add(self, scene: Scene) -> list[View]:
        """Add it to a scene, and return its outputs."""
        views = [
            scene.round(int(item)) if item.dtype is torch.int64 and item.numel() == 1 else scene.view(item)
            for item in self.inputs
        ]
        outputs = [views[item] if isinstance(item, int) else scene.view(item) for item in self.outputs]
        layer = None if self.synapses is None else scene.synapses(self.synapses)
        scene.add(self.op, views, outputs[0], self.numbers, further=outputs[1:], layer=layer)
        return outputs

    def exact(self) -> list[torch.Tensor]:
        """Return what the outputs hold afterwards."""
        inputs = [item.numpy().copy() for item in self.inputs]
        outputs = [inputs[item] if isinstance(item, int) else item.numpy().copy() for item in self.outputs]
        exact_spiking(self.op, self.numbers, inputs, outputs, synapses_of(self.synapses) if self.synapses else [])
        return [torch.from_numpy(item) for item in outputs]


def packed_bits(ones: torch.Tensor) -> torch.Tensor:
    """Return bools [rows, columns] as int64 words."""
    padded = np.pad(ones.numpy(), ((0, 0), (0, -ones.shape[1] % 64)))
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int64).copy())


def _spikes(rows: int, columns: int, rate: float = 0.2) -> torch.Tensor:
    """Return rows of words, of which the first has both ends and the last all."""
    ones = torch.rand((rows, columns), generator=torch.Generator().manual_seed(rows + columns)) < rate
    ones[0, [0, -1]] = True
    ones[-1] = True
    return packed_bits(ones)


def _out(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((rows, columns), int(CANARY), dtype=dtype)


def alone() -> Iterator[Alone]:
    """Yield each operation but SEND and SPIKES, of sizes that divide no vector and no word, too."""
    for rows, columns in ((1, 1), (1, 64), (2, 67), (3, 131)):
        x, current = draw(rows, columns), 3 * draw(rows, columns, seed=5)
        x[0, 0], x[-1, -1] = torch.inf, torch.nan
        one, each = torch.tensor([[0.9]]), draw(1, columns).abs()
        for vectors in ((one,), (each,), (one, each), (each, one, each), (one, one, one)):
            yield Alone(Op.INTEGRATE, [x, current, *vectors], [0])
        for slots, number in ((1, 0), (3, 5), (3, _FAR), (4, _FAR)):
            clock, ring = torch.tensor([[number]]), draw(slots * rows, columns, seed=number % 97)
            bits = _spikes(slots * rows, columns)
            yield Alone(Op.TAKE, [ring, clock], [_out(rows, columns), 0])
            yield Alone(Op.STORE_ROW, [x, clock], [ring])
            yield from (Alone(Op.ROW, [ring, clock], [_out(rows, columns)], (ago,)) for ago in {0, slots - 1})
            yield from (Alone(Op.UNPACK, [bits, clock], [_out(rows, columns)], (ago,)) for ago in {0, slots - 1})
            spikes = (x > 0).float()
            spikes[0, 0], spikes[0, -1] = -0.0, 0.5
            yield Alone(Op.PACK, [spikes, clock], [bits, bits.flip(0)])
            mem = x.round()  # some are at the threshold
            mem[0, -1] = 5
            for reset, inclusive in itertools.product((0, 1, 2), (0, 1)):
                for threshold, vector in ((torch.ones(1, 1), one), (each.round(), each), (mem.roll(1, 1), one)):
                    yield Alone(Op.FIRE, [mem, threshold, vector, clock], [bits, 0], (reset, inclusive))
                count = (current - 1).clamp(min=0).round()
                further = [count, current, each.round()]
                yield Alone(Op.FIRE, [mem, torch.ones(1, 1), one, clock, *further], [bits, 0, 4], (reset, inclusive))


def synapses(sources: int, targets: int, count: int, longest: int = 5) -> SparseWeight:
    """Return random synapses; some sources have none, and some pairs several."""
    random = torch.Generator().manual_seed(sources + targets + count)
    source, target = (torch.randint(size, (count,), generator=random) for size in (sources, targets))
    source[source == sources // 2] = sources - 1
    target[:9], source[:9] = targets - 1, sources - 1
    weight = 10 * torch.randn(count, generator=random)
    delay = torch.randint(1, longest + 1, (count,), generator=random)
    return SparseWeight.of(source, target, weight, delay, sources=sources, targets=targets)


def sends() -> Iterator[Alone]:
    """Yield SEND by each layout: near targets, distances that a byte can't hold, and such of two bytes."""
    for sources, targets, count in ((1, 1, 12), (70, 131, 900), (64, 3_000, 1_500), (67, 70_000, 800)):
        weight = synapses(sources, targets, count)
        for rows, slots, ago, number in ((1, 6, 0, 0), (1, 7, 1, _FAR), (2, 9, 2, _FAR + 1)):
            bits = _spikes(3 * rows, sources, 0.3)
            ring = draw(slots * rows, targets, seed=number % 97)
            yield Alone(Op.SEND, [bits, torch.tensor([[number]]), ring], [2], (ago, rows), weight)


@attrs.frozen(eq=False)
class Circuit:
    """A recurrent circuit in a scene: the views that a run changes, and the inputs of all rounds."""

    scene: Scene
    changed: dict[str, View]
    record: View

    def read(self) -> dict[str, torch.Tensor]:
        """Return what the views hold."""
        return {name: self.scene.read(view) for name, view in (*self.changed.items(), ("record", self.record))}


def circuit(scene: Scene, rows: int = 2, *, is_given: bool = False) -> tuple[Circuit, dict[str, torch.Tensor]]:
    """Add cells that inputs and they themselves reach by sparse synapses; return them, and what they hold afterwards.

    In each of ROUNDS: what arrives is taken from the ring, INTEGRATE, FIRE with refractory steps, and both send.

    Args:
        scene: Where.
        rows: Samples.
        is_given: Whether each run gives the states, and inputs and record for each of its rounds.
    """
    feed, back = _joined()
    sent, record_before = _spikes(ROUNDS * rows, INPUTS, 0.1), _out(ROUNDS * rows, CELLS)
    if is_given:
        views = {name: scene.given(value, len(value), per="run") for name, value in _rest(rows).items()}
        inputs, record = (scene.given(item, rows, per="round") for item in (sent, record_before))
    else:
        views = {name: scene.view(value) for name, value in _rest(rows).items()}
        inputs, record = scene.view(sent), scene.view(record_before)
    clock = scene.round(_START, counts=True)
    beta, level = torch.tensor([[0.8]]), torch.tensor([[45.0]])
    beta_at, level_at, steps_at = (scene.view(item) for item in (beta, level, torch.tensor([[2.0]])))
    arrived, before, ones = (scene.out(rows, CELLS) for _ in range(3))
    feed_at, back_at = scene.synapses(feed), scene.synapses(back)
    mem, count, ring, fired = views.values()
    scene.add(Op.SEND, [inputs, clock, ring], ring, (0, rows), layer=feed_at)
    scene.add(Op.TAKE, [ring, clock], arrived, further=[ring])
    scene.add(Op.COPY, [mem], before)
    scene.add(Op.INTEGRATE, [mem, arrived, beta_at], mem)
    refractory = [count, before, steps_at]
    scene.add(Op.FIRE, [mem, level_at, level_at, clock, *refractory], fired, (1, 0), further=[mem, count])
    scene.add(Op.SEND, [fired, clock, ring], ring, (0, rows), layer=back_at)
    scene.add(Op.UNPACK, [fired, clock], ones, (0,))
    scene.add(Op.STORE_ROW, [ones, clock], record)
    return Circuit(scene, views, record), _wanted(rows)


@functools.lru_cache(maxsize=1)
def _wanted(rows: int) -> dict[str, torch.Tensor]:
    """Return what a circuit holds after ROUNDS, and its record."""
    state = {name: value.numpy().copy() for name, value in _rest(rows).items()}
    found = _simulated(state, _spikes(ROUNDS * rows, INPUTS, 0.1).numpy(), _START, *_joined())
    return {name: torch.from_numpy(value) for name, value in found.items()}


def _rest(rows: int) -> dict[str, torch.Tensor]:
    """Return what a circuit begins with."""
    return {
        "mem": draw(rows, CELLS),
        "count": torch.zeros(rows, CELLS),
        "ring": torch.zeros(8 * rows, CELLS),
        "fired": torch.zeros(3 * rows, -(-CELLS // 64), dtype=torch.int64),
    }


def _joined() -> tuple[SparseWeight, SparseWeight]:
    """Return the synapses of inputs, and of cells."""
    return synapses(INPUTS, CELLS, 4_000, 3), synapses(CELLS, CELLS, 9_000, 6)


def _simulated(state: dict[str, Any], given: Any, start: int, feed: SparseWeight, back: SparseWeight) -> dict[str, Any]:
    """Return the state of a circuit after ROUNDS, and its record."""
    mem, count, ring, fired = state["mem"], state["count"], state["ring"], state["fired"]
    known: list[Synapses] = [synapses_of(feed), synapses_of(back)]
    rows, (beta, level, steps) = len(mem), (np.full((1, 1), item, np.float32) for item in (0.8, 45.0, 2.0))
    arrived, ones, record = np.zeros_like(mem), np.zeros_like(mem), np.zeros((ROUNDS * rows, CELLS), np.float32)
    for number in range(start, start + ROUNDS):
        clock = np.array([[number]])
        exact_spiking(Op.SEND, (0, rows), [given, clock, ring], [ring], known[0])
        exact_spiking(Op.TAKE, (), [ring, clock], [arrived, ring], [])
        before = mem.copy()
        exact_spiking(Op.INTEGRATE, (), [mem, arrived, beta], [mem], [])
        further = [count, before, steps]
        exact_spiking(Op.FIRE, (1, 0), [mem, level, level, clock, *further], [fired, mem, count], [])
        exact_spiking(Op.SEND, (0, rows), [fired, clock, ring], [ring], known[1])
        exact_spiking(Op.UNPACK, (0,), [fired, clock], [ones], [])
        exact_spiking(Op.STORE_ROW, (), [ones, clock], [record], [])
    return {**state, "record": record}
