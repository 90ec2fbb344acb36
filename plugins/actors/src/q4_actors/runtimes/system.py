"""``ActorSystem``: actors on threads, processes or Ray, with their supervision and their shared tensors."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import q4core as q4
from q4_actors.runtimes import checkpoints
from q4_actors.runtimes.actor import MAX_RESTARTS, Actor, ActorRef, Options, Spec
from q4_actors.runtimes.errors import ActorDeadError, ActorError
from q4_actors.runtimes.threads import Threads
from q4core.plugin_api import emit

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from q4_actors.runtimes.actor import Report
    from q4_actors.runtimes.memory_report import ActorMemory
    from q4_actors.runtimes.weights import HasForm, SharedWeight
    from q4_actors.tensors.rings import RingForm, Rings
    from q4_actors.tensors.tensor import MutableTensor

__all__ = ["ActorSystem"]

RUNTIMES = ("threads", "processes", "ray")
MAX_MAILBOX = 256  # pages of a pipe: Linux's default limit for users


class ActorSystem:
    """Actors and the tensors that they share; the same program runs on threads, processes and Ray.

    Calls that wait for a dead actor raise an ``ActorDeadError``, and so does ``check()``. Leaving the ``with``
    block stops all actors, and closes the tensors. Events are ``q4.actor.started``, ``failed``, ``restarted``, ``dead``
    and ``stopped``.

    Args:
        runtime: ``"threads"``; ``"processes"`` (Linux); or ``"ray"``: the cluster that ``ray.init`` joined, else one
            that is started on this machine.
        mailbox: How many messages may wait for an actor: a power of two, at most 256. On Ray: how many each sender may
            have on their way.
        restarts: How often an actor is restarted within ``window`` seconds before it is dead: 0 … 64. On Ray a killed
            one: how often at all.
        window: Seconds.
        when_dead: What the system does when an actor is dead after failures: ``"go_on"``, or ``"stop"`` all others.
        resume: A checkpoint. Tensors that ``mutable`` makes begin with its contents and versions.
        ray_options: What Ray's ``options`` takes for each actor: resources, or the strategy of a placement group.
            Defaults to actors that are spread over the nodes.

    Raises:
        ConfigError: An argument is not legal, or the runtime is not installed here.
        CheckpointError: ``resume`` is no checkpoint, or was changed since it was written.
    """

    def __init__(  # noqa: PLR0913  # the options of one call
        self,
        runtime: str = "threads",
        *,
        mailbox: int = 64,
        restarts: int = 3,
        window: float = 60.0,
        when_dead: str = "go_on",
        resume: str | os.PathLike[str] | None = None,
        ray_options: Mapping[str, Any] | None = None,
    ) -> None:
        _require("runtime", runtime, "one of " + ", ".join(map(repr, RUNTIMES)), is_met=runtime in RUNTIMES)
        is_size = _is_whole(mailbox, 1, MAX_MAILBOX) and mailbox & (mailbox - 1) == 0
        _require("mailbox", mailbox, f"a power of two, 1 … {MAX_MAILBOX}", is_met=is_size)
        _require("restarts", restarts, f"0 … {MAX_RESTARTS}", is_met=_is_whole(restarts, 0, MAX_RESTARTS))
        is_time = isinstance(window, (int, float)) and not isinstance(window, bool) and window > 0
        _require("window", window, "seconds, more than 0", is_met=is_time)
        _require("ray_options", ray_options, "None but on Ray", is_met=ray_options is None or runtime == "ray")
        _require("when_dead", when_dead, "'go_on' or 'stop'", is_met=when_dead in {"go_on", "stop"})
        self._stops_all = when_dead == "stop"
        self._resumed = {} if resume is None else checkpoints.load(resume)
        self._actors: dict[str, ActorRef] = {}
        self._tensors: dict[str, MutableTensor] = {}
        self._sources: dict[str, str] = {}
        self._weights: list[SharedWeight] = []
        self._rings: list[Rings] = []
        self._dead: ActorDeadError | None = None
        self._lock = threading.RLock()
        self._is_closed = False
        self._numbers = itertools.count(1)
        self._runtime = _make_runtime(runtime, Options(mailbox, restarts, float(window)), self._report, ray_options)

    # -- actors

    def spawn(self, kind: type[Actor], /, *args: Any, name: str | None = None, **named: Any) -> ActorRef:
        """Start an actor and return its reference, which takes messages at once.

        Args:
            kind: A subclass of ``Actor``.
            *args: What it is made with, now and after each failure. Processes and Ray pickle it, as ``kind``.
            name: For messages, events and reports. Defaults to class and number.
            **named: As ``args``.

        Raises:
            ConfigError: ``kind`` is no subclass of ``Actor``, or the name is taken.
            MessageError: The class or an argument can't be pickled.
            ActorError: The system was stopped, or the machine gives no room for another actor.
        """
        _require("kind", kind, "a subclass of Actor", is_met=isinstance(kind, type) and issubclass(kind, Actor))
        _require("name", name, "text or None", is_met=name is None or (isinstance(name, str) and bool(name)))
        with self._lock, q4.using(q4.SessionConfig()) as config:
            self._require_open()
            label = name or f"{kind.__name__}-{next(self._numbers)}"
            hint = "Stop the other one first, or take another name."
            is_free = label not in self._actors or not self._actors[label].is_alive()
            _require("name", label, "one that no live actor has", is_met=is_free, hint=hint)
            ref: ActorRef = self._runtime.spawn(Spec(kind, args, named, label, config))
            self._actors[label] = ref
            return ref

    @property
    def actors(self) -> dict[str, ActorRef]:
        """The actors that were spawned, by name, dead ones included."""
        with self._lock:
            return dict(self._actors)

    def check(self) -> None:
        """Raise if an actor is dead after failures.

        Raises:
            ActorDeadError: The first that died.
        """
        if self._dead is not None:
            raise self._dead

    # -- state

    def mutable(self, tensor: torch.Tensor, *, name: str, source: str | None = None, **options: Any) -> MutableTensor:
        """Return a tensor that all actors share, with a copy of ``tensor`` or what the checkpoint has of that name.

        Args:
            tensor: The first content.
            name: Its name in checkpoints and messages.
            source: Identifies what computes it, by a digest of weights for example. Checkpoints store it, and a
                checkpoint's tensor of another source is rejected. Defaults to None, which accepts any.
            **options: ``mode``, and of ``q4_actors.mutable`` what else the runtime has: threads take all of it;
                processes and Ray have the system's memory on the CPU, and refuse what requires another.

        Returns:
            A ``MutableTensor`` (threads), a ``SharedMutableTensor`` (processes) or Ray's, all with the same methods:
            ``read``, ``write``, ``wait``, ``snapshot``, ``replace``, ``version``.

        Raises:
            ConfigError: The name is taken, or an option is not legal.
            InputError: ``tensor`` can't be shared so, or the checkpoint's has another shape, dtype, mode or source.
            UnifiedMemoryError: Required, and impossible.
        """
        _require("name", name, "text", is_met=isinstance(name, str) and bool(name))
        with self._lock:
            self._require_open()
            _require("name", name, "one that no other tensor has", is_met=name not in self._tensors)
            options = {key: value for key, value in options.items() if value is not None}
            stored, version = self._resumed.get(name), 0
            if stored is not None:
                checkpoints.check_fits(name, stored, tensor, options.get("mode"), source)
                tensor, version = stored.tensor.to(tensor.device), stored.version
                options["mode"] = stored.mode
            made: MutableTensor = self._runtime.mutable(tensor, name, version, **options)
            self._tensors[name] = made
            if source is not None:
                self._sources[name] = source
            return made

    def share(self, what: q4.Q4Linear | q4.PackedWeight | HasForm, *, canonical: bool = True) -> SharedWeight:
        """Return a prepared weight that actors use without a copy: ``weight.layer()`` in each.

        Args:
            what: A prepared layer, with its bias; a weight, which is prepared first, in a session of its own; or what
                lies in tensors alone, such as sparse synapses: its ``shared_form`` gives them.
            canonical: Whether the canonical form is shared as well, for processes in which another backend serves.

        Returns:
            A weight over the layer's own tensors (threads), or in shared memory (processes), or in Ray's object store,
            of which each node has one copy. It is closed with the system.

        Raises:
            InputError: It is no layer and no weight; or on a GPU, whose memory threads alone share; or there is too
                little shared memory.
            LifecycleError: Its backend can't export what it prepared.
        """
        with self._lock:
            self._require_open()
            made: SharedWeight = self._runtime.share(what, canonical=canonical)
            self._weights.append(made)
            return made

    def rings(self, forms: Mapping[str, RingForm]) -> Rings:
        """Return rings of rows that actors publish by stamps; see ``Rings``. They are in no checkpoint.

        Args:
            forms: Name → form.

        Raises:
            ActorError: The system was stopped, or the object store is full (Ray).
            InputError: There is too little shared memory (processes).
        """
        with self._lock:
            self._require_open()
            made: Rings = self._runtime.rings(forms)
            self._rings.append(made)
            return made

    def memory_report(self) -> dict[str, ActorMemory]:
        """Return the resident memory of each live actor's process, by the actor's name; on Linux."""
        found = {}
        for name, ref in self.actors.items():
            with contextlib.suppress(ActorDeadError):
                found[name] = ref.memory()
        return found

    @property
    def clock(self) -> int:
        """The least version of the system's tensors: the number of steps that all have done; 0 without tensors."""
        with self._lock:
            return min((tensor.version for tensor in self._tensors.values()), default=0)

    def checkpoint(self, path: str | os.PathLike[str], *, timeout: float | None = 10.0) -> dict[str, int]:
        """Write all tensors as they are at one instant to a file, which is replaced as a whole.

        Args:
            path: The file.
            timeout: Seconds to wait until no tensor changes while they are copied.

        Returns:
            The version of each tensor in the file.

        Raises:
            ActorError: Updates never paused long enough. Checkpoint between two steps of the clock.
            CheckpointError: The file can't be written.
        """
        with self._lock:
            self._require_open()
            return checkpoints.save(path, self._tensors, self._sources, timeout)

    # -- end

    def stop(self, *, timeout: float | None = None) -> None:
        """Stop every actor after what it was sent so far, and close the tensors. Stopping twice is allowed.

        Args:
            timeout: Seconds for all of them; processes that take longer are killed.

        Raises:
            ActorError: Threads still handle messages after that time; their tensors are closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            actors = list(self._actors.values())
        late = []
        for ref in actors:
            ref.begin_stop()
        for ref in actors:
            try:
                ref.stop(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except ActorError as error:
                late.append(error)
        for tensor in self._tensors.values():
            tensor.close()
        for weight in self._weights:
            weight.close()
        for rings in self._rings:
            rings.close()
        self._runtime.close()
        if late:
            raise late[0]

    def __enter__(self) -> Self:
        """Return itself, to be stopped at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it; after an exception, at once."""
        try:
            self.stop(timeout=None if kind is None else 1.0)
        except ActorError:
            if kind is None:
                raise

    def _require_open(self) -> None:
        if self._is_closed:
            raise ActorError("the actor system was stopped", hint="Make another one.")

    def _report(self, event: str, *, level: int = logging.DEBUG, **fields: Any) -> None:
        """Send an event, and act on that of a death."""
        with contextlib.suppress(q4.Q4PluginWarning):  # warnings turned into errors; the supervisor goes on
            emit(f"q4.actor.{event}", level=level, **fields)
        if event == "dead":
            name, why = fields["actor"], fields["error"]
            self._dead = self._dead or ActorDeadError(f"actor {name!r} is dead: {why}", actor=name, why=why)
            if self._stops_all:
                for ref in tuple(self._actors.values()):  # without the lock: a spawn may hold it, and wait for this
                    ref.begin_stop()


def _make_runtime(runtime: str, options: Options, report: Report, ray_options: Mapping[str, Any] | None) -> Any:
    """Return what runs actors (``spawn``), and holds what they share (``mutable``, ``share``), until ``close``."""
    if runtime == "threads":
        return Threads(options, report)
    if runtime == "ray":
        try:
            from q4_actors.runtimes.ray import RayRuntime  # noqa: PLC0415  # it needs Ray
        except ImportError as error:
            raise q4.ConfigError(
                f"runtime 'ray' can't be used: {error}", hint="pip install 'q4-actors[ray]'"
            ) from error
        return RayRuntime(options, report, ray_options or {})
    if sys.platform != "linux":
        raise q4.ConfigError("ActorSystem", name="runtime", rule="'threads' outside Linux", value=runtime)
    from q4_actors.runtimes.processes import Processes  # noqa: PLC0415  # it needs Linux

    return Processes(options, report)


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _require(name: str, value: object, rule: str, *, is_met: bool, hint: str | None = None) -> None:
    if not is_met:
        raise q4.ConfigError("ActorSystem", name=name, rule=rule, value=value, hint=hint)
