"""A spiking network of actors tells handwritten digits: their memory is shared, their synapses have four bits.

    python examples/actor_snn.py [--actors 4] [--processes] [--kills 3] [--jitter 0.01] [--picture actor_snn.png]

Each population of leaky integrate-and-fire neurons owns its state as a ``MutableTensor``, and its synapses as
``Q4Linear`` layers, which read the other populations' spikes where these lie, uncopied. One update is one step, so the
version is the clock, and a step happens wholly or not at all. Hence the same result, bit for bit, whatever the number
of actors, and whoever is late or killed. Needs scikit-learn (the data), matplotlib and rich.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import random
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

mpl.use("Agg")

import torch
from matplotlib import pyplot as plt
from rich.progress import track
from train_ste import digits

import q4core as q4

SIZE, DIGITS = 64, 10
HIDDEN = ("a", "b", "c", "d")
SOURCES = {**dict.fromkeys(HIDDEN, ("pixels", *HIDDEN)), "out": HIDDEN}
"""Whom each population reads."""
LEAK, FORMAT = 0.9, "nf4"  # blocks of 64 lie within one source's rows, so parts are quantised like the whole
MEMBRANE, COUNT, SPIKES = 0, 1, 2  # in a state: potentials, spikes so far, spikes of even steps and of odd ones


def integrate(membrane: torch.Tensor, current: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the membranes after one step, and their spikes, which have a smooth slope for training."""
    membrane = LEAK * membrane + current
    slope = torch.sigmoid(2.0 * (membrane - 1.0))
    spikes = slope + ((membrane >= 1.0).float() - slope).detach()
    return membrane - spikes.detach(), spikes


def input_spikes(images: torch.Tensor, step: int) -> torch.Tensor:
    """Return the pixels' spikes in one step [M, 64]: the brighter, the likelier."""
    return (torch.rand(images.shape, generator=torch.Generator().manual_seed(step)) < images).float()


def train(images: torch.Tensor, labels: torch.Tensor, epochs: int, steps: int = 20) -> dict[str, torch.Tensor]:
    """Return the masters [256, 64 + 256] of ``hidden`` and [10, 256] of ``out``, trained as four-bit weights."""
    generator, width = torch.Generator().manual_seed(0), SIZE * len(HIDDEN)
    shapes = {"hidden": (width, SIZE + width), "out": (DIGITS, width)}
    masters = {name: torch.randn(shape, generator=generator).mul_(0.06) for name, shape in shapes.items()}
    optimiser = torch.optim.Adam([master.requires_grad_() for master in masters.values()], lr=2e-3)
    for epoch in track(range(epochs), "training"):
        for batch in torch.randperm(len(images), generator=generator).split(128):
            hidden, out = (q4.training.ste_weight(master, FORMAT) for master in masters.values())
            membranes = spikes = torch.zeros(len(batch), width)
            potentials = counts = torch.zeros(len(batch), DIGITS)
            rate = torch.zeros(())
            for step in range(epoch * steps, (epoch + 1) * steps):
                potentials, fired = integrate(potentials, spikes @ out.T)
                seen = torch.cat([input_spikes(images[batch], step), spikes], 1)
                membranes, spikes = integrate(membranes, seen @ hidden.T)
                counts, rate = counts + fired, rate + spikes.mean() / steps
            loss = torch.nn.functional.cross_entropy(0.5 * counts, labels[batch]) + rate  # quiet neurons are cheap
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return {name: master.detach() for name, master in masters.items()}


class Population:
    """Leaky integrate-and-fire neurons, with their state and their synapses from each source."""

    def __init__(self, name: str, masters: dict[str, torch.Tensor], states: dict[str, q4.MutableTensor]) -> None:
        self.state, self.pixels = states[name], states["pixels"]
        session = q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact"))
        rows = masters["out"] if name == "out" else masters["hidden"].split(SIZE)[HIDDEN.index(name)]
        parts = zip(SOURCES[name], rows.split(SIZE, 1), strict=True)
        self.synapses = [
            (states[source], source == "pixels", session.linear(q4.training.quantize_packed(part.contiguous(), FORMAT)))
            for source, part in parts
        ]

    def advance(self, step: int) -> None:
        """Compute one step from the pixels of this step and the others' spikes of the last one."""
        self.pixels.wait(step)  # that version comes when all have done the last step, so none is two steps ahead
        current = torch.zeros(self.state.shape[1:])
        for source, is_input, synapses in self.synapses:
            with source.read() as seen:
                current += synapses(seen.tensor[0 if is_input else SPIKES + (step - 1) % 2])
        with self.state.write() as state:
            state[MEMBRANE], state[SPIKES + step % 2] = integrate(state[MEMBRANE], current)
            state[COUNT] += state[SPIKES + step % 2]


