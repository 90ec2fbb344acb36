"""``using`` in threads: a thread has the configuration of the context that it runs in, whatever others do meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import q4core as q4
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Callable


def _backend() -> str | None:
    return q4.resolve_config().backend


def _in_thread(function: Callable[[], object]) -> object:
    told: list[object] = []
    thread = threading.Thread(target=contextvars.copy_context().run, args=(lambda: told.append(function()),))
    thread.start()
    thread.join()
    return told[0]


def _in_pool(function: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, function).result()


def _in_loop(function: Callable[[], object]) -> object:
    async def run() -> object:
        return await asyncio.to_thread(function)

    return asyncio.run(run())


STARTERS = {"thread": _in_thread, "pool": _in_pool, "loop": _in_loop}


@pytest.mark.parametrize("start", STARTERS.values(), ids=STARTERS)
def test_using_reaches_threads_that_run_in_its_context(start: Callable[[Callable[[], object]], object]) -> None:
    """Threads, pools and tasks that are given a copy of the context have its configuration; later ones do not."""
    with q4.using(q4.SessionConfig(backend="outer")):
        assert start(_backend) == "outer"
        assert start(lambda: _in_thread(_backend)) == "outer"
    assert start(_backend) is None


def test_a_block_in_a_thread_goes_over_what_it_inherited() -> None:
    """Inside a thread a block of its own wins field by field, ends where it ends, and affects no other thread."""

    def work() -> tuple[object, ...]:
        with q4.using(q4.SessionConfig(device="cpu")):
            inner = (_backend(), q4.resolve_config().device, _in_thread(lambda: q4.resolve_config().device))
        return (*inner, q4.resolve_config().device)

    with q4.using(q4.SessionConfig(backend="outer", device="meta")):
        assert _in_thread(work) == ("outer", "cpu", "cpu", "meta")
        assert q4.resolve_config().device == "meta"


def test_blocks_of_several_threads_do_not_meet() -> None:
    """Threads inside blocks of their own at once keep theirs, and so do the threads that each of them starts."""
    barrier = threading.Barrier(3)
    told: dict[str, object] = {}

    def actor(name: str) -> None:
        with q4.using(q4.SessionConfig(backend=name)):
            barrier.wait(scaled(60))
            told[name] = (_backend(), _in_thread(_backend))
            barrier.wait(scaled(60))

    actors = [threading.Thread(target=actor, args=(name,)) for name in ("a", "b")]
    for thread in actors:
        thread.start()
    barrier.wait(scaled(60))
    assert (_backend(), _in_thread(_backend)) == (None, None)  # this thread is inside no block
    barrier.wait(scaled(60))
    for thread in actors:
        thread.join()
    assert told == {"a": ("a", "a"), "b": ("b", "b")}


def test_using_leaves_threads_of_others_as_they_are() -> None:
    """Nothing of the standard library is replaced: the start of a thread is its own."""
    start = threading.Thread.start
    with q4.using(q4.SessionConfig(backend="outer")):
        assert threading.Thread.start is start
