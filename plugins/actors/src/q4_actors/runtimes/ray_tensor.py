"""``RayTensor``: the contract of ``MutableTensor`` over a Ray cluster, for ``VERSIONED`` state.

One of Ray's actors keeps the newest versions in the object store, and says whose turn it is to write. Readers
get the store's own memory; a writer changes a copy, which is sent when its block ends well. Whoever has the turn is
asked whether it still lives when somebody else wants it: a process that was lost holds nothing.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import re
import secrets
import time
import types
from typing import TYPE_CHECKING, Any

import ray
import torch

import q4core as q4
from q4_actors.runtimes.errors import ActorError
from q4_actors.tensors.arguments import MutableMode, check_content, check_version, label_of, to_mode, to_seconds
from q4_actors.tensors.placing import decide_for_processes, record
from q4_actors.tensors.snapshot import MutableStats, Snapshot
from q4_actors.tensors.tensor import MutableTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BORN", "Hub", "RayTensor", "key_of", "words_of"]

BORN = secrets.token_hex(8)
"""Which incarnation of its actor this process is."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LOOK_S = 0.2
"""How often the holder of a turn is asked whether it lives, while others wait for it."""
_Holder = tuple[Any, str, str]
"""Ray's handle of a writer, None for the process that spawns; which incarnation; and which of its blocks."""


class _State:
    """One tensor: its newest version, and the turn."""

    def __init__(self, content: Any, version: int) -> None:
        self.content, self.version = ray.put(content), version
        self.holder: _Holder | None = None
        self.moved = asyncio.Condition()


class Hub:
    """One of Ray's actors for each system: the newest version of each tensor, whose turn it is, and all events."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._stopped: set[str] = set()

    async def report(self, event: Any) -> None:
        """Keep an event until it is taken."""
        await self._events.put(event)

    async def events(self) -> list[Any]:
        """Return the events that there are, as soon as there is one."""
        found = [await self._events.get()]
        while not self._events.empty():
            found.append(self._events.get_nowait())
        return found

    async def watch(self, name: str, handle: Any) -> None:
        """Report an actor that Ray has given up, unless it was stopped."""
        try:
            await handle.stay.remote()
        except ray.exceptions.RayError as error:
            key = key_of(handle)
            if key not in self._stopped:
                await self.report(("lost", logging.ERROR, {"actor": name, "key": key, "error": words_of(error)}))

    async def forget(self, actor: str) -> None:
        """Take note that an actor was stopped."""
        self._stopped.add(actor)

    async def add(self, name: str, content: Any, version: int) -> None:
        """Keep a tensor."""
        self._states[name] = _State(content, version)

    async def newest(self, name: str) -> tuple[list[Any], int]:
        """Return the newest content, boxed so that it is not fetched, and its version."""
        state = self._states[name]
        return [state.content], state.version

    async def version(self, name: str) -> int:
        """Return the newest version."""
        return self._states[name].version

    async def wait(self, name: str, version: int, seconds: float | None) -> bool:
        """Wait for a version."""
        state = self._states[name]
        async with state.moved:
            try:
                await asyncio.wait_for(state.moved.wait_for(lambda: state.version >= version), seconds)
            except asyncio.TimeoutError:
                return False
        return True

    async def begin(self, name: str, holder: _Holder, seconds: float | None) -> bool:
        """Take the turn; False if the time ran out."""
        state, deadline = self._states[name], None if seconds is None else time.monotonic() + seconds
        while state.holder is not None and state.holder[1:] != holder[1:]:
            known = state.holder
            if not await _lives(known):
                if state.holder is known:
                    state.holder = None
                continue
            left = _LOOK_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            async with state.moved:
                try:
                    await asyncio.wait_for(state.moved.wait(), min(left, _LOOK_S))
                except asyncio.TimeoutError:
                    continue
        state.holder = holder
        return True

    async def end(self, name: str, holder: _Holder, content: Any) -> int:
        """Give the turn back, with a new content or None; return the version, −1 if the turn was lost."""
        state = self._states[name]
        if state.holder is None or state.holder[1:] != holder[1:]:
            return -1
        if content is not None:
            state.content, state.version = ray.put(content), state.version + 1
        state.holder = None
        async with state.moved:
            state.moved.notify_all()
        return state.version


def key_of(handle: Any) -> str:
    """Return what no other actor has: a name may be taken again."""
    key: str = handle._actor_id.hex()  # noqa: SLF001  # Ray tells it nowhere else
    return key


def words_of(error: BaseException) -> str:
    """Return what Ray says of an actor that it has given up, or whose node is lost; a cause comes last."""
    text = " ".join(_COLOUR.sub("", str(error)).split())
    return f"Ray says: {type(error).__name__}: {text if len(text) < 600 else f'{text[:300]} … {text[-300:]}'}"  # noqa: PLR2004  # as above


async def _lives(holder: _Holder) -> bool:
    """Return whether a writer is the incarnation that took the turn."""
    handle, born, _ = holder
    if handle is None:
        return True
    try:
        return bool((await handle.status.remote())[0] == born)
    except ray.exceptions.RayError:
        return False


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
        self._protocol: Any = types.SimpleNamespace(label=label_of(name), **facts)  # what the base class looks at

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
        """Make one, which a hub keeps."""
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
        """Let go of it in this process; the system that made it ends it for all."""
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
        return torch.from_numpy(array).view(dtype).view(shape), version

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
