"""What NEST, Brian2 and Norse computed for single neurons, written by ``plugins/snn/tests/golden``."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

__all__ = ["case", "run", "steps_of"]

_FOLDER = Path(__file__).parents[2] / "plugins" / "snn" / "tests" / "golden"


@functools.cache
def _golden(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_FOLDER / file).read_text(encoding="utf-8"))
    return found


def case(name: str, file: str = "simulators.json") -> dict[str, Any]:
    """Return what a simulator computed; currents and states over time as float64."""
    found = _golden(file)["cases"][name]
    names = {"x", "v", "u", "w", "rho", "ex", "in"} & {*found}
    return {**found, **{key: torch.tensor(found[key], dtype=torch.float64) for key in names}}


def steps_of(which: str) -> list[int]:
    """Return the steps in which ``exciting`` or ``inhibiting`` spikes reach NEST's neurons."""
    found: list[int] = _golden("simulators.json")[which]
    return found


def run(neuron: torch.nn.Module, x: torch.Tensor, *state: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
    """Return the steps in which a neuron fires under currents [T], and each of its states over time."""
    fired, states = [], []
    with torch.no_grad():
        for step, current in enumerate(x):
            spikes, *after = neuron(current[None], *state)
            state = tuple(after)
            states.append(torch.cat(after))
            fired += [step] if spikes else []
    return fired, [*torch.stack(states).unbind(1)]
