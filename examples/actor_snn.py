"""A spiking network of actors classifies handwritten digits: their memory is shared, their synapses have four bits.

    python examples/actor_snn.py [--actors 3] [--runtime processes] [--kills 3] [--jitter 0.01] [--picture snn.png]
    python examples/actor_snn.py --device cuda --unified-memory require_unified

Each population of leaky integrate-and-fire neurons owns its state as a ``MutableTensor``, and its synapses as
``Q4Linear`` layers, which read the other populations' spikes in place, without a copy. One update is one step, so the
version is the clock, and a step happens completely or not at all. So the result is the same, bit for bit, for any
number of actors, even if some are late or killed.

It needs scikit-learn (the data), matplotlib and rich: pip install "q4core[examples]". ``--runtime ray`` joins the
cluster that ``RAY_ADDRESS`` names, or starts one here: pip install "q4-actors[ray]"
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import time
from pathlib import Path
from typing import NamedTuple

import torch
from snn_network import DIGITS, FORMAT, HIDDEN, SIZE, SOURCES, input_spikes, integrate, train
from snn_picture import draw
from train_ste import digits

import q4core as q4
from q4_actors import Actor, ActorSystem, MutableTensor

Tensors = dict[str, torch.Tensor]
States = dict[str, MutableTensor]
MAX_RESTARTS = 64
MEMBRANE, COUNT, SPIKES = 0, 1, 2  # in a state: potentials, spikes so far, spikes of even steps and of odd ones


class Plan(NamedTuple):
    """How long to run, with how many actors of which kind, how many to kill, how unsteady, and where states lie."""

    steps: int = 40
    actors: int = 4
    runtime: str = "threads"
    kills: int = 0
    jitter: float = 0.0
    device: str | None = None
    unified_memory: str | None = None

    @property
    def side(self) -> str | None:
        """The side from which states are read and written: the CPU's, where the synapses are."""
        return "cpu" if self.device == "cuda" else None


class Population:
    """Leaky integrate-and-fire neurons, with their state and their synapses from each source."""

    def __init__(self, name: str, masters: Tensors, states: States, side: str | None) -> None:
        self.state, self.pixels, self.side = states[name], states["pixels"], side
        session = q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact"))
        rows = masters["out"] if name == "out" else masters["hidden"].split(SIZE)[HIDDEN.index(name)]
        parts = zip(SOURCES[name], rows.split(SIZE, 1), strict=True)
        self.synapses = [
            (states[source], source == "pixels", session.linear(q4.quantize(part.contiguous(), FORMAT)))
            for source, part in parts
        ]

    def advance(self, step: int) -> None:
        """Compute one step from the pixels of this step and the others' spikes of the last one."""
        self.pixels.wait(step)  # that version comes when all have done the last step, so none is two steps ahead
        current = torch.zeros(self.state.shape[1:])
        for source, is_input, synapses in self.synapses:
            with source.read(device=self.side) as seen:
                current += synapses(seen.tensor[0 if is_input else SPIKES + (step - 1) % 2])
        with self.state.write(device=self.side) as state:
            state[MEMBRANE], state[SPIKES + step % 2] = integrate(state[MEMBRANE], current)
            state[COUNT] += state[SPIKES + step % 2]


class Worker(Actor):
    """Advances its populations from the step of their states."""

    def __init__(self, names: tuple[str, ...], plan: Plan, masters: Tensors, states: States) -> None:
        self.populations = [Population(name, masters, states, plan.side) for name in names]
        self.jitter = plan.jitter

    def on_receive(self, step: int) -> float:
        """Do a step, and return how many bytes an update has copied."""
        for one in self.populations:
            if one.state.version < step:  # else its predecessor did it before it was killed
                time.sleep(random.random() * self.jitter)  # noqa: S311  # no secret
                one.advance(step)
        stats = [one.state.stats() for one in self.populations]
        return sum(one.bytes_copied / max(1, one.writes) for one in stats)


class Outcome(NamedTuple):
    """Result of a run: each population's last state, what image 0 did in each step, and the cost."""

    states: dict[str, torch.Tensor]
    membranes: torch.Tensor
    spikes: torch.Tensor
    step_seconds: float
    step_bytes: float
    killed: int

    @property
    def digest(self) -> str:
        """Digest that is equal for two runs only if every bit is."""
        parts = (*self.states.values(), self.membranes, self.spikes)
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16]


