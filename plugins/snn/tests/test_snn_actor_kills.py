"""Actors that are killed within chunks leave no trace: neither in the bits nor in shared memory."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crews import RECORD, expect_same, made, spikes

from q4_actors import ActorSystem
from q4_snn.actors import ActorNetwork
from q4core import LifecycleError, Q4Error
from tests.support.limits import scaled, until

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux")
SHARED = Path("/dev/shm")  # noqa: S108  # where Linux keeps shared memory


def segments(system: ActorSystem) -> list[Path]:
    """Return the files of all that a system shares."""
    shared: list[Any] = [*system._tensors.values(), *system._rings, *(weight._where for weight in system._weights)]
    return [SHARED / getattr(item, "segment", getattr(item, "name", "")) for item in shared]


def run_killed(path: Path, fatal: Sequence[int], steps: int, chunk: int) -> None:
    """Run with kills, and expect the same bits, and that nothing is left."""
    x = spikes(steps)
    with ActorSystem("processes", restarts=64, window=1.0) as system:
        crew = ActorNetwork(made(path, fatal), system, batch=2, actors=3, chunk=chunk)
        expect_same([crew(part, RECORD) for part in x.split(steps // 2)], x)
        files = segments(system)
        assert files
        assert all(file.exists() for file in files)
    assert path.stat().st_size >= steps + len(fatal)
    assert not any(file.exists() for file in files)


@pytest.mark.slow
def test_killed_within_chunks(tmp_path: Path) -> None:
    """An actor that is killed in the first, in a middle and in the last step of a chunk does it again, twice in one."""
    run_killed(tmp_path / "steps", [1, 9, 10, 26], steps=40, chunk=8)


@pytest.mark.slow
@pytest.mark.soak
def test_two_hundred_kills(tmp_path: Path) -> None:
    """Two hundred kills, one in about five steps, leave the same bits and nothing in shared memory."""
    run_killed(tmp_path / "steps", range(3, 1003, 5), steps=800, chunk=4)


@pytest.mark.slow
def test_killed_at_any_time() -> None:
    """Actors that are killed from outside, while they wait, run or commit, leave the same bits."""
    x, is_over = spikes(120), threading.Event()
    with ActorSystem("processes", restarts=64, window=1.0) as system:
        crew = ActorNetwork(made(), system, batch=2, actors=3, chunk=6)

        def kill() -> None:
            for name in [f"neurons-{index % 3}" for index in range(6)]:
                is_over.wait(0.3)
                system.actors[name].kill()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            found = [crew(x, RECORD)]
        finally:
            is_over.set()
            killer.join()
        expect_same(found, x)


def test_checkpoints_across_runtimes(tmp_path: Path) -> None:
    """A run goes on from threads to processes and back, with another number of actors and another chunk."""
    x, found = spikes(45), []
    plans = (("threads", 1, 4), ("processes", 3, 7), ("threads", 2, 64))
    for index, (runtime, actors, chunk) in enumerate(plans):
        before = tmp_path / f"state-{index}" if index else None
        with ActorSystem(runtime, resume=before) as system:
            crew = ActorNetwork(made(), system, batch=2, actors=actors, chunk=chunk)
            assert crew.clock == 15 * index
            found.append(crew(x[15 * index :][:15], RECORD))
            system.checkpoint(tmp_path / f"state-{index + 1}")
    expect_same(found, x)


def test_a_chunk_that_is_undone() -> None:
    """Where a run is ended when chunks are on their way, all actors go back to the last one that is committed."""
    x = spikes(24)
    for runtime in ("threads", "processes"):
        with ActorSystem(runtime) as system:
            crew = ActorNetwork(made(), system, batch=2, actors=3, chunk=4)
            found, feed = [crew(x[:8], RECORD)], crew._feed

            def cut(chunk: Any, inputs: Any, feed: Any = feed) -> None:
                feed(chunk, inputs)
                if chunk.first == 13:
                    raise KeyboardInterrupt

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(crew, "_feed", cut)
                with pytest.raises(KeyboardInterrupt):
                    crew(1 - x[8:], RECORD)
            assert crew.clock == 8
            found.append(crew(x[8:], RECORD))
            expect_same(found, x)


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where shared memory is full, the network is refused by a typed error, and what was made is removed."""
    real = os.posix_fallocate
    made_so_far = []

    def fallocate(file: int, offset: int, length: int) -> None:
        made_so_far.append(length)
        if len(made_so_far) == 5:
            raise OSError(28, "No space left on device")
        real(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with ActorSystem("processes") as system:
        with pytest.raises(LifecycleError, match="No space left on device"):
            ActorNetwork(made(), system, batch=2)
        files = segments(system)
    assert not any(file.exists() for file in files)


def test_dead_actor() -> None:
    """An actor that is killed too often ends the run by an error that names it, and later runs, too."""
    with ActorSystem("processes", restarts=0) as system:
        crew = ActorNetwork(made(), system, batch=2, actors=2, chunk=4)
        crew(spikes(8))
        system.actors["neurons-1"].kill()
        until(lambda: not system.actors["neurons-1"].is_alive())
        for _ in range(2):
            with pytest.raises(Q4Error, match="neurons-1"):
                crew(spikes(8))
        system.stop(timeout=scaled(20.0))
