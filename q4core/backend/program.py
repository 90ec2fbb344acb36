"""Programs: a static list of operations over bound buffers, which a backend runs by one call.

An operation reads and writes views of buffers. A buffer is either bound (a parameter, a table, a cache, an input: a tensor
that the caller keeps and may change between runs) or scratch (made by whoever runs the program, undefined before its first
write). Numbers that change from run to run, such as a token or a position, stand in int64 buffers.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from q4core.backend.support import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from q4core.backend.contract import Prepared
    from q4core.backend.support import Segment


class Op(enum.Enum):
    """What a step computes. Views are [rows, columns] of float32, unless a line says otherwise; R rows, C columns.

    Sums are of float32 products in float32 or wider. ``numbers`` are the options of a step, in the order that is given.
    """

    EMBEDDING = "embedding"
    """tokens int64 [1, R] → [R, C]: rows of a packed layer, or of the second input, a table [V, C]. A token that is out of
    range is told before anything is computed."""
    LINEAR = "linear"
    """x [R, K] → [R, N]: a packed layer, or the second input, a weight [N, K]; the last input is a bias [1, N] where
    ``numbers[0]`` is 1."""
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
    """query [heads, C], keys and values [kv_heads · capacity, C], position int64 [1, 1] → [heads, C]: softmax of the query
    with the keys 0 … position, times the values. ``numbers``: kv_heads, scale, window (how many of the last keys are
    seen; 0 for all)."""
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


@attrs.frozen
class Buffer:
    """Memory of a program.

    Args:
        name: For messages.
        size: Elements.
        dtype: float32 or int64.
        is_bound: Whether the caller gives it; else it is scratch.
    """

    name: str
    size: int
    dtype: torch.dtype = torch.float32
    is_bound: bool = False


@attrs.frozen
class View:
    """Rows and columns of a buffer; columns are contiguous.

    Args:
        buffer: Index of the buffer.
        rows: R.
        columns: C.
        offset: Of the first element, in elements.
        stride: From row to row, in elements; ``columns`` unless told.
    """

    buffer: int
    rows: int
    columns: int
    offset: int = 0
    stride: int = attrs.field(default=attrs.Factory(lambda self: self.columns, takes_self=True))


def _views(items: Iterable[View]) -> tuple[View, ...]:
    return tuple(items)


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
    inputs: tuple[View, ...] = attrs.field(converter=_views)
    outputs: tuple[View, ...] = attrs.field(converter=_views)
    layer: int | None = None
    numbers: tuple[float, ...] = attrs.field(default=(), converter=_numbers)
    label: str = ""


@attrs.frozen
class Program:
    """Buffers and steps, checked: every view lies inside its buffer, and every step has the views that its operation asks.

    Args:
        buffers: Memory.
        steps: Operations, in order.
        layers: (out_features, in_features) of each packed layer.

    Raises:
        ConfigError: A step does not fit; the message names it.
    """

    buffers: tuple[Buffer, ...] = attrs.field(converter=tuple)
    steps: tuple[Step, ...] = attrs.field(converter=tuple)
    layers: tuple[tuple[int, int], ...] = attrs.field(default=(), converter=tuple)

    def __attrs_post_init__(self) -> None:
        """Check every view and every step."""
        require(bool(self.steps), "program", "steps", "at least one", self.steps)


@attrs.frozen(eq=False)
class BoundLayer:
    """A packed layer of a program, as its backend prepared it.

    Args:
        prepared: The weight.
        bias: [N] of float32, or None.
        segments: Which path serves which number of rows.
    """

    prepared: Prepared
    bias: torch.Tensor | None
    segments: tuple[Segment, ...]


class Runner(Protocol):
    """A bound program."""

    def __call__(self) -> None:
        """Run every step once.

        Allocates nothing. Raises InputError, before anything is written, where a token or a position is out of range.
        """
        ...


class RunsPrograms(Protocol):
    """The optional capability: a backend whose manifest declares the op ``"program"`` has this method."""

    def bind_program(self, program: Program, buffers: Sequence[torch.Tensor], layers: Sequence[BoundLayer]) -> Runner:
        """Return what runs a program over buffers.

        Args:
            program: Checked.
            buffers: One contiguous CPU tensor for each buffer of the program, scratch ones too, 64-byte aligned where they
                are scratch. They keep their address and size as long as the runner is used; the core looks at that.
            layers: The packed layers, all prepared by this backend.

        Raises:
            PrepareError: The backend does not serve such a program.
        """
        ...
