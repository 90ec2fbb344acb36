"""The self-probe of programs: each step against the reference, and the whole against its steps, bit by bit.

A step's result depends on its inputs alone, so programs of one step, run one after another, give the bits of the whole
one; and where each step is right, so is the whole, with no bound that grows from step to step.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_programs.cache_rows import CACHE_DTYPES, narrowed, row_columns, widened
from q4_programs.contract import BoundLayer
from q4_programs.ops import SPIKING, WITH_SPANS, Op
from q4_programs.sparse import SparseWeight
from q4core.plugin_api import outside_inference

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from q4_programs.contract import RunsPrograms
    from q4_programs.program import Program, Step, View
    from q4core import Prepared

__all__ = ["find_fault"]

_PARAMETERS = frozenset({Op.LINEAR, Op.EMBEDDING, Op.RMS_NORM, Op.LAYER_NORM, Op.ROTARY})
"""Operations whose float inputs after the first are a model's own: read, never written."""
_ROUNDINGS = 32
"""Of both results, for an element, in addition to those of its sum."""
_UNIT = 2.0**-24
_LEAST_POSITIONS = 40
_ROUNDS = 3
"""Of a program with a clock."""
_MOST_ENTRIES = 1 << 18
"""Of synapses in a trial: random numbers make half of all neurons fire, and the reference needs 100 bytes for each."""
_RARE = 6
"""Random words whose common bits are the spikes of a trial: one in 64 neurons."""
_FEW_TOKENS = 11
"""Of a program of several tokens, in the run whose bits are compared."""
_STEPS_OF_KIND = 2
"""Steps of each kind in a trial: where blocks repeat, one and the next."""
_STRIDES = 7, 11, 13, 1
"""From one position of a trial to the next: the first that meets all of them."""


def find_fault(
    backend: RunsPrograms,
    reference: RunsPrograms,
    program: Program,
    buffers: Sequence[torch.Tensor],
    layers: Sequence[BoundLayer],
) -> str | None:
    """Return what is wrong with a backend's results for a program, or None.

    Args:
        backend: Declares programs.
        reference: What it is compared with.
        program: Checked.
        buffers: Flat, one for each buffer of the program; those that are no parameters are neither read nor written.
        layers: Bound.
    """
    with outside_inference(), torch.no_grad():
        layers = [_fewer(layer) for layer in layers]
        program = _first_of_kind(program, layers)
        bound = tuple(attrs.evolve(item, is_bound=True, given=None) for item in program.buffers)
        trial = _Trial(attrs.evolve(program, buffers=bound))
        if program.tokens is None:
            return _fault(backend, reference, program, trial, buffers, layers)
        # Of all tokens each kind of step alone, as the rows of products are taken in many ways; of a few the whole.
        number, most = program.tokens
        trial.values[number] = most
        if fault := _fault(backend, reference, program, trial, buffers, layers, is_whole=False):
            return fault
        trial.values[number] = min(most, _FEW_TOKENS)
        return _fault(backend, reference, program, trial, buffers, layers)