class Plan(NamedTuple):
    """How long to run, with how many actors of which kind, how many of them to kill, and how unsteady they are."""

    steps: int = 40
    actors: int = 4
    processes: bool = False
    kills: int = 0
    jitter: float = 0.0

    def names(self, index: int) -> tuple[str, ...]:
        """Return the populations of one actor."""
        return tuple(SOURCES)[index :: self.actors]


def act(index: int, plan: Plan, masters: dict[str, torch.Tensor], states: dict[str, q4.MutableTensor]) -> None:
    """Be an actor: advance its populations from wherever their states are, and tell what was copied."""
    torch.set_num_threads(1)
    populations = [Population(name, masters, states) for name in plan.names(index)]
    for step in range(1, plan.steps + 1):
        for one in populations:
            if one.state.version < step:  # else a killed forerunner has done it
                time.sleep(random.random() * plan.jitter)  # noqa: S311  # no secret
                one.advance(step)
    stats = [one.state.stats() for one in populations]
    with states["copied"].write(wait=True) as total:
        total.add_(sum(one.bytes_copied / max(1, one.writes) for one in stats))


class Crew:
    """Actors at work; whoever is killed is replaced."""

    def __init__(self, plan: Plan, masters: dict[str, torch.Tensor], states: dict[str, q4.MutableTensor]) -> None:
        self.plan, self.masters, self.states = plan, masters, states
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["q4core", "train_ste"])  # so that a replacement starts at once
        self.hire: Any = server.Process if plan.processes else threading.Thread
        self.workers = [self.start(index) for index in range(plan.actors)]

    def start(self, index: int) -> Any:
        """Start one actor."""
        worker = self.hire(target=act, args=(index, self.plan, self.masters, self.states), daemon=True)
        worker.start()
        return worker

    def replace_killed(self, step: int) -> None:
        """Start those anew that were killed before they had done this step."""
        for index, worker in enumerate(self.workers):
            if not worker.is_alive() and any(self.states[name].version < step for name in self.plan.names(index)):
                if not self.plan.processes or worker.exitcode >= 0:
                    raise SystemExit(f"actor {index} failed in step {step}")
                self.workers[index] = self.start(index)


class Outcome(NamedTuple):
    """What a run leaves: each population's last state, what image 0 did in each step, and what it took."""

    states: dict[str, torch.Tensor]
    membranes: torch.Tensor
    spikes: torch.Tensor
    step_seconds: float
    step_bytes: float

    @property
    def digest(self) -> str:
        """What two runs have in common only if every bit is the same."""
        parts = (*self.states.values(), self.membranes, self.spikes)
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16]


