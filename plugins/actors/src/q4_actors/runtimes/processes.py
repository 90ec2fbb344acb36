"""Actors as processes of a Linux machine: mailboxes are pipes, state is in shared memory, the dead are replaced."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import secrets
import signal
import sys
import threading
import time
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from q4_actors.runtimes.actor import (
    ActorRef,
    Life,
    Options,
    RestartLimit,
    Spec,
    dead_error,
    full_error,
    late_error,
    sendable,
)
from q4_actors.runtimes.errors import ActorDeadError, ActorError, MessageError
from q4_actors.runtimes.mailbox import FRAME, LOOK_S, Frame, Kind, Page, Post, State, dumps
from q4_actors.runtimes.memory_report import memory_of
from q4_actors.runtimes.weights import InSegment, SharedWeight, share_by
from q4_actors.tensors.backoff import Watch
from q4_actors.tensors.placing import decide_for_processes, record
from q4_actors.tensors.segment import FOLDER
from q4_actors.tensors.shared import SharedMutableTensor
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from q4_actors.runtimes.actor import Report
    from q4_actors.runtimes.memory_report import ActorMemory

__all__ = ["ProcessRef", "Processes", "note_cause"]

_EVENTS_ROOM = 64
_NUMBERS = itertools.count(secrets.randbits(40))
_HERE = threading.local()
"""This thread's ``_ReplyBox`` by folder."""


class _ReplyBox:
    """Where answers to one thread arrive."""

    def __init__(self, post: Post) -> None:
        self._post, self.name = post, f"r{secrets.token_hex(7)}"
        file = post.make_box(self.name, 16)
        self._file, self._watch = file, Watch(file)
        weakref.finalize(self, _remove_box, file, post.folder / self.name)

    def take(self, seconds: float) -> Frame | None:
        """Return the next answer, None if the time runs out."""
        if not self._watch.wait(seconds):
            return None
        return Frame.read(self._post.folder, os.read(self._file, FRAME))


def _remove_box(file: int, path: pathlib.Path) -> None:
    os.close(file)
    path.unlink(missing_ok=True)


@functools.cache
def _post_of(folder: str, process: int) -> Post:  # noqa: ARG001  # a forked child has its own
    return Post(pathlib.Path(folder))


class ProcessRef(ActorRef):
    """An actor that is a process, as any process of the system holds it."""

    def __init__(self, post: Post, number: int, name: str, room: int, owner: Processes | None = None) -> None:
        self._post, self._number, self.name, self._room, self._owner = post, number, name, room, owner
        self._box, self.page = f"box{number}", Page(post.folder / f"page{number}")

    def tell(self, message: Any, *, timeout: float | None = None) -> None:
        """Send a message; see ``ActorRef.tell``."""
        self._send(Kind.TELL, message, None if timeout is None else time.monotonic() + timeout)

    def ask(self, message: Any, *, timeout: float | None = None) -> Any:
        """Send a message and return the answer; see ``ActorRef.ask``."""
        if getattr(_HERE, "actor", None) == (self._post.folder, self._number):
            raise ActorError(f"actor {self.name!r} asks itself, and would wait for ever", actor=self.name)
        boxes = vars(_HERE).setdefault("boxes", {})
        box = boxes.get(self._post.folder) or boxes.setdefault(self._post.folder, _ReplyBox(self._post))
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            answer = self._await_answer(message, box, deadline, timeout)
        except BaseException:
            boxes.pop(self._post.folder, None)  # what comes late finds nobody, and fills no box that nobody empties
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
            is_dead = self.page.state == State.DEAD  # looked at before the box: what it answered is there by now
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
        if getattr(_HERE, "actor", None) == (self._post.folder, self._number):
            return
        if self._owner is not None:
            self._owner.await_end(self._number, timeout)
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
        if self._owner is None:
            raise ActorError(f"actor {self.name!r} can be killed by the process that spawned it", actor=self.name)
        self._owner.kill(self._number)

    def is_alive(self) -> bool:
        """Return whether it takes messages."""
        return self.page.state == State.LIVE

    def memory(self) -> ActorMemory:
        """Return the memory of its process; see ``ActorRef.memory``."""
        if self._owner is None:
            raise ActorError(
                f"the memory of actor {self.name!r} is told by the process that spawned it", actor=self.name
            )
        try:
            return memory_of(self._owner.pid_of(self._number))
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
            is_own = getattr(_HERE, "actor", None) == (self._post.folder, self._number)
            if is_own or left <= 0:  # who waits for itself makes no room
                raise full_error(self.name, self._room)
            self._post.await_room(self._box, min(left, LOOK_S))


