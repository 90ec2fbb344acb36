"""Scaling of networks over actors and nodes: steps and spikes per second, and bytes that a step moves.

Strong scaling gives one network to more actors; weak scaling gives each actor a population of its own. Every run must
leave the bits of the network in one process. Threads and processes take turns; Ray's nodes are raylets on this machine.
What a message and a byte cost is measured apart, for the model in ``docs/actors.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import pickle
import statistics
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from benchmarks import record, verdict
from q4_actors import Actor, ActorSystem
from q4_nn import pack_
from q4_snn import LIF, Network, Population, Projection, spikegen
from q4_snn.actors import ActorNetwork
from q4_snn.worker import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from q4_actors import MutableTensor

RATE, BETA = 0.05, 0.9
CHUNK = 64
STEPS_PER_S = {1: 3_000.0, 2: 4_800.0}
"""Of the ring of 4 populations by so many actors that are processes: what the engine is to reach on two cores."""
FASTER = 1.5
"""How much two threads gain over one there."""
MOST_BYTES = 1_000 + 16_384 / CHUNK
"""Written in a step there: what fired, as bits, and once a chunk the states."""
SMALL, LARGE = 1 << 8, 1 << 20
"""Numbers of float32 whose updates show the cost of a message, and that of a byte."""
NODES, NEURONS, SOURCES, DELAY, LINK_BYTES_PER_S = 1000, 10_000, 10, 15, 1.25e9
"""The model's: nodes with a population each, its neurons, how many others each reads, the least delay between them in
steps; and a link of 10 Gbit/s."""


@attrs.frozen
class Plan:
    """Neurons of a population, steps of a sample, samples, populations of the one network, and numbers of actors."""

    neurons: int = 1024
    steps: int = 256
    rounds: int = 7
    populations: int = 4
    actors: tuple[int, ...] = (1, 2, 4)

    def on_ray(self) -> Plan:
        """Return a shorter one: a step takes milliseconds there, and each actor's process seconds to begin."""
        return attrs.evolve(self, steps=2 * CHUNK, rounds=3, actors=(1, 2))


class Passer(Actor):
    """Reads one tensor and updates another, as a population does in a step."""

    def __init__(self, own: MutableTensor, source: MutableTensor) -> None:
        self.own, self.source = own, source

    def on_receive(self, message: Any) -> None:  # noqa: ARG002  # of any kind
        """Do it once."""
        with self.source.read() as seen:
            self.own.replace(seen.tensor, wait=True)


def ring(populations: int, neurons: int, session: q4.Session) -> Network:
    """Return populations that read the input, and the spikes that their neighbour fired in the step before."""
    torch.manual_seed(0)
    pixels = Population("pixels", neurons, spikes=True)
    cells = [Population(f"cells-{index}", neurons, LIF.from_beta(BETA)) for index in range(populations)]
    projections = [Projection(pixels, one, format="nf4") for one in cells]
    projections += [Projection(cells[index - 1], one, format="nf4", delay=1) for index, one in enumerate(cells)]
    network = Network([pixels, *cells], projections)
    for parameter in network.parameters():
        parameter.data.mul_(4)
    pack_(network, session)
    return network


