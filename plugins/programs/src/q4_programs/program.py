"""Programs: a static list of operations over bound buffers, which a backend runs by one call.

An operation reads and writes views of buffers. A buffer is either bound (a parameter, a table, a cache, an input: a
tensor of the caller's, which may change between runs) or scratch (allocated when the program is bound, written before
it is read). Numbers that change from run to run, such as a token or a position, are in int64 buffers.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Buffer", "Op", "Program", "Step", "View"]


class Op(enum.Enum):
    """The operation of a step. Views are [rows, columns] of float32, unless a line says otherwise; R rows, C columns.

    Sums are of float32 products in float32 or wider. ``numbers`` are the options of a step, in the order that is given.
    """

    EMBEDDING = "embedding"
    """tokens int64 [1, R] → [R, C]: rows of a packed layer, or of the second input, a table [V, C]."""
    LINEAR = "linear"
    """x [R, K] → [R, N]: a packed layer with its own bias, the bits of the backend's ``linear``; or the second input, a
    weight [N, K], and then the last input is a bias [1, N] where ``numbers[0]`` is 1."""
    RMS_NORM = "rms_norm"
    """x [R, C], weight [1, C] → x / sqrt(mean(x²) + eps) · (weight + shift). ``numbers``: eps, shift (0 or 1)."""
    LAYER_NORM = "layer_norm"
    """x [R, C], weight [1, C], bias [1, C] → the layer norm of each row. ``numbers``: eps."""
    ROTARY = "rotary"
    """x [heads, C], table [positions, D] of cos then sin of D / 2 pairs, position int64 [1, 1] → x turned, its first D
    columns. ``numbers``: 1 where the members of a pair are neighbours, 0 where they are D / 2 apart."""
    STORE = "store"
    """x [heads, C], position int64 [1, 1] → row ``position`` of each head of a cache [heads · capacity, C]."""
    ATTENTION = "attention"
    """query [heads, C], keys and values [kv_heads · capacity, C], position int64 [1, 1] → [heads, C]: softmax of the
    query with the keys 0 … position, times the values. ``numbers``: kv_heads, scale, window (how many of the last keys
    are seen; 0 for all)."""
    ADD = "add"
    """a [R, C], b [R, C] or [1, C] → a + b."""
    MULTIPLY = "multiply"
    """a [R, C], b [R, C] or [1, C] → a · b."""
    AFFINE = "affine"
    """x → x · ``numbers[0]`` + ``numbers[1]``, rounded twice."""
    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    SOFTMAX = "softmax"
    """Of each row, as all of the six above: x [R, C] → [R, C]."""
    COPY = "copy"
    """x [R, C] → [R, C]."""
    ARGMAX = "argmax"
    """x [R, C] → int64 [1, R]: the column of each row's largest number, the first of equals; a NaN is the largest."""
    TOP_K = "top_k"
    """x [R, C] → the k largest numbers of each row [R, k], falling, and their columns int64 [R, k]; equals by column.
    ``numbers``: k."""