def _attached(folder: str, number: int, name: str, room: int) -> ProcessRef:
    try:
        return ProcessRef(_post_of(folder, os.getpid()), number, name, room)
    except (OSError, ActorError) as error:
        raise dead_error(name, "its system was stopped") from error


# -- in the actor's process


def note_cause(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Keep why an actor can't begin for its supervisor, too; ``sys.excepthook`` of the server's processes.

    It is called where a process can't import the script.
    """
    path = pathlib.Path(multiprocessing.current_process().name)
    if path.parent.parent == FOLDER and path.name.startswith("page"):
        _note(path, error)
    sys.__excepthook__(kind, error, trace)


def _note(page: pathlib.Path, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # the system was stopped
        Page(page).note(describe_exception(error))


class _Sealed:
    """A spec that arrives as bytes, so that the actor's process unpickles it where an error is noted."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        """Pickle as it would be pickled itself, while the process is made: tensors go as shared memory."""
        return bytes, (bytes(ForkingPickler.dumps(self._spec)),)


def _work(folder: str, number: int, sealed: bytes, options: Options, threads: int) -> None:
    """Be an actor."""
    try:
        spec: Spec = pickle.loads(sealed)  # noqa: S301  # of the process that spawned this one
        del sealed
        multiprocessing.current_process().name = spec.name
        _live(folder, number, spec, options, threads)
    except PLUGIN_FAULTS as error:
        _note(pathlib.Path(folder) / f"page{number}", error)
        raise


def _live(folder: str, number: int, spec: Spec, options: Options, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that spawned it
    torch.set_num_threads(threads)
    post = _post_of(folder, os.getpid())
    threading.Thread(target=_end_with_parent, args=(post,), daemon=True).start()
    page = Page(post.folder / f"page{number}")
    _HERE.actor = (post.folder, number)

    def report(event: str, *, level: int = logging.DEBUG, **fields: Any) -> None:
        post.send_waiting("events", Kind.EVENT, dumps("an event", (event, level, fields)))

    box = os.open(post.folder / f"box{number}", os.O_RDWR | os.O_CLOEXEC)
    watch = Watch(box)
    with q4.using(spec.config):
        life = Life(spec, RestartLimit(options.window, page.times[: options.restarts]), report)
        try:
            life.start()
            while True:
                if not page.current[0]:  # else its forerunner was killed while it handled that
                    if not watch.wait(0.0 if page.state == State.ENDING else None):
                        break
                    os.readv(box, [page.current])
                frame = Frame.read(post.folder, page.current)
                if frame.kind != Kind.STOP:
                    _handle(life, spec.name, post, frame)
                page.current[0] = 0
                post.forget(frame)
            life.stop()
            page.end(State.DEAD)
        except ActorDeadError as error:
            page.current[0] = 0
            page.end(State.DEAD, error.details["why"])


def _handle(life: Life, name: str, post: Post, frame: Frame) -> None:
    is_asked, label = frame.kind == Kind.ASK, f"the answer of actor {name!r}"
    if not is_asked:
        life.handle(frame.body, is_asked=False, load=pickle.loads)
        return
    try:
        kind, body = Kind.WELL, dumps(label, life.handle(frame.body, is_asked=True, load=pickle.loads))
    except PLUGIN_FAULTS as error:
        kind, body = Kind.WRONG, pickle.dumps(sendable(label, error, pickle.dumps), protocol=5)
    _answer(post, frame, kind, body)


def _answer(post: Post, frame: Frame, kind: int, body: bytes) -> None:
    try:
        post.send_waiting(frame.reply, kind, body, number=frame.number)
    except BrokenPipeError:  # whoever asked is gone
        return
    except MessageError as error:
        post.send_waiting(frame.reply, Kind.WRONG, pickle.dumps(error), number=frame.number)


def _end_with_parent(post: Post) -> None:
    """Wait for the end of the process that spawned this one, take away what it left, and end."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        for mark in post.folder.glob("segment-*"):
            (FOLDER / mark.name.removeprefix("segment-")).unlink(missing_ok=True)
        post.remove()
        os._exit(1)


# -- in the process that spawns


class _Worker:
    """One actor as its supervisor sees it."""

    def __init__(self, spec: Spec, ref: ProcessRef, box: int) -> None:
        self.spec, self.ref, self.box = spec, ref, box
        self.process: Any = None
        self.ended = threading.Event()


class Processes:
    """The runtime of processes: one each, from a server without threads, and a thread here that replaces the dead."""

    def __init__(self, options: Options, report: Report) -> None:
        self._options, self._report = options, report
        self._post = Post()
        self._events = self._post.make_box("events", _EVENTS_ROOM)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", "q4_actors.runtimes.preload"])  # by the server, once
        self._workers: dict[int, _Worker] = {}
        self._lock = threading.RLock()
        self._is_closing = False
        self._thread = threading.Thread(target=self._supervise, name="actor supervisor", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._post.close)

    def spawn(self, spec: Spec) -> ProcessRef:
        """Start an actor."""
        with self._lock:
            number = len(self._workers)
            box = self._post.make_box(f"box{number}", self._options.mailbox)
            try:
                Page.create(self._post.folder / f"page{number}")
                worker = _Worker(spec, ProcessRef(self._post, number, spec.name, self._options.mailbox, self), box)
                self._start(worker, number)
            except BaseException as error:
                _remove_box(box, self._post.folder / f"box{number}")  # the number is the next one's
                (self._post.folder / f"page{number}").unlink(missing_ok=True)
                if isinstance(error, (pickle.PicklingError, AttributeError, TypeError)):
                    text = f"actor {spec.name!r} can't be sent to a process: {error}"
                    raise MessageError(text, hint="Classes and arguments must be importable and picklable.") from error
                if isinstance(error, (OSError, EOFError)):
                    hint = 'Is what the script runs under `if __name__ == "__main__":`? Is there memory for a process?'
                    text = f"actor {spec.name!r} gets no process: {describe_exception(error)}"
                    raise ActorError(text, hint=hint) from error
                raise
            self._workers[number] = worker
        self._wake()
        return worker.ref

    def mutable(self, tensor: torch.Tensor, name: str, version: int, **options: Any) -> SharedMutableTensor:
        """Return a tensor in shared memory."""
        decision = decide_for_processes(name, options.pop("unified_memory", None), options.pop("device", None))
        made = SharedMutableTensor(tensor, name=name, version=version, **options)
        record(made, decision)
        self._note_segment(made.segment)
        return made

    def share(self, what: q4.Q4Linear | q4.PackedWeight, *, canonical: bool) -> SharedWeight:
        """Return a weight in shared memory."""

        def make(tensors: list[torch.Tensor]) -> InSegment:
            made = InSegment(tensors)
            self._note_segment(made.name)
            return made

        return share_by(make, what, canonical=canonical)

    def _note_segment(self, name: str) -> None:
        """Note shared memory whose name goes with this process, however it ends."""
        (self._post.folder / f"segment-{name}").touch(mode=0o600)

    def await_end(self, number: int, timeout: float | None) -> None:
        """Wait until an actor's process is gone; kill it if the time runs out."""
        worker = self._workers[number]
        if not worker.ended.wait(timeout):
            self.kill(number)
            worker.ended.wait()

    def kill(self, number: int) -> None:
        """Kill an actor's process."""
        with self._lock:
            worker = self._workers[number]
            if not worker.ended.is_set():
                worker.process.kill()

    def pid_of(self, number: int) -> int:
        """Return the number of an actor's process; −1 if it has ended."""
        with self._lock:
            worker = self._workers[number]
            return -1 if worker.ended.is_set() else worker.process.pid

    def close(self) -> None:
        """Let go of the mailboxes, once every actor has ended."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        for worker in self._workers.values():
            os.close(worker.box)
        os.close(self._events)
        vars(_HERE).get("boxes", {}).pop(self._post.folder, None)
        self._end()

    def _start(self, worker: _Worker, number: int) -> None:
        arguments = (str(self._post.folder), number, _Sealed(worker.spec), self._options, torch.get_num_threads())
        page = str(self._post.folder / f"page{number}")  # the process's name until it begins: see note_cause
        worker.process = self._context.Process(target=_work, args=arguments, name=page, daemon=True)
        worker.process.start()

    def _wake(self) -> None:
        self._post.send("events", Kind.STOP, b"")  # where the mailbox is full, the supervisor is awake

    def _supervise(self) -> None:
        """Pass on what actors report, and replace those that were killed."""
        while not self._is_closing:
            with self._lock:
                working = [(number, worker) for number, worker in self._workers.items() if not worker.ended.is_set()]
                sentinels = {worker.process.sentinel: number for number, worker in working}
            ready = multiprocessing.connection.wait([self._events, *sentinels])
            if self._events in ready:
                self._pass_on(os.read(self._events, FRAME))
            else:
                for sentinel in ready:
                    self._bury(sentinels[sentinel])

    def _pass_on(self, data: bytes) -> None:
        frame = Frame.read(self._post.folder, data)
        if frame.kind == Kind.EVENT:
            event, level, fields = pickle.loads(frame.body)  # noqa: S301  # the folder is this user's alone
            self._post.forget(frame)
            self._report(event, level=level, **fields)

    def _bury(self, number: int) -> None:
        """Take note of a process that has ended: a new one takes its place, or nobody does."""
        worker = self._workers[number]
        page, name = worker.ref.page, worker.spec.name
        with self._lock:
            worker.process.join()
            if page.state == State.LIVE:
                noted = page.take_note()
                error = f"its process ended {f'by {noted}' if noted else f'with exit code {worker.process.exitcode}'}"
                self._report("failed", level=logging.WARNING, actor=name, error=error)
                if RestartLimit(self._options.window, page.times[: self._options.restarts]).allows():
                    self._report("restarted", level=logging.WARNING, actor=name)
                    worker.process.close()
                    try:
                        self._start(worker, number)
                    except PLUGIN_FAULTS as fault:
                        error = f"it can't be restarted: {describe_exception(fault)}"
                    else:
                        return
                page.end(State.DEAD, f"too many failures, the last: {error}")
                self._report("dead", level=logging.ERROR, actor=name, error=error)
            page.end(State.DEAD)
            self._drain(worker)
            worker.process.close()
            worker.ended.set()

    def _drain(self, worker: _Worker) -> None:
        """Tell whoever still waits for an answer of a dead actor."""
        os.set_blocking(worker.box, False)
        waiting = [bytes(worker.ref.page.current)] if worker.ref.page.current[0] else []
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(os.read(worker.box, FRAME))
        for data in waiting:
            frame = Frame.read(self._post.folder, data)
            self._post.forget(frame)
            if frame.kind == Kind.ASK:
                error = dead_error(worker.spec.name, worker.ref.page.why)
                with contextlib.suppress(BrokenPipeError):
                    self._post.send(frame.reply, Kind.WRONG, pickle.dumps(error), number=frame.number)
