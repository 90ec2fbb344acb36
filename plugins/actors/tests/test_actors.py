"""Tests of actors: the same program on every runtime."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from acting import Echo, Friend, Starting
from actor_fixtures import steps

import q4core as q4
from q4_actors import (
    ActorDeadError,
    ActorError,
    ActorSystem,
    AskTimeoutError,
    MailboxFullError,
    MutableTensor,
    SharedMutableTensor,
)
from tests.support.limits import scaled, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_actors import ActorRef


def test_ask_and_tell(system: ActorSystem) -> None:
    """Messages of one sender are handled in order, and the return value answers an ask."""
    ref = system.spawn(Echo, name="echo")
    assert ref.ask({"a": torch.arange(3)}, timeout=scaled(20.0))["a"].tolist() == [0, 1, 2]
    for _ in range(20):  # more than the mailbox holds: tell waits
        ref.tell("x")
    assert ref.ask("count", timeout=scaled(20.0)) == 22
    assert ref.ask("name", timeout=scaled(20.0)) == "echo"
    assert repr(ref) == "ActorRef('echo', alive)"
    ref.stop(timeout=scaled(20.0))
    assert repr(ref) == "ActorRef('echo', dead)"


def test_large_messages(system: ActorSystem, runtime: str) -> None:
    """A message and an answer larger than a page arrive whole, and leave nothing behind."""
    ref = system.spawn(Echo)
    large = torch.arange(100_000)
    assert torch.equal(ref.ask(large, timeout=scaled(20.0)), large)
    for _ in range(6):
        ref.tell(large)
    ref.stop(timeout=scaled(20.0))
    if runtime == "processes":
        assert not [*system._runtime._post.folder.glob("m*")]


def test_actors_know_one_another(system: ActorSystem) -> None:
    """A reference can be an argument or a message, and works in another actor."""
    echo = system.spawn(Echo)
    friend = system.spawn(Friend, other=echo)
    assert friend.ask("count", timeout=scaled(20.0)) == 1
    assert friend.ask((echo, "count"), timeout=scaled(20.0)) == 2
    with pytest.raises(ValueError, match="from afar"):
        friend.ask((echo, ("raise", "from afar")), timeout=scaled(20.0))
    with pytest.raises(ActorError, match="asks itself"):
        friend.ask((friend, "count"), timeout=scaled(20.0))


def test_exception_of_an_ask(system: ActorSystem) -> None:
    """What an actor raises in an ask is raised there, and the actor goes on as it was."""
    ref = system.spawn(Echo)
    with pytest.raises(ValueError, match="for the asker"):
        ref.ask(("raise", "for the asker"), timeout=scaled(20.0))
    with pytest.raises(SystemExit):
        ref.ask(("exit", 3), timeout=scaled(20.0))
    assert ref.ask("count", timeout=scaled(20.0)) == 3


def test_failure_restarts(system: ActorSystem, heard: Callable[[], list[tuple[str, dict[str, Any]]]]) -> None:
    """An exception in a tell restarts the actor, and events report it."""
    ref = system.spawn(Echo, name="fragile")
    ref.tell(("raise", "by a tell"))
    assert ref.ask("count", timeout=scaled(20.0)) == 1
    ref.stop(timeout=scaled(20.0))
    until(lambda: "stopped" in [event for event, _ in heard()])
    assert [event for event, _ in heard()] == ["started", "failed", "restarted", "started", "stopped"]
    assert all(fields["actor"] == "fragile" for _, fields in heard())
    assert "by a tell" in heard()[1][1]["error"]
    system.check()


def test_failing_start(system: ActorSystem, tmp_path: Path) -> None:
    """An actor that fails while it starts is restarted."""
    assert system.spawn(Starting, tmp_path / "there").ask(1, timeout=scaled(20.0)) == 1


def test_restart_loop(system: ActorSystem) -> None:
    """An actor that fails too often is dead: waiting and later calls raise an error that names it."""
    ref = system.spawn(Echo, name="doomed")
    other = system.spawn(Echo)
    with contextlib.suppress(ActorDeadError):
        for _ in range(4):
            ref.tell(("raise", "again"))
    with pytest.raises(
        ActorDeadError, match=r"actor 'doomed' is dead: too many failures, the last by .*again"
    ) as raised:
        ref.ask("count", timeout=scaled(20.0))
    assert raised.value.details["actor"] == "doomed"
    assert not ref.is_alive()
    with pytest.raises(ActorDeadError):
        ref.tell(1)
    until(lambda: system._dead is not None)
    with pytest.raises(ActorDeadError, match="doomed"):
        system.check()
    assert other.ask(1, timeout=scaled(20.0)) == 1  # the others go on
    assert system.spawn(Echo, name="doomed").ask(1, timeout=scaled(20.0)) == 1  # the name is free again


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
    ref.ask(0, timeout=scaled(20.0))
    ref.tell(("sleep", 0.5))
    time.sleep(0.1)  # it sleeps by now
    for _ in range(4):
        ref.tell("x", timeout=0)
    with pytest.raises(MailboxFullError, match="mailbox of actor 'busy' is full: 4 messages") as raised:
        ref.tell("x", timeout=0)
    assert raised.value.details["limit"] == 4
    with pytest.raises(MailboxFullError):
        ref.tell("x", timeout=0.01)
    ref.tell("x", timeout=scaled(20.0))
    assert ref.ask("count", timeout=scaled(20.0)) == 8


def test_ask_timeout(system: ActorSystem) -> None:
    """An answer that is late raises for the asker, and is not taken for the next one's."""
    ref = system.spawn(Echo, name="slow")
    ref.ask(1, timeout=scaled(20.0))
    with pytest.raises(AskTimeoutError, match=r"actor 'slow' did not answer within 0\.05 s"):
        ref.ask(("sleep", 0.2), timeout=0.05)
    assert ref.ask("count", timeout=scaled(20.0)) == 3


