"""Tests of actors: the same program on every runtime."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from acting import Echo, Friend, Gone, Starting, Stepper, Unsendable, actor_events

import q4core as q4
from q4_actors import (
    Actor,
    ActorDeadError,
    ActorError,
    ActorSystem,
    AskTimeoutError,
    MailboxFullError,
    MessageError,
    MutableTensor,
    SharedMutableTensor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_actors import ActorRef

LINUX = sys.platform == "linux"
RUNTIMES = ["threads", *(["processes"] if LINUX else [])]
SHARED = Path("/dev/shm")  # noqa: S108  # where Linux keeps shared memory
only_processes = pytest.mark.skipif(not LINUX, reason="processes are for Linux")


@pytest.fixture(scope="module", params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    """Return each runtime in turn."""
    return str(request.param)


@pytest.fixture
def system(runtime: str) -> Iterator[ActorSystem]:
    """Return a system that is stopped after the test."""
    with ActorSystem(runtime, mailbox=4, restarts=2) as made:
        yield made


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, dict[str, Any]]]]:
    """Return a function that gives the events of actors so far."""
    caplog.set_level(logging.DEBUG, logger="q4core")
    return lambda: actor_events(caplog)


def until(check: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_ask_and_tell(system: ActorSystem) -> None:
    """Messages of one sender are handled in order, and the return value answers an ask."""
    ref = system.spawn(Echo, name="echo")
    assert ref.ask({"a": torch.arange(3)}, timeout=20.0)["a"].tolist() == [0, 1, 2]
    for _ in range(20):  # more than the mailbox holds: tell waits
        ref.tell("x")
    assert ref.ask("count", timeout=20.0) == 22
    assert ref.ask("name", timeout=20.0) == "echo"
    assert repr(ref) == "ActorRef('echo', alive)"
    ref.stop(timeout=20.0)
    assert repr(ref) == "ActorRef('echo', dead)"


def test_large_messages(system: ActorSystem) -> None:
    """A message and an answer larger than a page arrive whole, and leave nothing behind."""
    ref = system.spawn(Echo)
    large = torch.arange(100_000)
    assert torch.equal(ref.ask(large, timeout=20.0), large)
    for _ in range(6):
        ref.tell(large)
    ref.stop(timeout=20.0)
    assert not [item for folder in SHARED.glob("q4actors-*") for item in folder.glob("m*")]


def test_actors_know_one_another(system: ActorSystem) -> None:
    """A reference can be an argument or a message, and works in another actor."""
    echo = system.spawn(Echo)
    friend = system.spawn(Friend, other=echo)
    assert friend.ask("count", timeout=20.0) == 1
    assert friend.ask((echo, "count"), timeout=20.0) == 2
    with pytest.raises(ValueError, match="from afar"):
        friend.ask((echo, ("raise", "from afar")), timeout=20.0)
    with pytest.raises(ActorError, match="asks itself"):
        friend.ask((friend, "count"), timeout=20.0)


def test_exception_of_an_ask(system: ActorSystem) -> None:
    """What an actor raises in an ask is raised there, and the actor goes on as it was."""
    ref = system.spawn(Echo)
    with pytest.raises(ValueError, match="for the asker"):
        ref.ask(("raise", "for the asker"), timeout=20.0)
    with pytest.raises(SystemExit):
        ref.ask(("exit", 3), timeout=20.0)
    assert ref.ask("count", timeout=20.0) == 3


def test_failure_restarts(system: ActorSystem, heard: Callable[[], list[tuple[str, dict[str, Any]]]]) -> None:
    """An exception in a tell restarts the actor, and events tell of it."""
    ref = system.spawn(Echo, name="fragile")
    ref.tell(("raise", "by a tell"))
    assert ref.ask("count", timeout=20.0) == 1
    ref.stop(timeout=20.0)
    until(lambda: "stopped" in [event for event, _ in heard()])
    assert [event for event, _ in heard()] == ["started", "failed", "restarted", "started", "stopped"]
    assert all(fields["actor"] == "fragile" for _, fields in heard())
    assert "by a tell" in heard()[1][1]["error"]
    system.check()


def test_failing_start(system: ActorSystem, tmp_path: Path) -> None:
    """An actor that fails while it starts is restarted."""
    assert system.spawn(Starting, tmp_path / "there").ask(1, timeout=20.0) == 1


def test_restart_loop(system: ActorSystem) -> None:
    """An actor that fails too often is dead: whoever waits or comes later gets an error that names it."""
    ref = system.spawn(Echo, name="doomed")
    other = system.spawn(Echo)
    with contextlib.suppress(ActorDeadError):
        for _ in range(4):
            ref.tell(("raise", "again"))
    with pytest.raises(
        ActorDeadError, match=r"actor 'doomed' is dead: too many failures, the last by .*again"
    ) as raised:
        ref.ask("count", timeout=20.0)
    assert raised.value.details["actor"] == "doomed"
    assert not ref.is_alive()
    with pytest.raises(ActorDeadError):
        ref.tell(1)
    until(lambda: system._dead is not None)
    with pytest.raises(ActorDeadError, match="doomed"):
        system.check()
    assert other.ask(1, timeout=20.0) == 1  # the others go on
    assert system.spawn(Echo, name="doomed").ask(1, timeout=20.0) == 1  # the name is free again


def test_system_stops_with_its_dead(runtime: str) -> None:
    """Where the system is to stop when an actor is dead, all others stop."""
    with ActorSystem(runtime, restarts=0, when_dead="stop") as system:
        ref, other = system.spawn(Echo), system.spawn(Echo)
        ref.tell(("raise", "once"))
        until(lambda: not other.is_alive())
        with pytest.raises(ActorDeadError, match="stopped"):
            other.tell(1)
        with pytest.raises(ActorDeadError, match="once"):
            system.check()


def test_full_mailbox(system: ActorSystem) -> None:
    """A full mailbox refuses or lets wait, as the timeout says; nothing is lost or doubled."""
    ref = system.spawn(Echo, name="busy")
    ref.ask(0, timeout=20.0)
    ref.tell(("sleep", 0.5))
    time.sleep(0.1)  # it sleeps by now
    for _ in range(4):
        ref.tell("x", timeout=0)
    with pytest.raises(MailboxFullError, match="mailbox of actor 'busy' is full: 4 messages") as raised:
        ref.tell("x", timeout=0)
    assert raised.value.details["limit"] == 4
    with pytest.raises(MailboxFullError):
        ref.tell("x", timeout=0.01)
    ref.tell("x", timeout=20.0)
    assert ref.ask("count", timeout=20.0) == 8


def test_ask_timeout(system: ActorSystem) -> None:
    """An answer that is late raises for the asker, and is not taken for the next one's."""
    ref = system.spawn(Echo, name="slow")
    ref.ask(1, timeout=20.0)
    with pytest.raises(AskTimeoutError, match=r"actor 'slow' did not answer within 0\.05 s"):
        ref.ask(("sleep", 0.2), timeout=0.05)
    assert ref.ask("count", timeout=20.0) == 3


