"""``MutableTensor`` and exceptions from signal handlers, such as Ctrl-C, at every instant of a use, one by one."""

from __future__ import annotations

import linecache
import pathlib
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from abandonment import content_of
from sharing import Held

import q4_actors
import q4core as q4
from q4_actors import MutableMode, MutableTensor, SharedMutableTensor

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable
    from types import FrameType

    from typing_extensions import Self

FOLDER = str(pathlib.Path(q4_actors.__file__).parent)
LONG = 5.0
ONES = [1.0] * 4


class Instants:
    """While it lasts, counts the instants at which this thread could be interrupted, and raises at one of them.

    These are the beginnings of functions and of lines, and the returns of calls of C, in the package under test: more
    than those at which CPython runs signal handlers. But not the lines of ``with`` and ``try``, where it runs none: the
    first are passed once more between a block's end and the call of ``__exit__``, the others do nothing at all.
    """

    def __init__(self, chosen: int | None) -> None:
        self.chosen, self.count = chosen, 0

    def _pass(self) -> None:
        self.count += 1
        if self.count == self.chosen:
            sys.settrace(None)
            sys.setprofile(None)
            raise KeyboardInterrupt

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER) or frame.f_code.co_name == "__del__":
            return None  # what a finaliser raises reaches nobody
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "call" or (event == "line" and not line.startswith(("with ", "try:"))):
            self._pass()
        return self._trace

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "c_return" and code.co_filename.startswith(FOLDER) and code.co_name != "__del__":
            self._pass()

    def __enter__(self) -> Self:
        """Begin to count."""
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        sys.setprofile(None)
        sys.settrace(None)


def _read(state: MutableTensor) -> None:
    with state.read() as view:
        view.tensor.sum()


def _read_twice(state: MutableTensor) -> None:
    with state.read(), state.read():
        pass


def _read_and_fail(state: MutableTensor) -> None:
    try:
        with state.read():
            raise ValueError  # noqa: TRY301  # the block is what fails
    except ValueError:
        pass


def _write(state: MutableTensor) -> None:
    with state.write() as tensor:
        tensor.fill_(1.0)


def _write_and_fail(state: MutableTensor) -> None:
    try:
        with state.write() as tensor:
            tensor[:2] = 7.0
            raise ValueError  # noqa: TRY301  # as above
    except ValueError:
        pass


USES: dict[str, Callable[[MutableTensor], object]] = {
    "read": _read,
    "read in a read": _read_twice,
    "read that fails": _read_and_fail,
    "snapshot": lambda state: state.snapshot(),
    "wait": lambda state: state.wait(0),
    "write": _write,
    "write that fails": _write_and_fail,
    "replace": lambda state: state.replace(torch.ones(4)),
}


def _is_interrupted(use: Callable[[], object], chosen: int) -> bool:
    """Use it, interrupted at the chosen instant; return whether there was such an instant."""
    try:
        with Instants(chosen):
            use()
    except KeyboardInterrupt:
        return True
    return False


def _use_once(state: MutableTensor) -> None:
    state.replace(torch.ones(4), timeout=0)
    assert content_of(state, timeout=0) == ONES


def _check_free(state: MutableTensor, threads: concurrent.futures.ThreadPoolExecutor, where: str) -> None:
    """Raise unless this thread, another one and another process could use it at once."""
    handles = [state]
    if isinstance(state, SharedMutableTensor):
        handles.append(SharedMutableTensor.attach(state.segment))
    for handle in handles:
        for is_here in (True, False):
            try:
                _use_once(handle) if is_here else threads.submit(_use_once, handle).result(LONG)
            except q4.Q4Error as error:
                raise AssertionError(f"interrupted at instant {where}: {error}") from error
    for handle in handles[1:]:
        handle.close()


