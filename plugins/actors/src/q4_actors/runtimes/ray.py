"""Actors as Ray's actors: Ray places, calls and restarts them, and its object store holds what they share."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import ray
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
from q4_actors.runtimes.memory_report import ActorMemory, memory_of
from q4_actors.runtimes.ray_hub import BORN, Hub, key_of, words_of
from q4_actors.runtimes.ray_rings import RayRings
from q4_actors.runtimes.ray_tensor import RayTensor
from q4_actors.runtimes.weights import HasForm, SharedWeight, forms_of, from_flat, share_by, to_flat
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from q4_actors.runtimes.actor import Report
    from q4_actors.tensors.rings import RingForm

__all__ = ["RayRef", "RayRuntime"]

_LOOK_S = 0.001
_WAITING = 100_000
"""Calls that may wait in the hub: one for each actor, and one for each wait for a tensor. Ray's own limit is 1,000."""
_LEAST_BYTES = 4096  # Ray aligns buffers from 2048 bytes on

with warnings.catch_warnings():  # torch gives this once: what lies in the store can't be written to, and is not
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class _Host:
    """One of Ray's actors, in which an actor lives."""

    def __init__(self, spec: Spec, options: Options, threads: int, hub: Any) -> None:
        torch.set_num_threads(threads)
        self._spec, self._hub, self._why, self._ended = spec, hub, "", threading.Event()
        self._life = Life(spec, RestartLimit(options.window, [float("-inf")] * options.restarts), self._report)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._report("failed", level=logging.WARNING, actor=spec.name, error="Ray lost its process")
            self._report("restarted", level=logging.WARNING, actor=spec.name)
        with q4.using(spec.config):
            try:
                self._life.start()
            except ActorDeadError as error:
                self._why = error.details["why"]

    def receive(self, message: Any, is_asked: bool) -> Any:  # noqa: FBT001  # Ray's calls
        """Handle a message; return the answer and None, or None and the error.

        Nothing is raised: what Ray can't send is then the answer, and its process goes on after ``SystemExit``.
        """
        name = self._spec.name
        if self._why:
            return None, dead_error(name, self._why)
        with q4.using(self._spec.config):
            try:
                return self._life.handle(message, is_asked=is_asked), None
            except PLUGIN_FAULTS as error:
                if is_asked:
                    return None, sendable(f"the answer of actor {name!r}", error, ray.cloudpickle.dumps)
                if not isinstance(error, ActorDeadError):
                    raise
                self._why = error.details["why"]
        return None, None

    def stop(self) -> None:
        """End, after what was sent before."""
        if not self._why:
            self._why = "it was stopped"
            with q4.using(self._spec.config):
                self._life.stop()
        ray.get(self._hub.forget.remote(ray.get_runtime_context().get_actor_id()))
        self._ended.set()

    def stay(self) -> None:
        """Return when it was stopped: so that Ray reports any other end."""
        self._ended.wait()

    def status(self) -> tuple[str, str]:
        """Return which incarnation this is, and why it accepts no messages any more, if so; at any time."""
        return BORN, self._why

    def memory(self) -> ActorMemory:
        """Return the memory of this process; at any time."""
        return memory_of()

    def _report(self, event: str, *, level: int = logging.DEBUG, **fields: Any) -> None:
        self._hub.report.remote((event, level, fields))


