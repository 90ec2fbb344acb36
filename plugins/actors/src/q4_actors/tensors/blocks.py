"""The ``with`` blocks in which a ``MutableTensor`` is read and written."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from q4_actors.tensors.rwlock import HERE, Ticket
from q4core import LifecycleError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from q4_actors.tensors.protocol import Content

__all__ = ["ReadView", "WriteBlock", "refuse_again", "refuse_outside"]


class ReadView(Ticket):
    """What ``read()`` gives: ``tensor`` and ``version`` of one version, while its ``with`` block lasts."""

    __slots__ = ("_alias", "_content", "base", "begun_on", "deadline", "mark", "number", "side", "timeout", "turn")

    base: torch.Tensor
    begun_on: int | None
    deadline: float | None
    mark: tuple[int, int]
    number: int
    """``version``, once it is known."""

    def __init__(self, content: Content, timeout: float | None) -> None:
        self.is_admitted = False
        self._content = content
        self._alias: torch.Tensor | None = None
        self.timeout = timeout
        self.side: str | None = None
        self.turn: AbstractContextManager[torch.Tensor] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The content, by an alias without graph. To be read; see ``docs/memory.md`` for how a change is found out.

        Raises:
            LifecycleError: The block has ended, or was never entered.
        """
        if self._alias is None:
            refuse_outside(self._content.label, "tensor")
        return self._alias

    @property
    def version(self) -> int:
        """The version that is read, or was.

        Raises:
            LifecycleError: The block was never entered.
        """
        try:
            return self.number
        except AttributeError:  # not yet
            refuse_outside(self._content.label, "version")

    def __enter__(self) -> Self:
        """Begin to read."""
        if hasattr(self, "thread"):
            refuse_again(self._content.label)
        self.thread = HERE.thread
        try:
            self._alias = self._content.begin_read(self)
        except BaseException:
            self._content.drop_read(self)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the read, and raise ``PoisonedError`` if this version was changed meanwhile."""
        self._alias = None
        if self.is_admitted:
            self._content.end_read(self, error)


class WriteBlock(Ticket):
    """What ``write()`` gives: the tensor to change, while its ``with`` block lasts."""

    __slots__ = (
        "_content",
        "address",
        "alias",
        "begun_on",
        "deadline",
        "extent",
        "healing",
        "side",
        "source",
        "timeout",
        "turn",
        "wait",
        "work",
    )

    work: torch.Tensor
    address: int
    """Where ``work`` lay when the block began."""
    extent: int | None
    """How many bytes were there; None where a storage can't be resized."""
    alias: torch.Tensor
    begun_on: int | None
    deadline: float | None

    def __init__(
        self,
        content: Content,
        wait: bool,  # noqa: FBT001  # called by position, on the fast path
        timeout: float | None,
        source: torch.Tensor | None = None,
        healing: bool = False,  # noqa: FBT001, FBT002  # as above
    ) -> None:
        self.is_admitted = False
        self.extent = None
        self._content = content
        self.wait = wait
        self.timeout = timeout
        self.source = source
        self.healing = healing
        self.side: str | None = None
        self.turn: AbstractContextManager[torch.Tensor] | None = None

    def __enter__(self) -> torch.Tensor:
        """Begin to write."""
        if hasattr(self, "thread"):
            refuse_again(self._content.label)
        self.thread = HERE.thread
        try:
            return self._content.begin_write(self)
        except BaseException:
            self._content.drop_write(self)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Publish the update as the next version, or drop it if the block failed."""
        if self.is_admitted:
            self._content.end_write(self, error)


def refuse_outside(label: str, name: str) -> NoReturn:
    """Raise, since a read view is used outside its block."""
    hint = "Take a snapshot() for what must last longer."
    raise LifecycleError(f"view.{name} of {label} is used outside its with block", hint=hint)


def refuse_again(label: str) -> NoReturn:
    """Raise, since a block is entered once."""
    raise LifecycleError(f"this with block of {label} was entered before", hint="Call read() or write() each time.")
