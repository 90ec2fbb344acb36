"""``MutableTensor``: what holders may do to the content, and how a change outside ``write()`` is found out."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharing import LONG, Held, content_of, failing_block

import q4core as q4
from q4_actors import MutableMode, MutableTensor
from q4_actors.tensors.dual_view import DeviceSync
from q4core.errors import LifecycleError
from tests.support.limits import scaled, until

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable


# -- what a reader holds


def test_old_version_lives_as_long_as_its_reader(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """VERSIONED: a view stays as it was while writers go on, and its memory goes with its last holder."""
    state = MutableTensor(torch.zeros(4))
    old = weakref.ref(state._protocol.tensor)
    with state.read() as view:
        for value in range(1, 4):
            threads.submit(state.replace, torch.full((4,), float(value)), timeout=scaled(LONG)).result(scaled(LONG))
        assert (view.version, state.version) == (0, 3)
        assert view.tensor.tolist() == [0.0] * 4
        assert old() is not None
    assert old() is None


def test_readers_alias_is_its_own(mode: MutableMode) -> None:
    """What a reader asks of autograd stays with the reader."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state.read() as view, state.read() as other:
        view.tensor.requires_grad_()
        assert not other.tensor.requires_grad
    with state.read() as view:
        assert not view.tensor.requires_grad


def test_view_ends_with_its_block(mode: MutableMode) -> None:
    """The view's tensor is gone after the block, and before it; its version may still be asked for."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with pytest.raises(q4.LifecycleError):
        _ = state.read().tensor
    with state.read() as view:
        pass
    assert view.version == 0
    with pytest.raises(q4.LifecycleError):
        _ = view.tensor


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.add_(1.0),
        lambda tensor: tensor[1:].zero_(),
        lambda tensor: torch.add(tensor, 1.0, out=tensor),
        lambda tensor: tensor.resize_(8),
        lambda tensor: tensor.detach().mul_(2.0),
        lambda tensor: tensor.untyped_storage().resize_(0),
    ],
)
def test_change_by_a_reader_is_found_out(mode: MutableMode, change: Callable[[torch.Tensor], object]) -> None:
    """A reader that changes what it reads gets PoisonedError with the rule, and so do all others until reset."""
    state = MutableTensor(torch.ones(4), mode=mode, name="membrane")
    with pytest.raises(q4.PoisonedError) as caught, state.read() as view:
        change(view.tensor)
    assert caught.value.value == "version 0 was changed in place outside write()"
    assert "mutable tensor 'membrane' is poisoned" in str(caught.value)
    with pytest.raises(q4.PoisonedError):
        state.snapshot()
    state.reset(torch.full((4,), 2.0))
    assert content_of(state) == [2.0] * 4


def test_change_of_an_old_version_is_reported_to_its_readers_only(
    threads: concurrent.futures.ThreadPoolExecutor,
) -> None:
    """A newer version that was made before is not touched by it."""
    state = MutableTensor(torch.zeros(4))
    other = state.read()
    other.__enter__()
    with pytest.raises(q4.PoisonedError) as caught, state.read() as view:  # noqa: PT012  # the block is the subject
        threads.submit(state.replace, torch.ones(4), timeout=scaled(LONG)).result(scaled(LONG))
        view.tensor.fill_(7.0)
    assert caught.value.details["version"] == 0
    with pytest.raises(q4.PoisonedError):
        other.__exit__(None, None, None)
    assert (content_of(state), state.version) == ([1.0] * 4, 1)


def test_waiting_writer_gets_the_poison_error_at_once(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """A writer that waits for readers learns that one of them changed the content, though others still read."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    other = Held(threads, state.read())
    with pytest.raises(q4.PoisonedError), state.read() as view:  # noqa: PT012  # the block is the subject
        writer = threads.submit(state.replace, torch.ones(4), timeout=2 * scaled(LONG))
        until(lambda: state._protocol.gate.has_writer)
        view.tensor.add_(1.0)
    assert isinstance(writer.exception(scaled(LONG)), q4.PoisonedError)
    with pytest.raises(q4.PoisonedError):
        other.release()


