"""Tests of actors that are processes: kills, pipes, and what is left in shared memory."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from acting import Echo, Gone, Nesting, Unsendable
from actor_fixtures import SHARED, steps

import q4core as q4
from q4_actors import (
    Actor,
    ActorDeadError,
    ActorError,
    ActorSystem,
    AskTimeoutError,
    MessageError,
    SharedMutableTensor,
)
from tests.support.limits import scaled, until, within

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are for Linux")


def test_killed_actors_change_nothing(tmp_path: Path, heard: Callable[[], list[tuple[str, dict[str, Any]]]]) -> None:
    """Actors that are killed within their updates are replaced, handle that message again, and the bits agree."""
    expected = steps("threads", tmp_path)
    assert torch.equal(steps("processes", tmp_path, fatal=(3, 4, 9, 15)), expected)
    assert [event for event, _ in heard()].count("failed") == 4
    assert "exit code -9" in next(fields["error"] for event, fields in heard() if event == "failed")


@pytest.mark.parametrize("inner", ["threads", "processes"])
@pytest.mark.parametrize("outer", ["threads", "processes"])
def test_an_actor_has_a_system_of_its_own(outer: str, inner: str) -> None:
    """Systems nest; when the outer actor is killed, its own actors end with it, and its successor has new ones."""
    with ActorSystem(outer, restarts=2) as system:
        actor = system.spawn(Nesting, inner, name="outer")
        own, child, answer = actor.ask("hello", timeout=scaled(60.0))
        assert answer == "hello"
        assert (own == os.getpid(), child == own) == (outer == "threads", inner == "threads")
        if outer == "processes":
            os.kill(own, signal.SIGKILL)
            until(lambda: not Path(f"/proc/{own}").exists())
            newer, newer_child, answer = actor.ask("again", timeout=scaled(60.0))
            assert (answer, newer != own, newer_child != child) == ("again", True, True)
            until(lambda: not Path(f"/proc/{child}").exists())


@pytest.mark.soak
def test_many_kills(tmp_path: Path, heard: Callable[[], list[tuple[str, dict[str, Any]]]]) -> None:
    """After twenty kills, one within each step, the bits are the same."""
    expected = steps("threads", tmp_path)
    assert torch.equal(steps("processes", tmp_path, fatal=tuple(range(1, 21))), expected)
    assert [event for event, _ in heard()].count("failed") == 20


def test_server_has_one_thread() -> None:
    """Processes are forked from a server without threads, which has imported what they need."""
    with ActorSystem("processes") as system:
        status = Path(f"/proc/{system.spawn(Echo).ask('pid', timeout=scaled(60.0))}/status").read_text(encoding="ascii")
        (parent,) = [line.split()[1] for line in status.splitlines() if line.startswith("PPid:")]
        assert parent != str(os.getpid())
        assert len(list(Path(f"/proc/{parent}/task").iterdir())) == 1


def test_killed_too_often() -> None:
    """A process that is killed more often than the limit allows is dead, and calls that wait for it raise."""
    with ActorSystem("processes", restarts=1) as system:
        ref = system.spawn(Echo, name="killed")
        first = ref.ask("pid", timeout=scaled(20.0))
        ref.kill()
        assert ref.ask("pid", timeout=scaled(20.0)) != first
        ref.tell(("sleep", 30))
        until(lambda: ref.page.current[0] != 0)  # type: ignore[attr-defined]  # a process's
        ref.kill()
        with pytest.raises(ActorDeadError, match=r"actor 'killed' is dead: .* exit code -9"):
            ref.ask(1, timeout=scaled(20.0))


def test_stop_kills_what_is_late() -> None:
    """A process that does not end in time is killed, and calls that wait for its answer raise."""
    system = ActorSystem("processes")
    ref = system.spawn(Echo)
    ref.ask(1, timeout=scaled(20.0))
    ref.tell(("sleep", 60))
    with within(10):
        system.stop(timeout=0.1)
    with pytest.raises(ActorError, match="was stopped"):
        system.spawn(Echo)


def test_messages_that_cannot_be_sent() -> None:
    """A message, an answer, an error or an argument that can't be pickled is a typed error, and the actor goes on."""
    with ActorSystem("processes") as system:
        ref = system.spawn(Echo, name="far")
        with pytest.raises(MessageError, match=r"a message to actor 'far' can't be pickled: function"):
            ref.tell(lambda: None)
        with pytest.raises(MessageError, match="the answer of actor 'far' can't be pickled: function"):
            ref.ask("lambda", timeout=scaled(20.0))
        assert ref.ask(1, timeout=scaled(20.0)) == 1
        with pytest.raises(MessageError, match="error that can't be pickled: Odd"):
            system.spawn(Unsendable).ask(1, timeout=scaled(20.0))

        class Local(Actor):
            pass

        with pytest.raises(MessageError, match="'local' can't be sent to a process"):
            system.spawn(Local, name="local")


