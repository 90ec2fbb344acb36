"""``SharedMutableTensor``: the contract of ``MutableTensor`` between processes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NoReturn

from q4_actors.arguments import MutableMode, check_content, label_of, to_mode, to_seconds
from q4_actors.blocks import ReadView
from q4_actors.native import find_cells
from q4_actors.native_content import NativeContent
from q4_actors.native_in_place import NativeInPlace
from q4_actors.segment import ATOMICS, LOCKS, MAX_SLOTS, Form, Segment
from q4_actors.shared_content import SharedContent
from q4_actors.tensor import MutableTensor
from q4core.errors import ConfigError, InputError, LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from typing_extensions import Self

__all__ = ["SharedMutableTensor"]

LEAST_SLOTS, USUAL_SLOTS = 3, 4


class SharedMutableTensor(MutableTensor):
    """A tensor that one thread of one process at a time updates, and any number of processes read, on one machine.

    Give it to a ``Process`` (spawned or forked) as an argument, or send its ``segment`` and ``attach`` there. Keep the
    maker's tensor while others may attach: its end takes the name away. A process that dies holds nothing any more.

    Args:
        tensor: The first content, version 0: strided, on the CPU. It is copied.
        mode: How an update and its readers are kept apart.
        name: For messages.
        slots: ``VERSIONED``: how many versions there is room for, 3 … 64; None means 4. Of these, one is the newest and
            one the writer's; the others are for readers that still hold older versions. ``IN_PLACE``: None.
        native: Whether processes agree by the atomics of the plugin ``q4-shared-native``, which then all of them need,
            or by the core's own, slower locks. None: by atomics where this process has them.

    Raises:
        InputError: ``tensor`` is none that can be shared so, or there is too little shared memory.
        ConfigError: ``mode``, ``name``, ``slots`` or ``native`` is not legal, or the platform is not Linux.
        LifecycleError: The system refuses a file or a lock.
    """

    _content: SharedContent
    _reader: Callable[..., ReadView] | None = None

    def __init__(
        self,
        tensor: torch.Tensor,
        *,
        mode: MutableMode = MutableMode.VERSIONED,
        name: str | None = None,
        slots: int | None = None,
        native: bool | None = None,
    ) -> None:
        label = label_of(name)
        mode = to_mode(label, mode)
        check_content(label, tensor, copy=True)
        if tensor.device.type != "cpu":
            raise InputError(label, name="tensor", rule="on the CPU", value=str(tensor.device))
        count = _count_of(label, slots, mode)
        form = Form(mode, tensor.dtype, tuple(tensor.shape), count, _layout(label, native=native))
        segment = Segment.create(label, form, tensor.detach())
        self._adopt(segment, label, name)

    def _adopt(self, segment: Segment, label: str, name: str | None) -> None:
        self._mode = segment.form.mode
        self._name = name
        if segment.form.layout == LOCKS:
            self._content = SharedContent(segment, label)
            return
        cells = find_cells()
        if cells is None:
            segment.close()
            hint = "Install q4-shared-native here, or make the tensor with native=False."
            rule, got = "that of the core's own locks", "that of atomics, which only q4-shared-native has"
            raise LifecycleError(f"segment of {label}", name="layout", rule=rule, value=got, hint=hint)
        kind = NativeContent if self._mode is MutableMode.VERSIONED else NativeInPlace
        self._content = content = kind(segment, label, cells)
        self._reader = content.cells.read

    def read(self, *, timeout: float | None = None, device: str | None = None) -> ReadView:
        """Return a ``with`` block, as ``MutableTensor.read`` does, with the same arguments and errors."""
        if device is not None:
            return super().read(timeout=timeout, device=device)
        content = self._content
        if timeout is not None:
            timeout = to_seconds(content.label, timeout)
        return ReadView(content, timeout) if self._reader is None else self._reader(content, timeout)

    @classmethod
    def attach(
        cls,
        segment: str,
        *,
        name: str | None = None,
        mode: MutableMode | None = None,
        dtype: torch.dtype | None = None,
        shape: Iterable[int] | None = None,
    ) -> Self:
        """Return this process's own handle of a tensor that another process shares.

        Args:
            segment: The maker's ``segment``.
            name: For messages, which else name the segment.
            mode: What it must be; None takes what is there, also below.
            dtype: What it must be.
            shape: What it must be.

        Raises:
            LifecycleError: It has vanished, or its size or header is wrong.
            InputError: It has another mode, dtype or shape.
            ConfigError: ``segment``, ``mode``, ``shape`` or ``name`` is not legal, or the platform is not Linux.
        """
        label = label_of(segment if name is None and isinstance(segment, str) else name)
        try:
            lengths = None if shape is None else tuple(shape)
        except TypeError:
            raise ConfigError(label, name="shape", rule="lengths, one for each dimension", value=shape) from None
        wanted = {
            "mode": None if mode is None else to_mode(label, mode),
            "dtype": dtype,
            "shape": lengths,
        }
        joined = Segment.attach(label, segment)
        for what, rule in wanted.items():
            got = getattr(joined.form, what)
            if rule is not None and rule != got:
                joined.close()
                raise InputError(f"segment of {label}", name=what, rule=str(rule), value=str(got))
        tensor = cls.__new__(cls)
        tensor._adopt(joined, label, name)  # noqa: SLF001  # its own class's
        return tensor

    @property
    def segment(self) -> str:
        """What another process gives to ``attach``."""
        return self._content.segment.name

    @property
    def is_native(self) -> bool:
        """Whether processes agree by atomics, those of ``q4-shared-native``, or by the core's own locks."""
        return self._content.segment.form.layout == ATOMICS

    @property
    def version(self) -> int:
        """The number of the newest version, of whichever process; 0 is the first content.

        Raises:
            LifecycleError: It is closed.
        """
        content = self._content
        with content.lock:
            content.check_size()
            content.refresh()
            if content.is_closed:
                content.check()
            return content.version

    @property
    def is_closed(self) -> bool:
        """Whether ``close()`` was called in this process, or by the maker."""
        content = self._content
        with content.lock:
            content.check_size()
            content.refresh()
            return content.is_closed

    def wait(self, version: int, timeout: float | None = None) -> bool:
        """Wait until the version is at least ``version``; arguments and errors as for ``MutableTensor.wait``.

        What another process writes is seen within a millisecond.
        """
        content = self._content
        if not isinstance(version, int) or isinstance(version, bool):
            raise ConfigError(content.label, name="version", rule="an integer", value=version)
        return content.wait_for(version, None if timeout is None else to_seconds(content.label, timeout))

    def close(self) -> None:
        """Let go of it here; the maker's ``close()`` ends it for all processes. Closing twice is allowed.

        Whoever waits is told; readers inside their block keep their version; an update under way is dropped.
        """
        self._content.close()

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., MutableTensor], tuple[object, ...]]:  # type: ignore[override]  # it can be pickled
        """Pickle as a handle: another process that unpickles it attaches to the same tensor.

        Raises:
            LifecycleError: It is closed.
        """
        if self.is_closed:
            self._content.raise_closed()
        form = self._content.segment.form
        return _attached, (type(self), self.segment, self._name, form)

    def __repr__(self) -> str:
        """Name, mode, form and state."""
        with self._content.lock, contextlib.suppress(LifecycleError):
            self._content.check_size()
            self._content.refresh()
        how = "by atomics" if self.is_native else "by locks"
        return super().__repr__().replace("MutableTensor", "SharedMutableTensor", 1)[:-1] + f", {how})"

    def __copy__(self) -> NoReturn:
        """Refuse.

        Raises:
            LifecycleError: Always.
        """
        super().__reduce_ex__(2)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Refuse.

        Raises:
            LifecycleError: Always.
        """
        super().__reduce_ex__(2)


def _count_of(label: str, slots: int | None, mode: MutableMode) -> int:
    """Return for how many versions there is to be room."""
    if mode is MutableMode.IN_PLACE:
        if slots is not None:
            hint = "Leave slots out, or take VERSIONED."
            raise ConfigError(label, name="slots", rule="None where updates are in place", value=slots, hint=hint)
        return 1
    count = USUAL_SLOTS if slots is None else slots
    if not isinstance(count, int) or isinstance(count, bool) or not LEAST_SLOTS <= count <= MAX_SLOTS:
        raise ConfigError(label, name="slots", rule=f"{LEAST_SLOTS} … {MAX_SLOTS}", value=slots)
    return count


def _layout(label: str, *, native: bool | None) -> int:
    """Return by which protocol processes are to agree."""
    if native is not None and not isinstance(native, bool):
        raise ConfigError(label, name="native", rule="True, False or None", value=native)
    found = native is not False and find_cells() is not None
    if native and not found:
        hint = "Install q4-shared-native, and look at `q4 doctor`; or leave native=None."
        raise ConfigError(label, name="native", rule="False or None without its plugin", value=native, hint=hint)
    return ATOMICS if found else LOCKS


def _attached(
    cls: type[SharedMutableTensor],
    segment: str,
    name: str | None,
    form: Form,
) -> SharedMutableTensor:
    return cls.attach(segment, name=name, mode=form.mode, dtype=form.dtype, shape=form.shape)
