"""Main loop of an actor in its own process: messages from its mailbox, one at a time, until it is stopped."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pathlib
import pickle
import signal
import sys
import threading
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from q4_actors.runtimes.actor import Life, Options, RestartLimit, Spec, sendable
from q4_actors.runtimes.errors import ActorDeadError, MessageError
from q4_actors.runtimes.mailbox import Frame, Kind, Page, Post, State, dumps
from q4_actors.runtimes.process_ref import HERE, post_of
from q4_actors.runtimes.watch import Watch
from q4_actors.tensors.segment import FOLDER
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Sealed", "note_cause", "work"]


def note_cause(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Record for the supervisor why an actor can't start; ``sys.excepthook`` of the server's processes.

    It is called where a process can't import the script.
    """
    path = pathlib.Path(multiprocessing.current_process().name)
    if path.parent.parent == FOLDER and path.name.startswith("page"):
        _note(path, error)
    sys.__excepthook__(kind, error, trace)


def _note(page: pathlib.Path, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # the system was stopped
        Page(page).note(describe_exception(error))


class Sealed:
    """A spec that arrives as bytes, so that the actor's process unpickles it where an error is noted."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        """Pickle as it would be pickled itself, while the process is made: tensors go as shared memory."""
        return bytes, (bytes(ForkingPickler.dumps(self._spec)),)


def work(folder: str, number: int, sealed: bytes, options: Options, threads: int) -> None:
    """Run an actor."""
    try:
        spec: Spec = pickle.loads(sealed)  # noqa: S301  # of the process that spawned this one
        del sealed
        process = multiprocessing.current_process()
        process.name = spec.name
        process.daemon = False  # Python forbids daemons' children; these end with this one as it does with its parent
        _live(folder, number, spec, options, threads)
    except PLUGIN_FAULTS as error:
        _note(pathlib.Path(folder) / f"page{number}", error)
        raise


def _live(folder: str, number: int, spec: Spec, options: Options, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that spawned it
    torch.set_num_threads(threads)
    post = post_of(folder, os.getpid())
    threading.Thread(target=_end_with_parent, args=(post,), daemon=True).start()
    page = Page(post.folder / f"page{number}")
    HERE.actor = (post.folder, number)

    def report(event: str, *, level: int = logging.DEBUG, **fields: Any) -> None:
        post.send_waiting("events", Kind.EVENT, dumps("an event", (event, level, fields)))

    box = os.open(post.folder / f"box{number}", os.O_RDWR | os.O_CLOEXEC)
    watch = Watch(box)
    with q4.using(spec.config):
        life = Life(spec, RestartLimit(options.window, page.times[: options.restarts]), report)
        try:
            life.start()
            while True:
                if not page.current[0]:  # else its predecessor was killed while it handled that
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
    except BrokenPipeError:  # the caller is gone
        return
    except MessageError as error:
        post.send_waiting(frame.reply, Kind.WRONG, pickle.dumps(error), number=frame.number)


def _end_with_parent(post: Post) -> None:
    """Wait for the end of the process that spawned this one, remove what it left, and end."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        for mark in post.folder.glob("segment-*"):
            (FOLDER / mark.name.removeprefix("segment-")).unlink(missing_ok=True)
        post.remove()
        os._exit(1)
