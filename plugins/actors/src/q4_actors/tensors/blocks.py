"""The ``with`` blocks in which a ``MutableTensor`` is read and written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4_actors.tensors.tickets import HERE, ReadTicket, WriteTicket

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from q4_actors.tensors.protocol import ThreadProtocol

__all__ = ["ReadView", "WriteBlock"]


class ReadView(ReadTicket):
    """What ``read()`` gives: ``tensor`` and ``version`` of one version, while its ``with`` block lasts."""

    __slots__ = ("_alias", "_content")

    def __init__(self, content: ThreadProtocol, timeout: float | None) -> None:
        self.is_admitted = False
        self._content = content
        self._alias: torch.Tensor | None = None
        self.timeout = timeout
        self.side = None
        self.turn = None

    @property
    def tensor(self) -> torch.Tensor:
        """The content, by an alias without graph. To be read; see ``docs/memory.md`` for how a change is detected.

        Raises:
            LifecycleError: The block has ended, or was never entered.
        """
        if self._alias is None:
            self._content.raise_outside("tensor")
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
            self._content.raise_outside("version")

    def __enter__(self) -> Self:
        """Begin to read."""
        if hasattr(self, "thread"):
            self._content.raise_again()
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


class WriteBlock(WriteTicket):
    """What ``write()`` gives: the tensor to change, while its ``with`` block lasts."""

    __slots__ = ("_content",)

    def __init__(
        self,
        content: ThreadProtocol,
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
        self.side = None
        self.turn = None

    def __enter__(self) -> torch.Tensor:
        """Begin to write."""
        if hasattr(self, "thread"):
            self._content.raise_again()
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
