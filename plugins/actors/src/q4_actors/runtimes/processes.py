"""Actors as processes on Linux: mailboxes are pipes, state is in shared memory, dead processes are replaced."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from q4_actors.runtimes.actor import Options, RestartLimit, Spec, dead_error
from q4_actors.runtimes.errors import ActorError, MessageError
from q4_actors.runtimes.mailbox import FRAME, Frame, Kind, Page, Post, State
from q4_actors.runtimes.process_ref import HERE, ProcessRef, Worker, remove_box
from q4_actors.runtimes.process_worker import Sealed, work
from q4_actors.runtimes.weights import HasForm, InSegment, SharedWeight, share_by
from q4_actors.tensors.placing import decide_for_processes, record
from q4_actors.tensors.rings import SharedRings
from q4_actors.tensors.shared import SharedMutableTensor
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Mapping

    import q4core as q4
    from q4_actors.runtimes.actor import Report
    from q4_actors.tensors.rings import RingForm

__all__ = ["Processes"]

_EVENTS_ROOM = 64


class Processes:
    """The runtime of processes: one for each actor, forked from a server without threads, and a supervising thread."""

    def __init__(self, options: Options, report: Report) -> None:
        self._options, self._report = options, report
        self._post = Post()
        self._events = self._post.make_box("events", _EVENTS_ROOM)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["__main__", "q4_actors.runtimes.preload"])  # by the server, once
        self._workers: dict[int, Worker] = {}
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
                page = Page.create(self._post.folder / f"page{number}")
                worker = Worker(spec, page, box, self._lock)
                handle = ProcessRef(self._post, number, spec.name, self._options.mailbox, worker)
                self._start(worker, number)
            except BaseException as error:
                remove_box(box, self._post.folder / f"box{number}")  # the number is the next one's
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
        return handle

    def mutable(self, tensor: torch.Tensor, name: str, version: int, **options: Any) -> SharedMutableTensor:
        """Return a tensor in shared memory."""
        decision = decide_for_processes(name, options.pop("unified_memory", None), options.pop("device", None))
        made = SharedMutableTensor(tensor, name=name, version=version, **options)
        record(made, decision)
        self._note_segment(made.segment)
        return made

    def share(self, what: q4.Q4Linear | q4.PackedWeight | HasForm, *, canonical: bool) -> SharedWeight:
        """Return a weight in shared memory."""

        def make(tensors: list[torch.Tensor]) -> InSegment:
            made = InSegment(tensors)
            self._note_segment(made.name)
            return made

        return share_by(make, what, canonical=canonical)

    def rings(self, forms: Mapping[str, RingForm]) -> SharedRings:
        """Return rings in shared memory."""
        made = SharedRings(forms)
        self._note_segment(made.segment)
        return made

    def _note_segment(self, name: str) -> None:
        """Note shared memory whose name goes with this process, however it ends."""
        (self._post.folder / f"segment-{name}").touch(mode=0o600)

    def close(self) -> None:
        """Close the mailboxes, once every actor has ended."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        for worker in self._workers.values():
            os.close(worker.box)
        os.close(self._events)
        vars(HERE).get("boxes", {}).pop(self._post.folder, None)
        self._end()

    def _start(self, worker: Worker, number: int) -> None:
        arguments = (str(self._post.folder), number, Sealed(worker.spec), self._options, torch.get_num_threads())
        page = str(self._post.folder / f"page{number}")  # the process's name until it begins: see note_cause
        worker.process = self._context.Process(target=work, args=arguments, name=page, daemon=True)
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
                    self._handle_exit(sentinels[sentinel])

    def _pass_on(self, data: bytes) -> None:
        frame = Frame.read(self._post.folder, data)
        if frame.kind == Kind.EVENT:
            event, level, fields = pickle.loads(frame.body)  # noqa: S301  # the folder is this user's alone
            self._post.forget(frame)
            self._report(event, level=level, **fields)

    def _handle_exit(self, number: int) -> None:
        """Handle the end of a process: restart the actor, or report its death."""
        worker = self._workers[number]
        page, name = worker.page, worker.spec.name
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

    def _drain(self, worker: Worker) -> None:
        """Raise in every caller that still waits for an answer of a dead actor."""
        os.set_blocking(worker.box, False)
        waiting = [bytes(worker.page.current)] if worker.page.current[0] else []
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting.append(os.read(worker.box, FRAME))
        for data in waiting:
            frame = Frame.read(self._post.folder, data)
            self._post.forget(frame)
            if frame.kind == Kind.ASK:
                error = dead_error(worker.spec.name, worker.page.why)
                with contextlib.suppress(BrokenPipeError):
                    self._post.send(frame.reply, Kind.WRONG, pickle.dumps(error), number=frame.number)
