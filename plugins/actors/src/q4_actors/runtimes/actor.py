"""``Actor``, which users subclass, its reference ``ActorRef``, and its life cycle with restarts."""

from __future__ import annotations

import abc
import contextlib
import logging
import pickle
import time
from typing import TYPE_CHECKING, Any

import attrs

from q4_actors.runtimes.errors import ActorDeadError, AskTimeoutError, MailboxFullError, MessageError
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSequence

    from q4_actors.runtimes.memory_report import ActorMemory
    from q4core import SessionConfig

    Report = Callable[..., None]
    """``report(event, level=…, **fields)``: sends ``q4.actor.<event>``."""

__all__ = [
    "MAX_RESTARTS",
    "Actor",
    "ActorRef",
    "Life",
    "RestartLimit",
    "Spec",
    "dead_error",
    "full_error",
    "late_error",
    "sendable",
]

MAX_RESTARTS = 64


class Actor:
    """An object that handles messages, one at a time; subclasses implement ``on_receive``.

    Its arguments are those of ``spawn``. It is created in its own thread or process, and again, with the same
    arguments, after each failure: state that must survive a failure belongs in a shared tensor.

    Attributes:
        name: The name given to ``spawn``; set before ``on_start``.
    """

    name: str

    def on_start(self) -> None:
        """Begin, before the first message and after each restart."""

    def on_receive(self, message: Any) -> Any:
        """Handle a message.

        Args:
            message: The message.

        Returns:
            The answer to an ``ask``; dropped after a ``tell``. An exception is raised in the caller of ``ask``. After a
            ``tell`` it is a failure: the actor is restarted.
        """
        raise NotImplementedError

    def on_stop(self) -> None:
        """End, after the last message; not called after a failure."""


class ActorRef(abc.ABC):
    """A reference to an actor. It may be an argument of another actor, and be sent in messages.

    Attributes:
        name: The actor's.
    """

    name: str

    @abc.abstractmethod
    def tell(self, message: Any, *, timeout: float | None = None) -> None:
        """Send a message without waiting for an answer.

        Args:
            message: Not to be changed afterwards. Processes and Ray get a pickled copy.
            timeout: Seconds to wait for room in the mailbox, None for no limit, 0 for not at all.

        Raises:
            MailboxFullError: There was no room in time.
            ActorDeadError: The actor handles no messages any more.
            MessageError: It can't be pickled, or there is no room for it.
        """

    @abc.abstractmethod
    def ask(self, message: Any, *, timeout: float | None = None) -> Any:
        """Send a message and return what the actor answers.

        Args:
            message: As for ``tell``.
            timeout: Seconds to wait for room and for the answer, None for no limit.

        Raises:
            AskTimeoutError: There was no answer in time.
            MailboxFullError, ActorDeadError, MessageError: As ``tell``; ActorDeadError also if it dies meanwhile.
            ActorError: The actor asks itself.
            Exception: What the actor raised. It goes on with its next message.
        """

    @abc.abstractmethod
    def stop(self, *, timeout: float | None = None) -> None:
        """Let the actor handle the messages sent so far, and end; a dead actor is left as it is.

        Args:
            timeout: Seconds to wait for its end. A process, or an actor of Ray's, is killed then.

        Raises:
            ActorError: It is a thread, and still handles a message after that time.
        """

    @abc.abstractmethod
    def begin_stop(self) -> None:
        """Take no further messages, and end after those that were sent; don't wait for it."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End an actor's process as a crash would, at once; supervision restarts it. To test what a crash does.

        Raises:
            ActorError: It is a thread, or this process did not spawn it.
        """

    @abc.abstractmethod
    def memory(self) -> ActorMemory:
        """Return the memory of the process in which it runs.

        Raises:
            ActorDeadError: It is dead.
            ActorError: This process did not spawn it, or the system has no such figures (outside Linux).
        """

    @abc.abstractmethod
    def is_alive(self) -> bool:
        """Return whether it handles messages, or will after a restart."""

    def __repr__(self) -> str:
        """Name and state."""
        return f"ActorRef({self.name!r}, {'alive' if self.is_alive() else 'dead'})"