def simulate(masters: dict[str, torch.Tensor], images: torch.Tensor, plan: Plan) -> Outcome:
    """Show the images [M, 64] to actors, step by step, and write down what image 0 does."""
    sizes = {name: [4, len(images), DIGITS if name == "out" else SIZE] for name in SOURCES}
    sizes |= {"pixels": [1, len(images), SIZE], "copied": [1]}
    trace = torch.zeros(2, plan.steps, SIZE * len(HIDDEN) + DIGITS)
    fatal = {plan.steps * (kill + 1) // (plan.kills + 1) for kill in range(plan.kills)}
    make = q4.SharedMutableTensor if plan.processes else q4.MutableTensor
    with contextlib.ExitStack() as stack:
        states = {name: stack.enter_context(make(torch.zeros(size), name=name)) for name, size in sizes.items()}
        crew = Crew(plan, masters, states)
        for step in range(1, plan.steps + 1):
            states["pixels"].replace(input_spikes(images, -step)[None])
            if step in fatal:
                random.choice(crew.workers).kill()  # noqa: S311  # no secret
            for name, part in zip(SOURCES, trace.split(SIZE, 2), strict=True):
                while not states[name].wait(step, timeout=0.1):
                    crew.replace_killed(step)
                with states[name].read() as seen:
                    part[:, step - 1] = seen.tensor[[MEMBRANE, SPIKES + step % 2], 0]
            if step == 1:
                started = time.perf_counter()  # everybody is there
        seconds = (time.perf_counter() - started) / (plan.steps - 1)
        for worker in crew.workers:
            worker.join()
        copied = states["copied"].snapshot().tensor.item() + states["pixels"].stats().bytes_copied / plan.steps
        last = {name: states[name].snapshot().tensor for name in SOURCES}
        return Outcome(last, trace[0], trace[1], seconds, copied)


def draw(outcome: Outcome, image: torch.Tensor, label: int, path: Path) -> None:
    """Draw what one image does: every spike, the membranes of the digits' neurons, and some of the hidden ones'."""
    figure, panels = plt.subplot_mosaic("ST;SH", figsize=(11, 5.5), layout="constrained", width_ratios=(1.3, 1))
    raster, out, hidden = panels["S"], panels["T"], panels["H"]
    colors = ("#3465a4", "#75507b", "#c17d11", "#4e9a06", "#cc0000")
    time_ = range(1, len(outcome.spikes) + 1)
    parts = zip(outcome.spikes.split(SIZE, 1), outcome.membranes.split(SIZE, 1), strict=True)
    for index, (spikes, membranes) in enumerate(parts):
        step, neuron = spikes.numpy().nonzero()
        raster.scatter(step + 1, neuron + index * SIZE, s=6, marker="|", color=colors[index])
        middle = index * SIZE + spikes.shape[1] / 2
        raster.text(len(time_) + 1.5, middle, tuple(SOURCES)[index], color=colors[index], va="center")
        if index < len(HIDDEN):
            hidden.plot(time_, membranes[:, int(spikes.sum(0).argmax())].numpy(), color=colors[index], lw=1)
    for digit, potentials in enumerate(outcome.membranes[:, -DIGITS:].numpy().T):
        color = colors[-1] if digit == label else "#888a85"
        out.plot(time_, potentials, color=color, lw=1.5 if digit == label else 0.8)
    raster.set(xlabel="step", ylabel="neuron", ylim=(-6, 5.3 * SIZE), title=f"{int(outcome.spikes.sum()):,} spikes")
    out.set(ylabel="membrane", title=f"the ten digits' neurons; {label} is true, and red")
    hidden.set(xlabel="step", ylabel="membrane", title="each hidden population's busiest neuron")
    inset = raster.inset_axes((0.02, 0.83, 0.16, 0.16))
    inset.imshow(image.reshape(8, 8).numpy(), cmap="gray_r")
    inset.set(xticks=[], yticks=[])
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Train, run the actors, draw, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=len(SOURCES), choices=range(1, len(SOURCES) + 1))
    parser.add_argument("--processes", action="store_true", help="processes instead of threads")
    parser.add_argument("--kills", type=int, default=0, help="how many actors to kill on the way")
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="seconds that an actor sleeps at most before each step"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--picture", type=Path, default=Path("actor_snn.png"))
    options = parser.parse_args()
    if options.kills and not options.processes:
        parser.error("--kills needs --processes: threads can't be killed")
    if options.steps <= 1:
        parser.error("--steps must be at least 2")
    torch.set_num_threads(1)  # the actors are what runs in parallel
    images, labels, test_images, test_labels = digits()
    masters = train(images, labels, options.epochs)
    plan = Plan(**{field: getattr(options, field) for field in Plan._fields})
    outcome = simulate(masters, test_images, plan)
    draw(outcome, test_images[0], int(test_labels[0]), options.picture)
    spikes = sum(float(state[COUNT].sum()) for state in outcome.states.values()) / plan.steps
    rate = 1 / outcome.step_seconds
    right = float((outcome.states["out"][COUNT].argmax(1) == test_labels).float().mean())
    print(f"{plan.actors} {'processes' if plan.processes else 'threads'}, {plan.kills} killed on the way")
    print(f"{rate:,.0f} steps/s of {len(test_images)} images, {spikes * rate:,.0f} spikes/s")
    print(f"{outcome.step_bytes:,.0f} bytes copied per step")
    print(f"test accuracy {right:.1%} with {FORMAT} synapses; result {outcome.digest}")
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
