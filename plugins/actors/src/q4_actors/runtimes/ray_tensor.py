"""``RayTensor``: the contract of ``MutableTensor`` over a Ray cluster, for ``VERSIONED`` state.

The hub keeps the newest versions in the object store, and says whose turn it is to write. Readers get the store's own
memory; a writer changes a copy, which is sent when its block ends well.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import types
from typing import TYPE_CHECKING, Any

import ray
import torch

import q4core as q4
from q4_actors.runtimes.errors import ActorError
from q4_actors.runtimes.ray_hub import BORN
from q4_actors.tensors.arguments import MutableMode, check_content, check_version, label_of, to_mode, to_seconds
from q4_actors.tensors.placing import decide_for_processes, record
from q4_actors.tensors.snapshot import MutableStats, Snapshot
from q4_actors.tensors.tensor import MutableTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RayTensor"]


def _sent(tensor: torch.Tensor) -> Any:
    """Return a tensor as NumPy's bytes, which Ray stores as they are."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class RayTensor(MutableTensor):
    """A mutable tensor that the actors of a Ray cluster share. It is made by ``ActorSystem.mutable``.

    It is ``VERSIONED``. A read is two calls, and no copy on a node that has the version; an update copies three times.
    A system's tensors are lost with the node of their hub: resume from a checkpoint.
    """

    def __init__(self, hub: Any, name: str, form: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self._hub, self._name, self._form, self._is_closed = hub, name, form, False
        self._mode = MutableMode.VERSIONED
        self.counts: collections.Counter[str] = collections.Counter()
        facts = {"dtype": form[0], "shape": torch.Size(form[1]), "device": torch.device("cpu")}
        self._protocol: Any = types.SimpleNamespace(label=label_of(name), **facts)  # what the base class reads

    @classmethod
    def create(  # noqa: PLR0913  # the options of one call
        cls,
        hub: Any,
        tensor: torch.Tensor,
        name: str,
        version: int,
        *,
        mode: MutableMode | str = MutableMode.VERSIONED,
        unified_memory: q4.UnifiedMemoryPolicy | str | None = None,
        device: torch.device | str | None = None,
    ) -> RayTensor:
        """Make one, which a hub stores."""
        label = label_of(name)
        if to_mode(label, mode) is not MutableMode.VERSIONED:
            raise q4.ConfigError(label, name="mode", rule="'versioned' on Ray", value=mode)
        decision = decide_for_processes(name, unified_memory, device)
        check_content(label, tensor, copy=True)
        if tensor.device.type != "cpu":
            raise q4.InputError(label, name="tensor", rule="on the CPU", value=str(tensor.device))
        made = cls(hub, name, (tensor.dtype, tuple(tensor.shape)))
        made.call("add", _sent(tensor), version)
        record(made, decision)
        return made

    @property
    def version(self) -> int:
        """The number of the newest version.

        Raises:
            LifecycleError: It is closed, or the hub's node is lost.
        """
        return int(self.call("version"))

    @property
    def is_poisoned(self) -> bool:
        """False: a writer that fails changes nothing."""
        return False

    @property
    def is_closed(self) -> bool:
        """Whether it was closed in this process."""
        return self._is_closed

    def stats(self) -> MutableStats:
        """Return what this handle's blocks have done so far; an update copies three times."""
        names = ("reads", "writes", "snapshots", "failures", "conflicts")
        copies = 3 * self.counts["writes"] + self.counts["snapshots"]
        size = self.shape.numel() * self.dtype.itemsize
        return MutableStats(**{name: self.counts[name] for name in names}, copies=copies, bytes_copied=copies * size)

    def read(self, *, timeout: float | None = None, device: str | None = None) -> Any:
        """Return a block that gives ``tensor`` and ``version``; see ``MutableTensor.read``. It never waits."""
        self._check_options(timeout, device)
        return _reading(self)

    def snapshot(self, *, timeout: float | None = None) -> Snapshot:
        """Return an own copy of one whole version."""
        self._check_options(timeout, None)
        tensor, version = self.content()
        self.counts["snapshots"] += 1
        return Snapshot(tensor.clone(), version)

    def wait(self, version: int, timeout: float | None = None) -> bool:
        """Wait until the version is at least ``version``; see ``MutableTensor.wait``."""
        check_version(self._protocol.label, version)
        return bool(self.call("wait", version, to_seconds(self._protocol.label, timeout)))

    def write(self, *, wait: bool = False, timeout: float | None = None, device: str | None = None) -> Any:
        """Return a block that gives the tensor to change; see ``MutableTensor.write``."""
        self._check_options(timeout, device)
        return _writing(self, timeout if wait else 0.0)

    def replace(self, tensor: torch.Tensor, *, wait: bool = False, timeout: float | None = None) -> None:
        """Make a copy of ``tensor`` the next version; see ``MutableTensor.replace``."""
        source = self._fitting("replace", tensor)
        with self.write(wait=wait, timeout=timeout) as content:
            content.copy_(source)

    def reset(self, tensor: torch.Tensor | None = None, *, timeout: float | None = None) -> None:  # noqa: ARG002  # the contract's
        """Raise a ``LifecycleError``: it is never poisoned."""
        raise q4.LifecycleError(f"{self._protocol.label} is not poisoned")

    def close(self) -> None:
        """Close it in this process; the system that made it ends it for all."""
        self._is_closed = True

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the hub.

        Raises:
            ActorError: The object store is full.
            LifecycleError: It is closed, or the hub's node is lost.
        """
        if self._is_closed:
            raise q4.LifecycleError(f"{self._protocol.label} is closed")
        try:
            return ray.get(getattr(self._hub, method).remote(self._name, *arguments))
        except ray.exceptions.RayActorError as error:
            text = f"{self._protocol.label} is lost: its system was stopped, or its node failed"
            raise q4.LifecycleError(text, hint="Resume from a checkpoint.") from error
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            text = f"the object store has no room for a version of {self._protocol.label}"
            raise ActorError(text, hint="Give Ray more memory.") from error

    def content(self) -> tuple[torch.Tensor, int]:
        """Return the newest version, in the store's memory, and its number."""
        (boxed,), version = self.call("newest")
        dtype, shape = self._form
        array = ray.get(boxed)
        if not array.size:
            return torch.empty(shape, dtype=dtype, device="cpu"), version
        return torch.frombuffer(array, dtype=dtype).view(shape), version

    def _check_options(self, timeout: float | None, device: str | None) -> None:
        to_seconds(self._protocol.label, timeout)
        if device not in {None, "cpu"}:
            raise q4.ConfigError(self._protocol.label, name="device", rule="'cpu' on Ray", value=device)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Send as a handle of the same tensor."""
        return type(self), (self._hub, self._name, self._form)

    def __repr__(self) -> str:
        """Name, form and state."""
        dtype, shape = self._form
        return f"RayTensor({self._name!r}, {dtype} {list(shape)}{', closed' if self._is_closed else ''})"


@contextlib.contextmanager
def _reading(owner: RayTensor) -> Iterator[types.SimpleNamespace]:
    """Give the newest version, in the store's memory."""
    tensor, version = owner.content()
    owner.counts["reads"] += 1
    view = types.SimpleNamespace(tensor=tensor, version=version)
    del tensor
    try:
        yield view
    finally:
        del view.tensor


@contextlib.contextmanager
def _writing(owner: RayTensor, seconds: float | None) -> Iterator[torch.Tensor]:
    """Take the turn, give a copy of the newest version, and publish it, unless the block failed."""
    context, label = ray.get_runtime_context(), label_of(owner.name)
    is_actor = context.get_actor_id() is not None
    holder = (context.current_actor if is_actor else None, BORN if is_actor else "", secrets.token_hex(8))
    if not owner.call("begin", holder, seconds):
        owner.counts["conflicts"] += 1
        text = f"{label} is being written by another actor"
        raise q4.WriteConflictError(text, hint="Use write(wait=True) or retry.")
    try:
        work = owner.content()[0].clone()
        yield work.view_as(work)
        version = owner.call("end", holder, _sent(work))
    except BaseException:  # also where the store is full
        owner.counts["failures"] += 1
        owner.call("end", holder, None)
        raise
    if version < 0:
        owner.counts["failures"] += 1
        raise q4.LifecycleError(f"an update of {label} lost its turn, and is dropped")
    owner.counts["writes"] += 1