def moved(network: Network, crew: ActorNetwork, runtime: str, actors: int, steps: int) -> dict[str, float]:
    """Return the bytes that a step of one sample writes, reads and sends, on average over a run."""
    chunks = -(-steps // CHUNK) / steps
    sizes = crew.row_bytes()
    message = 0 if runtime == "threads" else actors * len(pickle.dumps(Chunk(1, CHUNK), protocol=5))
    return {
        "written_bytes": sum(sizes.values()) + sum(crew.state_bytes().values()) * chunks,
        "spikes_as_bits_bytes": sum(sizes.values()),
        "read_bytes": sum(sizes[item.source] for name in network.order for item in network.graph.into(name)),
        "message_bytes": message * chunks,
    }


def rows_of(plan: Plan, runtimes: Sequence[str], nodes: int = 1) -> list[dict[str, Any]]:
    """Run each network on each runtime, and return a row for each."""
    forms = [(form, actors) for form in ("strong", "weak") for actors in plan.actors]
    return [row for form, actors in forms for row in runs(plan, form, actors, runtimes, nodes)]


def runs(plan: Plan, form: str, actors: int, runtimes: Sequence[str], nodes: int) -> Iterator[dict[str, Any]]:
    """Run one network on each runtime; ``SystemExit`` where one gives other bits than the network in one process."""
    populations = actors if form == "weak" else plan.populations
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        session = stack.enter_context(q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")))
        network = ring(populations, plan.neurons, session)
        generator = torch.Generator().manual_seed(1)
        x = spikegen.rate(torch.full((1, plan.neurons), RATE), plan.steps, generator=generator)
        expected, state = network(x, record=network.order)
        for _ in range(plan.rounds + 1):
            expected, state = network(x, state, record=network.order)
        samples: dict[str, list[float]] = {runtime: [] for runtime in runtimes}
        crews = {}
        for runtime in runtimes:
            system = stack.enter_context(ActorSystem(runtime))
            crews[runtime] = ActorNetwork(network, system, batch=1, actors=actors, chunk=CHUNK)
            crews[runtime](x)
        for _ in range(plan.rounds):
            for runtime, crew in crews.items():
                started = time.perf_counter()
                crew(x, ())
                samples[runtime].append((time.perf_counter() - started) / plan.steps * 1e6)
        for runtime, crew in crews.items():
            spikes = crew(x, network.order)
            if any(not torch.equal(spikes[name], expected[name]) for name in network.order):
                raise SystemExit(f"{form}, {actors} actors on {runtime}, {nodes} nodes: other bits")
            rate = 1e6 / statistics.median(samples[runtime])
            fired = sum(float(spikes[name].sum()) for name in network.order if name not in network.inputs)
            yield {
                "form": form,
                "runtime": runtime,
                "nodes": nodes,
                "actors": actors,
                "populations": populations,
                "digest": hashlib.sha256(torch.cat([*spikes.values()]).numpy().tobytes()).hexdigest()[:16],
                "us_per_step": record.summary(samples[runtime]),
                "steps_per_s": rate,
                "spikes_per_s": rate * fired / plan.steps,
                "events_per_s": rate * (fired + populations * float(x.sum())) / plan.steps * plan.neurons,
                "bytes_per_step": moved(network, crew, runtime, actors, plan.steps),
            }


def costs(runtime: str, rounds: int, **options: Any) -> dict[str, Any]:
    """Return what asking an actor for an update costs: with a small tensor, and for each byte of a large one."""
    calls: dict[str, Callable[[], object]] = {}
    with ActorSystem(runtime, **options) as system:
        for name, size in (("small", SMALL), ("large", LARGE)):
            pair = [system.mutable(torch.ones(size), name=f"{name}-{index}") for index in range(2)]
            ref = system.spawn(Passer, *pair)
            calls[name] = lambda ref=ref: ref.ask(1, timeout=120.0)  # type: ignore[misc]  # its own ref
        samples = record.interleaved_us(calls, rounds=rounds, repeats=5)
        found: dict[str, Any] = {f"{name}_us": record.summary(values) for name, values in samples.items()}
        more = found["large_us"]["median"] - found["small_us"]["median"]
        found["bytes_per_s"] = 4 * (LARGE - SMALL) / more * 1e6
        if runtime == "ray":
            import ray  # noqa: PLC0415  # not everywhere

            hub: Any = pair[0]._hub  # type: ignore[attr-defined]  # noqa: SLF001  # Ray's handle
            started = time.perf_counter()
            ray.get([hub.version.remote("small-0") for _ in range(1000)])
            found["hub_calls_per_s"] = 1000 / (time.perf_counter() - started)
    return found


def model(cost: dict[str, Any], events_per_s: float) -> dict[str, float]:
    """Return seconds for a step on ``NODES`` nodes by each of its bounds; ``docs/actors.md`` has the formulas."""
    state = 4 * NEURONS + DELAY * NEURONS / 8  # membranes, and the last rows of bits
    calls = 2 / DELAY + 7 / CHUNK  # publish and wait; then wait, write (3), publish, and the driver's wait and publish
    return {
        "hub_calls_s": NODES * calls / cost["hub_calls_per_s"],
        "hub_link_s": NODES * state / CHUNK / LINK_BYTES_PER_S,
        "node_link_s": SOURCES * NEURONS / 8 / LINK_BYTES_PER_S,
        "latency_s": cost["small_us"]["median"] / 1e6 / DELAY,
        "compute_s": RATE * SOURCES * NEURONS**2 / events_per_s,
    }


def judge(rows: Sequence[dict[str, Any]]) -> list[verdict.Verdict]:
    """Compare the one network with what the engine is to reach."""
    strong = {(row["runtime"], row["actors"]): row for row in rows if row["form"] == "strong" and row["nodes"] == 1}
    found = [
        verdict.Verdict(
            "steps/s", f"{actors} actors that are processes", strong["processes", actors]["steps_per_s"], least
        )
        for actors, least in STEPS_PER_S.items()
    ]
    gain = strong["threads", 2]["steps_per_s"] / strong["threads", 1]["steps_per_s"]
    written = strong["processes", 1]["bytes_per_step"]["written_bytes"]
    return [
        *found,
        verdict.Verdict("two actors against one", "threads", gain, FASTER),
        verdict.Verdict("bytes written in a step", "processes", written, MOST_BYTES, is_most=True),
    ]


def on_ray(plan: Plan, nodes: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return rows of a cluster of raylets, and the costs of an actor on the last of them."""
    import ray  # noqa: PLC0415  # not everywhere
    from ray.cluster_utils import Cluster  # noqa: PLC0415  # as above

    cluster = Cluster()
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=8, object_store_memory=200_000_000, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False)
        rows, here = rows_of(plan, ["ray"], nodes), ray.get_runtime_context().get_node_id()
        last = next((node["NodeID"] for node in ray.nodes() if node["NodeID"] != here), here)
        where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(last, soft=False)
        return rows, costs("ray", plan.rounds, ray_options={"scheduling_strategy": where})
    finally:
        ray.shutdown()
        cluster.shutdown()


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``scaling.json``, and print a line for each run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small network, without Ray, for development")
    is_quick = parser.parse_args(arguments).quick
    plan, local = Plan(32, 3, 2, 2, (1, 2)) if is_quick else Plan(), ("threads", "processes")
    torch.set_num_threads(1)
    plans = {"plan": attrs.asdict(plan), "plan_on_ray": attrs.asdict(plan.on_ray())}
    result: dict[str, Any] = {**plans, "rows": rows_of(plan, local)}
    result["costs"] = {runtime: costs(runtime, plan.rounds) for runtime in local}
    if not is_quick and importlib.util.find_spec("ray"):
        for nodes in (1, 3):
            rows, result["costs"][f"ray-{nodes}"] = on_ray(plan.on_ray(), nodes)
            result["rows"] += rows
        alone = max(row["events_per_s"] for row in result["rows"] if row["actors"] == 1)
        result["model"] = model(result["costs"]["ray-3"], alone)
    judged = [] if is_quick else judge(result["rows"])
    result["verdicts"] = [one.to_json() for one in judged]
    for row in result["rows"]:
        where = f"{row['form']:<7}{row['runtime']:<10}{row['nodes']} nodes {row['actors']} actors"
        print(f"{where} {row['steps_per_s']:9,.0f} steps/s {row['spikes_per_s']:11,.0f} spikes/s", end=" ")
        print(f"{row['bytes_per_step']['written_bytes']:10,.0f} bytes written per step  {row['digest']}")
    for line in verdict.lines(judged):
        print(line)
    folder = record.BUILD if is_quick else record.RESULTS
    print(f"written: {record.write(record.of_isa('scaling'), result, folder=folder)}")
