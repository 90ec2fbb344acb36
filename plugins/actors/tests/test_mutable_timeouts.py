"""What refusals of mutable tensors name: who was there, and what a tensor is."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharing import LONG, Held

import q4core as q4
from q4_actors import MutableMode, MutableTensor, SharedMutableTensor
from q4_actors.tensors.backoff import Backoff
from tests.support.limits import scaled

if TYPE_CHECKING:
    import concurrent.futures


def test_timeout_error_names_the_holder(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """The refusal names readers where readers were there, and the other writer where one was."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    for block, who in (
        (state.read(timeout=scaled(LONG)), "readers are there"),
        (state.write(timeout=scaled(LONG)), "another writer is there"),
    ):
        held = Held(threads, block)
        with pytest.raises(q4.WriteConflictError) as caught, state.write(wait=True, timeout=0.01):
            raise AssertionError("let in")
        assert who in str(caught.value)
        held.release()


@pytest.mark.parametrize("kind", [MutableTensor, SharedMutableTensor])
@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (torch.eye(3).to_mkldnn(), "torch._mkldnn"),
        (torch.eye(3).as_subclass(type("Mine", (torch.Tensor,), {})), "Mine"),
    ],
)
def test_what_a_tensor_is_is_named(kind: Any, tensor: torch.Tensor, value: str) -> None:
    """A sparse tensor is refused by its layout, a subclass by its type."""
    with pytest.raises(q4.InputError) as caught:
        kind(tensor)
    assert caught.value.value == value


def test_a_closed_shared_tensor_is_not_pickled() -> None:
    """A handle that is closed is refused where it is pickled, and not on unpickling."""
    state = SharedMutableTensor(torch.zeros(4), name="membrane")
    assert pickle.dumps(state)
    other = SharedMutableTensor.attach(state.segment)
    state.close()
    with pytest.raises(q4.LifecycleError, match="mutable tensor 'membrane' is closed"):
        pickle.dumps(state)
    with pytest.raises(q4.LifecycleError):
        pickle.dumps(other)  # the maker has ended it for all


def test_polls_become_rare() -> None:
    """Who waits for a slow neighbour polls every half millisecond at first, and less than 200 times in a second."""
    backoff = Backoff(None)
    slept: list[float] = []
    while sum(slept) < 1.0:
        slept.append(backoff.next() or 0.0)
    assert slept[:7] == [0.0005] * 7
    assert slept == sorted(slept)
    assert (slept[-1], 100 < len(slept) < 200) == (0.01, True)
    assert Backoff(None, 0.1).next() == 0.1
    assert Backoff(0.0).next() is None
