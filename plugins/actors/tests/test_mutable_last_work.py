"""A writer's tensor is freed in the next turn, because torch gives up the interpreter's lock to free one."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from sharing import failing_block

from q4_actors import MutableMode, MutableTensor, SharedMutableTensor

if TYPE_CHECKING:
    from collections.abc import Callable

MAKERS = [MutableTensor, SharedMutableTensor]


@pytest.fixture(params=MAKERS, ids=["threads", "processes"])
def state(request: pytest.FixtureRequest) -> MutableTensor:
    """Return a tensor that is updated in place."""
    state: MutableTensor = request.param(torch.zeros(4), mode=MutableMode.IN_PLACE)
    return state


def _written(state: MutableTensor, use: Callable[[torch.Tensor], object]) -> weakref.ref[torch.Tensor]:
    with state.write() as tensor:
        use(tensor)
    return weakref.ref(tensor)


def test_writers_tensor_goes_in_the_next_turn(state: MutableTensor) -> None:
    """A writer that drops its last name after the block frees nothing there, so that readers don't run ahead of it."""
    first = _written(state, lambda tensor: tensor.add_(1))
    assert first() is not None
    second = _written(state, lambda tensor: tensor.add_(1))
    assert first() is None
    assert second() is not None
    state.close()
    assert second() is None


def test_graph_of_a_writer_ends_with_its_block(state: MutableTensor) -> None:
    """A tensor that was made part of a graph is not retained, nor is one whose update failed."""
    assert _written(state, lambda tensor: tensor.requires_grad_())() is None
    failed: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        with state.write() as tensor:
            failed.append(weakref.ref(tensor))
            raise RuntimeError("boom")

    with failing_block():
        fail()
    assert failed[0]() is None
