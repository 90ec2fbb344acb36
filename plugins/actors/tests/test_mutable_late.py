"""``MutableTensor`` and blocks that are left after their place was given back."""

from __future__ import annotations

import pytest
import torch
from abandonment import HUNG, Abandoned, Call, content_of, write

import q4core as q4
from q4_actors import MutableMode, MutableTensor
from tests.support.limits import scaled


def test_write_block_that_is_left_too_late(mode: MutableMode) -> None:
    """Once its place was given back, leaving it is a LifecycleError for who does, and nothing happens to the rest."""
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    for version, error in enumerate((None, RuntimeError("boom"))):
        writer = Abandoned(state.write(), keeps=True, use=lambda tensor: tensor.fill_(7.0))
        writer.end()
        Call(state.reset if state.is_poisoned else lambda: write(state, 0.0)).result()
        stats = state.stats()
        if error is None:
            with pytest.raises(q4.LifecycleError) as caught:
                writer.block.__exit__(None, None, None)
            assert "membrane" in str(caught.value)
            assert "thread" in str(caught.value)
        else:
            writer.block.__exit__(type(error), error, None)
        assert (state.version, state.is_poisoned, state.stats()) == (version + 1, False, stats)
        assert content_of(state) == [0.0] * 4


def test_write_block_that_is_left_too_late_does_not_end_another(mode: MutableMode) -> None:
    """The writer who came after stays the only one."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    writer = Abandoned(state.write(), keeps=True)
    writer.end()
    if state.is_poisoned:
        state.reset(timeout=scaled(HUNG))
    with state.write(timeout=scaled(HUNG)) as tensor:
        with pytest.raises(q4.LifecycleError):
            writer.block.__exit__(None, None, None)
        assert isinstance(Call(lambda: write(state, 1.0)).error(), q4.WriteConflictError)
        tensor.fill_(2.0)
    assert content_of(state) == [2.0] * 4


def test_in_place_read_block_that_is_left_too_late() -> None:
    """What it saw may be two versions, so it is a LifecycleError; the tensor, which is right, is not poisoned."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE, name="membrane")
    for error in (None, RuntimeError("boom")):
        reader = Abandoned(state.read(), keeps=True)
        reader.end()
        Call(lambda: write(state, 1.0)).result()
        if error is None:
            with pytest.raises(q4.LifecycleError, match="membrane"):
                reader.block.__exit__(None, None, None)
        else:
            reader.block.__exit__(type(error), error, None)
        assert not state.is_poisoned
        assert content_of(state) == [1.0] * 4


def test_versioned_read_block_may_be_left_late() -> None:
    """Its version stayed what it was, so leaving it is fine; if the reader changed it, leaving still raises."""
    state = MutableTensor(torch.zeros(4))
    for touches in (False, True):
        reader = Abandoned(state.read(), keeps=True)
        reader.end()
        assert not state.is_poisoned
        Call(lambda: write(state, 1.0)).result()
        if touches:
            reader.block.tensor.fill_(7.0)
            with pytest.raises(q4.PoisonedError):
                reader.block.__exit__(None, None, None)
        else:
            reader.block.__exit__(None, None, None)
        assert (content_of(state), state.is_poisoned) == ([1.0] * 4, False)
