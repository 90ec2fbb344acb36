"""Who runs the populations of ``actor_snn.py``: threads or processes, some of which are killed and replaced.

A part of that example, which needs: pip install "q4core[examples]"
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from snn_network import SOURCES

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from q4_actors import MutableTensor


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


class Crew:
    """Actors at work; whoever is killed is replaced."""

    def __init__(
        self,
        act: Callable[..., None],
        plan: Plan,
        masters: dict[str, torch.Tensor],
        states: dict[str, MutableTensor],
    ) -> None:
        self.act, self.plan, self.masters, self.states = act, plan, masters, states
        server = multiprocessing.get_context("forkserver")
        # What an actor's script imports is imported once, before there are actors, so that one is replaced at once.
        server.set_forkserver_preload(["matplotlib.pyplot", "q4core", "rich.progress", "sklearn.datasets"])
        self.hire: Any = server.Process if plan.processes else threading.Thread
        self.workers = [self.start(index) for index in range(plan.actors)]

    def kill_one(self, step: int) -> bool:
        """Kill somebody at work; return whether that is what ended them."""
        self.replace_killed(step)
        worker = random.choice(self.workers)  # noqa: S311  # no secret
        worker.kill()
        worker.join()
        return bool(worker.exitcode == -signal.SIGKILL)

    def start(self, index: int) -> Any:
        """Start one actor."""
        worker = self.hire(target=self.act, args=(index, self.plan, self.masters, self.states), daemon=True)
        worker.start()
        return worker

    def replace_killed(self, step: int) -> None:
        """Start those anew that were killed before they had done this step."""
        for index, worker in enumerate(self.workers):
            if not worker.is_alive() and any(self.states[name].version < step for name in self.plan.names(index)):
                if not self.plan.processes or worker.exitcode >= 0:
                    raise SystemExit(f"actor {index} failed in step {step}")
                self.workers[index] = self.start(index)