_SHAPES: dict[Op, tuple[str, str, int]] = {
    Op.EMBEDDING: ("i1R VC", "RC", 0),
    Op.LINEAR: ("RK NK 1N", "RN", 1),
    Op.RMS_NORM: ("RC 1C", "RC", 2),
    Op.LAYER_NORM: ("RC 1C 1C", "RC", 1),
    Op.ROTARY: ("RC PD i11", "RC", 1),
    Op.STORE: ("HC i11", "MC", 0),
    Op.ATTENTION: ("HC MC MC i11", "HC", 3),
    Op.ADD: ("RC BC", "RC", 0),
    Op.MULTIPLY: ("RC BC", "RC", 0),
    Op.AFFINE: ("RC", "RC", 2),
    Op.ARGMAX: ("RC", "i1R", 0),
    Op.TOP_K: ("RC", "RT iRT", 1),
}
"""Rows and columns of each input and output, a letter for a size, and how many numbers there are; ``i`` for int64. An
operation that is not here has one input and one output, both RC."""
_ALIKE = ("RC", "RC", 0)
_LENGTHS = frozenset("MPV")
"""Sizes on which no code of an operation depends: lengths of caches and tables."""
_IN_PLACE = frozenset(Op) - {Op.EMBEDDING, Op.LINEAR, Op.STORE, Op.ATTENTION, Op.COPY, Op.ARGMAX, Op.TOP_K}


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
        dtype: float32 or int64.
        is_bound: Whether the caller gives it; else it is scratch.

    Raises:
        ConfigError: The size or the dtype is not legal.
    """

    name: str
    size: int
    dtype: torch.dtype = torch.float32
    is_bound: bool = False

    def __attrs_post_init__(self) -> None:
        """Check size and dtype."""
        what = f"buffer {self.name!r}"
        _require(_is_count(self.size), what, "size", "a positive whole number", self.size)
        _require(self.dtype in {torch.float32, torch.int64}, what, "dtype", "float32 or int64", self.dtype)


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
            element by element (activations, ADD, MULTIPLY, AFFINE, norms, ROTARY, SOFTMAX). Other overlaps are refused.
        layer: Index of the packed layer, for EMBEDDING and LINEAR that have one.
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
        """Return each view, inputs first, with the letters of its rows and columns, after ``i`` where it is int64."""
        inputs, outputs, _ = _SHAPES.get(self.op, _ALIKE)
        names = inputs.split()
        if self.layer is not None:
            del names[1:]
        if self.op is Op.LINEAR and self.numbers[:1] != (1.0,):
            del names[2:]
        yield from zip((*self.inputs, *self.outputs), (*names, *outputs.split()), strict=True)

    def kind(self) -> tuple[object, ...]:
        """Return all that the code of the operation may depend on but its packed layer: not the length of a cache."""
        sizes = [
            (None if name[-2] in _LENGTHS else view.rows, view.columns, view.stride == view.columns)
            for view, name in self.patterns()
        ]
        return self.op, self.numbers, *sizes


@attrs.frozen
class Program:
    """Buffers and steps, checked: every view lies inside its buffer, and every step has the views of its operation.

    Args:
        buffers: Memory.
        steps: Operations, in order.
        layers: (out_features, in_features) of each packed layer.

    Raises:
        ConfigError: A step does not fit; the message names it.
    """

    buffers: tuple[Buffer, ...] = attrs.field(converter=_tuple)
    steps: tuple[Step, ...] = attrs.field(converter=_tuple)
    layers: tuple[tuple[int, int], ...] = attrs.field(default=(), converter=_tuple)

    def __attrs_post_init__(self) -> None:
        """Check every view and every step."""
        _require(bool(self.steps), "program", "steps", "at least one", self.steps)
        known = {index for index, buffer in enumerate(self.buffers) if buffer.is_bound}
        for index, step in enumerate(self.steps):
            label = f" ({step.label})" if step.label else ""
            what = f"program step {index}, {getattr(step.op, 'value', step.op)}{label}"
            self._check(step, what)
            early = [self.buffers[view.buffer].name for view in step.inputs if view.buffer not in known]
            _require(not early, what, "inputs", "bound or written by a step before", early)
            known.update(view.buffer for view in step.outputs)

    def limit(self, step: Step) -> int:
        """Return how many values a step's token or position may have."""
        if step.op is Op.EMBEDDING and step.layer is not None:
            return self.layers[step.layer][0]
        if step.op is Op.STORE:
            return step.outputs[0].rows // step.inputs[0].rows
        return step.inputs[1].rows // (int(step.numbers[0]) if step.op is Op.ATTENTION else 1)

    def _check(self, step: Step, what: str) -> None:
        sizes = {"1": 1}
        if step.layer is not None:
            _require(step.op in {Op.LINEAR, Op.EMBEDDING}, what, "layer", "None", step.layer)
            is_there = _is_count(step.layer, 0) and step.layer < len(self.layers)
            _require(is_there, what, "layer", f"below {len(self.layers)}, the number of packed layers", step.layer)
            names = "NK" if step.op is Op.LINEAR else "VC"
            sizes |= dict(zip(names, self.layers[step.layer], strict=True))
            _require(
                step.numbers[:1] != (1.0,), what, "numbers", "without a bias besides the packed layer's", step.numbers
            )
        try:
            patterns = tuple(step.patterns())
        except ValueError:
            count = (len(step.inputs), len(step.outputs))
            raise ConfigError(what, name="inputs, outputs", rule="as many as its operation has", value=count) from None
        for view, name in patterns:
            self._check_view(view, torch.int64 if name[0] == "i" else torch.float32, what)
            for letter, size, of in zip(name[-2:], (view.rows, view.columns), ("rows", "columns"), strict=True):
                rule = f"of {sizes.setdefault(letter, size)} {of}"
                _require(sizes[letter] == size, what, f"buffer {self.buffers[view.buffer].name!r}", rule, size)
        _check_numbers(step, sizes, what)
        for place, output in enumerate(step.outputs):
            for view in (*step.inputs, *step.outputs[:place]):
                is_same = step.op in _IN_PLACE and view == output
                _require(is_same or not view.overlaps(output), what, "output", "apart from what else it has", output)

    def _check_view(self, view: View, dtype: torch.dtype, what: str) -> None:
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
        _require(buffer.dtype is dtype, what, f"buffer {buffer.name!r}", f"of {dtype}", buffer.dtype)


def _check_numbers(step: Step, sizes: dict[str, int], what: str) -> None:
    """Check the options of a step, and the sizes that depend on one another."""
    op, numbers = step.op, step.numbers
    count = _SHAPES.get(op, _ALIKE)[2]
    counts = {count} if op is not Op.LINEAR else {0, 1}
    is_legal = len(numbers) in counts and all(map(math.isfinite, numbers))
    rule = f"{count} finite numbers"
    if is_legal and op in {Op.ADD, Op.MULTIPLY}:
        is_legal, rule = sizes["B"] in {1, sizes["R"]}, "with a second input of 1 row or as many as the first"
    elif is_legal and op in {Op.RMS_NORM, Op.LAYER_NORM}:
        is_legal, rule = numbers[0] >= 0 and numbers[1:] in {(), (0.0,), (1.0,)}, "eps ≥ 0, and 0 or 1"
    elif is_legal and op is Op.ROTARY:
        is_legal = numbers[0] in {0, 1} and sizes["D"] % 2 == 0 and sizes["D"] <= sizes["C"]
        rule = "0 or 1, and a table of even columns, no more than x has"
    elif is_legal and op is Op.STORE:
        is_legal, rule = sizes["M"] % sizes["H"] == 0, "with a cache of as many rows for each head"
    elif is_legal and op is Op.ATTENTION:
        heads, _, window = numbers
        is_legal = heads >= 1 and heads.is_integer() and sizes["H"] % heads == 0 and sizes["M"] % heads == 0
        is_legal = is_legal and window >= 0 and window.is_integer()
        rule = "kv_heads (a divisor of the heads and of the cache's rows), scale, and a window ≥ 0"
    elif is_legal and op is Op.TOP_K:
        is_legal, rule = numbers[0] == sizes["T"] <= sizes["C"], "k, the columns of the outputs, at most those of x"
    _require(is_legal, what, "numbers", rule, numbers)
