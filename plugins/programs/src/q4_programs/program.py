"""Programs: a static list of operations over bound buffers, which a backend runs by one call.

An operation reads and writes views of buffers. A buffer is bound (a parameter, a table, a cache, an input: a tensor of
the caller's, whose numbers may change between runs), or given (a tensor of the caller's, another one with each run: a
state, or inputs and records of many rounds), or scratch (allocated when the program is bound, written before it is
read). Numbers that change from run to run, such as a token or a position, are in int64 buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_programs.cache_rows import CACHE_DTYPES, row_columns
from q4_programs.ops import (
    ALIASES,
    IN_PLACE,
    LENGTHS,
    WITH_CLOCK,
    WITH_POSITIONS,
    WITH_SPANS,
    WITHOUT_TOKENS,
    Op,
    numbers_rule,
    patterns_of,
)
from q4core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Buffer", "Program", "Step", "View"]


_MOST_ROUNDS = 1 << 62
_FIXED = frozenset({Op.LINEAR, Op.EMBEDDING})
"""Operations whose memory stays where it is: they are prepared for it when they are bound."""


def _tuple(items: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(items)


def _require(condition: bool, what: str, name: str, rule: str, value: object) -> None:  # noqa: FBT001  # reads as a sentence
    if not condition:
        raise ConfigError(what, name=name, rule=rule, value=value)


def _is_count(value: object, least: int = 1) -> bool:
    return type(value) is int and value >= least


@attrs.frozen
class Buffer:
    """Memory of a program.

    Args:
        name: For messages.
        size: Elements.
        dtype: float32 or int64; of keys and values float16 or int8, too.
        is_bound: Whether the caller gives it when the program is bound.
        given: ``"run"`` where each run gives it anew, ``"round"`` where a run gives one for each of its rounds. Buffers
            that are neither bound nor given are scratch.

    Raises:
        ConfigError: The size, the dtype or ``given`` is not legal.
    """

    name: str
    size: int
    dtype: torch.dtype = torch.float32
    is_bound: bool = False
    given: str | None = None

    def __attrs_post_init__(self) -> None:
        """Check size and dtype."""
        what = f"buffer {self.name!r}"
        is_legal = self.given is None or (self.given in {"run", "round"} and not self.is_bound)
        _require(is_legal, what, "given", "run or round, of a buffer that is not bound, or None", self.given)
        _require(_is_count(self.size), what, "size", "a positive whole number", self.size)
        is_legal = self.dtype is torch.int64 or self.dtype in CACHE_DTYPES
        _require(is_legal, what, "dtype", "float32 or int64, or float16 or int8 of a cache", self.dtype)


@attrs.frozen
class View:
    """Rows and columns of a buffer; columns are contiguous.

    Args:
        buffer: Index of the buffer.
        rows: R.
        columns: C.
        offset: Of the first element, in elements.
        stride: From row to row, in elements. Defaults to ``columns``.
    """

    buffer: int
    rows: int
    columns: int
    offset: int = 0
    stride: int = attrs.field(default=attrs.Factory(lambda self: self.columns, takes_self=True))

    @property
    def end(self) -> int:
        """Behind the last element."""
        return self.offset + (self.rows - 1) * self.stride + self.columns

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the view of a flat buffer: [rows, columns]."""
        return buffer.as_strided((self.rows, self.columns), (self.stride, 1), buffer.storage_offset() + self.offset)

    def overlaps(self, other: View) -> bool:
        """Return whether two views share an element."""
        if self.buffer != other.buffer or self.end <= other.offset or other.end <= self.offset:
            return False
        if self.stride != other.stride:
            return True
        # Columns of the same rows: apart if the steps from one to the other leave room for both.
        apart = (other.offset - self.offset) % self.stride
        return apart < self.columns or self.stride - apart < other.columns


def _numbers(items: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(item) for item in items)