def test_stop(system: ActorSystem) -> None:
    """What was sent before stop is handled; whoever asks later is told."""
    ref = system.spawn(Echo, name="stopped")
    ref.tell(("sleep", 0.05))
    ref.tell("x")
    ref.stop(timeout=20.0)
    with pytest.raises(ActorDeadError, match="actor 'stopped' is dead: it was stopped"):
        ref.ask(1, timeout=20.0)
    ref.stop()


def test_config_of_the_spawner(system: ActorSystem) -> None:
    """``using`` reaches an actor, and so does the number of torch's threads."""
    with q4.using(q4.SessionConfig(activation_precision="exact")):
        ref = system.spawn(Echo)
    assert ref.ask("config", timeout=20.0) is q4.ActivationPrecision.EXACT
    assert system.spawn(Echo).ask("config", timeout=20.0) is q4.ActivationPrecision.AUTO
    assert ref.ask("threads", timeout=20.0) == torch.get_num_threads()


def steps(
    runtime: str, folder: Path, *, half: bool = False, resume: Path | None = None, fatal: tuple[int, ...] = ()
) -> torch.Tensor:
    """Run two actors that read each other for 20 steps, or half of them, with some that are killed."""
    with ActorSystem(runtime, resume=resume, restarts=64) as system:
        states = [system.mutable(torch.arange(8.0) + index, name=f"s{index}") for index in range(2)]
        dies = system.mutable(torch.zeros(32, dtype=torch.uint8), name="dies", mode="in_place") if fatal else None
        refs = [system.spawn(Stepper, states[index], states[1 - index], fatal, dies) for index in range(2)]
        first = states[0].version + 1
        for step in range(first, 11 if half else 21):
            for ref in refs:  # one after the other reads, so that the order is the program's
                assert ref.ask(step, timeout=30.0) == step
        if half:
            assert system.checkpoint(folder / "half.pt") == {"s0": 10, "s1": 10}
            assert system.clock == 10
        return torch.stack([state.snapshot().tensor for state in states])