@attrs.frozen
class Spec:
    """The specification from which an actor is created and restarted.

    Args:
        kind: The class.
        args: Its arguments.
        named: Its arguments by name.
        name: The actor's.
        config: The spawner's configuration, which the actor inherits.
    """

    kind: type[Actor]
    args: tuple[Any, ...]
    named: dict[str, Any]
    name: str
    config: SessionConfig


@attrs.frozen
class Options:
    """Options of every actor of a system: mailbox size, and restarts in a window of seconds."""

    mailbox: int
    restarts: int
    window: float


class RestartLimit:
    """A limit on restarts in any window of time.

    Args:
        window: Seconds.
        times: When the last ones were, as many as are allowed; minus infinity for none.
    """

    def __init__(self, window: float, times: MutableSequence[float]) -> None:
        self._window, self._times = window, times

    def allows(self) -> bool:
        """Count a restart, or return False where there were too many."""
        oldest = min(range(len(self._times)), key=self._times.__getitem__, default=None)
        now = time.monotonic()
        if oldest is None or now - self._times[oldest] < self._window:
            return False
        self._times[oldest] = now
        return True


def dead_error(name: str, why: str) -> ActorDeadError:
    """Return the error for a call on a dead actor."""
    return ActorDeadError(f"actor {name!r} is dead: {why}", hint="Spawn another one.", actor=name, why=why)


def full_error(name: str, limit: int) -> MailboxFullError:
    """Return the error for a message to a full mailbox."""
    hint = "Wait longer (timeout=), or send fewer messages at a time."
    text = f"the mailbox of actor {name!r} is full: {limit} messages wait"
    return MailboxFullError(text, hint=hint, actor=name, limit=limit)


def late_error(name: str, timeout: float | None) -> AskTimeoutError:
    """Return the error for an answer that did not arrive in time."""
    return AskTimeoutError(f"actor {name!r} did not answer within {timeout} s", actor=name)


def sendable(label: str, error: BaseException, dumps: Callable[[BaseException], bytes]) -> BaseException:
    """Return an error that another process can unpickle: some can't be restored from what ``dumps`` writes."""
    with contextlib.suppress(*PLUGIN_FAULTS):
        pickle.loads(dumps(error))  # noqa: S301  # its own
        return error
    return MessageError(f"{label} is an error that can't be pickled: {describe_exception(error)}")


class Life:
    """A running actor: the instance, replaced after each failure as long as the limit allows."""

    def __init__(self, spec: Spec, limit: RestartLimit, report: Report) -> None:
        self._spec, self._limit, self._report = spec, limit, report
        self._actor = Actor()

    def start(self) -> None:
        """Make the instance.

        Raises:
            ActorDeadError: It failed more often than the limit allows.
        """
        spec = self._spec
        while True:
            try:
                self._actor = spec.kind(*spec.args, **spec.named)
                self._actor.name = spec.name
                self._actor.on_start()
            except PLUGIN_FAULTS as error:
                self._fail(error)
            else:
                self._report("started", actor=spec.name)
                return

    def handle(self, message: Any, *, is_asked: bool, load: Callable[[Any], Any] | None = None) -> Any:
        """Handle a message, which ``load`` unpacks if it is given, and return or raise what answers it.

        Raises:
            ActorDeadError: The message was no ``ask``, and the actor failed more often than the limit allows.
        """
        try:
            return self._actor.on_receive(message if load is None else load(message))
        except PLUGIN_FAULTS as error:
            if is_asked:
                raise
            self._fail(error)
        self.start()
        return None

    def stop(self) -> None:
        """Call ``on_stop``, and report the end."""
        try:
            self._actor.on_stop()
        except PLUGIN_FAULTS as error:
            self._report("failed", level=logging.WARNING, actor=self._spec.name, error=describe_exception(error))
        self._report("stopped", actor=self._spec.name)

    def _fail(self, error: BaseException) -> None:
        name, text = self._spec.name, describe_exception(error)
        self._report("failed", level=logging.WARNING, actor=name, error=text)
        if not self._limit.allows():
            self._report("dead", level=logging.ERROR, actor=name, error=text)
            raise dead_error(name, f"too many failures, the last by {text}") from error
        self._report("restarted", level=logging.WARNING, actor=name)
