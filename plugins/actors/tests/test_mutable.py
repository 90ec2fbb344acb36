"""``MutableTensor``: updates, reads and snapshots of whole versions, and what failing writers leave."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharing import LONG, content_of, poisoned

import q4core as q4
from q4_actors import MutableMode, MutableStats, MutableTensor
from tests.support.limits import scaled

if TYPE_CHECKING:
    import concurrent.futures


# -- updates and reads


def test_write_publishes_the_next_version(mode: MutableMode) -> None:
    """A block that ends well makes its changes version + 1."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    assert state.version == 0
    with state.write() as tensor:
        tensor.add_(1.0)
        assert state.version == 0
    with state.read() as view:
        assert view.version == state.version == 1
        assert view.tensor.tolist() == [1.0] * 4


def test_update_builds_on_the_version_before(mode: MutableMode) -> None:
    """A writer finds the last version's content."""
    state = MutableTensor(torch.arange(3.0), mode=mode)
    for _ in range(3):
        with state.write() as tensor:
            tensor.mul_(2.0)
    assert content_of(state) == [0.0, 8.0, 16.0]


def test_update_is_counted_and_copied_as_promised(mode: MutableMode) -> None:
    """A read copies nothing, a snapshot once, an update once (VERSIONED) or never (IN_PLACE)."""
    state = MutableTensor(torch.zeros(256), mode=mode)
    for _ in range(5):
        with state.read() as view, state.read() as other:
            assert view.tensor.data_ptr() == other.tensor.data_ptr()
    assert state.stats() == MutableStats(
        reads=10, writes=0, snapshots=0, failures=0, conflicts=0, copies=0, bytes_copied=0
    )
    for _ in range(3):
        with state.write() as tensor:
            tensor.add_(1.0)
    copies = 3 if mode is MutableMode.VERSIONED else 0
    assert (state.stats().writes, state.stats().copies, state.stats().bytes_copied) == (3, copies, copies * 1024)
    for _ in range(2):
        state.snapshot()
    stats = state.stats()
    assert (stats.snapshots, stats.reads) == (2, 10)
    assert (stats.copies, stats.bytes_copied) == (copies + 2, (copies + 2) * 1024)


def test_address_moves_or_stays(mode: MutableMode) -> None:
    """IN_PLACE keeps its address through every kind of update; VERSIONED never changes what was published."""
    state = MutableTensor(torch.zeros(64), mode=mode)
    with state.read() as view:
        before, old = view.tensor.data_ptr(), view.tensor
    with state.write() as tensor:
        tensor.add_(1.0)
    with state.read() as view:
        after = view.tensor.data_ptr()
    state.replace(torch.ones(64))
    with state.read() as view:
        last = view.tensor.data_ptr()
    if mode is MutableMode.IN_PLACE:
        assert before == after == last
    else:
        assert before != after
        assert float(old.sum()) == 0.0


def test_snapshot_is_an_own_copy(mode: MutableMode) -> None:
    """A snapshot has its version, and later updates and its own changes go separate ways."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    state.replace(torch.ones(4))
    snapshot = state.snapshot()
    with state.write() as tensor:
        tensor.fill_(5.0)
    snapshot.tensor.add_(1.0)
    assert snapshot.version == 1
    assert snapshot.tensor.tolist() == [2.0] * 4
    assert content_of(state) == [5.0] * 4


def test_replace_copies_once(mode: MutableMode) -> None:
    """What replaces the content is copied once, and not shared."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    new = torch.ones(4)
    state.replace(new)
    new.fill_(9.0)
    assert (content_of(state), state.version, state.stats().copies) == ([1.0] * 4, 1, 1)