def test_same_bits_everywhere(runtime: str, tmp_path: Path) -> None:
    """Every runtime computes the same bits, also from a checkpoint on."""
    expected = steps("threads", tmp_path)
    assert torch.equal(steps(runtime, tmp_path), expected)
    assert not torch.equal(steps(runtime, tmp_path, half=True), expected)
    assert torch.equal(steps(runtime, tmp_path, resume=tmp_path / "half.pt"), expected)


@only_processes
def test_killed_actors_change_nothing(tmp_path: Path, heard: Callable[[], list[tuple[str, dict[str, Any]]]]) -> None:
    """Actors that are killed within their updates are replaced, handle that message again, and the bits agree."""
    expected = steps("threads", tmp_path)
    assert torch.equal(steps("processes", tmp_path, fatal=(3, 4, 9, 15)), expected)
    assert [event for event, _ in heard()].count("failed") == 4
    assert "exit code -9" in next(fields["error"] for event, fields in heard() if event == "failed")


@only_processes
@pytest.mark.soak
def test_many_kills(tmp_path: Path, heard: Callable[[], list[tuple[str, dict[str, Any]]]]) -> None:
    """After twenty kills, one within each step, the bits are the same."""
    expected = steps("threads", tmp_path)
    assert torch.equal(steps("processes", tmp_path, fatal=tuple(range(1, 21))), expected)
    assert [event for event, _ in heard()].count("failed") == 20


@only_processes
def test_server_has_one_thread() -> None:
    """Processes are forked from a server without threads, which has imported what they need."""
    with ActorSystem("processes") as system:
        status = Path(f"/proc/{system.spawn(Echo).ask('pid', timeout=60.0)}/status").read_text(encoding="ascii")
        (parent,) = [line.split()[1] for line in status.splitlines() if line.startswith("PPid:")]
        assert parent != str(os.getpid())
        assert len(list(Path(f"/proc/{parent}/task").iterdir())) == 1


@only_processes
def test_killed_too_often() -> None:
    """A process that is killed more often than the limit allows is dead, and whoever waits for it is told."""
    with ActorSystem("processes", restarts=1) as system:
        ref = system.spawn(Echo, name="killed")
        first = ref.ask("pid", timeout=20.0)
        ref.kill()
        assert ref.ask("pid", timeout=20.0) != first
        ref.tell(("sleep", 30))
        until(lambda: ref.page.current[0] != 0)  # type: ignore[attr-defined]  # a process's
        ref.kill()
        with pytest.raises(ActorDeadError, match=r"actor 'killed' is dead: .* exit code -9"):
            ref.ask(1, timeout=20.0)


@only_processes
def test_stop_kills_what_is_late() -> None:
    """A process that does not end in time is killed, and whoever waits for its answer is told."""
    system = ActorSystem("processes")
    ref = system.spawn(Echo)
    ref.ask(1, timeout=20.0)
    ref.tell(("sleep", 60))
    started = time.monotonic()
    system.stop(timeout=0.1)
    assert time.monotonic() - started < 10
    with pytest.raises(ActorError, match="was stopped"):
        system.spawn(Echo)


def test_thread_that_is_late() -> None:
    """A thread that does not end in time is named."""
    system = ActorSystem("threads")
    ref = system.spawn(Echo, name="late")
    ref.tell(("sleep", 0.5))
    time.sleep(0.05)
    with pytest.raises(ActorError, match="actor 'late' still handles a message"):
        system.stop(timeout=0.01)
    with pytest.raises(ActorError, match="can't be killed"):
        ref.kill()


@only_processes
def test_messages_that_cannot_be_sent() -> None:
    """A message, an answer, an error or an argument that can't be pickled is a typed error, and the actor goes on."""
    with ActorSystem("processes") as system:
        ref = system.spawn(Echo, name="far")
        with pytest.raises(MessageError, match=r"a message to actor 'far' can't be pickled: function"):
            ref.tell(lambda: None)
        with pytest.raises(MessageError, match="the answer of actor 'far' can't be pickled: function"):
            ref.ask("lambda", timeout=20.0)
        assert ref.ask(1, timeout=20.0) == 1
        with pytest.raises(MessageError, match="error that can't be pickled: Odd"):
            system.spawn(Unsendable).ask(1, timeout=20.0)

        class Local(Actor):
            pass

        with pytest.raises(MessageError, match="'local' can't be sent to a process"):
            system.spawn(Local, name="local")


