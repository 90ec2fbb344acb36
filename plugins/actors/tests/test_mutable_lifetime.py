"""``MutableTensor``: making one, waiting for a version, closing."""

from __future__ import annotations

import copy
import pickle
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharing import LONG, content_of, failing_block, poisoned

import q4core as q4
from q4_actors import MutableMode, MutableTensor, SharedMutableTensor
from tests.support.limits import scaled, until

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable


# -- waiting for a version


def test_wait_returns_when_the_version_is_there(
    threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode
) -> None:
    """True as soon as the version is reached or passed."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    assert state.wait(0, timeout=0)
    waiting = [threads.submit(state.wait, version, scaled(LONG)) for version in (1, 3)]
    until(lambda: state._protocol.waiting == 2)
    state.replace(torch.ones(4))
    assert waiting[0].result(scaled(LONG))
    assert not waiting[1].done()
    for _ in range(3):
        state.replace(torch.ones(4))
    assert waiting[1].result(scaled(LONG))
    assert state.wait(2)


def test_wait_says_when_the_time_ran_out(mode: MutableMode) -> None:
    """False, and nothing else happens."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    assert state.wait(1, timeout=0) is False
    assert state.wait(1, timeout=0.01) is False
    assert state.stats().conflicts == 0


def test_waiting_threads_get_the_poison_error(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """Readers, writers and those who wait for a version get PoisonedError when the writer before them fails."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    with failing_block(), state.write():
        waiting: list[concurrent.futures.Future[Any]] = [
            threads.submit(state.wait, 1, 2 * scaled(LONG)),
            threads.submit(state.snapshot, timeout=2 * scaled(LONG)),
            threads.submit(state.replace, torch.ones(4), wait=True, timeout=2 * scaled(LONG)),
        ]
        gate = state._protocol.gate
        until(lambda: bool(state._protocol.waiting and gate._waiting_readers and gate._waiting_writers))
        raise RuntimeError("boom")
    for future in waiting:
        assert isinstance(future.exception(scaled(LONG)), q4.PoisonedError)
    state.reset()
    assert content_of(state) == [0.0] * 4


# -- lifetime


def test_use_after_close_is_refused(mode: MutableMode) -> None:
    """Everything that needs the content is a LifecycleError that names the tensor; facts stay."""
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    content = weakref.ref(state._protocol.tensor)
    state.close()
    state.close()
    assert content() is None
    for use in (
        lambda: state.read().__enter__(),
        lambda: state.write().__enter__(),
        state.snapshot,
        lambda: state.replace(torch.zeros(4)),
        lambda: state.wait(0),
        state.reset,
        lambda: state.version,
    ):
        with pytest.raises(q4.LifecycleError) as caught:
            use()
        assert "mutable tensor 'membrane' is closed" in str(caught.value)
    assert state.is_closed
    assert (state.shape, state.dtype, state.device.type, state.stats().writes) == ((4,), torch.float32, "cpu", 0)


def test_close_with_blocks_open(threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode) -> None:
    """Readers finish with their version; an update under way is dropped, and its writer raises."""
    state = MutableTensor(torch.ones(4), mode=mode)
    with state.read() as view:
        threads.submit(state.close).result(scaled(LONG))
        assert view.tensor.tolist() == [1.0] * 4
    state = MutableTensor(torch.ones(4), mode=mode)
    with pytest.raises(q4.LifecycleError), state.write() as tensor:  # noqa: PT012  # the block is the subject
        tensor.add_(1.0)
        state.close()
    state = MutableTensor(torch.ones(4), mode=mode)
    with failing_block(), state.write():
        state.close()
        raise RuntimeError("boom")


def test_close_wakes_who_waits(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """Readers, writers and those who wait for a version get LifecycleError."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    with pytest.raises(q4.LifecycleError), state.write():  # noqa: PT012  # the block is the subject
        waiting: list[concurrent.futures.Future[Any]] = [
            threads.submit(state.wait, 1, 2 * scaled(LONG)),
            threads.submit(state.snapshot, timeout=2 * scaled(LONG)),
            threads.submit(state.replace, torch.ones(4), wait=True, timeout=2 * scaled(LONG)),
        ]
        gate = state._protocol.gate
        until(lambda: bool(state._protocol.waiting and gate._waiting_readers and gate._waiting_writers))
        state.close()
        for future in waiting:
            assert isinstance(future.exception(scaled(LONG)), q4.LifecycleError)


def test_with_closes(mode: MutableMode) -> None:
    """The tensor itself is a block that closes it."""
    with MutableTensor(torch.zeros(4), mode=mode) as state:
        assert not state.is_closed
    assert state.is_closed


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(mode: MutableMode, duplicate: Callable[[object], object]) -> None:
    """A copy would be another tensor that looks like this one, so it is an error that says what to do."""
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    with pytest.raises(q4.LifecycleError) as caught:
        duplicate(state)
    assert "membrane" in str(caught.value)
    assert "snapshot" in str(caught.value.hint)
    assert "SharedMutableTensor" in str(caught.value.hint)


def test_repr_says_what_it_is(mode: MutableMode) -> None:
    """Name, mode, form and state, in every state."""
    state = MutableTensor(torch.zeros(2, 3), mode=mode, name="membrane")
    assert repr(state) == f"MutableTensor('membrane', {mode.value}, torch.float32 [2, 3] on cpu, version 0)"
    assert "poisoned" in repr(poisoned(mode))
    state.close()
    assert "closed" in repr(state)


# -- making one


def test_first_content_is_copied_unless_owned(mode: MutableMode) -> None:
    """copy=False takes the tensor itself; otherwise it is copied, contiguous."""
    tensor = torch.zeros(3, 4).t()
    with MutableTensor(tensor, mode=mode, copy=False).read() as view:
        assert view.tensor.data_ptr() == tensor.data_ptr()
        assert view.tensor.stride() == tensor.stride()
    with MutableTensor(tensor, mode=mode).read() as view:
        assert view.tensor.data_ptr() != tensor.data_ptr()
        assert view.tensor.is_contiguous()
    state = MutableTensor(tensor, mode=mode, copy=False)
    tensor.add_(1.0)
    with pytest.raises(q4.PoisonedError):
        state.snapshot()


class _Wrapped(torch.Tensor):
    """A tensor subclass, as quantisation libraries have them."""


def _quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove them
        return torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8)


