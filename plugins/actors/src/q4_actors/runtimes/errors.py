"""Errors between actors; each names the actor."""

from __future__ import annotations

from q4core import Q4Error

__all__ = ["ActorDeadError", "ActorError", "AskTimeoutError", "MailboxFullError", "MessageError"]


class ActorError(Q4Error, RuntimeError, code="actor"):
    """An actor or its system can't do what was asked."""


class ActorDeadError(ActorError, code="actor_dead"):
    """The actor was stopped, or failed more often than the restart limit allows; its node may be lost (Ray)."""


class AskTimeoutError(ActorError, code="ask_timeout"):
    """No answer came in time; the actor may still handle the message."""


class MailboxFullError(ActorError, code="mailbox_full"):
    """The actor's mailbox had no room in time; the message was not sent."""


class MessageError(ActorError, ValueError, code="message"):
    """A message or an answer can't be sent to another process: it can't be pickled, or there is no room for it."""
