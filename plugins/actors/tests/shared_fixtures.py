"""Fixtures of the tests of mutable tensors, for the core's and for a plugin's run of them."""

from __future__ import annotations

import concurrent.futures
import pickle
from typing import TYPE_CHECKING

import pytest
import torch

from q4_actors import MutableMode, SharedMutableTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["content", "keeps", "other", "state", "threads"]


@pytest.fixture
def content() -> torch.Tensor:
    """Return what the shared tensor begins with: four ones."""
    return torch.ones(4)


@pytest.fixture
def state(mode: MutableMode, content: torch.Tensor) -> Iterator[SharedMutableTensor]:
    """Give a shared tensor."""
    with SharedMutableTensor(content, mode=mode, name="membrane") as state:
        yield state


@pytest.fixture
def other(state: SharedMutableTensor) -> Iterator[SharedMutableTensor]:
    """Give another handle, which is to the first what another process's is."""
    with pickle.loads(pickle.dumps(state)) as other:  # noqa: S301  # our own
        yield other


@pytest.fixture(params=[True, False], ids=["kept", "collected"])
def keeps(request: pytest.FixtureRequest) -> bool:
    """Whether the block that its thread did not leave is still referenced."""
    return bool(request.param)


@pytest.fixture
def threads() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Give a pool whose threads are joined at the end."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool
