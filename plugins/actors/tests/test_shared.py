"""``SharedMutableTensor``: making one, attaching to it, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import gc
import itertools
import mmap
import os
import pathlib
import pickle
import signal
import struct
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sharing import content_of, failing_block

import q4core as q4
from q4_actors import MutableMode, SharedMutableTensor
from q4_actors.tensors import arguments, form, segment
from q4_actors.tensors.file_locks import FileLocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER = pathlib.Path("/dev/shm")  # noqa: S108  # where segments are


def _files() -> set[str]:
    return {path.name for path in FOLDER.iterdir() if path.name.startswith("q4core-")}


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Return what lists the segments that this test has made and that still have a name; others may come and go."""
    own = f"{os.getpid():08x}"
    count = itertools.count()
    monkeypatch.setattr("secrets.token_hex", lambda _: f"{own}{next(count):08x}")
    return lambda: {name for name in _files() if own in name}


@contextlib.contextmanager
def _in_use(path: pathlib.Path) -> Iterator[None]:
    """Hold a file as whoever is attached does, so that no tensor made meanwhile, in another process, removes it."""
    locks = FileLocks(str(path), path.name)
    locks.try_shared(segment.USED)
    try:
        yield
    finally:
        locks.close()


# -- one memory


@pytest.mark.parametrize(
    "content",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(7.0),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.ones(3, requires_grad=True),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_both_sides_see_the_same(mode: MutableMode, content: torch.Tensor) -> None:
    """Any dtype and shape goes in and comes out bit for bit, and an update of either side is seen by the other."""
    with SharedMutableTensor(content, mode=mode) as state, SharedMutableTensor.attach(state.segment) as other:
        assert (other.mode, other.dtype, other.shape) == (mode, content.dtype, content.shape)
        taken = other.snapshot().tensor
        assert (
            taken.contiguous()
            .flatten()
            .view(torch.uint8)
            .equal(content.detach().contiguous().flatten().view(torch.uint8))
        )
        other.replace(torch.ones_like(content))
        with state.read() as view:
            assert view.version == state.version == other.version == 1
            assert view.tensor.to(torch.float64 if not content.is_complex() else torch.complex128).eq(1).all()


def test_read_copies_nothing(state: SharedMutableTensor, other: SharedMutableTensor) -> None:
    """What read() gives lies in the shared memory itself; an update copies once, or never in place."""
    with other.read() as view, pathlib.Path("/proc/self/maps").open(encoding="utf-8") as maps:
        address = view.tensor.data_ptr()
        spans = [line.split()[0].split("-") for line in maps if other.segment in line]
    assert any(int(low, 16) <= address < int(high, 16) for low, high in spans)
    with other.write() as tensor:
        tensor.fill_(2.0)
    assert other.stats().copies == (state.mode is MutableMode.VERSIONED)
    assert other.stats().bytes_copied == 16 * (state.mode is MutableMode.VERSIONED)
    assert state.stats().copies == 0
    assert content_of(state) == [2.0] * 4


def test_failed_update_is_reported_to_the_other_side(state: SharedMutableTensor, other: SharedMutableTensor) -> None:
    """VERSIONED: nothing has happened. IN_PLACE: PoisonedError with the cause, until either side resets."""
    with failing_block(), state.write() as tensor:
        tensor.fill_(7.0)
        raise RuntimeError("boom")
    if state.mode is MutableMode.VERSIONED:
        assert (content_of(other), other.version, other.is_poisoned) == ([1.0] * 4, 0, False)
        return
    with pytest.raises(q4.PoisonedError) as caught:
        other.snapshot()
    assert "boom" in str(caught.value)
    assert "membrane" in str(caught.value)
    other.reset(torch.full((4,), 3.0))
    assert (content_of(state), state.version, state.is_poisoned) == ([3.0] * 4, 1, False)


def test_change_outside_write_is_reported_to_the_other_side(
    state: SharedMutableTensor, other: SharedMutableTensor
) -> None:
    """A reader that writes poisons the newest version for all, until reset."""
    with pytest.raises(q4.PoisonedError), state.read() as view:
        view.tensor.fill_(7.0)
    for use in (other.snapshot, other.write().__enter__, lambda: other.wait(1, timeout=0)):
        with pytest.raises(q4.PoisonedError) as caught:
            use()
        assert "changed in place outside write()" in str(caught.value)
    assert other.is_poisoned
    other.reset()
    assert content_of(state) == content_of(other) == [0.0] * 4


def test_change_of_an_old_version_spares_the_newest() -> None:
    """A reader of an old version that writes gets the error itself, and no other process does."""
    with SharedMutableTensor(torch.ones(4)) as state, SharedMutableTensor.attach(state.segment) as other:
        with pytest.raises(q4.PoisonedError), state.read() as view:  # noqa: PT012  # the block is the subject
            other.replace(torch.zeros(4))
            view.tensor.fill_(7.0)
        assert content_of(state) == content_of(other) == [0.0] * 4


def test_writer_that_keeps_its_tensor_is_found_out(mode: MutableMode) -> None:
    """A change by a former writer is reported to its process's next reader, and so to all."""
    with SharedMutableTensor(torch.ones(4), mode=mode) as state, SharedMutableTensor.attach(state.segment) as other:
        with state.write() as kept:
            kept.fill_(2.0)
        kept.fill_(7.0)
        with pytest.raises(q4.PoisonedError):
            state.snapshot()
        with pytest.raises(q4.PoisonedError):
            other.snapshot()


def test_memory_can_not_be_resized(state: SharedMutableTensor) -> None:
    """What would move the content is refused by torch, and then the update fails."""
    with pytest.raises(RuntimeError, match="not resizable"), state.write() as tensor:
        tensor.resize_(8)
    with pytest.raises(q4.InputError), SharedMutableTensor(torch.ones(4)).write() as tensor:
        tensor.set_(torch.ones(4).untyped_storage())


# -- slots


def test_slots_held_by_readers_are_never_written() -> None:
    """With all old slots held, a writer is refused with the numbers, or waits; the readers' versions stay."""
    with SharedMutableTensor(torch.zeros(4), slots=3) as state, SharedMutableTensor.attach(state.segment) as other:
        views = []
        for value in (1.0, 2.0):
            block = other.read()
            views.append(block.__enter__())
            state.replace(torch.full((4,), value))
        for wait, timeout, said in ((False, None, "has no room for a new version"), (True, 0.02, "within 0.02 s")):
            with pytest.raises(q4.WriteConflictError) as caught:
                state.replace(torch.full((4,), 9.0), wait=wait, timeout=timeout)
            assert said in str(caught.value)
            assert "readers of old versions hold 2 of 3 slots" in str(caught.value)
        assert [(view.version, view.tensor[0].item()) for view in views] == [(0, 0.0), (1, 1.0)]
        views[0].__exit__(None, None, None)
        state.replace(torch.full((4,), 3.0))
        assert (views[1].tensor[0].item(), content_of(other)) == (1.0, [3.0] * 4)
        views[1].__exit__(None, None, None)


@pytest.mark.parametrize("slots", [2, 65, True, 4.0, "4"])
def test_number_of_slots_is_checked(slots: Any) -> None:
    """ConfigError says what is legal."""
    with pytest.raises(q4.ConfigError) as caught:
        SharedMutableTensor(torch.zeros(4), slots=slots)
    assert (caught.value.name, caught.value.rule) == ("slots", "3 … 64")


def test_slots_are_refused_where_updates_are_in_place() -> None:
    """There is one; a request for more is not silently dropped."""
    with pytest.raises(q4.ConfigError, match="slots must be None where updates are in place, got 8"):
        SharedMutableTensor(torch.zeros(4), mode=MutableMode.IN_PLACE, slots=8)


# -- what is refused


def test_version_overflow_is_refused(state: SharedMutableTensor) -> None:
    """The last version that the word has room for is written; the next is a LifecycleError that changes nothing."""
    largest = arguments.MAX_VERSION
    words = state._protocol.segment.words
    words[form.CURRENT] |= (largest - 1) << 8
    state.replace(torch.full((4,), 2.0))
    assert state.version == largest
    with pytest.raises(q4.LifecycleError) as caught, state.write():
        pass
    assert f"has come to its last version, {largest}" in str(caught.value)
    assert (content_of(state), state.version, state.is_poisoned) == ([2.0] * 4, largest, False)
    assert words[form.CURRENT] > 0


@pytest.mark.parametrize(
    ("options", "name"),
    [({"mode": "other"}, "mode"), ({"dtype": torch.float64}, "dtype"), ({"shape": (2, 2)}, "shape")],
)
def test_other_form_than_expected_is_refused(state: SharedMutableTensor, options: dict[str, Any], name: str) -> None:
    """InputError names the tensor, what differs, and both values."""
    if name == "mode":
        options = {"mode": next(mode for mode in MutableMode if mode is not state.mode)}
    with pytest.raises(q4.InputError) as caught:
        SharedMutableTensor.attach(state.segment, name="membrane", **options)
    assert caught.value.name == name
    assert "membrane" in str(caught.value)
    SharedMutableTensor.attach(state.segment, mode=state.mode, dtype=torch.float32, shape=[4]).close()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.replace(torch.zeros(5)),
        lambda state: state.replace(torch.zeros(4, dtype=torch.float64)),
        lambda state: state.replace([0.0] * 4),
    ],
    ids=["shape", "dtype", "type"],
)
def test_update_of_another_form_is_refused(state: SharedMutableTensor, change: Callable[[Any], object]) -> None:
    """InputError, and nothing has changed."""
    with pytest.raises(q4.InputError) as caught:
        change(state)
    assert "membrane" in str(caught.value)
    assert (content_of(state), state.version) == ([1.0] * 4, 0)


@pytest.mark.parametrize("name", ["", "q4core-", "../etc/passwd", "q4core-0123456789abcdeg", "q4core-../x", None, 7])
def test_what_is_no_segment_name_is_refused(name: Any) -> None:
    """ConfigError, before any file is looked at."""
    with pytest.raises(q4.ConfigError) as caught:
        SharedMutableTensor.attach(name, name="membrane")
    assert caught.value.name == "segment"


def test_vanished_segment_is_refused(state: SharedMutableTensor) -> None:
    """LifecycleError that says so, also for a handle that was pickled before."""
    pickled = pickle.dumps(state)
    state.close()
    with pytest.raises(q4.LifecycleError) as caught:
        SharedMutableTensor.attach(state.segment, name="membrane")
    assert "vanished" in str(caught.value)
    with pytest.raises(q4.LifecycleError) as caught:
        pickle.loads(pickled)  # noqa: S301  # our own
    assert "membrane" in str(caught.value)


def _overwrite(offset: int, form: str, value: object) -> Callable[[pathlib.Path], None]:
    def spoil(path: pathlib.Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(struct.pack(form, value))

    return spoil


def _resize(change: int) -> Callable[[pathlib.Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size + change)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda path: os.truncate(path, 0), "size"),
        (lambda path: os.truncate(path, 100), "size"),
        (_resize(-1), "size"),
        (_resize(1), "size"),
        (_overwrite(0, "8s", b"somebody"), "magic"),
        (_overwrite(8, "q", 99), "layout"),
        (_overwrite(16, "q", 7), "mode"),
        (_overwrite(24, "q", 0), "slots"),
        (_overwrite(24, "q", 1000), "slots"),
        (_overwrite(32, "q", 8192), "slot size"),
        (_overwrite(40, "q", 17), "content size"),
        (_overwrite(48, "q", -1), "rank"),
        (_overwrite(48, "q", 33), "rank"),
        (_overwrite(56, "16s", b"nonsense"), "dtype"),
        (_overwrite(56, "16s", b"nn"), "dtype"),
        (_overwrite(72, "q", -4), "shape"),
        (_overwrite(72, "q", 2**62), "slot size"),
        (_overwrite(512, "q", -1), "current word"),
        (_overwrite(512, "q", 250), "current word"),
    ],
)
def test_damaged_segment_is_refused(
    state: SharedMutableTensor, spoil: Callable[[pathlib.Path], None], name: str
) -> None:
    """LifecycleError names the tensor, the field and the rule."""
    broken = FOLDER / f"q4core-{os.getpid():016x}"
    broken.write_bytes((FOLDER / state.segment).read_bytes())
    try:
        spoil(broken)
        with _in_use(broken), pytest.raises(q4.LifecycleError) as caught:
            SharedMutableTensor.attach(broken.name, name="membrane")
        assert caught.value.name == name
        assert "membrane" in str(caught.value)
    finally:
        broken.unlink(missing_ok=True)


def test_what_is_no_file_is_refused() -> None:
    """A folder, a link and a pipe by that name are LifecycleErrors, and nothing waits."""
    path = FOLDER / f"q4core-{os.getpid():016x}"
    makers: list[Callable[[], object]] = [path.mkdir, lambda: path.symlink_to("/etc/passwd"), lambda: os.mkfifo(path)]
    for make in makers:
        make()
        try:
            with pytest.raises(q4.LifecycleError):
                SharedMutableTensor.attach(path.name)
        finally:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_too_large_a_tensor_is_refused_with_numbers(own_names: Callable[[], set[str]]) -> None:
    """InputError with both sizes, before any memory is taken."""
    free = os.statvfs(FOLDER)
    content = torch.zeros(1, dtype=torch.uint8).expand(free.f_bavail * free.f_frsize // 2)
    before = own_names()
    with pytest.raises(q4.InputError) as caught:
        SharedMutableTensor(content, name="membrane")
    assert caught.value.name == "size"
    assert isinstance(caught.value.value, int)
    assert caught.value.value >= 4 * content.numel()
    assert own_names() == before


def test_system_that_refuses_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, own_names: Callable[[], set[str]], state: SharedMutableTensor
) -> None:
    """No more files, memory or locks: a LifecycleError that names the tensor, and nothing is left behind."""
    before = own_names()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    for module, name in ((os, "posix_fallocate"), (os, "link"), (mmap, "mmap")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(q4.LifecycleError) as caught:
                SharedMutableTensor(torch.zeros(4), name="membrane")
            assert "membrane" in str(caught.value)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuse)
        with pytest.raises(q4.LifecycleError, match=r"grants .*membrane.* no file lock"):
            SharedMutableTensor.attach(state.segment, name="membrane")
    assert own_names() == before
    assert content_of(state) == [1.0] * 4


