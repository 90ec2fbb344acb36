"""Actors on Ray: the same program and the same bits as on threads, on one node and on three."""

from __future__ import annotations

import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from tests.support.limits import scaled, until

if TYPE_CHECKING:
    from pathlib import Path

    from q4_actors import ActorSystem

__all__ = ["cluster", "system"]

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]  # Ray's own
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray
    from acting import Echo, Friend, Gone, Holding, Layered, Stepper, Unsendable
    from ray_clusters import cluster, system

    from q4_actors import ActorDeadError, ActorError, AskTimeoutError, MailboxFullError, MessageError
    from q4_actors import ActorSystem as System


def expect_death(system: ActorSystem, name: str) -> None:
    """Expect that the system soon reports a dead actor."""
    until(lambda: system._dead is not None)
    with pytest.raises(ActorDeadError, match=name):
        system.check()


def test_messages(system: ActorSystem) -> None:
    """Messages, exceptions, restarts and references work as on threads."""
    with q4.using(q4.SessionConfig(activation_precision="exact")):
        ref = system.spawn(Echo, name="echo")
    for _ in range(10):
        ref.tell("x")
    assert ref.ask("count", timeout=scaled(60.0)) == 11
    assert ref.ask("config", timeout=scaled(60.0)) is q4.ActivationPrecision.EXACT
    with pytest.raises(ValueError, match="for the asker"):
        ref.ask(("raise", "for the asker"), timeout=scaled(60.0))
    friend = system.spawn(Friend, other=ref)
    assert friend.ask("count", timeout=scaled(60.0)) == 14
    with pytest.raises(ActorError, match="asks itself"):
        friend.ask((friend, "count"), timeout=scaled(60.0))
    ref.tell(("raise", "by a tell"))
    assert ref.ask("count", timeout=scaled(60.0)) == 1
    assert system.memory_report()["echo"].pid != os.getpid()
    friend.stop()
    ref.tell(("sleep", 5))
    ref.stop(timeout=0.1)  # so it is killed
    assert system.spawn(Echo, name="echo").ask(1, timeout=scaled(60.0)) == 1
    time.sleep(0.5)
    system.check()  # none of them is dead after failures


def test_errors(system: ActorSystem) -> None:
    """A late answer, a full mailbox, what can't be pickled, and a dead actor are errors that name the actor."""
    ref = system.spawn(Echo, name="slow")
    ref.ask(1, timeout=scaled(60.0))
    with pytest.raises(AskTimeoutError, match="actor 'slow' did not answer"):
        ref.ask(("sleep", 0.5), timeout=0.05)
    for _ in range(3):  # in addition to the one that is late
        ref.tell("x", timeout=0)
    with pytest.raises(MailboxFullError, match="mailbox of actor 'slow' is full"):
        ref.tell("x", timeout=0)
    with pytest.raises(MessageError, match="a message to actor 'slow' can't be pickled"):
        ref.tell((message for message in "generators can't be pickled"), timeout=scaled(5.0))
    ref.kill()
    assert ref.ask(2, timeout=scaled(60.0)) == 2
    large = system.spawn(Holding, torch.ones(1_000_000))
    assert large.ask(1, timeout=scaled(60.0)) == 1_000_000
    large.kill()
    assert large.ask(2, timeout=scaled(60.0)) == 1_000_000
    for _ in range(3):
        ref.tell(("raise", "again"), timeout=scaled(60.0))
    with pytest.raises(ActorDeadError, match=r"actor 'slow' is dead: too many failures, the last by .*again"):
        ref.ask(3, timeout=scaled(60.0))
    expect_death(system, "slow")


def test_answers_and_exits(system: ActorSystem) -> None:
    """What can't be sent is the error that processes give, SystemExit is the asker's, and the actor goes on."""
    ref, odd = system.spawn(Echo, name="echo"), system.spawn(Unsendable, name="odd")
    for message, text in (("pair", "Pair: 1 and 2"), ("lock", "Odd")):
        with pytest.raises(MessageError, match=f"answer of actor 'odd' is an error that can't be pickled: {text}"):
            odd.ask(message, timeout=scaled(60.0))
    with pytest.raises(MessageError, match=r"the answer of actor 'echo' can't be pickled: .*generator"):
        ref.ask("generator", timeout=scaled(60.0))
    with pytest.raises(MessageError, match=r"the answer of actor 'echo' can't be unpickled: .*it has vanished"):
        ref.ask("gone", timeout=scaled(60.0))
    with pytest.raises(MessageError, match=r"a message to actor 'echo' can't be unpickled: .*it has vanished"):
        ref.ask(Gone(), timeout=scaled(60.0))
    with pytest.raises(SystemExit) as caught:
        ref.ask(("exit", 3), timeout=scaled(60.0))
    assert caught.value.code == 3
    assert ref.ask("count", timeout=scaled(60.0)) == 4


def test_start_that_fails(system: ActorSystem) -> None:
    """A call on an actor whose arguments can't be unpickled raises the reason."""
    ref = system.spawn(Holding, Gone(), name="lost")
    with pytest.raises(ActorDeadError, match=r"actor 'lost' is dead: .*it has vanished"):
        ref.ask(1, timeout=scaled(60.0))
    expect_death(system, "it has vanished")


