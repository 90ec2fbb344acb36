"""Actors, and tensors that threads or processes share: whole versions only (``docs/actors.md``, ``docs/memory.md``)."""

from q4_actors.runtimes.actor import Actor, ActorRef
from q4_actors.runtimes.errors import ActorDeadError, ActorError, AskTimeoutError, MailboxFullError, MessageError
from q4_actors.runtimes.memory_report import ActorMemory
from q4_actors.runtimes.system import ActorSystem
from q4_actors.runtimes.weights import HasForm, SharedWeight, share
from q4_actors.tensors.arguments import MutableMode
from q4_actors.tensors.blocks import ReadView, WriteBlock
from q4_actors.tensors.placing import mutable
from q4_actors.tensors.rings import RingForm, Rings
from q4_actors.tensors.shared import SharedMutableTensor
from q4_actors.tensors.snapshot import MutableStats, Snapshot
from q4_actors.tensors.tensor import MutableTensor

__all__ = [
    "Actor",
    "ActorDeadError",
    "ActorError",
    "ActorMemory",
    "ActorRef",
    "ActorSystem",
    "AskTimeoutError",
    "HasForm",
    "MailboxFullError",
    "MessageError",
    "MutableMode",
    "MutableStats",
    "MutableTensor",
    "ReadView",
    "RingForm",
    "Rings",
    "SharedMutableTensor",
    "SharedWeight",
    "Snapshot",
    "WriteBlock",
    "mutable",
    "share",
]