def test_replacement_by_the_content_in_another_order(mode: MutableMode) -> None:
    """A view that outlives its block is copied first, for torch copies nothing onto itself in another order."""
    state = MutableTensor(torch.arange(9.0).reshape(3, 3), mode=mode)
    with state.read() as view:
        kept = view.tensor
    state.replace(kept.t())
    with state.read() as view:
        assert torch.equal(view.tensor, torch.arange(9.0).reshape(3, 3).t())
    state.replace(kept if mode is MutableMode.IN_PLACE else state.snapshot().tensor)
    assert (state.version, state.is_poisoned) == (2, False)


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        (torch.zeros(5), "shape"),
        (torch.zeros(1), "shape"),
        (torch.zeros(4, dtype=torch.float64), "dtype"),
        (torch.zeros(4, dtype=torch.int32), "dtype"),
        (torch.zeros(4, device="meta"), "tensor"),
        ([0.0] * 4, "tensor"),
    ],
)
def test_replacement_that_does_not_fit_changes_nothing(mode: MutableMode, tensor: Any, name: str) -> None:
    """Another shape, dtype, device or type is an InputError that names it; the tensor is as before."""
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    with pytest.raises(q4.InputError) as caught:
        state.replace(tensor)
    assert caught.value.name == name
    assert "membrane" in str(caught.value)
    assert (state.version, content_of(state)) == (0, [0.0] * 4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_any_dtype_and_shape(mode: MutableMode, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Scalars, empty tensors and every dtype go through an update, a replacement and a snapshot."""
    state = MutableTensor(torch.zeros(shape, dtype=dtype), mode=mode)
    with state.write() as tensor:
        tensor.copy_(torch.ones(shape).to(dtype))
    state.replace(state.snapshot().tensor)
    snapshot = state.snapshot()
    assert (snapshot.version, snapshot.tensor.dtype, tuple(snapshot.tensor.shape)) == (2, dtype, shape)
    assert bool((snapshot.tensor.to(torch.complex128) == 1.0).all())


# -- failures


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt("boom"), GeneratorExit("boom")])
def test_failed_writer_changes_nothing_when_versioned(error: BaseException) -> None:
    """Whatever leaves the block early, readers keep the version that they had."""
    state = MutableTensor(torch.zeros(4))
    with pytest.raises(type(error), match="boom"), state.write() as tensor:  # noqa: PT012  # the block is the subject
        tensor.fill_(7.0)
        raise error
    assert (content_of(state), state.version, state.is_poisoned) == ([0.0] * 4, 0, False)
    assert (state.stats().failures, state.stats().writes) == (1, 0)
    with state.write() as tensor:
        tensor.add_(1.0)
    assert content_of(state) == [1.0] * 4


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt("boom"), GeneratorExit("boom")])
def test_failed_writer_poisons_in_place(error: BaseException) -> None:
    """Every use raises, with the cause, until the content is reset."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE, name="membrane")
    with pytest.raises(type(error), match="boom"), state.write() as tensor:  # noqa: PT012  # the block is the subject
        tensor.fill_(7.0)
        raise error
    assert state.is_poisoned
    for use in (
        lambda: state.read().__enter__(),
        lambda: state.write().__enter__(),
        state.snapshot,
        lambda: state.replace(torch.zeros(4)),
        lambda: state.wait(0),
    ):
        with pytest.raises(q4.PoisonedError) as caught:
            use()
        assert "membrane" in str(caught.value)
        assert type(error).__name__ in str(caught.value.value)
    assert state.version == 0


def test_reset_heals(mode: MutableMode) -> None:
    """After reset the content is zeros, or what was given, under a new version; the address stays in IN_PLACE."""
    for content, expected in ((None, 0.0), (torch.full((4,), 3.0), 3.0)):
        state = poisoned(mode)
        address = state._protocol.tensor.data_ptr()
        state.reset(content)
        assert (content_of(state), state.version, state.is_poisoned) == ([expected] * 4, 1, False)
        assert mode is MutableMode.VERSIONED or state._protocol.tensor.data_ptr() == address
        with state.write() as tensor:
            tensor.add_(1.0)
        assert state.version == 2


def test_reset_refuses_a_healthy_tensor(mode: MutableMode) -> None:
    """Reset is for what is poisoned; it never wipes good content."""
    state = MutableTensor(torch.ones(4), mode=mode)
    with pytest.raises(q4.LifecycleError, match="is not poisoned"):
        state.reset()
    assert (content_of(state), state.version) == ([1.0] * 4, 0)


def test_reset_with_wrong_content_leaves_it_poisoned(mode: MutableMode) -> None:
    """A reset that does not fit heals nothing."""
    state = poisoned(mode)
    with pytest.raises(q4.InputError):
        state.reset(torch.zeros(5))
    assert state.is_poisoned


def test_only_one_of_two_resets_takes_effect(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """The second one finds a healthy tensor, and raises."""
    for _ in range(20):
        state = poisoned(mode)
        ready = threading.Barrier(2)

        def reset(state: MutableTensor = state, ready: threading.Barrier = ready) -> bool:
            ready.wait(scaled(LONG))
            try:
                state.reset()
            except q4.LifecycleError:
                return False
            return True

        assert sorted(future.result(scaled(LONG)) for future in [threads.submit(reset) for _ in range(2)]) == [
            False,
            True,
        ]
        assert state.version == 1