def steps(runtime: str, count: int, *, resume: Path | None = None, save: Path | None = None, fatal: Any = ()) -> Any:
    """Run two actors that read each other, with some that are killed within their updates."""
    with System(runtime, resume=resume, restarts=8) as system:
        states = [system.mutable(torch.arange(8.0) + index, name=f"s{index}") for index in range(2)]
        dies = system.mutable(torch.zeros(32, dtype=torch.uint8), name="dies") if fatal else None
        refs = [system.spawn(Stepper, states[index], states[1 - index], fatal, dies) for index in range(2)]
        for step in range(states[0].version + 1, count + 1):
            for ref in refs:
                assert ref.ask(step, timeout=scaled(60.0)) == step
        if save is not None:
            system.checkpoint(save)
        return torch.stack([state.snapshot().tensor for state in states])


def test_same_bits(cluster: Any, tmp_path: Path) -> None:
    """Ray on three nodes gives the bits of threads: after a kill, and from a checkpoint on."""
    expected = steps("threads", 12)
    steps("ray", 6, save=tmp_path / "half.pt", fatal=(3,))
    assert torch.equal(steps("ray", 12, resume=tmp_path / "half.pt"), expected)


def test_shared_weight(system: ActorSystem) -> None:
    """Actors on two nodes compute with the store's copy of a weight, to the layer's own bits."""
    torch.manual_seed(0)
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        layer = session.linear(q4.quantize(torch.randn(256, 512), "nf4"), torch.randn(256))
        weight, x = system.share(layer), torch.randn(3, 512)
        refs = [system.spawn(Layered, weight) for _ in range(2)]
        assert all(torch.equal(ref.ask(x, timeout=scaled(60.0)), layer(x)) for ref in refs)


def test_tensor_errors(system: ActorSystem) -> None:
    """Two writers, options that Ray does not have, and a closed tensor are the errors of a mutable tensor."""
    state = system.mutable(torch.zeros(3), name="state", unified_memory="prefer_unified")
    assert state.placement is not None
    assert (state.placement.action, "belongs to one process" in state.placement.reason) == ("fallback", True)
    with state.write() as tensor:
        tensor.add_(1)
        with pytest.raises(q4.WriteConflictError), state.write():
            pass
        assert state.snapshot().version == 0
    with pytest.raises(ValueError, match="on purpose"), state.write() as tensor:
        raise ValueError("on purpose")
    with state.read() as view:
        assert (view.version, view.tensor.tolist()) == (1, [1.0, 1.0, 1.0])
    assert state.wait(1, timeout=1.0)
    counts = state.stats()
    assert (counts.reads, counts.writes, counts.snapshots) == (1, 1, 1)
    assert (counts.failures, counts.conflicts, counts.bytes_copied) == (1, 1, 4 * 12)
    assert not state.wait(2, timeout=0.05)
    with pytest.raises(q4.ConfigError, match="mode must be 'versioned' on Ray"):
        system.mutable(torch.zeros(3), name="other", mode="in_place")
    with pytest.raises(q4.UnifiedMemoryError):
        system.mutable(torch.zeros(3), name="managed", unified_memory="require_unified")
    with pytest.raises(q4.ConfigError, match="device must be 'cpu' but on threads"):
        system.mutable(torch.zeros(3), name="afar", device="cuda")
    state.close()
    with pytest.raises(q4.LifecycleError, match="is closed"):
        state.snapshot()


class Full:
    """A hub for whose contents the object store has no room."""

    def __init__(self, hub: Any) -> None:
        self.begin, self.newest, self._end, self.end = hub.begin, hub.newest, hub.end, self

    def remote(self, name: str, holder: Any, content: Any) -> Any:
        """Refuse a content."""
        if content is not None:
            raise ray.exceptions.ObjectStoreFullError
        return self._end.remote(name, holder, None)


def test_store_that_is_full(system: ActorSystem) -> None:
    """An update that finds no room is a typed error that names the tensor; the state stays, and others may write."""
    state: Any = system.mutable(torch.zeros(3), name="state")
    hub, state._hub = state._hub, Full(state._hub)
    with pytest.raises(ActorError, match="no room for a version of mutable tensor 'state'"):
        state.replace(torch.ones(3))
    state._hub = hub
    assert state.snapshot().tensor.tolist() == [0, 0, 0]
    state.replace(torch.ones(3))
    assert state.version == 1


def test_many_waits(system: ActorSystem) -> None:
    """More calls than Ray lets an actor handle by default may wait for a version, and an update still comes."""
    state: Any = system.mutable(torch.zeros(3), name="state")
    waits = [state._hub.wait.remote("state", 1, 20.0) for _ in range(1200)]
    state.replace(torch.ones(3), wait=True, timeout=scaled(5.0))
    assert all(ray.get(waits, timeout=scaled(60.0)))


def test_lost_node(cluster: Any) -> None:
    """An actor whose node is lost, and that may run nowhere else, is dead for all calls; its system goes on."""
    node = cluster.add_node(num_cpus=1, resources={"lost": 1}, object_store_memory=100_000_000)
    with System("ray", restarts=0, ray_options={"resources": {"lost": 0.1}}) as system:
        state = system.mutable(torch.zeros(3), name="state")
        ref = system.spawn(Echo, name="remote")
        assert ref.ask(1, timeout=scaled(60.0)) == 1
        cluster.remove_node(node)
        with pytest.raises(ActorDeadError, match=r"actor 'remote' is dead: Ray says: .*node"):
            ref.ask(1, timeout=scaled(60.0))
        assert not ref.is_alive()
        expect_death(system, "remote")  # calls that wait for a tensor raise, too
        state.replace(torch.ones(3))
        assert state.version == 1
