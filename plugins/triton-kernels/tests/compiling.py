"""Compilation of programs for the tests, in one process for each core: the results as they get ready."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    import pytest

    from q4_triton_kernels import Compiled, Usage

__all__ = ["Became", "Compiling", "compiled_aside", "selected"]

_MOST_PROCESSES = 8


class _Item(Protocol):
    """What can be sent to another process, and compiles there."""

    def compile(self) -> Compiled: ...


@attrs.frozen
class Became:
    """What a program became.

    Args:
        ptx: Its text.
        shared_bytes: Shared memory of one block.
        usage: What ptxas reports.
    """

    ptx: str = attrs.field(repr=False)
    shared_bytes: int
    usage: Usage


def _compile(item: _Item) -> Became:
    try:
        compiled = item.compile()
        return Became(compiled.ptx, compiled.shared_bytes, compiled.usage())
    except Exception as error:  # noqa: BLE001  # Triton's own errors can't be sent from one process to another
        raise RuntimeError(f"{item} does not compile: {type(error).__name__}: {error}") from None


class Compiling:
    """Programs that are being compiled.

    Args:
        pool: What compiles them.
        items: The programs, in the order in which they are wanted.
    """

    def __init__(self, pool: ProcessPoolExecutor, items: Iterable[Any]) -> None:
        self._pool = pool
        self._futures: dict[Hashable, Future[Became]] = {}
        for item in items:
            self._submit(item)

    def _submit(self, item: Any) -> Future[Became]:
        if item not in self._futures:
            self._futures[item] = self._pool.submit(_compile, item)
        return self._futures[item]

    def __getitem__(self, item: Any) -> Became:
        """Wait for a program and return what it became."""
        return self._submit(item).result()

    def take(self, item: Any) -> Became:
        """Return the same and forget it: the texts of thousands do not fit the memory."""
        became = self[item]
        del self._futures[item]
        return became


@contextlib.contextmanager
def compiled_aside(items: Iterable[Any]) -> Iterator[Compiling]:
    """Compile programs in processes of their own while the block runs; what is left at its end is given up."""
    count = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield Compiling(pool, items)
    finally:
        pool.shutdown(cancel_futures=True)


def selected(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Return what the tests that were selected are given under a parameter's name."""
    given = [getattr(item, "callspec", None) for item in request.session.items]
    return [call.params[name] for call in given if call is not None and name in call.params]
