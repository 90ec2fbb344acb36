"""``SharedMutableTensor``: the contract of ``MutableTensor`` between processes."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, NoReturn

from q4_actors.tensors.arguments import MutableMode, check_content, check_version, label_of, to_mode
from q4_actors.tensors.form import MAX_SLOTS, Form
from q4_actors.tensors.segment import Segment
from q4_actors.tensors.shm_protocol import ShmProtocol
from q4_actors.tensors.tensor import MutableTensor
from q4_actors.tensors.tickets import HERE
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType

    import torch
    from typing_extensions import Self

    from q4_actors.tensors.blocks import ReadView

__all__ = ["SharedMutableTensor"]

LEAST_SLOTS, USUAL_SLOTS = 3, 4


class SharedMutableTensor(MutableTensor):
    """A tensor that one thread of one process at a time updates, and any number of processes read, on one machine.

    Give it to a ``Process`` (spawned or forked) as an argument, or send its ``segment`` and ``attach`` there. Keep the
    maker's tensor while others may attach: its end takes the name away. A process that dies holds nothing any more.

    Args:
        tensor: The first content, version 0: strided, on the CPU. It is copied.
        mode: How an update and its readers are isolated from each other.
        name: For messages.
        slots: ``VERSIONED``: how many versions there is room for, 3 … 64; None means 4. Of these, one is the newest and
            one the writer's; the others are for readers that still hold older versions. ``IN_PLACE``: None.
        version: The number of the first content, where it goes on from a snapshot.

    Raises:
        InputError: ``tensor`` can't be shared, or there is too little shared memory.
        ConfigError: ``mode``, ``name``, ``slots`` or ``version`` is not legal, or the extension module is missing:
            outside Linux, or where q4-actors was installed without a C++ compiler.
        LifecycleError: The system refuses a file or a lock.
    """

    _protocol: ShmProtocol

    def __init__(
        self,
        tensor: torch.Tensor,
        *,
        mode: MutableMode = MutableMode.VERSIONED,
        name: str | None = None,
        slots: int | None = None,
        version: int = 0,
    ) -> None:
        label = label_of(name)
        mode = to_mode(label, mode)
        check_content(label, tensor, copy=True)
        if tensor.device.type != "cpu":
            raise InputError(label, name="tensor", rule="on the CPU", value=str(tensor.device))
        _extension(label)
        form = Form(mode, tensor.dtype, tuple(tensor.shape), _count_of(label, slots, mode))
        check_version(label, version, is_first=True)
        self._adopt(Segment.create(label, form, tensor.detach(), version), label, name)

    def _adopt(self, segment: Segment, label: str, name: str | None) -> None:
        self._mode, self._name = segment.form.mode, name
        bytes_each = segment.form.content_bytes
        cells = _extension(label).Core(segment.memory, segment.slots, HERE, bytes_each, segment.locks.file)
        self._protocol = ShmProtocol(segment, label, cells)

    def _view(self, timeout: float | None) -> ReadView:
        return self._protocol.cells.read(self._protocol, timeout)

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
            ConfigError: ``segment``, ``mode``, ``shape`` or ``name`` is not legal, or the extension module is missing.
        """
        label = label_of(segment if name is None and isinstance(segment, str) else name)
        try:
            lengths = None if shape is None else tuple(shape)
        except TypeError:
            raise ConfigError(label, name="shape", rule="lengths, one for each dimension", value=shape) from None
        wanted = {"mode": None if mode is None else to_mode(label, mode), "dtype": dtype, "shape": lengths}
        _extension(label)
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
        return self._protocol.segment.name

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., MutableTensor], tuple[object, ...]]:  # type: ignore[override]  # it can be pickled
        """Pickle as a handle: another process that unpickles it attaches to the same tensor.

        Raises:
            LifecycleError: It is closed.
        """
        if self.is_closed:
            self._protocol.raise_closed()
        form = self._protocol.segment.form
        return _attached, (type(self), self.segment, self._name, form)

    def __copy__(self, *_: object) -> NoReturn:
        """Refuse ``copy`` and ``deepcopy``.

        Raises:
            LifecycleError: Always.
        """
        super().__reduce_ex__(2)

    __deepcopy__ = __copy__


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


def _extension(label: str) -> ModuleType:
    """Return the extension module, by which processes agree."""
    try:
        return importlib.import_module("q4_actors._native")
    except ImportError as error:
        text = f"{label} can't be shared between processes: the extension module of q4-actors is missing"
        hint = "Install a C++ compiler, then: pip install --force-reinstall --no-deps q4-actors."
        if sys.platform != "linux":
            hint = "It is for Linux. Use a MutableTensor, which threads share."
        raise ConfigError(text, hint=hint) from error


def _attached(cls: type[SharedMutableTensor], segment: str, name: str | None, form: Form) -> SharedMutableTensor:
    return cls.attach(segment, name=name, mode=form.mode, dtype=form.dtype, shape=form.shape)