def test_stop(system: ActorSystem) -> None:
    """What was sent before stop is handled; later calls raise."""
    ref = system.spawn(Echo, name="stopped")
    ref.tell(("sleep", 0.05))
    ref.tell("x")
    ref.stop(timeout=scaled(20.0))
    with pytest.raises(ActorDeadError, match="actor 'stopped' is dead: it was stopped"):
        ref.ask(1, timeout=scaled(20.0))
    ref.stop()


def test_config_of_the_spawner(system: ActorSystem) -> None:
    """``using`` reaches an actor, and so does the number of torch's threads."""
    with q4.using(q4.SessionConfig(activation_precision="exact")):
        ref = system.spawn(Echo)
    assert ref.ask("config", timeout=scaled(20.0)) is q4.ActivationPrecision.EXACT
    assert system.spawn(Echo).ask("config", timeout=scaled(20.0)) is q4.ActivationPrecision.AUTO
    assert ref.ask("threads", timeout=scaled(20.0)) == torch.get_num_threads()


def test_same_bits_everywhere(runtime: str, tmp_path: Path) -> None:
    """Every runtime computes the same bits, also from a checkpoint on."""
    expected = steps("threads", tmp_path)
    assert torch.equal(steps(runtime, tmp_path), expected)
    assert not torch.equal(steps(runtime, tmp_path, half=True), expected)
    assert torch.equal(steps(runtime, tmp_path, resume=tmp_path / "half.pt"), expected)


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
    system.stop(timeout=scaled(20.0))
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
    with pytest.raises(q4.CheckpointError, match="q4_actors must be 2, got 9"):
        ActorSystem(runtime, resume=tmp_path / "bad.pt")
    with ActorSystem(runtime, resume=path) as other:
        zeros, half = torch.zeros(3), torch.zeros(3).half()
        for tensor, mode in ((torch.zeros(4), None), (half, None), (zeros, "in_place")):
            with pytest.raises(q4.InputError, match="must be the checkpoint's"):
                other.mutable(tensor, name="state", mode=mode)
        made = other.mutable(torch.zeros(3), name="state")
        assert (made.version, made.snapshot().tensor.tolist()) == (1, [1.0, 1.0, 1.0])


def test_checkpoint_of_a_moving_state(system: ActorSystem, tmp_path: Path) -> None:
    """A checkpoint while a thread updates two tensors in turn holds versions that were there at one instant."""
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
            versions = system.checkpoint(tmp_path / "c.pt", timeout=scaled(20.0))
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
        ref.ask(1, timeout=scaled(20.0))
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
        refs[0].ask(1, timeout=scaled(60.0))
        refs[0].tell(("sleep", 3))
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"), ActorSystem(runtime) as made:
        fail(made)
    assert not refs[0].is_alive()