class RayRef(ActorRef):
    """An actor that Ray runs, as any process of the cluster holds it; ``why`` it takes nothing more of this one."""

    def __init__(self, name: str, handle: Any, room: int) -> None:
        self.name, self._handle, self._room, self.why = name, handle, room, ""

    def tell(self, message: Any, *, timeout: float | None = None) -> None:
        """Send a message; see ``ActorRef.tell``."""
        self._send(message, timeout, is_asked=False)

    def ask(self, message: Any, *, timeout: float | None = None) -> Any:
        """Send a message and return the answer; see ``ActorRef.ask``."""
        started = time.monotonic()
        if ray.get_runtime_context().get_actor_id() == key_of(self._handle):
            raise ActorError(f"actor {self.name!r} asks itself, and would wait forever", actor=self.name)
        reply = self._send(message, timeout, is_asked=True)
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
        try:
            value, error = ray.get(reply, timeout=left)
        except ray.exceptions.GetTimeoutError:
            raise late_error(self.name, timeout) from None
        except ray.exceptions.RayTaskError as fault:  # not the actor's: those are answers
            raise _unsent(self.name, fault.cause, is_message=True) from None
        except ray.exceptions.RaySystemError as fault:
            raise _unsent(self.name, fault, is_message=False) from None
        except ray.exceptions.RayError as fault:
            raise self._dead(fault) from fault
        if error is not None:
            raise error
        return value

    def stop(self, *, timeout: float | None = None) -> None:
        """End it; see ``ActorRef.stop``."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._handle.stop.remote(), timeout=timeout)
        self.why = self.why or "it was stopped"
        ray.kill(self._handle)

    def begin_stop(self) -> None:
        """Take no further messages of this process, and end after those that are there."""
        self.why = self.why or "it was stopped"
        with contextlib.suppress(ray.exceptions.RayError):
            self._handle.stop.remote()

    def kill(self) -> None:
        """Kill its process, which Ray replaces; see ``ActorRef.kill``."""
        ray.kill(self._handle, no_restart=False)

    def memory(self) -> ActorMemory:
        """Return the memory of its process, on its node; see ``ActorRef.memory``."""
        return self._get(self._handle.memory.remote())  # type: ignore[no-any-return]  # Ray's

    def is_alive(self) -> bool:
        """Return whether it takes messages, or will after a restart."""
        if self.why:
            return False
        with contextlib.suppress(ActorDeadError):
            return not self._get(self._handle.status.remote())[1]
        return False

    def __getstate__(self) -> dict[str, Any]:
        """Send as Ray's handle."""
        return {**vars(self), "why": ""}

    def _get(self, answer: Any) -> Any:
        try:
            return ray.get(answer)
        except ray.exceptions.RayError as error:
            raise self._dead(error) from error

    def _send(self, message: Any, timeout: float | None, *, is_asked: bool) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self.why:
                raise dead_error(self.name, self.why)
            try:
                return self._handle.receive.remote(message, is_asked)
            except ray.exceptions.PendingCallsLimitExceeded:
                if deadline is not None and time.monotonic() >= deadline:
                    raise full_error(self.name, self._room) from None
                time.sleep(_LOOK_S)
            except ray.exceptions.ObjectStoreFullError as error:
                text = f"a message to actor {self.name!r} can't be sent: the object store is full"
                raise MessageError(text, hint="Share a weight or a tensor, or give Ray more memory.") from error
            except ray.exceptions.RayActorError as error:
                raise self._dead(error) from error
            except (TypeError, AttributeError) as error:
                text = f"a message to actor {self.name!r} can't be pickled: {type(message).__name__}"
                raise MessageError(text, hint="Send plain data, tensors, references and shared tensors.") from error

    def _dead(self, error: BaseException) -> ActorDeadError:
        """Return the error of an actor that Ray has given up, or whose node is lost."""
        return dead_error(self.name, words_of(error))


class InStore:
    """Tensors in Ray's object store: each node has one copy."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._forms, total = forms_of(tensors)
        flat = torch.zeros(max(total, _LEAST_BYTES), dtype=torch.uint8, device="cpu")
        to_flat(tensors, flat)
        try:
            self._ref: Any = ray.put(flat.numpy())
        except ray.exceptions.ObjectStoreFullError as error:
            node = ray.get_runtime_context().get_node_id()
            raise ActorError(f"the object store of node {node} has no room for {total} bytes") from error

    def tensors(self) -> list[torch.Tensor]:
        """Return them, over the store's memory."""
        if self._ref is None:
            raise q4.LifecycleError("the shared weight is closed")
        return from_flat(torch.frombuffer(ray.get(self._ref), dtype=torch.uint8), self._forms)

    def close(self) -> None:
        """Drop this process's reference."""
        self._ref = None