def test_update_under_way_does_not_heal(threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """A version that a reader changed stays known as changed until reset, also if others write meanwhile."""
    state = MutableTensor(torch.zeros(4))

    def change() -> None:
        with state.read() as view:
            view.tensor.fill_(7.0)

    with pytest.raises(q4.PoisonedError), state.write() as tensor:  # noqa: PT012  # the block is the subject
        tensor.add_(1.0)
        assert isinstance(threads.submit(change).exception(scaled(LONG)), q4.PoisonedError)
    assert (state.version, state.is_poisoned, state.stats().failures) == (0, True, 1)


def test_readers_own_error_is_not_hidden(mode: MutableMode) -> None:
    """Where the block raises and has changed the content too, its own error comes out and the tensor is poisoned."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with failing_block(), state.read() as view:
        view.tensor.add_(1.0)
        raise RuntimeError("boom")
    assert state.is_poisoned


@pytest.mark.parametrize("use", ["read", "write"])
def test_change_by_a_writer_after_its_block_is_detected(mode: MutableMode, use: str) -> None:
    """The tensor that write() gave must not be changed once the block is over; nobody is let in to what it is then."""
    state = MutableTensor(torch.zeros(4), mode=mode)
    with state.write() as tensor:
        tensor.add_(1.0)
    tensor.add_(1.0)
    entered = False
    with pytest.raises(q4.PoisonedError), getattr(state, use)():
        entered = True
    assert not entered
    assert (state.version, state.is_poisoned) == (1, True)


def test_change_while_an_update_is_copied_is_found_out() -> None:
    """An update that was begun from a version that is changed meanwhile is not published."""
    state = MutableTensor(torch.zeros(4))
    stray = state._protocol.tensor.detach()

    def race(*_: object) -> torch.Tensor:
        stray[:2] = 7.0
        return torch.zeros(4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("q4_actors.tensors.protocol.detached_copy", race)
        with pytest.raises(q4.PoisonedError), state.write():
            pass
    assert (state.version, state.is_poisoned) == (0, True)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda tensor: tensor.resize_(3, 3), "shape"),
        (lambda tensor: tensor.resize_(1, 2), "shape"),
        (lambda tensor: tensor.t_(), "stride"),
        (lambda tensor: tensor.set_(torch.ones(2, 2)), "address"),
        (lambda tensor: setattr(tensor, "data", torch.ones(2, 2)), "address"),
        (lambda tensor: setattr(tensor, "data", torch.ones(2, 2, dtype=torch.float64)), "dtype"),
    ],
)
def test_writer_may_change_values_only(mode: MutableMode, change: Callable[[Any], object], name: str) -> None:
    """A block that changes the form is a failed update, with an error that names what it changed."""
    state = MutableTensor(torch.zeros(2, 2), mode=mode)
    with pytest.raises(q4.InputError) as caught, state.write() as tensor:
        change(tensor)
    assert caught.value.name == name
    assert (state.version, state.is_poisoned) == (0, mode is MutableMode.IN_PLACE)
    if mode is MutableMode.VERSIONED:
        assert state.snapshot().tensor.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_in_place_address_that_moves_is_found_out() -> None:
    """Torch can move a storage under all its tensors; a stable address is promised, so that is a failed update."""
    state = MutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE)
    with pytest.raises(q4.InputError) as caught, state.write() as tensor:
        tensor.share_memory_()
    assert caught.value.name == "address"
    state.reset(torch.ones(4))
    assert content_of(state) == [1.0] * 4


# -- autograd and inference mode


def test_content_is_outside_every_graph(mode: MutableMode) -> None:
    """Parameters are detached, and a writer's graph ends at the update."""
    weight = torch.nn.Parameter(torch.ones(4))
    state = MutableTensor(weight, mode=mode)
    graph = weight * 2.0
    alive = weakref.ref(graph)
    with state.write() as tensor:
        tensor.mul_(graph)
        assert tensor.requires_grad
    del tensor, graph
    assert alive() is None
    state.replace(state.snapshot().tensor * weight)
    with state.read() as view:
        assert (view.tensor.requires_grad, view.tensor.grad_fn) == (False, None)
        assert view.tensor.tolist() == [2.0] * 4
    assert not state.snapshot().tensor.requires_grad
    assert weight.tolist() == [1.0] * 4


def test_backward_through_overwritten_content_is_an_error(mode: MutableMode) -> None:
    """IN_PLACE: autograd notices that what it saved is gone; VERSIONED: the saved version is still there."""
    state = MutableTensor(torch.full((4,), 3.0), mode=mode)
    weight = torch.ones(4, requires_grad=True)
    with state.read() as view:
        loss = (view.tensor * weight).sum()
    state.replace(torch.zeros(4))
    if mode is MutableMode.IN_PLACE:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        loss.backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [3.0] * 4


def test_inference_mode_leaves_no_trace(mode: MutableMode) -> None:
    """Made, written, read and copied in inference mode, it is an ordinary tensor outside, and stays guarded."""
    with torch.inference_mode():
        state = MutableTensor(torch.zeros(4), mode=mode)
        with state.write() as tensor:
            tensor.add_(1.0)
        state.replace(torch.full((4,), 2.0))
        snapshot = state.snapshot()
        with state.read() as view:
            assert view.tensor.tolist() == [2.0] * 4
        with pytest.raises(q4.PoisonedError), state.read() as view:
            view.tensor.add_(1.0)
        state.reset()
    assert not snapshot.tensor.is_inference()
    with state.read() as view:
        assert not view.tensor.is_inference()
    with torch.no_grad(), state.write() as tensor:
        tensor.add_(1.0)
    assert content_of(state) == [1.0] * 4


# -- devices that run behind


STREAM, OTHER = 11, 12


class PretendedStreams:
    """Streams that do nothing but note what is asked of them."""

    def __init__(self) -> None:
        self.stream, self.is_recording_graph = STREAM, False
        self.seen: list[tuple[str, int, object]] = []
        self.error: Exception | None = None

    def current(self) -> int:
        """As ``Streams``', like all that follow."""
        return self.stream

    def is_capturing(self) -> bool:  # noqa: D102
        return self.is_recording_graph

    def record(self) -> str:  # noqa: D102
        if self.error is not None:
            raise self.error
        self.seen.append(("record", self.stream, None))
        return f"event on {self.stream}"

    def follow(self, event: object) -> None:  # noqa: D102
        self.seen.append(("follow", self.stream, event))

    def wait_for(self, event: object) -> None:  # noqa: D102
        self.seen.append(("wait", 0, event))

    def keep(self, tensor: torch.Tensor) -> None:  # noqa: D102
        self.seen.append(("keep", self.stream, tensor.data_ptr()))

    def synchronise(self) -> None:  # noqa: D102
        self.seen.append(("synchronise", 0, None))

    def taken(self) -> list[tuple[str, int, object]]:
        """Return what was asked since the last time."""
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
def on_device(mode: MutableMode, monkeypatch: pytest.MonkeyPatch) -> tuple[MutableTensor, PretendedStreams]:
    """A mutable tensor that takes itself for one on a device."""
    streams = PretendedStreams()
    monkeypatch.setattr("q4_actors.tensors.dual_view.TorchStreams", lambda device, keep: streams)
    state = MutableTensor(torch.zeros(4), mode=mode, name="membrane")
    state._protocol.device = torch.device("cuda", 0)
    state._protocol.sync = DeviceSync(state._protocol)
    state._protocol.device = torch.device("cpu")  # for who gives it new content
    assert streams.taken()[-1] == ("record", STREAM, None), "who made it may still be filling it"
    return state, streams


def test_blocks_on_other_streams_follow_the_update(
    on_device: tuple[MutableTensor, PretendedStreams], mode: MutableMode
) -> None:
    """Where work is queued, a block waits on the device for what must come before, and the CPU never does."""
    state, streams = on_device
    event, later = f"event on {STREAM}", f"event on {OTHER}"
    address = state._protocol.tensor.data_ptr()
    streams.stream = OTHER
    with state.read() as view:
        assert streams.taken() == [("follow", OTHER, event), ("keep", OTHER, view.tensor.data_ptr())]
    is_in_place = mode is MutableMode.IN_PLACE
    assert streams.taken() == ([("record", OTHER, None)] if is_in_place else [])
    streams.stream = STREAM
    with state.write():
        readers = [("follow", STREAM, later)] if is_in_place else []
        assert streams.taken() == [*readers, ("keep", STREAM, address)]
    assert streams.taken() == [("record", STREAM, None)]
    streams.stream = OTHER
    state.snapshot()
    assert streams.taken()[0] == ("follow", OTHER, event)
    state.replace(torch.ones(4))
    assert [item for item in streams.taken() if item[0] in {"wait", "synchronise"}] == []


def test_device_that_fails_fails_the_update(
    on_device: tuple[MutableTensor, PretendedStreams], mode: MutableMode
) -> None:
    """If an update can't be awaited, it is dropped, or the tensor poisoned; the next update waits for the device."""
    state, streams = on_device
    streams.error = RuntimeError("boom")
    with failing_block(), state.write() as tensor:
        tensor.add_(1.0)
    is_in_place = mode is MutableMode.IN_PLACE
    assert (state.version, state.is_poisoned) == (0, is_in_place)
    streams.error = None
    streams.taken()
    if is_in_place:
        state.reset()
        assert ("synchronise", 0, None) in streams.taken()
    with state.write(timeout=0) as tensor:
        tensor.add_(1.0)
    assert ("synchronise", 0, None) not in streams.taken()


def test_reader_that_leaves_no_event_is_waited_for(
    on_device: tuple[MutableTensor, PretendedStreams], mode: MutableMode
) -> None:
    """A reader whose event fails raises, and the next writer in place waits for the whole device."""
    state, streams = on_device
    streams.error = RuntimeError("boom")
    is_in_place = mode is MutableMode.IN_PLACE
    with failing_block() if is_in_place else contextlib.nullcontext(), state.read():
        pass
    streams.error = None
    streams.taken()
    with state.write(timeout=0):
        pass
    assert (("synchronise", 0, None) in streams.taken()) is is_in_place


def test_capture_is_for_an_address_that_stays(
    on_device: tuple[MutableTensor, PretendedStreams], mode: MutableMode
) -> None:
    """In a graph's capture IN_PLACE blocks wait for nothing, and VERSIONED ones are refused, by name."""
    state, streams = on_device
    streams.is_recording_graph = True
    for block in (state.read(), state.write()):
        if mode is MutableMode.IN_PLACE:
            with block:
                pass
            assert streams.taken() == []
        else:
            with pytest.raises(LifecycleError, match=r"membrane.*capture"), block:
                raise AssertionError("let in")
    streams.is_recording_graph = False
    with state.write(timeout=0):
        pass


@pytest.mark.gpu
def test_cuda_update_is_whole_on_every_stream(
    threads: concurrent.futures.ThreadPoolExecutor, mode: MutableMode
) -> None:
    """Writers and readers on streams of their own see whole versions."""
    state = MutableTensor(torch.zeros(1 << 20, device="cuda"), mode=mode)

    def read() -> tuple[int, list[float]]:
        with torch.cuda.stream(torch.cuda.Stream()), state.read(timeout=scaled(LONG)) as view:
            return view.version, view.tensor.unique().tolist()

    for value in range(1, 20):
        with torch.cuda.stream(torch.cuda.Stream()), state.write(timeout=scaled(LONG)) as tensor:
            torch.cuda._sleep(10_000_000)
            tensor.fill_(value)
        assert threads.submit(read).result(scaled(LONG)) == (value, [float(value)])
