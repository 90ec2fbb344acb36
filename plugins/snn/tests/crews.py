"""Networks for crews of actors, whose processes may be killed, where every process can import them."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import torch

from q4_snn import LI, LIF, Network, Population, Projection, SparseProjection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RECORD = ("a", "a.mem", "b", "out")


class Mortal(LIF):
    """Neurons whose process is killed in some of the steps that they do, counted over all of their processes."""

    path: Path | None = None
    fatal: frozenset[int] = frozenset()

    def forward(self, x: torch.Tensor, *state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Step, or die."""
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(b".")
                count = file.tell()
            if count in self.fatal:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x, *state)


def made(path: Path | None = None, fatal: Sequence[int] = ()) -> Network:
    """Return populations with sparse synapses of several delays, recurrent ones, and a cycle over two actors."""
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    neuron = Mortal(1e-3)
    neuron.path, neuron.fatal = path, frozenset(fatal)
    pixels, a = Population("pixels", 30, spikes=True), Population("a", 70, neuron)
    b, out = Population("b", 70, LIF(1e-3)), Population("out", 5, LI(1e-3))

    def sparse(source: Population, target: Population) -> SparseProjection:
        origin, end = (torch.randint(size, (600,), generator=random) for size in (source.size, target.size))
        steps = torch.randint(1, 7, (600,), generator=random)
        weight = 0.3 * torch.rand(600, generator=random)
        return SparseProjection(origin, end, weight, steps, sources=source, targets=target)

    return Network(
        [pixels, a, b, out],
        [sparse(pixels, a), sparse(a, b), Projection(a, b, name="dense"), sparse(b, a), Projection(b, out, delay=3)],
    )


def spikes(steps: int, batch: int = 2) -> torch.Tensor:
    """Return random spikes [T, B, 30]."""
    return (torch.rand(steps, batch, 30, generator=torch.Generator().manual_seed(1)) < 0.2).float()


def expect_same(parts: Sequence[dict[str, torch.Tensor]], x: torch.Tensor) -> None:
    """Expect the bits of the network in one process."""
    with torch.no_grad():
        expected, _ = made()(x, record=RECORD)
    assert 0.02 < expected["a"].mean() < 0.98
    assert 0.02 < expected["b"].mean() < 0.98
    for name in RECORD:
        assert torch.equal(torch.cat([part[name] for part in parts]), expected[name]), name
