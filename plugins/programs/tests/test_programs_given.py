"""Given buffers: memory that each run gives anew, once or for each of its rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_programs import Buffer, Op, Program, Step, View, bind

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 70
BETA = 0.9


def leaky(per: str = "round") -> tuple[Program, list[torch.Tensor]]:
    """Return a leaky sum: a state, inputs, and a record of each round; and the bound buffers, the clock among them."""
    buffers = (
        Buffer("state", SIZE, given="run"),
        Buffer("clock", 1, torch.int64, is_bound=True),
        Buffer("input", SIZE, given=per),
        Buffer("beta", 1, is_bound=True),
        Buffer("record", SIZE, given=per),
    )
    state, x, record, beta = View(0, 1, SIZE), View(2, 1, SIZE), View(4, 1, SIZE), View(3, 1, 1)
    steps = Step(Op.INTEGRATE, (state, x, beta), (state,)), Step(Op.COPY, (state,), (record,))
    return Program(buffers, steps, clock=1), [torch.tensor([0]), torch.tensor([BETA])]


def expected(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the state after each round."""
    found = []
    for row in x:
        state = BETA * state + row
        found.append(state)
    return torch.stack(found)


@pytest.mark.parametrize("threads", [1, 2])
def test_states_and_rounds(threads: int) -> None:
    """Each round has its row, whatever lies between two; a state goes on in the caller's memory, from call to call."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        bound = bind(*leaky(), name="leaky")
        wide = torch.randn(9, SIZE + 3)
        x, state = wide[:, :SIZE], torch.randn(SIZE)
        right, record = expected(x, state), torch.full((9, SIZE + 5), 7.0)
        bound(4, [state, x[:4], record[:4, :SIZE]])
        bound(5, [state, x[4:], record[4:, :SIZE]])
        assert torch.equal(record[:, :SIZE], right)
        assert torch.equal(state, right[-1])
        assert bool((record[:, SIZE:] == 7).all())
        assert int(bound.buffers[1]) == 9
        other, one = torch.zeros(1, SIZE), torch.randn(1, SIZE)
        bound(6, [other, one.expand(6, SIZE), record[:6, :SIZE]])
        assert torch.equal(record[:6, :SIZE], expected(one.expand(6, SIZE), torch.zeros(SIZE)))
    finally:
        torch.set_num_threads(before)


def _overlapping(x: torch.Tensor, state: torch.Tensor, record: torch.Tensor) -> Sequence[torch.Tensor]:
    return [state, x, x]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x, state, _: [state, x], "given must be 3 tensors"),
        (lambda x, state, record: [state, x[:2], record], "buffer 'input' must be [3, …] with contiguous rows of 70"),
        (lambda x, state, record: [state, x.double(), record], "buffer 'input' must be"),
        (lambda x, state, record: [state[:-1], x, record], "buffer 'state' must be a contiguous tensor of 70"),
        (lambda x, state, record: [state, x, record[:1].expand(3, -1)], "each apart"),
        (lambda x, state, record: [state, x.T.contiguous().T, record], "buffer 'input' must be"),
        (_overlapping, "buffer 'record' must be memory that nothing else of the program has"),
        (lambda x, _, record: [record[1], x, record], "buffer 'record' must be memory that nothing else"),
    ],
)
def test_what_does_not_fit(change: Any, says: str) -> None:
    """It is refused with the buffer's name, and nothing was written."""
    bound = bind(*leaky(), name="leaky")
    x, state, record = torch.randn(3, SIZE), torch.randn(SIZE), torch.zeros(3, SIZE)
    copies = x.clone(), state.clone(), record.clone()
    with pytest.raises(q4.InputError) as refused:
        bound(3, change(x, state, record))
    assert says in str(refused.value)
    assert all(map(torch.equal, (x, state, record), copies))
    assert int(bound.buffers[1]) == 0


def test_what_may_not_be_given() -> None:
    """A clock, and what a product reads or writes, stay where they are."""
    with pytest.raises(q4.ConfigError, match="given must be run or round"):
        Buffer("x", 3, given="step")
    with pytest.raises(q4.ConfigError, match="given must be run or round, of a buffer that is not bound"):
        Buffer("x", 3, is_bound=True, given="run")
    buffers = Buffer("x", 4, given="round"), Buffer("w", 8, is_bound=True), Buffer("y", 2, is_bound=True)
    step = Step(Op.LINEAR, (View(0, 1, 4), View(1, 2, 4)), (View(2, 1, 2),), numbers=(0,))
    with pytest.raises(q4.ConfigError, match="no given one"):
        Program(buffers, (step,))
    clock = Buffer("clock", 1, torch.int64, given="run"), Buffer("ring", 8, is_bound=True), Buffer("y", 4)
    taken = Step(Op.ROW, (View(1, 2, 4), View(0, 1, 1)), (View(2, 1, 4),), numbers=(0,))
    with pytest.raises(q4.ConfigError, match="no given one"):
        Program(clock, (taken,))