def simulate(masters: Tensors, images: torch.Tensor, plan: Plan) -> Outcome:
    """Show the images [M, 64] to actors, step by step, and record what image 0 does."""
    sizes = {name: [4, len(images), DIGITS if name == "out" else SIZE] for name in SOURCES}
    sizes |= {"pixels": [1, len(images), SIZE]}
    trace = torch.zeros(2, plan.steps, SIZE * len(HIDDEN) + DIGITS)
    fatal = {plan.steps * (kill + 1) // (plan.kills + 1) for kill in range(plan.kills)}
    with ActorSystem(plan.runtime, restarts=min(MAX_RESTARTS, plan.kills)) as system:
        where = {"device": plan.device, "unified_memory": plan.unified_memory}
        states = {name: system.mutable(torch.zeros(size), name=name, **where) for name, size in sizes.items()}
        names = [tuple(SOURCES)[index :: plan.actors] for index in range(plan.actors)]
        workers = [system.spawn(Worker, own, plan, masters, states) for own in names]
        for step in range(1, plan.steps + 1):
            with states["pixels"].write(device=plan.side) as pixels:
                pixels[0] = input_spikes(images, -step)
            for worker in workers:
                worker.tell(step)
            if step in fatal:
                random.choice(workers).kill()  # noqa: S311  # no secret
            for name, part in zip(SOURCES, trace.split(SIZE, 2), strict=True):
                while not states[name].wait(step, timeout=0.1):
                    system.check()  # whether an actor failed for good
                with states[name].read(device=plan.side) as seen:
                    part[:, step - 1] = seen.tensor[[MEMBRANE, SPIKES + step % 2], 0]
            if step == 1:
                started = time.perf_counter()  # all actors have started
        seconds = (time.perf_counter() - started) / (plan.steps - 1)
        copied = sum(worker.ask(plan.steps) for worker in workers)
        copied += states["pixels"].stats().bytes_copied / plan.steps
        last = {}
        for name in SOURCES:
            with states[name].read(device=plan.side) as seen:
                last[name] = seen.tensor.clone()
        return Outcome(last, trace[0], trace[1], seconds, copied, len(fatal))


def main() -> None:
    """Train, run the actors, draw, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    most = len(SOURCES)
    parser.add_argument(
        "--actors", type=int, default=most, choices=range(1, most + 1), help=f"how many (default {most})"
    )
    runtimes = ("threads", "processes", "ray")
    parser.add_argument("--runtime", choices=runtimes, default="threads", help="what actors are (default threads)")
    parser.add_argument("--kills", type=int, default=0, help="how many actors to kill on the way")
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="seconds that an actor sleeps at most before each step"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="whose memory the states lie in; cuda needs threads")
    policies = [policy.value for policy in q4.UnifiedMemoryPolicy]
    parser.add_argument("--unified-memory", choices=policies, help="whether CPU and GPU share it; cuda needs it")
    parser.add_argument("--steps", type=int, default=40, help="how long the images are shown (default 40)")
    parser.add_argument("--epochs", type=int, default=15, help="of training (default 15)")
    parser.add_argument("--picture", type=Path, default=Path("actor_snn.png"), help="a PNG (default actor_snn.png)")
    options = parser.parse_args()
    if options.kills and options.runtime == "threads":
        parser.error("--kills needs --runtime processes or ray: threads can't be killed")
    if options.runtime != "threads" and options.device == "cuda":
        parser.error("--device cuda needs threads: a GPU's memory belongs to one process")
    if options.steps <= 1:
        parser.error("--steps must be at least 2")
    if not 0 <= options.kills < options.steps:
        parser.error(f"--kills must be 0 … {options.steps - 1}: at most one before each further step")
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")
    if options.picture.suffix != ".png" or not options.picture.parent.is_dir():
        parser.error("--picture must be a file in a folder that is there, and end in .png")
    if not 0.0 <= options.jitter < math.inf:
        parser.error("--jitter must be seconds, 0 or more")
    torch.set_num_threads(1)  # the actors are what runs in parallel
    images, labels, test_images, test_labels = digits()
    masters = train(images, labels, options.epochs)
    plan = Plan(**{field: getattr(options, field) for field in Plan._fields})
    outcome = simulate(masters, test_images, plan)
    draw(outcome.spikes, outcome.membranes, test_images[0], int(test_labels[0]), options.picture)
    spikes = sum(float(state[COUNT].sum()) for state in outcome.states.values()) / plan.steps
    rate = 1 / outcome.step_seconds
    right = float((outcome.states["out"][COUNT].argmax(1) == test_labels).float().mean())
    print(f"{plan.actors} actors on {plan.runtime}, {outcome.killed} killed on the way")
    print(f"{rate:,.0f} steps/s of {len(test_images)} images, {spikes * rate:,.0f} spikes/s")
    print(f"{outcome.step_bytes:,.0f} bytes copied per step")
    print(f"test accuracy {right:.1%} with {FORMAT} synapses; result {outcome.digest}")
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