class RayRuntime:
    """The runtime of Ray: joins the cluster that ``ray.init`` joined, or starts one on this machine.

    Args:
        options: For each actor.
        report: Where events go.
        ray_options: For Ray's ``options`` of each actor: resources, a placement group.
    """

    def __init__(self, options: Options, report: Report, ray_options: Mapping[str, Any]) -> None:
        self._options, self._report, self._ray_options = options, report, dict(ray_options)
        self._is_own = not ray.is_initialized()
        if self._is_own:
            ray.init(include_dashboard=False, log_to_driver=False)
        node = ray.get_runtime_context().get_node_id()
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        hub = ray.remote(num_cpus=0, scheduling_strategy=here, max_concurrency=_WAITING)(Hub)
        self._hub: Any = hub.remote()
        self._handles: list[Any] = [self._hub]
        self._specs: list[Any] = []
        self._refs: dict[str, RayRef] = {}
        self._thread = threading.Thread(target=self._pass_on, name="actor events", daemon=True)
        self._thread.start()

    def spawn(self, spec: Spec) -> RayRef:
        """Start an actor."""
        options = {
            "max_restarts": self._options.restarts,
            "max_task_retries": -1,
            "max_pending_calls": self._options.mailbox,
            "scheduling_strategy": "SPREAD",
            **self._ray_options,
        }
        try:
            stored = ray.put(spec)  # Ray itself would drop a large one, and then can't restart the actor
            handle = _host().options(**options).remote(stored, self._options, torch.get_num_threads(), self._hub)
        except ray.exceptions.ObjectStoreFullError as error:
            text = f"the object store has no room for the arguments of actor {spec.name!r}"
            raise ActorError(text, hint="Share a weight or a tensor, or give Ray more memory.") from error
        except (TypeError, AttributeError, q4.Q4Error) as error:
            text = f"actor {spec.name!r} can't be sent to a process: {describe_exception(error)}"
            raise MessageError(text, hint="Classes and arguments must be importable and picklable.") from error
        self._handles.append(handle)
        self._specs.append(stored)
        self._refs[key_of(handle)] = ref = RayRef(spec.name, handle, self._options.mailbox)
        self._hub.watch.remote(spec.name, handle)
        return ref

    def mutable(self, tensor: torch.Tensor, name: str, version: int, **options: Any) -> RayTensor:
        """Return a tensor that the hub holds in Ray's object store."""
        return RayTensor.create(self._hub, tensor, name, version, **options)

    def rings(self, forms: Mapping[str, RingForm]) -> RayRings:
        """Return rings whose rows lie in the object store, and whose stamps are the hub's."""
        return RayRings.create(self._hub, secrets.token_hex(8), forms)

    @staticmethod
    def share(what: q4.Q4Linear | q4.PackedWeight | HasForm, *, canonical: bool) -> SharedWeight:
        """Return a weight in the object store."""
        return share_by(InStore, what, canonical=canonical)

    def close(self) -> None:
        """End what the runtime started."""
        for handle in self._handles:
            with contextlib.suppress(*PLUGIN_FAULTS):
                ray.kill(handle)
        self._thread.join(1.0)
        if self._is_own:
            ray.shutdown()

    def _pass_on(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # it was killed: the end
            while True:
                for event, level, fields in ray.get(self._hub.events.remote()):
                    if event != "lost":
                        self._report(event, level=level, **fields)
                    elif not self._refs[fields.pop("key")].why:  # else it took too long to stop, and was killed
                        self._report("dead", level=level, **fields)


def _host() -> Any:
    """Return the class of Ray's actors, with calls that don't wait for messages."""
    groups = {"status": "control", "memory": "control", "stay": "stay"}
    for name, group in groups.items():
        setattr(_Host, name, ray.method(concurrency_group=group)(getattr(_Host, name)))
    return ray.remote(concurrency_groups=dict.fromkeys(groups.values(), 1))(_Host)


def _unsent(name: str, error: BaseException, *, is_message: bool) -> MessageError:
    """Return the error for an answer that can't be pickled, or a message that can't be unpickled."""
    is_unpickled = isinstance(error, ray.exceptions.RaySystemError)
    what = "a message to" if is_message and is_unpickled else "the answer of"
    why = str(error).partition("\ntraceback: ")[0]
    return MessageError(f"{what} actor {name!r} can't be {'un' * is_unpickled}pickled: {why}")
