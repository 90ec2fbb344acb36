"""STDP over 4-bit synapses: the direction and the mean of changes, the grid, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import q4core as q4
from q4_snn import STDP
from q4core import ConfigError, FormatError, InputError


def weights(kind: str = "nf4") -> q4.PackedWeight:
    """Return a random weight [6, 128]."""
    return q4.quantize(torch.randn(6, 128, generator=torch.Generator().manual_seed(0)), kind)


def events(*fired: int, size: int) -> torch.Tensor:
    """Return the spikes [1, size] of some neurons."""
    return torch.zeros(1, size).index_fill_(1, torch.tensor(fired, dtype=torch.int64), 1.0)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "q4_0"])
def test_direction_and_grid(kind: str) -> None:
    """A source before its target strengthens, a source after it weakens; all weights are levels times their scale."""
    weight = weights(kind)
    before = q4.dequantize(weight)
    rule = STDP(weight, a_plus=0.05, a_minus=0.05)
    quiet = events(size=128), events(size=6)
    for _ in range(40):
        rule.step(events(3, size=128), quiet[1])
        rule.step(quiet[0], events(2, size=6))
        rule.step(events(70, size=128), quiet[1])
        for _ in range(200):
            rule.step(*quiet)
    after = q4.dequantize(rule.weight)
    assert after[2, 3] > before[2, 3]
    assert after[2, 70] < before[2, 70]
    changed = (after != before).nonzero().tolist()
    assert changed == [[2, 3], [2, 70]]
    assert torch.equal(rule.weight.scale, weight.scale)
    assert torch.equal(q4.dequantize(weight), before)
    level = after / weight.scale.repeat_interleave(weight.block_size, 1)
    levels = torch.tensor(weight.format.codebook)
    assert (level[..., None] - levels).abs().min(-1).values.max() < 1e-6
    assert set(rule.weight.codes().unique().tolist()) <= set(range(16))


def test_the_mean_is_the_float_rule() -> None:
    """Over many synapses the mean change is that of the rule in float: a · exp(-t / tau) for a pair t apart."""
    weight = q4.quantize(torch.rand(512, 128, generator=torch.Generator().manual_seed(0)) - 0.5, "nf4")
    rule = STDP(weight, a_plus=0.004, tau_plus=10e-3, dt=1e-3, seed=7)
    sources, targets = torch.ones(1, 128), torch.ones(1, 512)
    rule.step(sources, 0 * targets)
    for _ in range(4):
        assert rule.step(0 * sources, 0 * targets) == 0
    moved = rule.step(0 * sources, targets)
    inner = q4.dequantize(weight).abs() < 0.4  # none of these meets an end of its grid
    change = (q4.dequantize(rule.weight) - q4.dequantize(weight))[inner]
    expected = 0.004 * math.exp(-0.5)
    assert 0 < moved < change.numel() / 2
    assert abs(float(change.mean()) - expected) < 5 * float(change.std()) / math.sqrt(change.numel())
    assert float(change.std()) / math.sqrt(change.numel()) < expected / 20


def test_pairs_in_one_step_and_batches() -> None:
    """A pair in the same step strengthens; the changes of a batch add up."""
    rule = STDP(weights(), a_plus=0.1)
    assert rule.step(torch.ones(1, 128), torch.ones(1, 6)) > 0
    change = q4.dequantize(rule.weight) - q4.dequantize(weights())
    assert change.min() == 0
    assert change.max() > 0
    one, two = STDP(weights(), a_plus=0.02), STDP(weights(), a_plus=0.01)
    for rule, batch in ((one, 1), (two, 2)):
        rule.step(torch.ones(batch, 128), torch.zeros(batch, 6))
        rule.step(torch.zeros(batch, 128), torch.ones(batch, 6))
    assert torch.equal(one.weight.qdata, two.weight.qdata)


def test_refused() -> None:
    """Numbers out of range, formats without a grid of that kind and spikes of another size are errors."""
    options: list[dict[str, Any]] = [{"a_plus": -1.0}, {"tau_plus": 1e-4}, {"dt": math.nan}]
    for option in options:
        with pytest.raises(ConfigError) as caught:
            STDP(weights(), **option)
        assert caught.value.name == next(iter(option))
    for kind in ("nvfp4", "q4_1", "int4"):
        with pytest.raises(FormatError):
            STDP(weights(kind))
    with pytest.raises(InputError, match=r"targets must be of shape \[B, 6\]"):
        STDP(weights()).step(torch.zeros(1, 128), torch.zeros(1, 5))
    rule = STDP(weights())
    rule.step(torch.zeros(1, 128), torch.zeros(1, 6))
    with pytest.raises(InputError, match="sources must be a batch of 1"):
        rule.step(torch.zeros(3, 128), torch.zeros(3, 6))