@attrs.frozen
class Step:
    """One operation.

    Args:
        op: What it computes.
        inputs: What it reads.
        outputs: What it writes; a view that is an input as well, exactly, is changed in place where the operation works
            element by element (activations, ADD, MULTIPLY, AFFINE, norms, ROTARY, SOFTMAX), or says "in place". Other
            overlaps are refused.
        layer: Index of the packed layer, for EMBEDDING and LINEAR that have one, SPIKES and SEND.
        numbers: Options.
        label: What it belongs to, for messages and reports.
    """

    op: Op
    inputs: tuple[View, ...] = attrs.field(converter=_tuple)
    outputs: tuple[View, ...] = attrs.field(converter=_tuple)
    layer: int | None = None
    numbers: tuple[float, ...] = attrs.field(default=(), converter=_numbers)
    label: str = ""

    def patterns(self) -> Iterator[tuple[View, str]]:
        """Return each view, inputs first, with the letters of its rows and columns, after ``i`` or ``b`` for int64."""
        counts = len(self.inputs), len(self.outputs)
        is_packed, has_bias = self.layer is not None, self.numbers[:1] == (1.0,)
        names = patterns_of(self.op, *counts, is_packed=is_packed, has_bias=has_bias)
        yield from zip((*self.inputs, *self.outputs), (*names[0], *names[1]), strict=True)

    def kind(self) -> tuple[object, ...]:
        """Return all that the code of the operation may depend on but its packed layer: not the length of a cache."""
        sizes = [
            (None if name[-2] in LENGTHS else view.rows, view.columns, view.stride == view.columns)
            for view, name in self.patterns()
        ]
        return self.op, self.numbers, *sizes

    def of_tokens(self, count: int, most: int, first: int = 0) -> Step:
        """Return the step of a program of ``most`` tokens, as it is for ``count`` of them from ``first`` on.

        Raises:
            ConfigError: It is no step of tokens, or its rows are no multiple of them.
        """
        what = f"program step of {most} tokens, {self.op.value} {self.label}".rstrip()
        _require(self.op not in WITHOUT_TOKENS, what, "op", "one of tokens", self.op.value)
        views = []
        for view, name in self.patterns():
            is_index = name[0] == "i"
            letter, size = (name[-1], view.columns) if is_index else (name[-2], view.rows)
            scales = letter in {"R", "H", "T"} or (letter == "B" and size > 1)
            _require(not scales or size % most == 0, what, "rows", f"a multiple of {most}", size)
            if scales:
                each, stride = size // most, 1 if is_index else view.stride
                place = {"offset": view.offset + first * each * stride, "columns" if is_index else "rows": each * count}
                view = attrs.evolve(view, **place)  # noqa: PLW2901  # its part
            views.append(view)
        inputs = len(self.inputs)
        return attrs.evolve(self, inputs=views[:inputs], outputs=views[inputs:])