@pytest.mark.parametrize("use", USES)
def test_nothing_stays_held(use: str, mode: MutableMode, threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """Whenever the exception comes, everybody can go on at once, and the update was whole, or not, or is poisoned."""
    state = MutableTensor(torch.ones(4), mode=mode, name="membrane")
    chosen, poisoned = 1, 0
    while True:
        version = state.version
        if not _is_interrupted(lambda: USES[use](state), chosen):
            break
        where = f"{chosen} of {use}"
        if state.is_poisoned:
            assert mode is MutableMode.IN_PLACE, where
            assert use in {"write", "write that fails", "replace"}, where
            with pytest.raises(q4.PoisonedError) as caught:
                state.snapshot()
            assert "a writer" in str(caught.value.value), where
            state.reset(torch.ones(4), timeout=0)
            poisoned += 1
        assert content_of(state) == ONES, where
        assert state.version - version in {0, 1}, where
        _check_free(state, threads, where)
        chosen += 1
    assert chosen > 3  # by atomics most of it is one instant
    assert poisoned < chosen


def test_reset_can_be_begun_anew(mode: MutableMode, threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """An interrupted reset() has healed the tensor, or it is still poisoned and may be reset."""
    state = MutableTensor(torch.ones(4), mode=mode)
    chosen = 1
    while True:
        with pytest.raises(q4.PoisonedError), state.read() as view:
            view.tensor.fill_(7.0)
        is_hit = _is_interrupted(lambda: state.reset(torch.ones(4)), chosen)
        if state.is_poisoned:
            assert is_hit
            state.reset(torch.ones(4), timeout=0)
        assert content_of(state) == ONES
        _check_free(state, threads, str(chosen))
        if not is_hit:
            break
        chosen += 1
    assert chosen > 10


@pytest.mark.parametrize(  # a VERSIONED reader never waits
    ("kind", "mode"), [("read", MutableMode.IN_PLACE), *(("write", mode) for mode in MutableMode)]
)
def test_who_gives_up_waiting_is_forgotten(
    kind: str, mode: MutableMode, threads: concurrent.futures.ThreadPoolExecutor
) -> None:
    """An exception while a block waits its turn leaves nobody in the queue."""
    state = MutableTensor(torch.ones(4), mode=mode)
    options: dict[str, Any] = {"timeout": 0} if kind == "read" else {"timeout": 0, "wait": True}
    chosen, is_hit = 1, True

    def use() -> None:
        try:
            with getattr(state, kind)(**options):
                pass
        except q4.WriteConflictError:
            pass

    while is_hit:
        with Held(threads, state.write(timeout=LONG)):
            is_hit = _is_interrupted(use, chosen)
        _check_free(state, threads, str(chosen))
        chosen += 1
    assert chosen > 10


@pytest.mark.parametrize("kind", ["read", "write"])
def test_turn_is_handed_over(kind: str, threads: concurrent.futures.ThreadPoolExecutor) -> None:
    """Whoever waits for a block gets in though leaving it was interrupted."""
    state = MutableTensor(torch.ones(4), mode=MutableMode.IN_PLACE)
    chosen, is_hit = 1, True
    while is_hit:
        block = getattr(state, kind)(timeout=LONG)
        block.__enter__()
        waiting: list[concurrent.futures.Future[Any]] = [
            threads.submit(state.replace, torch.ones(4), wait=True, timeout=LONG)
        ]
        if kind == "write":
            waiting.append(threads.submit(state.snapshot, timeout=LONG))
        while len(state._content.gate._waiting_writers) + len(state._content.gate._waiting_readers) < len(waiting):
            assert not any(future.done() for future in waiting)
        is_hit = _is_interrupted(lambda block=block: block.__exit__(None, None, None), chosen)  # type: ignore[misc]
        del block
        for future in waiting:
            error = future.exception(LONG)
            assert error is None or (kind == "write" and isinstance(error, q4.PoisonedError)), chosen
        if state.is_poisoned:
            state.reset(torch.ones(4))
        _check_free(state, threads, str(chosen))
        chosen += 1
    assert chosen > 10