def test_copies_are_refused_and_pickles_attach(state: SharedMutableTensor, other: SharedMutableTensor) -> None:
    """copy and deepcopy would be another tensor that looks like this one; a pickle is another handle of it."""
    for use in (copy.copy, copy.deepcopy):
        with pytest.raises(q4.LifecycleError):
            use(state)
    assert (other.segment, other.name) == (state.segment, "membrane")


def test_repr_says_what_it_is(state: SharedMutableTensor, other: SharedMutableTensor) -> None:
    """Name, mode, form and the newest state, also where another process made it."""
    state.replace(torch.zeros(4))
    told = f"{state.mode.value}, torch.float32 [4] on cpu, version 1)"
    assert repr(other) == f"SharedMutableTensor('membrane', {told}"
    with SharedMutableTensor.attach(state.segment) as nameless:
        assert repr(nameless) == f"SharedMutableTensor({told}"


def test_a_handle_without_a_name_shows_its_segment(state: SharedMutableTensor) -> None:
    """Who attaches to several tensors learns from a message which one it is about."""
    with SharedMutableTensor.attach(state.segment) as nameless:
        assert nameless.name is None
        with pytest.raises(q4.InputError, match=rf"mutable tensor '{state.segment}'"):
            nameless.replace(torch.zeros(5))


# -- lifetime


def test_maker_ends_it_for_all(state: SharedMutableTensor, other: SharedMutableTensor) -> None:
    """After the maker's close every use is a LifecycleError; readers finish, an update under way is dropped."""
    with other.read() as view:
        state.close()
        assert view.tensor.tolist() == [1.0] * 4
    assert other.is_closed
    for use in (other.snapshot, other.write().__enter__, lambda: other.wait(1), lambda: other.version):
        with pytest.raises(q4.LifecycleError) as caught:
            use()
        assert "membrane" in str(caught.value)
    assert state.segment not in _files()


def test_update_under_way_is_dropped_by_close(state: SharedMutableTensor, other: SharedMutableTensor) -> None:
    """The writer raises; attached processes see the version before, or poison."""
    with pytest.raises(q4.LifecycleError), other.write() as tensor:  # noqa: PT012  # the block is the subject
        tensor.fill_(7.0)
        other.close()
    if state.mode is MutableMode.VERSIONED:
        assert (content_of(state), state.version) == ([1.0] * 4, 0)
    else:
        assert state.is_poisoned
        state.reset()
    state.replace(torch.zeros(4))


def test_other_handle_lets_go_alone(state: SharedMutableTensor, other: SharedMutableTensor) -> None:
    """close() of a handle that attached is its own affair."""
    other.close()
    other.close()
    with pytest.raises(q4.LifecycleError):
        other.snapshot()
    state.replace(torch.zeros(4))
    assert content_of(state) == [0.0] * 4
    SharedMutableTensor.attach(state.segment).close()


def test_everything_is_given_back(mode: MutableMode, own_names: Callable[[], set[str]]) -> None:
    """Names, files and mappings go with the handles, closed or collected, in a reader's block or not."""
    gc.collect()  # what earlier tests left is not to go meanwhile
    before, open_files = own_names(), len(list(pathlib.Path("/proc/self/fd").iterdir()))
    for closes in (True, False):
        state = SharedMutableTensor(torch.zeros(4), mode=mode)
        name = state.segment
        other = SharedMutableTensor.attach(name)
        with other.read() as view:
            other.close()
            assert view.tensor.tolist() == [0.0] * 4
        if closes:
            state.close()
        del state, other, view
        assert own_names() == before
        assert len(list(pathlib.Path("/proc/self/fd").iterdir())) == open_files
        assert name not in pathlib.Path("/proc/self/maps").read_text(encoding="utf-8")


def test_segment_of_a_killed_maker_is_removed(mode: MutableMode) -> None:
    """The next tensor made removes it, once it is no longer used."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads; the child uses none of them
        child = os.fork()
    if not child:  # pragma: no cover  # coverage does not see a process that is killed
        orphan = SharedMutableTensor(torch.zeros(4), mode=mode)
        os.write(theirs, orphan.segment.encode())
        signal.pause()
    name = os.read(ours, 64).decode()
    with SharedMutableTensor.attach(name) as user:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        SharedMutableTensor(torch.zeros(4)).close()
        assert name in _files()
        user.replace(torch.ones(4))
        assert content_of(user) == [1.0] * 4
    SharedMutableTensor(torch.zeros(4)).close()
    assert name not in _files()
    os.close(ours)
    os.close(theirs)