@only_processes
def test_spawn_after_one_that_failed() -> None:
    """What can't be spawned takes nothing away from the next one."""

    class Local(Actor):
        pass

    with ActorSystem("processes") as system:
        for _ in range(2):
            with pytest.raises(MessageError, match="can't be sent to a process"):
                system.spawn(Local)
        assert system.spawn(Echo).ask(1, timeout=20.0) == 1


@only_processes
def test_message_that_cannot_be_unpacked() -> None:
    """A message whose tensor is gone fails once, as any other, and the actor handles the next one."""
    with ActorSystem("processes", restarts=1) as system:
        ref, gone = system.spawn(Echo), SharedMutableTensor(torch.zeros(2))
        ref.ask(1, timeout=20.0)
        ref.tell(("sleep", 0.3))
        ref.tell(gone)
        gone.close()
        assert ref.ask("count", timeout=20.0) == 1  # restarted
        with pytest.raises(q4.LifecycleError, match="vanished"):
            ref.ask(Gone(), timeout=20.0)
        assert ref.ask("count", timeout=20.0) == 2


@only_processes
def test_answers_that_nobody_waits_for() -> None:
    """Many answers that come too late don't hold up the actor, and what large ones took is given back."""
    with ActorSystem("processes") as system:
        ref = system.spawn(Echo)
        ref.ask(1, timeout=20.0)
        ref.tell(("sleep", 0.3))
        for _ in range(20):  # more than a box for answers holds
            with pytest.raises(AskTimeoutError):
                ref.ask(torch.zeros(5000), timeout=0.0)
        ref.stop(timeout=5.0)
        assert ref.page.why == "it was stopped"  # type: ignore[attr-defined]  # a process's
        assert ref.page.current[0] == 0  # type: ignore[attr-defined]  # it was not killed
        assert not [item for folder in SHARED.glob("q4actors-*") for item in folder.glob("m*")]


@only_processes
def test_files_of_askers_that_ended() -> None:
    """Neither threads that asked nor systems that were stopped leave files open."""
    with ActorSystem("processes") as system:
        ref = system.spawn(Echo)
        files = Path(f"/proc/{ref.ask('pid', timeout=20.0)}/fd")
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
            system.spawn(Echo).ask(1, timeout=20.0)
        gc.collect()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[0] == counts[-1]


@only_processes
def test_reference_after_the_end() -> None:
    """A reference that is unpickled after its system was stopped tells so."""
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


@only_processes
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
        parent.wait(20)
    until(lambda: not Path(f"/proc/{pid}").exists())
    until(lambda: not {item.name for item in set(SHARED.iterdir()) - before if item.name.startswith("q4")})


def test_kinds_of_tensors(system: ActorSystem, runtime: str) -> None:
    """A system's tensors are of its runtime's kind, and closed at its end."""
    state = system.mutable(torch.zeros(3), name="state", mode="in_place")
    assert type(state) is (MutableTensor if runtime == "threads" else SharedMutableTensor)
    assert system.clock == 0
    state.replace(torch.ones(3))
    assert system.clock == 1
    with pytest.raises(q4.ConfigError, match="name must be one that no other tensor has"):
        system.mutable(torch.zeros(3), name="state")
    with pytest.raises(q4.UnifiedMemoryError):
        system.mutable(torch.zeros(3), name="managed", unified_memory="require_unified")
    with pytest.raises(q4.ConfigError, match="device"):
        system.mutable(torch.zeros(3), name="afar", device="cuda:99")
    system.stop(timeout=20.0)
    assert state.is_closed


