"""Networks of actors on Ray: one process's bits on several nodes, through kills, lost nodes and checkpoints."""

from __future__ import annotations

import os
import warnings
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch

import q4core as q4
from tests.support.limits import scaled, until

__all__ = ["cluster"]

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]  # Ray's own
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray
    from crews import RECORD, Mortal, expect_same, made, spikes
    from ray_clusters import cluster

    from q4_actors import ActorError, ActorSystem
    from q4_nn import pack_
    from q4_snn import LIF, Network, PlasticProjection, Population, Projection, STDPRule
    from q4_snn.actors import ActorNetwork

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGE = 1024
"""A batch by which a step's rows are more than what goes through the hub: 9 kB."""


def pids(system: ActorSystem) -> set[int]:
    """Return the numbers of the processes of a system: of its actors, and of its hub."""
    found = {memory.pid for memory in system.memory_report().values()}
    return found | {hub_of(system)}


def hub_of(system: ActorSystem) -> int:
    """Return the number of the process of a system's hub."""
    hub: Any = system._runtime._hub
    return int(ray.get(hub.__ray_call__.remote(lambda _: os.getpid())))


def expect_ended(processes: set[int]) -> None:
    """Expect that processes end."""
    until(lambda: not any(Path(f"/proc/{process}/exe").exists() for process in processes))


def test_killed_within_chunks(cluster: Any, tmp_path: Path) -> None:
    """Actors that are killed in the first, in a middle and in the last step of a chunk do it again, twice in one."""
    x, path = spikes(24), tmp_path / "steps"
    with ActorSystem("ray", restarts=8) as system:
        crew = ActorNetwork(made(path, [1, 6, 7, 16]), system, batch=2, actors=3, chunk=8)
        expect_same([crew(part, RECORD) for part in x.split(12)], x)
        processes = pids(system)
    assert path.stat().st_size >= 24 + 4
    expect_ended(processes)


def test_packed_network_after_a_kill(cluster: Any) -> None:
    """Packed layers are shared by all nodes; an actor that is killed between two runs takes them again."""
    torch.manual_seed(0)
    pixels, a, b = (
        Population(name, 64, None if name == "pixels" else LIF.from_beta(0.9)) for name in ("pixels", *"ab")
    )
    projections = [Projection(pixels, a), Projection(a, b, format="nf4"), Projection(b, a, format="nf4", delay=1)]
    network, x = Network([pixels, a, b], projections), 4 * torch.rand(8, 2, 64)
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session, torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(4)
        pack_(network, session)
        expected, _ = network(x, record=("a", "b"))
        assert expected["b"].sum() > 10
        with ActorSystem("ray") as system:
            crew = ActorNetwork(network, system, batch=2, actors=2)
            found = [crew(x[:4], ("a", "b"))]
            system.actors["neurons-0"].kill()
            found.append(crew(x[4:], ("a", "b")))
    for name, value in expected.items():
        assert torch.equal(torch.cat([part[name] for part in found]), value)


def test_lost_rows(cluster: Any) -> None:
    """Rows and recorded states whose node is lost within a run are published again by the actors' successors."""
    node = cluster.add_node(num_cpus=4, object_store_memory=200_000_000)
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.node_id, soft=True)
    x = spikes(18, LARGE)
    with ActorSystem("ray", restarts=8, ray_options={"scheduling_strategy": strategy}) as system:
        crew = ActorNetwork(made(), system, batch=LARGE, actors=3, chunk=3)
        found = [crew(x[:6], RECORD)]
        with futures.ThreadPoolExecutor(1) as pool:
            run = pool.submit(crew, x[6:], RECORD)
            until(lambda: crew.clock >= 9)
            assert not run.done()
            cluster.remove_node(node, allow_graceful=False)
            found.append(run.result(timeout=scaled(120.0)))
        processes = pids(system)
    expect_same(found, x)
    expect_ended(processes)


