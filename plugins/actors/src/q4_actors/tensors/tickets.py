"""Tickets: one request to read or to write, and the thread that made it, as long as that thread lives."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

__all__ = ["ENDED", "HERE", "BlockTicket", "ReadTicket", "Thread", "Ticket", "WriteTicket"]


class _Life:
    """Something that a thread's own storage holds, so that it goes when the thread ends."""

    __slots__ = ("__weakref__",)


Thread: TypeAlias = "weakref.ref[_Life]"
"""A thread, by its life: refers to None once it has ended, and equals no later one, unlike the system's numbers."""

ENDED: list[Callable[[Thread], None]] = []
"""Called by a thread that ends while its ``Thread`` is still referenced: inside a block, most likely."""


def _report_end(thread: Thread, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
    if not is_exiting():
        for look in ENDED:
            look(thread)


class _Here(threading.local):
    """The calling thread, as ``HERE.thread``."""

    def __init__(self) -> None:
        self._life = _Life()
        self.thread: Thread = weakref.ref(self._life, _report_end)


HERE = _Here()


class Ticket:
    """One request to read or to write, and the thread that made it."""

    __slots__ = ("bell", "is_admitted", "thread")

    bell: threading.Condition
    """Notified for this ticket alone, while it waits: each thread that wakes for nothing costs all others a turn."""
    thread: Thread

    def __init__(self) -> None:
        self.is_admitted = False


class BlockTicket(Ticket):
    """What both kinds of blocks ask for, and what a device's work needs to know of them."""

    __slots__ = ("begun_on", "deadline", "side", "timeout", "turn")

    begun_on: int | None
    deadline: float | None
    side: str | None
    timeout: float | None
    turn: AbstractContextManager[torch.Tensor] | None


class ReadTicket(BlockTicket):
    """A request to read: ``base`` at version ``number``, whose mark was ``mark``, once it is admitted."""

    __slots__ = ("base", "mark", "number")

    base: torch.Tensor
    mark: tuple[int, int]
    number: int


class WriteTicket(BlockTicket):
    """A request to write: ``work`` is changed by ``alias``; from ``source``, if that replaces the content."""

    __slots__ = ("address", "alias", "extent", "healing", "source", "wait", "work")

    work: torch.Tensor
    address: int
    """Where ``work`` lay when the block began."""
    extent: int | None
    """How many bytes were there; None where a storage can't be resized."""
    alias: torch.Tensor
    healing: bool
    source: torch.Tensor | None
    wait: bool
