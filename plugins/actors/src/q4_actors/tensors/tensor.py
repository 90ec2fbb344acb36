"""``MutableTensor``: one writer at a time, any number of readers, a version that only grows. For threads."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NoReturn

from q4_actors.tensors.arguments import MutableMode, check_content, check_version, label_of, to_mode, to_seconds
from q4_actors.tensors.blocks import ReadView, WriteBlock
from q4_actors.tensors.dual_view import DeviceSync
from q4_actors.tensors.protocol import PROTOCOLS, ThreadProtocol, copied
from q4_actors.tensors.snapshot import STATS, MutableStats, Snapshot
from q4core import ConfigError, InputError, LifecycleError
from q4core.memory import detached_copy, provider_of, was_taken_back

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from q4_actors.tensors.dual_view import DualView
    from q4core import MemoryDecision

__all__ = ["MutableTensor"]


def _apart(source: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
    """Return what can be copied into the content: a copy where both lie in the same memory, in another order."""
    is_other = source.untyped_storage().data_ptr() != content.untyped_storage().data_ptr()
    return source if is_other or source.is_set_to(content) else source.clone()


class MutableTensor:
    """A tensor that one thread at a time updates and any number of threads read, whole versions only.

    What lies in a memory provider's memory stays there: the first copy, every later version and what ``reset`` makes
    are allocated by that provider (and go back to it with their last reader), or the update is refused. Whose memory
    it is was noted by the policy that placed it, or by the provider; for ordinary memory nothing is asked.

    Args:
        tensor: The first content, version 0: strided, on CPU or CUDA, of any dtype and shape. It is detached.
        mode: How an update and its readers are isolated from each other.
        name: For messages.
        copy: False takes ``tensor`` itself instead of a copy: for its sole owner, who doesn't touch it again.
        sides: The CPU side and the CUDA side of ``tensor``'s memory (a provider's ``dual_view``), which ``read`` and
            ``write`` then give by ``device=``; for ``IN_PLACE`` and ``copy=False``.
        version: The number of the first content, where it goes on from a snapshot.

    Raises:
        InputError: ``tensor`` can't be shared.
        ConfigError: ``mode``, ``name`` or ``version`` is not legal.
        UnifiedMemoryError: ``tensor`` lies in a provider's memory, and there is no room for a copy.
        LifecycleError: It lies in memory that its provider took back, or where none can be had at this time.
    """

    placement: MemoryDecision | None = None
    """The decision of a unified-memory policy; set by ``q4_actors.mutable``."""

    def __init__(  # noqa: PLR0913  # the options of one tensor
        self,
        tensor: torch.Tensor,
        *,
        mode: MutableMode = MutableMode.VERSIONED,
        name: str | None = None,
        copy: bool = True,
        sides: DualView | None = None,
        version: int = 0,
    ) -> None:
        label = label_of(name)
        self._mode = to_mode(label, mode)
        if sides is not None and (copy or self._mode is MutableMode.VERSIONED):
            raise ConfigError(
                label, name="sides", rule="None unless IN_PLACE with copy=False, whose address stays", value="given"
            )
        if sides is not None and not (callable(getattr(sides, "turn", None)) and hasattr(sides, "streams")):
            hint = "Give what a memory provider's dual_view returns."
            raise ConfigError(label, name="sides", rule="a dual view", value=type(sides).__name__, hint=hint)
        check_content(label, tensor, copy=copy)
        self._name = name
        if not copy and was_taken_back(tensor):
            text = f"{label} can't begin in memory that was given back to its provider"
            raise LifecycleError(text, hint="Place a new tensor.")
        content = copied(tensor, provider_of(tensor), label) if copy else tensor.detach()
        check_version(label, version, is_first=True)
        is_in_place = self._mode is MutableMode.IN_PLACE
        self._protocol = ThreadProtocol(content, label, is_in_place=is_in_place, version=version)
        if sides is not None or tensor.device.type == "cuda":
            self._protocol.sync = DeviceSync(self._protocol, sides)
        PROTOCOLS.add(self._protocol)

    # -- facts

    @property
    def name(self) -> str | None:
        """The name given, for messages."""
        return self._name

    @property
    def mode(self) -> MutableMode:
        """How an update and its readers are isolated from each other."""
        return self._mode

    @property
    def shape(self) -> torch.Size:
        """The shape, which never changes."""
        return self._protocol.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype, which never changes."""
        return self._protocol.dtype

    @property
    def device(self) -> torch.device:
        """The device, which never changes."""
        return self._protocol.device

    @property
    def version(self) -> int:
        """The number of the newest version, of whichever process; 0 is the first content.

        Raises:
            LifecycleError: It is closed.
        """
        content = self._protocol
        with content.lock:
            content.observe()
            if content.is_closed:
                content.check()
            return content.version

    @property
    def is_poisoned(self) -> bool:
        """Whether the content is unknown until ``reset()``."""
        with self._protocol.lock:
            self._protocol.reclaim()
            return self._protocol.poison is not None

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` was called; between processes, in this one or by the maker."""
        with self._protocol.lock:
            self._protocol.observe()
            return self._protocol.is_closed

    def stats(self) -> MutableStats:
        """Return what has happened so far; also after ``close()``."""
        content = self._protocol
        with content.lock:
            content.reclaim()
            return MutableStats(**{field: getattr(content, field) for field in STATS})

    # -- reading

    def read(self, *, timeout: float | None = None, device: str | None = None) -> ReadView:
        """Return a ``with`` block that gives ``view.tensor`` and ``view.version`` of one whole version, uncopied.

        Args:
            timeout: Seconds to wait for the writer, None for no limit. Only ``IN_PLACE`` ever waits.
            device: ``"cpu"`` or ``"cuda"``: the side to read; None for the tensor as it was given.

        Raises:
            LifecycleError: It is closed (on entering, as all that follow). Or an ``IN_PLACE`` block is left after its
                thread has ended and its turn was given back.
            PoisonedError: The content is unknown; or (on leaving) the version was changed while it was read.
            WriteConflictError: The time ran out; or an ``IN_PLACE`` read inside this thread's own write.
            ConfigError: ``timeout`` or ``device`` is not legal.
        """
        side = None if device is None else self._side_of(device)
        view = self._view(None if timeout is None else to_seconds(self._protocol.label, timeout))
        if side is not None:
            view.side = side
        return view

    def snapshot(self, *, timeout: float | None = None) -> Snapshot:
        """Return an own copy of one whole version; arguments and errors as for ``read``."""
        content = self._protocol
        with self._view(to_seconds(content.label, timeout)) as view:
            copy = detached_copy(view.base)
        with content.lock:
            content.reads -= 1
            content.snapshots += 1
            content.count_copy()
        return Snapshot(copy, view.version)

    def _view(self, timeout: float | None) -> ReadView:
        return ReadView(self._protocol, timeout)

    def _side_of(self, device: str) -> str:
        """Return ``device``, if there is a tensor for it."""
        content = self._protocol
        if content.is_forked:
            content.raise_closed()
        if content.sync is None or not content.sync.has_dual_view:
            rule, hint = "None without a dual view", "Give one: MutableTensor(…, sides=…), over unified memory."
            raise ConfigError(content.label, name="device", rule=rule, value=device, hint=hint)
        if device not in {"cpu", "cuda"}:
            raise ConfigError(content.label, name="device", rule="'cpu', 'cuda' or None", value=device)
        return device

    def wait(self, version: int, timeout: float | None = None) -> bool:
        """Wait until the version is at least ``version``; another process's is seen within a millisecond.

        Args:
            version: The version to wait for.
            timeout: Seconds to wait, None for no limit.

        Returns:
            True once it is there, False if the time ran out.

        Raises:
            LifecycleError: It is closed, or was while waiting.
            PoisonedError: The content is unknown, or became so while waiting.
            WriteConflictError: It would never end: this thread itself writes, or holds an ``IN_PLACE`` read.
            ConfigError: ``version`` or ``timeout`` is not legal.
        """
        content = self._protocol
        check_version(content.label, version)
        return content.wait_for(version, to_seconds(content.label, timeout))

    # -- writing

    def write(self, *, wait: bool = False, timeout: float | None = None, device: str | None = None) -> WriteBlock:
        """Return a ``with`` block that gives the tensor to change in place; on success the version grows by one.

        If the block raises, or its thread ends inside it, a ``VERSIONED`` tensor stays as it was and an ``IN_PLACE``
        one is poisoned.

        Args:
            wait: Whether to wait in turn for another writer, instead of a ``WriteConflictError`` at once.
            timeout: Seconds to wait, for the other writer or (``IN_PLACE``, always) for readers; None for no limit.
            device: ``"cpu"`` or ``"cuda"``: the side to write; None for the tensor as it was given.

        Raises:
            WriteConflictError: Another writer is there or waits; the time ran out; or this thread holds a block of
                this tensor already (on entering, as all that follow).
            LifecycleError: It is closed; also on leaving, and then the update is dropped. Or the block is left after
                its thread has ended and its turn was given back.
            PoisonedError: The content is unknown.
            InputError: On leaving: the block changed the shape, dtype, strides or storage instead of values.
            UnifiedMemoryError: ``VERSIONED`` in a provider's memory: there is no room for a further version.
            ConfigError: ``timeout`` or ``device`` is not legal.
        """
        content = self._protocol
        block = WriteBlock(content, wait, None if timeout is None else to_seconds(content.label, timeout))
        if device is not None:
            block.side = self._side_of(device)
        return block

    def replace(self, tensor: torch.Tensor, *, wait: bool = False, timeout: float | None = None) -> None:
        """Make a copy of ``tensor`` the next version, in one update and with one copy.

        Args:
            tensor: Same shape, dtype and device.
            wait: As for ``write``.
            timeout: As for ``write``.

        Raises:
            InputError: Another shape, dtype or device; nothing has changed.
            WriteConflictError, LifecycleError, PoisonedError, UnifiedMemoryError, ConfigError: As ``write``.
        """
        source = self._fitting("replace", tensor)
        seconds = to_seconds(self._protocol.label, timeout)
        with WriteBlock(self._protocol, wait, seconds, source) as content:
            if self._mode is MutableMode.IN_PLACE:
                content.copy_(_apart(source, content))

    def reset(self, tensor: torch.Tensor | None = None, *, timeout: float | None = None) -> None:
        """Give a poisoned tensor known content again, as the next version.

        Args:
            tensor: Same shape, dtype and device; None for zeros.
            timeout: Seconds to wait for readers and other writers, None for no limit.

        Raises:
            LifecycleError: It is closed, or not poisoned (any more).
            InputError: Another shape, dtype or device; it stays poisoned.
            WriteConflictError, UnifiedMemoryError, ConfigError: As ``write``.
        """
        source = None if tensor is None else self._fitting("reset", tensor)
        seconds = to_seconds(self._protocol.label, timeout)
        with WriteBlock(self._protocol, True, seconds, source, True) as content:  # noqa: FBT003  # as WriteBlock says
            if self._mode is MutableMode.IN_PLACE:
                content.zero_() if source is None else content.copy_(_apart(source, content))

    def _fitting(self, what: str, tensor: torch.Tensor) -> torch.Tensor:
        label = f"{what}() of {self._protocol.label}"
        check_content(label, tensor, copy=True)
        for name in ("shape", "dtype", "device"):
            wanted, got = getattr(self, name), getattr(tensor, name)
            if wanted != got:
                raise InputError(label, name=name, rule=str(wanted), value=got)
        return tensor.detach()

    # -- lifetime

    def close(self) -> None:
        """Drop the content; later use is a ``LifecycleError``. Closing twice is allowed.

        Waiting threads raise that error; readers inside their block keep their version; an update under way is dropped.
        Between processes this one's handle is closed; the maker's ``close()`` ends it for all.
        """
        self._protocol.close()

    def __enter__(self) -> Self:
        """Return itself, to be closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse ``copy``, ``deepcopy`` and ``pickle``: a copy would be another tensor that looks like this one.

        Raises:
            LifecycleError: Always.
        """
        hint = "Between processes take a SharedMutableTensor; else make another one from snapshot().tensor."
        raise LifecycleError(f"{self._protocol.label} is shared, and can't be copied or pickled", hint=hint)

    def __repr__(self) -> str:
        """Name, mode, form and state."""
        content = self._protocol
        with content.lock, contextlib.suppress(LifecycleError):
            content.observe()
        is_known = content.poison is None
        state = "closed" if content.is_closed else f"version {content.version}" if is_known else "poisoned"
        name = "" if self._name is None else f"{self._name!r}, "
        form = f"{content.dtype} {list(content.shape)} on {content.device}"
        return f"{type(self).__name__}({name}{self._mode.value}, {form}, {state})"
