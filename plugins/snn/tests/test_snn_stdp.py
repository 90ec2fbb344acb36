"""STDP over 4-bit synapses: the direction and the mean of changes, the grid, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
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


@pytest.mark.parametrize("columns", [784, 100, 63])
def test_blocks_that_run_across_rows(columns: int) -> None:
    """A weight whose rows are no whole blocks learns as one whose rows are, and its scales stay where they were."""
    weight = q4.quantize(torch.randn(7, columns, generator=torch.Generator().manual_seed(0)), "nf4")
    before, rule = q4.dequantize(weight), STDP(weight, a_plus=10.0)
    assert torch.equal(q4.dequantize(rule.weight), before)
    last = columns - 1
    assert rule.step(events(last, size=columns), events(5, size=7)) == 1
    after = q4.dequantize(rule.weight)
    assert (after != before).nonzero().tolist() == [[5, last]]
    scale = weight.scale[(5 * columns + last) // weight.block_size]
    assert after[5, last] == scale  # the highest level of its own block
    with q4.Session() as session:
        x = torch.eye(columns)[last:]
        assert torch.allclose(session.linear(rule.weight)(x), after[:, last], rtol=1e-2, atol=1e-2)


def test_a_copy_goes_on_with_the_same_numbers() -> None:
    """A rule that was copied or pickled between two steps learns what the first one learns."""
    rule = STDP(weights(), a_plus=0.03, seed=5)
    rule.step(torch.ones(1, 128), torch.ones(1, 6))
    others = copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))  # noqa: S301  # of this test
    for item in (rule, *others):
        assert item.step(torch.ones(1, 128), torch.ones(1, 6)) > 0
    assert all(torch.equal(item.weight.qdata, rule.weight.qdata) for item in others)
    assert not torch.equal(rule.weight.qdata, weights().qdata)


def test_spikes_alone() -> None:
    """What is no spike is refused, and nothing is learnt; bool and whole numbers are spikes as floats are."""
    good = events(3, size=128), events(2, size=6)
    rule = STDP(weights(), a_plus=0.5)
    for wrong in (math.nan, 0.5, -1.0, math.inf):
        for name, pair in (("sources", (good[0] * wrong, good[1])), ("targets", (good[0], good[1] * wrong))):
            with pytest.raises(InputError, match=f"STDP: {name} must be 0 and 1 alone, got"):
                rule.step(*pair)
    rule.step(0 * good[0], good[1])  # nothing came before
    assert torch.equal(rule.weight.qdata, weights().qdata)
    for dtype in (torch.bool, torch.int64, torch.float64):
        other = STDP(weights(), a_plus=0.5)
        assert other.step(good[0].to(dtype), good[1].to(dtype)) == 1
    held = STDP(weights())
    held.step(good[0].requires_grad_(), good[1])
    assert held._traces is not None
    assert not held._traces[0].requires_grad


def test_refused() -> None:
    """Numbers out of range, formats without a grid of that kind and spikes of another size are errors."""
    options: list[dict[str, Any]] = [{"a_plus": -1.0}, {"tau_plus": 1e-4}, {"dt": math.nan}]
    options += [{"a_minus": torch.nn.Parameter(torch.ones(()))}, {"tau_minus": True}]
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
