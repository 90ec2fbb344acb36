"""``ProcessRef``: a reference to an actor in a process, for use in any process of its system."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import pickle
import secrets
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from q4_actors.runtimes.actor import ActorRef, dead_error, full_error, late_error
from q4_actors.runtimes.errors import ActorError
from q4_actors.runtimes.mailbox import FRAME, LOOK_S, Frame, Kind, Page, Post, State, dumps
from q4_actors.runtimes.memory_report import memory_of
from q4_actors.runtimes.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_actors.runtimes.actor import Spec
    from q4_actors.runtimes.memory_report import ActorMemory

__all__ = ["HERE", "ProcessRef", "Worker", "post_of", "remove_box"]

_NUMBERS = itertools.count(secrets.randbits(40))
HERE = threading.local()
"""This thread's reply boxes, by folder; and which actor it is, if it is one."""


class _ReplyBox:
    """Where answers to one thread arrive."""

    def __init__(self, post: Post) -> None:
        self._post, self.name = post, f"r{secrets.token_hex(7)}"
        file = post.make_box(self.name, 16)
        self._file, self._watch = file, Watch(file)
        weakref.finalize(self, remove_box, file, post.folder / self.name)

    def take(self, seconds: float) -> Frame | None:
        """Return the next answer, None if the time runs out."""
        if not self._watch.wait(seconds):
            return None
        return Frame.read(self._post.folder, os.read(self._file, FRAME))


def remove_box(file: int, path: pathlib.Path) -> None:
    """Remove a mailbox that this process reads."""
    os.close(file)
    path.unlink(missing_ok=True)


@functools.cache
def post_of(folder: str, process: int) -> Post:  # noqa: ARG001  # a forked child has its own
    """Return a process's part in the mailboxes of a system."""
    return Post(pathlib.Path(folder))


class Worker:
    """The process of one actor, as its supervisor holds it; ``lock`` guards ``process``, which may be replaced."""

    def __init__(self, spec: Spec, page: Page, box: int, lock: threading.RLock) -> None:
        self.spec, self.page, self.box, self._lock = spec, page, box, lock
        self.process: Any = None
        self.ended = threading.Event()

    def await_end(self, timeout: float | None) -> None:
        """Wait until the process is gone; kill it if the time runs out."""
        if not self.ended.wait(timeout):
            self.kill()
            self.ended.wait()

    def kill(self) -> None:
        """Kill the process."""
        with self._lock:
            if not self.ended.is_set():
                self.process.kill()

    @property
    def pid(self) -> int:
        """The number of the process; −1 if it has ended."""
        with self._lock:
            return -1 if self.ended.is_set() else self.process.pid


class ProcessRef(ActorRef):
    """An actor that is a process, as any process of the system holds it."""

    def __init__(self, post: Post, number: int, name: str, room: int, worker: Worker | None = None) -> None:
        self._post, self._number, self.name, self._room, self.worker = post, number, name, room, worker
        self._box, self.page = f"box{number}", Page(post.folder / f"page{number}")

    def tell(self, message: Any, *, timeout: float | None = None) -> None:
        """Send a message; see ``ActorRef.tell``."""
        self._send(Kind.TELL, message, None if timeout is None else time.monotonic() + timeout)

    def ask(self, message: Any, *, timeout: float | None = None) -> Any:
        """Send a message and return the answer; see ``ActorRef.ask``."""
        if getattr(HERE, "actor", None) == (self._post.folder, self._number):
            raise ActorError(f"actor {self.name!r} asks itself, and would wait forever", actor=self.name)
        boxes = vars(HERE).setdefault("boxes", {})
        box = boxes.get(self._post.folder) or boxes.setdefault(self._post.folder, _ReplyBox(self._post))
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            answer = self._await_answer(message, box, deadline, timeout)
        except BaseException:
            boxes.pop(self._post.folder, None)  # a late answer must not fill a pipe that has no reader
            with contextlib.suppress(OSError):
                while (late := box.take(0.0)) is not None:
                    self._post.forget(late)
            raise
        value = pickle.loads(answer.body)  # noqa: S301  # the folder is this user's alone
        if answer.kind == Kind.WELL:
            return value
        raise value

    def _await_answer(self, message: Any, box: _ReplyBox, deadline: float | None, timeout: float | None) -> Frame:
        number = next(_NUMBERS)
        self._send(Kind.ASK, message, deadline, number=number, reply=box.name)
        while True:
            left = LOOK_S if deadline is None else min(LOOK_S, max(0.0, deadline - time.monotonic()))
            is_dead = self.page.state == State.DEAD  # checked before the box: its answer is there by now
            answer = box.take(left)
            if answer is None:
                if is_dead:
                    raise dead_error(self.name, self.page.why)
                if deadline is not None and time.monotonic() >= deadline:
                    raise late_error(self.name, timeout)
            else:
                self._post.forget(answer)
                if answer.number == number:
                    return answer

    def stop(self, *, timeout: float | None = None) -> None:
        """End the process; see ``ActorRef.stop``."""
        self.begin_stop()
        if getattr(HERE, "actor", None) == (self._post.folder, self._number):
            return
        if self.worker is not None:
            self.worker.await_end(timeout)
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.page.state != State.DEAD:
            if deadline is not None and time.monotonic() > deadline:
                raise ActorError(f"actor {self.name!r} still handles a message after {timeout} s", actor=self.name)
            time.sleep(0.001)

    def begin_stop(self) -> None:
        """Take no further messages, and end after those that are there."""
        if self.page.state == State.LIVE:
            self.page.end(State.ENDING)
            with contextlib.suppress(BrokenPipeError):
                self._post.send(self._box, Kind.STOP, b"")  # wakes it; where the mailbox is full it is awake

    def kill(self) -> None:
        """Kill the process; see ``ActorRef.kill``."""
        if self.worker is None:
            raise ActorError(f"actor {self.name!r} can be killed by the process that spawned it", actor=self.name)
        self.worker.kill()

    def is_alive(self) -> bool:
        """Return whether it takes messages."""
        return self.page.state == State.LIVE

    def memory(self) -> ActorMemory:
        """Return the memory of its process; see ``ActorRef.memory``."""
        if self.worker is None:
            text = f"the memory of actor {self.name!r} is known to the process that spawned it"
            raise ActorError(text, actor=self.name)
        try:
            return memory_of(self.worker.pid)
        except OSError as error:
            raise dead_error(self.name, self.page.why) from error

    def __reduce__(self) -> tuple[Callable[..., ProcessRef], tuple[object, ...]]:
        """Pickle as a reference to the same actor."""
        return _attached, (str(self._post.folder), self._number, self.name, self._room)

    def _send(self, kind: int, message: Any, deadline: float | None, **options: Any) -> None:
        body = dumps(f"a message to actor {self.name!r}", message)
        while True:
            if self.page.state != State.LIVE:
                raise dead_error(self.name, self.page.why)
            if self._post.send(self._box, kind, body, **options):
                return
            left = LOOK_S if deadline is None else deadline - time.monotonic()
            is_own = getattr(HERE, "actor", None) == (self._post.folder, self._number)
            if is_own or left <= 0:  # an actor that waits for itself makes no room
                raise full_error(self.name, self._room)
            self._post.await_room(self._box, min(left, LOOK_S))


def _attached(folder: str, number: int, name: str, room: int) -> ProcessRef:
    try:
        return ProcessRef(post_of(folder, os.getpid()), number, name, room)
    except (OSError, ActorError) as error:
        raise dead_error(name, "its system was stopped") from error