def _inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4)


@pytest.mark.parametrize(
    ("tensor", "options", "name"),
    [
        ([0.0], {}, "tensor"),
        (torch.zeros(4).to_sparse(), {}, "tensor"),
        (torch.zeros(4, device="meta"), {}, "tensor"),
        (_quantised(), {}, "dtype"),
        (_quantised(), {"copy": False}, "dtype"),
        (torch.empty(4, dtype=torch.int4), {}, "dtype"),  # type: ignore[attr-defined]  # its stubs lack it
        (torch.zeros(4).as_subclass(_Wrapped), {}, "tensor"),
        (torch.zeros(1).expand(4), {"copy": False}, "tensor"),
        (_inference_tensor(), {"copy": False}, "tensor"),
    ],
)
def test_tensor_that_cannot_be_shared_is_refused(tensor: Any, options: dict[str, Any], name: str) -> None:
    """InputError names the rule that it breaks."""
    with pytest.raises(q4.InputError) as caught:
        MutableTensor(tensor, **options)
    assert caught.value.name == name
    assert caught.value.rule
    if not options:
        with pytest.raises(q4.InputError) as caught:
            SharedMutableTensor(tensor)
        assert caught.value.name == name


def test_expanded_and_inference_tensors_are_fine_as_copies(mode: MutableMode) -> None:
    """What can't be shared can be copied."""
    for tensor in (torch.zeros(1).expand(4), _inference_tensor()):
        state = MutableTensor(tensor, mode=mode)
        with state.write() as content:
            content.add_(torch.arange(4.0))
        assert content_of(state) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda: MutableTensor(torch.zeros(1), mode="both"), "mode"),  # type: ignore[arg-type]  # that is the point
        (lambda: MutableTensor(torch.zeros(1), name=3), "name"),  # type: ignore[arg-type]  # as above
        (lambda: MutableTensor(torch.zeros(1)).read(timeout=-1), "timeout"),
        (lambda: MutableTensor(torch.zeros(1)).snapshot(timeout=float("nan")), "timeout"),
        (lambda: MutableTensor(torch.zeros(1)).write(timeout="1"), "timeout"),  # type: ignore[arg-type]  # as above
        (lambda: MutableTensor(torch.zeros(1)).replace(torch.zeros(1), timeout=True), "timeout"),
        (lambda: MutableTensor(torch.zeros(1)).wait(0.5), "version"),  # type: ignore[arg-type]  # as above
        (lambda: MutableTensor(torch.zeros(1)).wait(True), "version"),
        (lambda: MutableTensor(torch.zeros(1)).wait(0, timeout=-1), "timeout"),
    ],
)
def test_bad_argument_is_a_config_error(use: Callable[[], object], name: str) -> None:
    """The error names the argument."""
    with pytest.raises(q4.ConfigError) as caught:
        use()
    assert caught.value.name == name


def test_endless_timeout_is_no_limit(mode: MutableMode) -> None:
    """More seconds than the platform can count are taken as its longest wait."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode(mode.value))
    with state.read(timeout=float("inf")), state.read(timeout=1e300):
        assert state.wait(0, timeout=float("inf"))