def test_checkpoint_errors(system: ActorSystem, runtime: str, tmp_path: Path) -> None:
    """A checkpoint that can't be written, read or fitted is a typed error, and an old file stays."""
    state, path = system.mutable(torch.zeros(3), name="state"), tmp_path / "c.pt"
    state.replace(torch.ones(3))
    system.checkpoint(path)
    with pytest.raises(q4.CheckpointError, match="can't be written"):
        system.checkpoint(tmp_path / "nowhere" / "c.pt")
    assert [item.name for item in tmp_path.iterdir()] == ["c.pt"]
    (tmp_path / "bad.pt").write_bytes(path.read_bytes()[:100])
    for bad in ("bad.pt", "missing.pt"):
        with pytest.raises(q4.CheckpointError, match="no checkpoint of an actor system"):
            ActorSystem(runtime, resume=tmp_path / bad)
    (tmp_path / "empty.pt").touch()
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    for bad in ("empty.pt", "tensor.pt"):
        with pytest.raises(q4.CheckpointError, match="no checkpoint of an actor system"):
            ActorSystem(runtime, resume=tmp_path / bad)
    torch.save({"q4_actors": 9, "tensors": {}}, tmp_path / "bad.pt")
    with pytest.raises(q4.CheckpointError, match="q4_actors must be 1, got 9"):
        ActorSystem(runtime, resume=tmp_path / "bad.pt")
    with ActorSystem(runtime, resume=path) as other:
        zeros, half = torch.zeros(3), torch.zeros(3).half()
        for tensor, mode in ((torch.zeros(4), None), (half, None), (zeros, "in_place")):
            with pytest.raises(q4.InputError, match="must be the checkpoint's"):
                other.mutable(tensor, name="state", mode=mode)
        made = other.mutable(torch.zeros(3), name="state")
        assert (made.version, made.snapshot().tensor.tolist()) == (1, [1.0, 1.0, 1.0])


def test_checkpoint_of_a_moving_state(system: ActorSystem, tmp_path: Path) -> None:
    """A checkpoint while somebody updates two tensors in turn holds versions that were there at one instant."""
    a, b = (system.mutable(torch.zeros(1), name=name) for name in "ab")
    ends = threading.Event()

    def move() -> None:
        while not ends.is_set():
            for state in (a, b):
                with state.write() as tensor:
                    tensor.add_(1)
            time.sleep(0.002)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(10):
            versions = system.checkpoint(tmp_path / "c.pt", timeout=20.0)
            assert versions["a"] - versions["b"] in {0, 1}
            kept = torch.load(tmp_path / "c.pt", weights_only=True)["tensors"]
            assert all(int(one["tensor"]) == one["version"] for one in kept.values())
    finally:
        ends.set()
        mover.join()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("runtime", {"runtime": "fibres"}),
        ("mailbox", {"mailbox": 3}),
        ("mailbox", {"mailbox": 512}),
        ("restarts", {"restarts": -1}),
        ("window", {"window": 0}),
        ("when_dead", {"when_dead": "panic"}),
    ],
)
def test_bad_options(name: str, options: dict[str, Any]) -> None:
    """An option that is not legal is named, with its rule."""
    with pytest.raises(q4.ConfigError, match=f"ActorSystem: {name} must be"):
        ActorSystem(**options)


def test_bad_spawn(system: ActorSystem) -> None:
    """What is no actor, or has a live actor's name, is refused."""
    with pytest.raises(q4.ConfigError, match="kind must be a subclass of Actor"):
        system.spawn(dict)  # type: ignore[arg-type]  # on purpose
    system.spawn(Echo, name="one")
    with pytest.raises(q4.ConfigError, match="name must be one that no live actor has, got 'one'"):
        system.spawn(Echo, name="one")


def test_events_are_logged(system: ActorSystem, caplog: pytest.LogCaptureFixture) -> None:
    """A failure is logged as a warning that names the actor."""
    with caplog.at_level(logging.WARNING, logger="q4core"):
        ref = system.spawn(Echo, name="logged")
        ref.tell(("raise", "for the log"))
        ref.ask(1, timeout=20.0)
        until(lambda: any("q4.actor.failed" in line and "actor=logged" in line for line in caplog.messages))


@pytest.mark.parametrize("number", [0, 1])
def test_examples_of_the_page(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page about actors shows runs, on threads, and a checkpoint of it is there."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "actors.md").read_text(encoding="utf-8")
    snippet = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[number].replace('"processes")', '"threads")')
    exec(snippet, {"__name__": "__main__"})  # noqa: S102  # our own
    assert [item.name for item in tmp_path.iterdir()] == ([] if number else ["counter.pt"])


def test_block_that_fails(runtime: str) -> None:
    """An exception in the block stops the actors at once, and is what comes out."""
    refs: list[ActorRef] = []

    def fail(system: ActorSystem) -> None:
        refs.append(system.spawn(Echo))
        refs[0].ask(1, timeout=60.0)
        refs[0].tell(("sleep", 3))
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"), ActorSystem(runtime) as made:
        fail(made)
    assert not refs[0].is_alive()