def _fault(  # noqa: C901, PLR0913  # one branch per comparison
    backend: RunsPrograms,
    reference: RunsPrograms,
    program: Program,
    trial: _Trial,
    buffers: Sequence[torch.Tensor],
    layers: Sequence[BoundLayer],
    *,
    is_whole: bool = True,
) -> str | None:
    """Return what is wrong in a trial: of each kind of step, and where asked for of the whole."""
    whole, steps = trial.buffers(buffers), trial.buffers(buffers)
    rounds = 1 if program.clock is None else _ROUNDS
    given, others = ([_rounds_of(program, index, steps[index], rounds) for index in program.given] for _ in "12")
    if is_whole:
        backend.bind_program(program, whole, layers)(*((rounds, given) if given else (rounds,) if rounds > 1 else ()))
    seen: set[object] = set()
    for number in range(rounds):
        rows = [item[number % len(item)] for item in others]
        _move(steps, program.given, rows)
        for index, step in enumerate(program.steps):
            kind = number, program.kind(step), None if step.layer is None else _layout(layers[step.layer].prepared)
            if kind in seen and not is_whole:
                continue
            one = attrs.evolve(trial.program, steps=(step,), clock=None)
            parts = trial.parts(step, step.inputs, steps)
            inputs = [part.clone() for part in parts] if step.op not in SPIKING else []
            outputs = [*trial.parts(step, step.outputs, steps)]
            before = [output.clone() for output in outputs]
            expected = before
            if kind not in seen:
                reference.bind_program(one, steps, layers)()
                expected = [output.clone() for output in outputs]
                for output, old in zip(outputs, before, strict=True):
                    output.copy_(old)
            backend.bind_program(one, steps, layers)()
            where = f"step {index}, {step.op.value} {step.label}".rstrip()
            if kind not in seen and (wrong := _compare(step, inputs, outputs, expected)) is not None:
                return f"{where}: {wrong}"
            seen.add(kind)
        _move(rows, range(len(rows)), [steps[index] for index in program.given])
        if program.clock is not None:
            steps[program.clock] += 1
    if not is_whole:
        return None
    pairs = zip(program.given, given, others, strict=True)
    if odd := [program.buffers[index].name for index, *both in pairs if not bool(_same(*both).all())]:
        return f"buffer {odd[0]!r}: other bits where it is given than where it is bound"
    _move(whole, program.given, [item[-1] for item in others])
    return _difference(program, trial, whole, steps)


def _difference(
    program: Program, trial: _Trial, whole: Sequence[torch.Tensor], steps: Sequence[torch.Tensor]
) -> str | None:
    """Return where a whole program left something else than its steps, or None."""
    if program.clock is not None and int(whole[program.clock]) != int(steps[program.clock]):
        return f"the clock is {int(whole[program.clock])} after {_ROUNDS} rounds, not {int(steps[program.clock])}"
    for index, step in enumerate(program.steps):
        pairs = zip(trial.parts(step, step.outputs, whole), trial.parts(step, step.outputs, steps), strict=True)
        if not all(bool(_same(one, other).all()) for one, other in pairs):
            return f"step {index}, {step.op.value}: other bits in the whole program than by itself"
    return None


def _move(to: Sequence[torch.Tensor], places: Iterable[int], values: Sequence[torch.Tensor]) -> None:
    for index, value in zip(places, values, strict=True):
        to[index].copy_(value)


def _rounds_of(program: Program, index: int, buffer: torch.Tensor, rounds: int) -> torch.Tensor:
    """Return what a run of a trial gives for a buffer: other numbers in each round, and a gap between two."""
    count = rounds if program.buffers[index].given == "round" else 1
    made = torch.zeros(count, len(buffer) + (8 if count > 1 else 0), dtype=buffer.dtype, device=buffer.device)
    for number, row in enumerate(made[:, : len(buffer)]):
        row.copy_(buffer.roll(number) if buffer.is_floating_point() else buffer)
    return made[:, : len(buffer)]


