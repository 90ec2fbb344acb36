"""Programs are checked when they are made: what does not fit is refused, and the message names the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import q4core as q4
from q4_programs import Buffer, Op, Program, Step, View

FLOATS, NUMBERS = Buffer("floats", 4096, is_bound=True), Buffer("numbers", 64, torch.int64, is_bound=True)
SCRATCH = Buffer("scratch", 4096)


def made(op: Op, inputs: Any, outputs: Any, numbers: Any = (), layer: int | None = None) -> Program:
    """Return a program of one step over two bound buffers and scratch."""
    step = Step(op, inputs, outputs, layer, numbers, "here")
    return Program((FLOATS, NUMBERS, SCRATCH), (step,), ((6, 8),))


def at(rows: int, columns: int, offset: int = 0, buffer: int = 0) -> View:
    """Return a view."""
    return View(buffer, rows, columns, offset)


X, OUT, POSITION = at(2, 8), at(2, 8, 512), at(1, 1, buffer=1)
LEGAL: list[tuple[Op, Any, Any, Any]] = [
    (Op.EMBEDDING, (at(1, 3, buffer=1), at(5, 8)), (at(3, 8, 512),), ()),
    (Op.LINEAR, (X, at(6, 8, 64)), (at(2, 6, 512),), (0,)),
    (Op.LINEAR, (X, at(6, 8, 64), at(1, 6, 200)), (at(2, 6, 512),), (1,)),
    (Op.RMS_NORM, (X, at(1, 8, 64)), (OUT,), (1e-6, 1)),
    (Op.LAYER_NORM, (X, at(1, 8, 64), at(1, 8, 128)), (OUT,), (1e-6,)),
    (Op.ROTARY, (X, at(9, 4, 64), POSITION), (X,), (0,)),
    (Op.STORE, (X, POSITION), (at(20, 8, 512),), ()),
    (Op.ATTENTION, (X, at(10, 8, 64), at(10, 8, 256), POSITION), (OUT,), (1, 0.5, 0)),
    (Op.ADD, (X, at(1, 8, 64)), (X,), ()),
    (Op.AFFINE, (X,), (X,), (2, 1)),
    (Op.SILU, (X,), (OUT,), ()),
    (Op.COPY, (X,), (OUT,), ()),
    (Op.ARGMAX, (X,), (at(1, 2, buffer=1),), ()),
    (Op.TOP_K, (X,), (at(2, 3, 512), at(2, 3, buffer=1)), (3,)),
]


@pytest.mark.parametrize(("op", "inputs", "outputs", "numbers"), LEGAL)
def test_each_operation_takes_its_own_views(op: Op, inputs: Any, outputs: Any, numbers: Any) -> None:
    """A step whose views fit is taken; with one too few, one of another size or too many numbers it is not."""
    made(op, inputs, outputs, numbers)
    wrong = [(inputs[:-1], outputs, numbers), (inputs, (*outputs, OUT), numbers), (inputs, outputs, (*numbers, 1, 1))]
    wrong += [(inputs, (View(0, 3, 5, 2048),), numbers), (inputs, outputs, (*numbers[:-1], float("nan")))]
    for given in wrong:
        with pytest.raises(q4.ConfigError, match=rf"program step 0, {op.value} \(here\): .* must be"):
            made(op, *given)


@pytest.mark.parametrize(
    "view",
    [
        at(2, 8, 4090),
        at(2, 8, -1),
        at(0, 8),
        at(2, 8, buffer=3),
        at(2, 8, buffer=-1),
        View(0, 2, 8, 0, 4),
        at(2, 8, 0, 1),
    ],
)
def test_views_lie_in_their_buffer(view: View) -> None:
    """A view that leaves its buffer, whose rows overlap, or that is of another dtype is refused."""
    with pytest.raises(q4.ConfigError, match="step 0, copy"):
        made(Op.COPY, (view,), (OUT,))


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "numbers"),
    [
        (Op.COPY, (X,), (X,), ()),
        (Op.SILU, (X,), (at(2, 8, 4),), ()),
        (Op.ADD, (X, at(2, 8, 8)), (X,), ()),
        (Op.LINEAR, (X, at(6, 8, 64)), (at(2, 6),), (0,)),
        (Op.TOP_K, (X,), (at(2, 3, 2), at(2, 3, buffer=1)), (3,)),
        (Op.ATTENTION, (X, at(10, 8, 64), at(10, 8, 256), POSITION), (at(2, 8, 64),), (1, 0.5, 0)),
    ],
)
def test_overlaps_are_refused(op: Op, inputs: Any, outputs: Any, numbers: Any) -> None:
    """What is read must not be written, but element by element in its place."""
    with pytest.raises(q4.ConfigError, match="apart from what else it has"):
        made(op, inputs, outputs, numbers)


def test_columns_side_by_side_do_not_overlap() -> None:
    """Two halves of the same rows are apart, though each spans the other."""
    halves = View(0, 4, 8, 0, 16), View(0, 4, 8, 8, 16)
    made(Op.COPY, halves[:1], halves[1:])
    assert not halves[0].overlaps(halves[1])
    assert View(0, 4, 8, 12, 16).overlaps(halves[0])


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "numbers"),
    [
        (Op.ROTARY, (X, at(9, 3, 64), POSITION), (X,), (0,)),
        (Op.ROTARY, (X, at(9, 16, 64), POSITION), (X,), (0,)),
        (Op.STORE, (X, POSITION), (at(21, 8, 512),), ()),
        (Op.ATTENTION, (at(4, 8), at(9, 8, 64), at(9, 8, 256), POSITION), (at(4, 8, 512),), (3, 1, 0)),
        (Op.ATTENTION, (X, at(10, 8, 64), at(10, 8, 256), POSITION), (OUT,), (1, 0.5, -1)),
        (Op.TOP_K, (X,), (at(2, 9, 512), at(2, 9, buffer=1)), (9,)),
        (Op.RMS_NORM, (X, at(1, 8, 64)), (OUT,), (-1, 0)),
        (Op.ADD, (at(4, 8), at(2, 8, 64)), (at(4, 8, 512),), ()),
    ],
)
def test_numbers_fit_the_views(op: Op, inputs: Any, outputs: Any, numbers: Any) -> None:
    """Heads divide, tables are even, k is no more than there is."""
    with pytest.raises(q4.ConfigError, match="numbers must be"):
        made(op, inputs, outputs, numbers)


def test_packed_layers_have_their_own_sizes_and_bias() -> None:
    """A step over a packed layer fits its sizes, has no bias besides the layer's, and names a layer that there is."""
    made(Op.LINEAR, (X,), (at(2, 6, 512),), (0,), 0)
    for inputs, outputs, numbers, layer in (
        ((at(2, 7),), (at(2, 6, 512),), (0,), 0),
        ((X, at(1, 6, 64)), (at(2, 6, 512),), (1,), 0),
        ((X,), (at(2, 6, 512),), (0,), 1),
    ):
        with pytest.raises(q4.ConfigError, match="step 0, linear"):
            made(Op.LINEAR, inputs, outputs, numbers, layer)
    with pytest.raises(q4.ConfigError, match="layer must be None"):
        made(Op.COPY, (X,), (OUT,), (), 0)


def test_scratch_is_written_before_it_is_read() -> None:
    """What nobody has written is no input."""
    with pytest.raises(q4.ConfigError, match="bound or written by a step before"):
        made(Op.COPY, (at(2, 8, buffer=2),), (OUT,))


def test_empty_programs_and_buffers() -> None:
    """A program has a step, and a buffer an element of a known dtype."""
    with pytest.raises(q4.ConfigError, match="steps must be at least one"):
        Program((FLOATS,), ())
    with pytest.raises(q4.ConfigError, match="size must be"):
        Buffer("x", 0)
    with pytest.raises(q4.ConfigError, match="dtype must be"):
        Buffer("x", 1, torch.bfloat16)