def test_killed_hub(cluster: Any, tmp_path: Path) -> None:
    """Without its hub a run raises a typed error that says what to do; no process is left, and a checkpoint helps."""
    x, path = spikes(40), tmp_path / "state"
    with ActorSystem("ray") as system:
        crew = ActorNetwork(made(), system, batch=2, actors=2, chunk=4)
        found = [crew(x[:20], RECORD)]
        system.checkpoint(path)
        processes = pids(system)
        with futures.ThreadPoolExecutor(1) as pool:
            run = pool.submit(crew, x[20:].repeat(8, 1, 1), RECORD)
            until(lambda: crew.clock >= 24)
            ray.kill(system._runtime._hub)
            with pytest.raises(q4.LifecycleError) as caught:
                run.result(timeout=scaled(120.0))
        assert caught.value.hint == "Resume from a checkpoint."
        with pytest.raises(q4.Q4Error, match="checkpoint"):
            crew(x[20:], RECORD)
        with pytest.raises(q4.LifecycleError, match="Resume from a checkpoint"):
            system.checkpoint(tmp_path / "other")
        assert [item.name for item in tmp_path.iterdir()] == ["state"]
        system.stop(timeout=scaled(10.0))
    expect_ended(processes)
    with ActorSystem("threads", resume=path) as system:
        found.append(ActorNetwork(made(), system, batch=2)(x[20:], RECORD))
    expect_same(found, x)


def test_checkpoints_across_runtimes(cluster: Any, tmp_path: Path) -> None:
    """A run goes from Ray to threads, back, and to processes, with other numbers of actors and other chunks."""
    x, found = spikes(40), []
    plans: Sequence[tuple[str, int, int]] = (("ray", 2, 4), ("threads", 1, 64), ("ray", 3, 7), ("processes", 2, 3))
    for index, (runtime, actors, chunk) in enumerate(plans):
        before = tmp_path / f"state-{index}" if index else None
        with ActorSystem(runtime, resume=before) as system:
            crew = ActorNetwork(made(), system, batch=2, actors=actors, chunk=chunk)
            assert crew.clock == 10 * index
            found.append(crew(x[10 * index :][:10], RECORD))
            system.checkpoint(tmp_path / f"state-{index + 1}")
    expect_same(found, x)


def test_learning(cluster: Any, tmp_path: Path) -> None:
    """What a projection learns survives a kill within a chunk and a checkpoint, to the same bits of every weight."""

    def learning(path: Path | None = None) -> Network:
        torch.manual_seed(0)
        neuron = Mortal(10e-3, dt=1e-3)
        neuron.path, neuron.fatal = path, frozenset({5})
        inputs, cells = Population("pixels", 30, spikes=True), Population("cells", 20, neuron)
        weight = q4.quantize(torch.rand(20, 30) * 0.1, "nf4")
        rule = STDPRule(a_plus=0.03, a_minus=0.02)
        item = PlasticProjection(inputs, cells, weight, rule, seed=3, name="learning")
        return Network([inputs, cells], [item, Projection(cells, cells, delay=1)])

    x, found = spikes(30), []
    with torch.no_grad():
        expected, state = learning()(x, record=("cells",))
    assert 0.02 < expected["cells"].mean() < 0.98
    for index, runtime in enumerate(("ray", "processes", "ray")):
        before = tmp_path / f"state-{index}" if index else None
        with ActorSystem(runtime, resume=before) as system:
            crew = ActorNetwork(learning(tmp_path / f"steps-{index}"), system, batch=2, chunk=4)
            found.append(crew(x[10 * index :][:10], ("cells",))["cells"])
            system.checkpoint(tmp_path / f"state-{index + 1}")
            learnt = crew.coming("learning")
    assert torch.equal(torch.cat(found), expected["cells"])
    assert torch.equal(learnt.view(torch.int32), state.coming["learning"].view(torch.int32))


def test_store_that_is_full(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that find no room are a typed error that names their ring; the run begins again where it was."""
    x = spikes(12, LARGE)
    with ActorSystem("ray") as system:
        crew = ActorNetwork(made(), system, batch=LARGE, chunk=4)
        with monkeypatch.context() as patch:
            patch.setattr(ray, "put", Mock(side_effect=ray.exceptions.ObjectStoreFullError))
            with pytest.raises(ActorError, match="no room for rows of ring 'pixels'"):
                crew(x, RECORD)
        assert crew.clock == 0
        expect_same([crew(x, RECORD)], x)


def test_two_callers(cluster: Any) -> None:
    """Calls of two threads run one after the other: together they give what one run gives."""
    x = spikes(6).repeat(2, 1, 1)
    with ActorSystem("ray") as system:
        crew = ActorNetwork(made(), system, batch=2, actors=2, chunk=3)
        with futures.ThreadPoolExecutor(2) as pool:
            found = [*pool.map(lambda part: crew(part, RECORD), x.split(6))]
        assert crew.clock == 12
    with torch.no_grad():
        expected, _ = made()(x, record=RECORD)
    if not torch.equal(found[0]["a.mem"], expected["a.mem"][:6]):
        found.reverse()
    expect_same(found, x)
