"""Turns: what is called between the rounds of a run, and may end it."""

from __future__ import annotations

import ctypes

import pytest
import torch

from q4_programs import REFERENCE, Buffer, Op, Program, Step, View, bind

ROUNDS, SIZE = 150, 200


class Ending:
    """Turns that note what a buffer holds in each, and end before a round."""

    def __init__(self, seen: torch.Tensor, last: int) -> None:
        self._seen, self._last = seen, last
        self.calls: list[tuple[int, int, float]] = []
        self._function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(self._call)
        self.address = (ctypes.cast(self._function, ctypes.c_void_p).value or 0, 0)

    def __call__(self, number: int, rounds: int, /) -> bool:
        """Note it."""
        self.calls.append((number, rounds, float(self._seen.min())))
        return number < self._last

    def _call(self, _: object, number: int, rounds: int) -> int:
        return int(not self(number, rounds))


def counting() -> tuple[Program, list[torch.Tensor]]:
    """Return a program that adds 1 to each number in a round, and keeps a record of it."""
    buffers = (
        Buffer("sum", SIZE, is_bound=True),
        Buffer("clock", 1, torch.int64, is_bound=True),
        Buffer("one", SIZE, is_bound=True),
        Buffer("record", SIZE, given="round"),
    )
    total, record = View(0, 1, SIZE), View(3, 1, SIZE)
    steps = Step(Op.ADD, (total, View(2, 1, SIZE)), (total,)), Step(Op.COPY, (total,), (record,))
    return Program(buffers, steps, clock=1), [torch.zeros(SIZE), torch.tensor([0]), torch.ones(SIZE)]


@pytest.mark.parametrize("runner", ["own", "reference"])
@pytest.mark.parametrize(("threads", "last"), [(1, ROUNDS), (2, ROUNDS), (1, 0), (1, 64), (2, 77)])
def test_turns(runner: str, threads: int, last: int) -> None:
    """They come before each round and after the last, once all before is written; where one says no, the run ends."""
    program, buffers = counting()
    bound = bind(program, buffers, name="counting")
    if runner == "reference":
        bound._run = REFERENCE.bind_program(program, [item.view(-1) for item in bound.buffers], ())
    record, turns, before = torch.zeros(ROUNDS, SIZE), Ending(buffers[0], last), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        bound(ROUNDS, [record], turns)
    finally:
        torch.set_num_threads(before)
    assert turns.calls == [(number, ROUNDS, float(number)) for number in range(last + 1)]
    assert int(buffers[1]) == last
    assert torch.equal(record[:, 0], torch.cat((torch.arange(1.0, last + 1), torch.zeros(ROUNDS - last))))
    bound(3, [record[:3]])
    assert int(buffers[1]) == last + 3
