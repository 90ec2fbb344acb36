"""Actors, and tensors that threads or processes share: whole versions only (``docs/actors.md``, ``docs/memory.md``)."""

from q4_actors.actor import Actor, ActorRef
from q4_actors.arguments import MutableMode
from q4_actors.blocks import ReadView, WriteBlock
from q4_actors.errors import ActorDeadError, ActorError, AskTimeoutError, MailboxFullError, MessageError
from q4_actors.memory_report import ActorMemory
from q4_actors.placing import mutable
from q4_actors.shared import SharedMutableTensor
from q4_actors.sharing import SharedWeight, share
from q4_actors.snapshot import MutableStats, Snapshot
from q4_actors.system import ActorSystem
from q4_actors.tensor import MutableTensor

__all__ = [
    "Actor",
    "ActorDeadError",
    "ActorError",
    "ActorMemory",
    "ActorRef",
    "ActorSystem",
    "AskTimeoutError",
    "MailboxFullError",
    "MessageError",
    "MutableMode",
    "MutableStats",
    "MutableTensor",
    "ReadView",
    "SharedMutableTensor",
    "SharedWeight",
    "Snapshot",
    "WriteBlock",
    "mutable",
    "share",
]
