"""``MutableTensor`` and blocks that are collected while their thread lives."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from abandonment import HUNG, Abandoned, Call, content_of, write

import q4core as q4
from q4_actors import MutableMode, MutableTensor


def test_collected_write_block_is_a_failed_update(mode: MutableMode) -> None:
    """A block that can't be left any more has failed: for its own thread and for others, also by way of a cycle."""
    for makes_cycle in (False, True):
        state = MutableTensor(torch.zeros(4), mode=mode)
        block = state.write()
        block.__enter__().fill_(7.0)
        if makes_cycle:
            block.source = cycle = [block]  # type: ignore[assignment]  # any cycle will do
            del cycle
        del block
        gc.collect()
        if mode is MutableMode.IN_PLACE:
            for call in (lambda: content_of(state), lambda: Call(lambda: content_of(state)).result()):  # noqa: B023
                with pytest.raises(q4.PoisonedError) as caught:
                    call()
                assert "without leaving" in str(caught.value.value)
            state.reset(timeout=HUNG)
        assert content_of(state) == [0.0] * 4
        write(state, 1.0, timeout=0)
        assert state.stats().failures == 1


def test_collected_read_block_keeps_no_writer_out(mode: MutableMode) -> None:
    """Its own thread and others may write; an outer block of the same thread still counts."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state.read():
        state.read().__enter__()
        with pytest.raises(q4.WriteConflictError):
            write(state, 1.0, timeout=0)
    state.read().__enter__()
    write(state, 1.0, timeout=0)
    state.read().__enter__()
    Call(lambda: write(state, 2.0, timeout=0)).result()
    assert (content_of(state), state.is_poisoned) == ([2.0] * 4, False)


def test_collected_blocks_leave_nothing_behind(mode: MutableMode) -> None:
    """The bookkeeping does not grow by blocks that nobody left, once there has been an update."""
    for drop in (
        lambda state: state.read().__enter__(),
        lambda state: Abandoned(state.read(), keeps=False).end(),
        lambda state: Call(lambda: state.read().__enter__()).result(),
    ):
        state = MutableTensor(torch.zeros(4), mode=mode)
        for _ in range(5):
            drop(state)
        write(state, 1.0)
        gate = state._content.gate
        assert (len(gate.readers), len(gate.lost_reads), len(gate.lost_writes)) == (0, 0, 0)


def test_collected_generator_leaves_its_block(mode: MutableMode) -> None:
    """A generator that its thread did not finish is closed by the interpreter, which fails its update."""
    state = MutableTensor(torch.zeros(4), mode=mode)

    def update() -> Any:
        with state.write(timeout=HUNG) as tensor:
            tensor.fill_(7.0)
            yield

    Call(lambda: next(update())).result()
    assert state.is_poisoned is (mode is MutableMode.IN_PLACE)
    if state.is_poisoned:
        state.reset(timeout=HUNG)
    assert Call(lambda: content_of(state)).result() == [0.0] * 4
    assert state.stats().failures == 1