def test_spawn_after_one_that_failed() -> None:
    """What can't be spawned takes nothing away from the next one."""

    class Local(Actor):
        pass

    with ActorSystem("processes") as system:
        for _ in range(2):
            with pytest.raises(MessageError, match="can't be sent to a process"):
                system.spawn(Local)
        assert system.spawn(Echo).ask(1, timeout=scaled(20.0)) == 1


def test_message_that_cannot_be_unpacked() -> None:
    """A message whose tensor is gone fails once, as any other, and the actor handles the next one."""
    with ActorSystem("processes", restarts=1) as system:
        ref, gone = system.spawn(Echo), SharedMutableTensor(torch.zeros(2))
        ref.ask(1, timeout=scaled(20.0))
        ref.tell(("sleep", 0.3))
        ref.tell(gone)
        gone.close()
        assert ref.ask("count", timeout=scaled(20.0)) == 1  # restarted
        with pytest.raises(q4.LifecycleError, match="vanished"):
            ref.ask(Gone(), timeout=scaled(20.0))
        assert ref.ask("count", timeout=scaled(20.0)) == 2


def test_answers_that_nobody_waits_for() -> None:
    """Many answers that come too late don't hold up the actor, and what large ones took is given back."""
    with ActorSystem("processes") as system:
        ref = system.spawn(Echo)
        ref.ask(1, timeout=scaled(20.0))
        ref.tell(("sleep", 0.3))
        for _ in range(20):  # more than a box for answers holds
            with pytest.raises(AskTimeoutError):
                ref.ask(torch.zeros(5000), timeout=0.0)
        ref.stop(timeout=scaled(5.0))
        assert ref.page.why == "it was stopped"  # type: ignore[attr-defined]  # a process's
        assert ref.page.current[0] == 0  # type: ignore[attr-defined]  # it was not killed
        assert not [*system._runtime._post.folder.glob("m*")]


def test_files_of_askers_that_ended() -> None:
    """Neither threads that asked nor systems that were stopped leave files open."""
    with ActorSystem("processes") as system:
        ref = system.spawn(Echo)
        files = Path(f"/proc/{ref.ask('pid', timeout=scaled(20.0))}/fd")
        before = len(list(files.iterdir()))
        for _ in range(20):
            thread = threading.Thread(target=ref.ask, args=(1,))
            thread.start()
            thread.join()
        assert len(list(files.iterdir())) <= before + 2
    del ref
    counts = []
    for _ in range(3):
        with ActorSystem("processes") as system:
            system.spawn(Echo).ask(1, timeout=scaled(20.0))
        gc.collect()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[0] == counts[-1]


def test_reference_after_the_end() -> None:
    """A reference that is unpickled after its system was stopped raises an error that says so."""
    with ActorSystem("processes") as system:
        data = pickle.dumps(system.spawn(Echo, name="gone"))
    with pytest.raises(ActorDeadError, match="actor 'gone' is dead: its system was stopped"):
        pickle.loads(data)  # noqa: S301  # its own


SCRIPT = """
import os, sys, time, torch
from acting import Echo
from q4_actors import ActorSystem
if __name__ == "__main__":
    system = ActorSystem("processes")
    state = system.mutable(torch.zeros(10), name="s")
    ref = system.spawn(Echo)
    print(ref.ask("pid"), state.segment, flush=True)
    ref.tell(("sleep", 60))
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGKILL], ids=lambda number: number.name
)
def test_end_of_the_parent(number: signal.Signals, tmp_path: Path) -> None:
    """After Ctrl-C, or when the parent is killed, no process, mailbox or shared memory is left."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    before = set(SHARED.iterdir())
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    ) as parent:
        assert parent.stdout is not None
        pid, segment = parent.stdout.readline().split()
        assert (SHARED / segment).exists()
        parent.send_signal(number)
        parent.wait(scaled(20))
    until(lambda: not Path(f"/proc/{pid}").exists())
    until(lambda: not {item.name for item in set(SHARED.iterdir()) - before if item.name.startswith("q4")})