class _Trial:
    """Buffers for a trial: parameters as they are, numbers in range, and random values in the place of the rest."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._limits: dict[int, int] = {}
        self.values: dict[int, int] = {}
        """Numbers of buffers that hold one."""
        self._parameters = set(range(len(program.buffers)))
        self._caches: set[int] = set()
        positions = _LEAST_POSITIONS
        for step in program.steps:
            self._parameters.difference_update(view.buffer for view in step.outputs)
            for place, (view, name) in enumerate(step.patterns()):
                if name[0] == "M" or (step.op in WITH_SPANS and name[0] == "L"):
                    self._caches.add(view.buffer)
                if place >= len(step.inputs):
                    continue
                if name[0] == "i":
                    limit = self.program.limit(step)
                    self._limits[view.buffer] = min(limit, self._limits.get(view.buffer, limit))
                elif step.op not in _PARAMETERS or place == 0:
                    self._parameters.discard(view.buffer)
            if step.op is Op.ATTENTION:
                positions = max(positions, int(step.numbers[2]) + 3, step.inputs[3].columns + 3)
        self._positions = positions

    def parts(self, step: Step, views: Sequence[View], buffers: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Return views of a step as tensors; of a cache the positions that the trial touches."""
        names = dict(step.patterns())
        for view in views:
            tensor = view.of(buffers[view.buffer])
            if names[view][0] == "M":
                capacity = self.program.limit(step)
                tensor = tensor.unflatten(0, (-1, capacity))[:, : min(capacity, self._positions)]
            elif step.op in WITH_SPANS and names[view][0] == "L":
                tensor = tensor[: _rows_of_spans(step)]
            yield tensor

    def buffers(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return buffers, the same each time; memory that no step touches is not, either."""
        made = [
            tensor
            if index in self._parameters and item.dtype is torch.float32
            else (torch.empty_like if index in self._caches else torch.zeros_like)(tensor)  # zeros take all the memory
            for index, (item, tensor) in enumerate(zip(self.program.buffers, given, strict=True))
        ]
        for index, limit in self._limits.items():
            used = min(limit, self._positions)
            stride = next(stride for stride in _STRIDES if math.gcd(stride, used) == 1)
            made[index].copy_((torch.arange(made[index].numel()) * stride + used - 1) % used)
        for step in self.program.steps:
            if step.op in WITH_SPANS:
                _fill_spans(step.inputs[-1].of(made[step.inputs[-1].buffer])[0], _rows_of_spans(step))
        for index, value in self.values.items():
            made[index].fill_(value)
        self._fill(made)
        return made

    def _fill(self, made: Sequence[torch.Tensor]) -> None:
        random = torch.Generator().manual_seed(0)
        for step in self.program.steps:
            for view, part in zip(step.outputs, self.parts(step, step.outputs, made), strict=True):
                if view.buffer in self._caches:  # what a step leaves as it is is compared, too
                    part.zero_()
        for step in self.program.steps:
            names = [name for _, name in step.patterns()]
            for view, name, part in zip(step.inputs, names, self.parts(step, step.inputs, made), strict=False):
                if name[0] == "b":
                    part.fill_(-1)
                    for _ in range(_RARE):
                        drawn = torch.randint(-(1 << 63), (1 << 63) - 1, part.shape, generator=random)
                        part.bitwise_and_(drawn.to(part.device))
                elif view.buffer not in self._parameters and part.dtype in CACHE_DTYPES:
                    shape = (*part.shape[:-1], part.shape[-1] - row_columns(0, part.dtype))
                    part.copy_(narrowed(torch.randn(shape, generator=random), part.dtype))


def _rows_of_spans(step: Step) -> int:
    """Return how many rows the spans of a trial are of: a cache may have more."""
    return min(step.inputs[-2].rows, 2 * step.outputs[0].rows + 2)


def _fill_spans(spans: torch.Tensor, rows: int) -> None:
    """Fill in spans of 1, 2, 3 … rows, one after another; every other one ends with its own row, as causal ones do."""
    first, length = 0, 1
    for row, span in enumerate(spans.view(-1, 2)):
        place = row % rows
        if place == 0 or place >= first + length:
            first, length = place, 1 if place == 0 else length + 1
        span.copy_(torch.tensor([first, place + 1 if length % 2 == 0 else min(rows, first + length)]))


def _first_of_kind(program: Program, layers: Sequence[BoundLayer]) -> Program:
    """Return a program of the first two steps of each kind, as later ones run no other code; with a clock, all."""
    counts, retained = Counter[object](), []
    for step in program.steps:
        kind = program.kind(step), None if step.layer is None else _layout(layers[step.layer].prepared)
        counts[kind] += 1
        if program.clock is not None or counts[kind] <= _STEPS_OF_KIND:
            retained.append(step)
    buffers = [attrs.evolve(item, is_bound=item.given is None) for item in program.buffers]
    return attrs.evolve(program, buffers=buffers, steps=retained)


def _fewer(layer: BoundLayer) -> BoundLayer:
    """Return a layer; of synapses the first ones."""
    if not isinstance(layer.prepared, SparseWeight):
        return layer
    head = layer.prepared.head(_MOST_ENTRIES)
    return BoundLayer(head, None, (), head)


def _layout(prepared: Prepared | SparseWeight) -> object:
    """Return what the code of a packed product depends on."""
    return id(prepared) if isinstance(prepared, SparseWeight) else prepared.meta


def _same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    same = one == other
    return same | (one.isnan() & other.isnan()) if one.is_floating_point() else same


def _compare(
    step: Step, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> str | None:
    """Return how a step's results differ from the reference's beyond their bound, or None."""
    for output, right in zip(outputs, expected, strict=True):
        wrong = ~_same(output, right)
        if (bound := _bound(step, inputs, right)) is not None:
            wrong &= ~((output.double() - right.double()).abs() <= bound)
        if bool(wrong.any()):
            place = tuple(int(number) for number in wrong.nonzero()[0])
            got, wanted = output[place].item(), right[place].item()
            return f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; {list(place)} is {got}, not {wanted}"
    return None


def _bound(  # noqa: C901  # one case per operation
    step: Step, inputs: Sequence[torch.Tensor], right: torch.Tensor
) -> torch.Tensor | None:
    """Return how far two right results may lie apart, by what each may round; None where both have the same bits.

    Two sums of C products each differ from the exact one by (C + roundings) · 2⁻²⁴ of the sum of their magnitudes.
    """
    if step.op in SPIKING:
        return None
    x = inputs[0].double()
    least: Any = torch.finfo(torch.float32).tiny
    right, columns, op = right.double().abs(), inputs[0].shape[-1], step.op
    if op is Op.LINEAR and step.layer is None:
        weights = inputs[1].double().abs()
        magnitude = x.abs() @ weights.T + (inputs[2].double().abs() if len(inputs) > 2 else 0)  # noqa: PLR2004  # a bias
    elif op is Op.RMS_NORM:
        magnitude = right
    elif op is Op.LAYER_NORM:
        weight, bias = inputs[1].double().abs(), inputs[2].double().abs()
        spread = (x.var(-1, correction=0, keepdim=True) + step.numbers[0]).rsqrt()
        magnitude = (x.abs() + x.abs().mean(-1, keepdim=True)) * spread * weight + bias
    elif op is Op.ROTARY:
        magnitude = 2 * x.abs().amax(-1, keepdim=True) * inputs[1].double().abs().max() + 0 * right
    elif op is Op.ATTENTION:
        keys, values = (widened(rows, torch.float64).abs() for rows in inputs[1:3])
        scores = step.numbers[1] * x.abs().sum(-1, keepdim=True) * keys.max()
        columns = max(columns, keys.shape[1])
        magnitude = (1 + 2 * scores) * values.max() + 0 * right  # a score's error is a share of its weight
    elif op is Op.ATTEND_SPANS:
        columns = max(columns, inputs[1].shape[0])
        scores = step.numbers[2] * x.abs().sum(-1, keepdim=True) * inputs[1].double().abs().max()
        magnitude = (1 + 2 * scores) * inputs[2].double().abs().max() + 0 * right
    elif op is Op.MEAN_SPANS:
        columns, magnitude = len(x), x.abs().amax(0) + 0 * right
    elif op is Op.SOFTMAX:
        magnitude = right * (1 + x.amax(-1, keepdim=True) - x)
    elif op in {Op.GELU, Op.GELU_TANH, Op.SILU, Op.SIGMOID, Op.TANH}:
        columns, magnitude = 1, right * (1 + x.abs()) + (x.abs() if op in {Op.GELU, Op.GELU_TANH} else 0)
        least = least * (1 + x.abs())  # where exp(-x) is infinite in float32, x / (1 + exp(-x)) is 0
    else:
        return None
    bound: torch.Tensor = 2 * (columns + _ROUNDINGS) * _UNIT * magnitude + least
    return bound