@attrs.frozen
class Program:
    """Buffers and steps, checked: every view lies inside its buffer, and every step has the views of its operation.

    Args:
        buffers: Memory.
        steps: Operations, in order.
        layers: (out_features, in_features) of each packed layer; (targets, sources) of synapses.
        clock: Index of a bound int64 buffer of one number, which is one more after each round; no step may write it.
        tokens: None, or the index of such a buffer and the number of tokens, 2 or more, that the steps are of: rows and
            positions are a multiple of it. A run is of as many tokens as the buffer says, from 1 on, and reads and
            writes the rows of the first ones alone.

    Raises:
        ConfigError: A step does not fit; the message names it.
    """

    buffers: tuple[Buffer, ...] = attrs.field(converter=_tuple)
    steps: tuple[Step, ...] = attrs.field(converter=_tuple)
    layers: tuple[tuple[int, int], ...] = attrs.field(default=(), converter=_tuple)
    clock: int | None = None
    tokens: tuple[int, int] | None = None

    def __attrs_post_init__(self) -> None:
        """Check every view and every step."""
        _require(bool(self.steps), "program", "steps", "at least one", self.steps)
        known = {index for index, buffer in enumerate(self.buffers) if buffer.is_bound or buffer.given}
        for index, step in enumerate(self.steps):
            label = f" ({step.label})" if step.label else ""
            what = f"program step {index}, {getattr(step.op, 'value', step.op)}{label}"
            self._check(step, what)
            early = [self.buffers[view.buffer].name for view in step.inputs if view.buffer not in known]
            _require(not early, what, "inputs", "bound or written by a step before", early)
            known.update(view.buffer for view in step.outputs)
            fixed = [view.buffer for view, name in step.patterns() if name[0] == "i" or step.op in _FIXED]
            moved = [self.buffers[buffer].name for buffer in fixed if self.buffers[buffer].given]
            _require(not moved, what, "views", "of bound or scratch memory: no given one", moved)
        if self.clock is not None:
            self._check_number("clock", self.clock)
        if self.tokens is not None:
            number, most = self.tokens
            self._check_number("tokens", number)
            is_legal = _is_count(most, 2) and self.clock is None and not self.given
            _require(is_legal, "program", "tokens", "2 or more, without a clock or given buffers", most)
            for step in self.steps:
                step.of_tokens(1, most)

    @property
    def has_tokens(self) -> bool:
        """Whether steps are of several tokens, at places of their own."""
        return self.tokens is not None or any(
            step.op in WITH_SPANS or (step.op in WITH_POSITIONS and step.inputs[-1].columns > 1) for step in self.steps
        )

    def by_token(self, count: int) -> Program:
        """Return a program that runs each step of this one for the first tokens, one after another."""
        most = 1 if self.tokens is None else self.tokens[1]
        steps = [step.of_tokens(1, most, token) for step in self.steps for token in range(count)]
        return attrs.evolve(self, steps=steps, tokens=None)

    @property
    def given(self) -> tuple[int, ...]:
        """Indices of the given buffers, in the order in which a run gets their tensors."""
        return tuple(index for index, buffer in enumerate(self.buffers) if buffer.given)

    @property
    def written(self) -> frozenset[int]:
        """Indices of the buffers that a step writes."""
        return frozenset(view.buffer for step in self.steps for view in step.outputs)

    def kind(self, step: Step) -> tuple[object, ...]:
        """Return a step's kind, with what its memory is."""
        memory = (self.buffers[view.buffer] for view, _ in step.patterns())
        return step.kind(), *((buffer.given, buffer.dtype) for buffer in memory)

    def limit(self, step: Step) -> int:
        """Return how many values a step's token, position or clock may have."""
        if step.op in WITH_CLOCK:
            return _MOST_ROUNDS
        if step.op is Op.EMBEDDING and step.layer is not None:
            return self.layers[step.layer][0]
        if step.op in WITH_SPANS:
            return step.inputs[-2].rows + 1
        if step.op is Op.STORE:
            return step.outputs[0].rows // (step.inputs[0].rows // step.inputs[1].columns)
        return step.inputs[1].rows // (int(step.numbers[0]) if step.op is Op.ATTENTION else 1)

    def _check_number(self, name: str, index: int) -> None:
        is_there = _is_count(index, 0) and index < len(self.buffers)
        facts = is_there and (buffer := self.buffers[index]).is_bound and buffer.size == 1
        facts = facts and buffer.dtype is torch.int64
        _require(facts, "program", name, "a bound int64 buffer of one number", index)
        written = any(view.buffer == index for step in self.steps for view in step.outputs)
        _require(not written, "program", name, "written by no step", index)

    def _check(self, step: Step, what: str) -> None:
        sizes = {"1": 1}
        needs = step.op in {Op.SPIKES, Op.SEND}
        _require(step.layer is not None or not needs, what, "layer", "there", None)
        if step.layer is not None:
            _require(needs or step.op in {Op.LINEAR, Op.EMBEDDING}, what, "layer", "None", step.layer)
            is_there = _is_count(step.layer, 0) and step.layer < len(self.layers)
            _require(is_there, what, "layer", f"below {len(self.layers)}, the number of packed layers", step.layer)
            names = "VC" if step.op is Op.EMBEDDING else "NK"
            sizes |= dict(zip(names, self.layers[step.layer], strict=True))
            is_legal = needs or step.numbers[:1] != (1.0,)
            _require(is_legal, what, "numbers", "without a bias besides the packed layer's", step.numbers)
        try:
            patterns = tuple(step.patterns())
        except ValueError:
            count = (len(step.inputs), len(step.outputs))
            raise ConfigError(what, name="inputs, outputs", rule="as many as its operation has", value=count) from None
        for view, name in patterns:
            self._check_view(view, name, what)
            columns = view.columns - row_columns(0, self.buffers[view.buffer].dtype)  # a scale is no number of a row
            for letter, size, of in zip(name[-2:], (view.rows, columns), ("rows", "columns"), strict=True):
                rule = f"of {sizes.setdefault(letter, size)} {of}"
                _require(sizes[letter] == size, what, f"buffer {self.buffers[view.buffer].name!r}", rule, size)
        broken = numbers_rule(step.op, step.numbers, sizes, len(step.inputs))
        _require(broken is None, what, "numbers", str(broken), step.numbers)
        for place, output in enumerate(step.outputs):
            alias = ALIASES.get(step.op, {}).get(place)
            _require(alias is None or step.inputs[alias] == output, what, "output", f"input {alias}", output)
            others = [view for index, view in enumerate(step.inputs) if index != alias]
            for view in (*others, *step.outputs[:place]):
                is_same = step.op in IN_PLACE and alias is None and view == output
                _require(is_same or not view.overlaps(output), what, "output", "apart from what else it has", output)

    def _check_view(self, view: View, name: str, what: str) -> None:
        is_legal = (
            _is_count(view.buffer, 0)
            and view.buffer < len(self.buffers)
            and _is_count(view.rows)
            and _is_count(view.columns)
            and _is_count(view.offset, 0)
            and _is_count(view.stride, view.columns)
            and view.end <= self.buffers[view.buffer].size
        )
        _require(is_legal, what, "view", "inside one of the buffers, its rows apart", view)
        buffer = self.buffers[view.buffer]
        dtypes = {torch.int64} if name[0] in "ib" else CACHE_DTYPES if name[0] == "M" else {torch.float32}
        rule = f"of {' or '.join(sorted(map(str, dtypes)))}"
        _require(buffer.dtype in dtypes, what, f"buffer {buffer.name!r}", rule, buffer.dtype)
