"""Actors as threads of this process."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

import q4core as q4
from q4_actors.runtimes.actor import ActorRef, Life, RestartLimit, Spec, dead_error, full_error, late_error
from q4_actors.runtimes.errors import ActorDeadError, ActorError
from q4_actors.runtimes.memory_report import memory_of
from q4_actors.runtimes.weights import HasForm, Held, SharedWeight, share_by
from q4_actors.tensors.placing import mutable
from q4_actors.tensors.rings import Rings
from q4core.plugin_api import PLUGIN_FAULTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from q4_actors.runtimes.actor import Options, Report
    from q4_actors.runtimes.memory_report import ActorMemory
    from q4_actors.tensors.rings import RingForm
    from q4_actors.tensors.tensor import MutableTensor

__all__ = ["ThreadRef", "Threads"]

_Reply = queue.SimpleQueue[tuple[bool, Any]]


class ThreadRef(ActorRef):
    """An actor that is a thread: its mailbox, and the thread's loop."""

    def __init__(self, spec: Spec, options: Options, report: Report) -> None:
        self.name, self._limit = spec.name, options.mailbox
        self._box: queue.SimpleQueue[tuple[Any, _Reply | None] | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._waiting = 0
        self._why: str | None = None  # why no messages are accepted any more
        self._thread = threading.Thread(
            target=self._run, args=(spec, options, report), name=f"actor {spec.name}", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # the system's limit
            raise ActorError(f"actor {spec.name!r} gets no thread: {error}", actor=spec.name) from error

    def tell(self, message: Any, *, timeout: float | None = None) -> None:
        """Send a message; see ``ActorRef.tell``."""
        self._put(message, None, timeout)

    def ask(self, message: Any, *, timeout: float | None = None) -> Any:
        """Send a message and return the answer; see ``ActorRef.ask``."""
        if threading.current_thread() is self._thread:
            raise ActorError(f"actor {self.name!r} asks itself, and would wait forever", actor=self.name)
        started, reply = time.monotonic(), _Reply()
        self._put(message, reply, timeout)
        try:
            if timeout is None:
                is_well, value = reply.get()
            else:
                is_well, value = reply.get(timeout=max(0.0, timeout - (time.monotonic() - started)))
        except queue.Empty:
            raise late_error(self.name, timeout) from None
        if is_well:
            return value
        raise value

    def stop(self, *, timeout: float | None = None) -> None:
        """End the thread; see ``ActorRef.stop``."""
        self.begin_stop()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            hint = "A thread can't be killed; give long work its own time limit."
            text = f"actor {self.name!r} still handles a message after {timeout} s"
            raise ActorError(text, hint=hint, actor=self.name)

    def begin_stop(self) -> None:
        """Take no further messages, and end after those that are there."""
        with self._room:
            if self._why is None:
                self._why = "it was stopped"
                self._box.put(None)
                self._room.notify_all()

    def kill(self) -> None:
        """Raise; see ``ActorRef.kill``."""
        hint = 'Use runtime="processes" to see what a crash does.'
        raise ActorError(f"actor {self.name!r} is a thread, and can't be killed", hint=hint, actor=self.name)

    def is_alive(self) -> bool:
        """Return whether it takes messages."""
        return self._why is None

    def memory(self) -> ActorMemory:
        """Return the memory of this process; see ``ActorRef.memory``."""
        try:
            return memory_of()
        except OSError as error:
            raise ActorError(f"the system does not report the memory of actor {self.name!r}: {error}") from error

    def _put(self, message: Any, reply: _Reply | None, timeout: float | None) -> None:
        with self._room:
            if self._why is None and self._box.qsize() >= self._limit:
                self._await_room(timeout)
            if self._why is not None:
                raise dead_error(self.name, self._why)
            self._box.put((message, reply))

    def _await_room(self, timeout: float | None) -> None:
        self._waiting += 1
        try:
            is_own = threading.current_thread() is self._thread  # it can't make room while it waits
            if is_own or not self._room.wait_for(
                lambda: self._why is not None or self._box.qsize() < self._limit, timeout
            ):
                raise full_error(self.name, self._limit)
        finally:
            self._waiting -= 1

    def _run(self, spec: Spec, options: Options, report: Report) -> None:
        with q4.using(spec.config):
            life = Life(spec, RestartLimit(options.window, [float("-inf")] * options.restarts), report)
            try:
                life.start()
                while (item := self._box.get()) is not None:
                    if self._waiting:
                        with self._room:
                            self._room.notify()
                    self._handle(life, *item)
                    del item  # it may hold large things
                life.stop()
            except ActorDeadError as error:
                with self._room:
                    self._why = error.details["why"]
                    self._room.notify_all()
            while not self._box.empty():  # nothing comes in any more
                item = self._box.get()
                if item is not None and item[1] is not None:
                    item[1].put((False, dead_error(self.name, self._why or "")))

    @staticmethod
    def _handle(life: Life, message: Any, reply: _Reply | None) -> None:
        if reply is None:
            life.handle(message, is_asked=False)
            return
        try:
            answer = (True, life.handle(message, is_asked=True))
        except PLUGIN_FAULTS as error:
            answer = (False, error)
        reply.put(answer)


class Threads:
    """The runtime of threads: tensors are ``MutableTensor``s, and messages are handed over uncopied."""

    def __init__(self, options: Options, report: Report) -> None:
        self._options, self._report = options, report

    def spawn(self, spec: Spec) -> ThreadRef:
        """Start an actor."""
        return ThreadRef(spec, self._options, self._report)

    @staticmethod
    def mutable(tensor: torch.Tensor, name: str, version: int, **options: Any) -> MutableTensor:
        """Return a tensor that the actors share."""
        return mutable(tensor, name=name, version=version, **options)

    @staticmethod
    def share(what: q4.Q4Linear | q4.PackedWeight | HasForm, *, canonical: bool) -> SharedWeight:
        """Return a weight over the very tensors of the layer."""
        return share_by(Held, what, canonical=canonical, devices=frozenset({"cpu", "cuda"}))

    @staticmethod
    def rings(forms: Mapping[str, RingForm]) -> Rings:
        """Return rings in this process's memory."""
        return Rings(forms)

    def close(self) -> None:
        """Release what the runtime holds: nothing."""
