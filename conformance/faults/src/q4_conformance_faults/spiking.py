"""A toy backend of programs of spiking networks, and the faults planted in it."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.outcome import Outcome
from q4_conformance_faults.fault import program_fault
from q4_conformance_faults.programs import ToyPrograms, read_behind
from q4_programs import REFERENCE, Op, SparseWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from q4_programs import Program, Step

__all__ = ["ToySpiking"]

_HOME = os.getpid()
"""The process that binds programs; its forks have another number."""
_LOW_WORD = 0xFFFF_FFFF
_EDGE = 64
"""The first target of a second thread that has whole words."""


class ToySpiking(ToyPrograms):
    """Runs programs by the reference over synapses that a fault changes, and lets it harm what they leave.

    Args:
        name: Its name.
        spoil: Is given a program's only step, and its inputs before the run, and its outputs after it.
        synapses: Returns what is used in the place of sparse synapses.
        runs: Runs rounds in another way: is given what runs them, how many, and the clock.
        gives: Returns what is used in the place of what a run is given.
    """

    def __init__(
        self,
        name: str = "toy-spiking",
        spoil: Callable[[Step, list[Tensor], list[Tensor]], None] | None = None,
        synapses: Callable[[SparseWeight], Any] = lambda weight: weight,
        runs: Callable[[Callable[..., object], int, Tensor], None] | None = None,
        gives: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda given: given,
    ) -> None:
        super().__init__(name)
        self.spoil, self.synapses, self.runs, self.gives = spoil, synapses, runs, gives

    def bind_program(self, program: Program, buffers: Sequence[Tensor], layers: Any) -> Callable[..., None]:
        """Bind by the reference."""
        layers = [
            attrs.evolve(layer, module=self.synapses(layer.module)) if isinstance(layer.module, SparseWeight) else layer
            for layer in layers
        ]
        run = REFERENCE.bind_program(program, buffers, layers)
        clocks = [view for step in program.steps for view, name in step.patterns() if name == "i11"]
        clock = buffers[clocks[0].buffer] if clocks else torch.zeros(1, dtype=torch.int64)

        def call(rounds: int = 1, given: Sequence[Tensor] = ()) -> None:
            steps = program.steps if len(program.steps) == 1 and self.spoil is not None else ()
            before = [[view.of(buffers[view.buffer]).clone() for view in step.inputs] for step in steps]
            if self.runs is None:
                run(rounds, self.gives(given))
            else:
                self.runs(functools.partial(run, given=given), rounds, clock)
            for step, inputs in zip(steps, before, strict=True):
                self.spoil(step, inputs, [view.of(buffers[view.buffer]) for view in step.outputs])  # type: ignore[misc]  # not None

        return call


class _Changed:
    """Synapses as they are but for what one function changes in their places, targets, weights and delays."""

    def __init__(self, weight: SparseWeight, change: Callable[..., tuple[Tensor, ...]]) -> None:
        self._weight, self._change, self.sources = weight, change, weight.sources

    def with_places(self, spiking: Tensor) -> tuple[Tensor, ...]:
        """Return what is changed."""
        return self._change(*self._weight.with_places(spiking))


def _changing(change: Callable[..., tuple[Tensor, ...]]) -> Callable[[SparseWeight], _Changed]:
    return functools.partial(_Changed, change=change)


def _backwards(*numbers: Tensor) -> tuple[Tensor, ...]:
    return tuple(item.flip(0) for item in numbers)


def _late(place: Tensor, target: Tensor, weight: Tensor, delay: Tensor) -> tuple[Tensor, ...]:
    return place, target, weight, delay + 1


def _edge_twice(place: Tensor, target: Tensor, weight: Tensor, delay: Tensor) -> tuple[Tensor, ...]:
    """Deliver to the first neuron of the second thread twice, as a race of two threads may."""
    if torch.get_num_threads() == 3:  # noqa: PLR2004  # a number of threads that few test
        weight = torch.where(target == _EDGE, 2 * weight, weight)
    return place, target, weight, delay


def _fillers(weight: SparseWeight) -> SparseWeight:
    """Take entries that are no synapses for such of one step."""
    return attrs.evolve(weight, steps=weight.steps.clamp(min=1))


def _slot_of(step: Step, inputs: list[Tensor], ring: Tensor) -> Tensor:
    """Return the rows that a round has of a ring."""
    clock = next(int(tensor) for tensor, (_, name) in zip(inputs, step.patterns(), strict=False) if name == "i11")
    rows = len(inputs[0]) if step.op in {Op.FIRE, Op.PACK} else step.outputs[0].rows
    slots: Tensor = ring.unflatten(0, (-1, rows))
    return slots[clock % len(slots)]


def _of(op: Op, change: Callable[[Step, list[Tensor], list[Tensor]], None]) -> Callable[..., None]:
    def spoil(step: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if step.op is op:
            change(step, inputs, outputs)

    return spoil


def _fused(_: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    x, current, beta, *more = (item.double() for item in inputs)
    total = beta * x + (more[0] * current if more else current)
    outputs[0].copy_(total + more[1] if len(more) > 1 else total)


def _no_count(_: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    if len(outputs) > 2:  # noqa: PLR2004  # bits, mem, count
        outputs[2].copy_(torch.where(inputs[4] > 0, inputs[4], outputs[2]))


def _bit_behind(step: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    if inputs[0].shape[1] % 64:
        _slot_of(step, inputs, outputs[0])[0, -1] |= -(2**63)


def _last_word(step: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    if inputs[0].shape[1] % 64 == 0:
        _slot_of(step, inputs, outputs[0])[:, -1] &= 2**63 - 1


def _not_taken(step: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    _slot_of(step, inputs, outputs[1]).copy_(outputs[0])


def _rough(_: Step, __: list[Tensor], outputs: list[Tensor]) -> None:
    if len(outputs[0]) > 1:
        outputs[0][0, 0] *= 1 + 2**-20


def _resets_held(_: Step, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    if len(outputs) > 2:  # noqa: PLR2004  # as above
        outputs[1].copy_(torch.where(inputs[4] > 0, inputs[0], outputs[1]))


def _in_32_bits(run: Callable[..., object], rounds: int, clock: Tensor) -> None:
    high = int(clock) & ~_LOW_WORD
    clock -= high
    try:
        run(rounds)
    finally:
        clock += high


def _in_forks(run: Callable[..., object], rounds: int, clock: Tensor) -> None:
    run(rounds)
    if os.getpid() != _HOME:
        clock += 1


def _once(run: Callable[..., object], rounds: int, clock: Tensor) -> None:
    start = int(clock)
    run(1)
    if rounds > 1:
        clock.fill_(start + rounds)


def _first_rows(given: Sequence[Tensor]) -> Sequence[Tensor]:
    """Use the first row that is given in all rounds."""
    return [item[:1].expand_as(item) for item in given]


def _late_rounds(run: Callable[..., object], rounds: int, clock: Tensor) -> None:
    """Look at the clock after the first round alone."""
    if rounds > 1 and int(clock) < 0:
        held = int(clock)
        clock.fill_(0)
        run(1)
        clock.fill_(held)
    run(rounds)


def _behind(_: Step, __: list[Tensor], outputs: list[Tensor]) -> None:
    flat = outputs[0]
    read_behind(flat.as_strided((flat.untyped_storage().nbytes() // flat.element_size(),), (1,), 0))


for _name, _part, _says, _facts in (
    ("adds-backwards", "send", "of output 0 are wrong", {"synapses": _changing(_backwards)}),
    ("delivers-late", "send", "of output 0 are wrong", {"synapses": _changing(_late)}),
    ("delivers-twice-at-the-edge", "send", "3 threads", {"synapses": _changing(_edge_twice)}),
    ("delivers-fillers", "send", "of output 0 are wrong", {"synapses": _fillers}),
    ("fuses-products", "operations", "integrate of", {"spoil": _of(Op.INTEGRATE, _fused)}),
    ("never-counts-down", "operations", "step 0, fire: 1 of 1 elements", {"spoil": _of(Op.FIRE, _no_count)}),
    (
        "moves-while-refractory",
        "operations",
        "step 0, fire: 1 of 1 elements",
        {"spoil": _of(Op.FIRE, _resets_held)},
    ),
    ("sets-bits-behind", "operations", "step 0, fire: 1 of 1 elements", {"spoil": _of(Op.FIRE, _bit_behind)}),
    ("drops-the-last-bit", "operations", "fire of [[1, 64]", {"spoil": _of(Op.FIRE, _last_word)}),
    ("leaves-the-slot", "operations", "step 0, take: 1 of 1 elements are wrong", {"spoil": _of(Op.TAKE, _not_taken)}),
    ("counts-32-bits", "operations", "of output", {"runs": _in_32_bits}),
    ("packs-words-roughly", "packed", "step 0, spikes: 1 of 335 elements are wrong", {"spoil": _of(Op.SPIKES, _rough)}),
    ("counts-more-in-forks", "forked", "in a process that was forked", {"runs": _in_forks}),
    ("runs-one-round", "rounds", "other bits in the whole program", {"runs": _once}),
    ("reads-one-row", "rounds", "other bits where it is given", {"gives": _first_rows}),
    ("looks-after-a-round", "refused", "was refused after something was written", {"runs": _late_rounds}),
):
    program_fault(_name, f"EX-25/{_part}", _says)(functools.partial(ToySpiking, **_facts))
program_fault("makes-tensors-in-rounds", "EX-25/quiet", "a run made tensors")(ToySpiking)
_crashing = functools.partial(ToySpiking, spoil=_of(Op.SEND, _behind))
program_fault("reads-past-the-ring", "EX-25/pages", "ended by SIGSEGV", ends=Outcome.CRASH)(_crashing)
