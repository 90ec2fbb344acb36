"""STDP over 4-bit synapses: the direction and the mean of changes, the grid, and what is refused."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import q4core as q4
from q4_snn import STDP, STDPRule
from q4_snn.stdp import Traces, dense_changes
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


def change_of(rule: STDPRule, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return by how much a rule changes synapses [N, K] without rounding, for spikes [T, B, …]."""
    traces = Traces.none(sources[0], targets[0])
    total = torch.zeros(targets.shape[2] * sources.shape[2], dtype=sources.dtype)
    for fired_in, fired_out in zip(sources, targets, strict=True):
        change, traces = rule.advance(traces, fired_in, fired_out)
        index, amount = dense_changes(change)
        assert len(index.unique()) == len(index)
        total[index] += amount
    return total.view(targets.shape[2], sources.shape[2])


def times(step: list[float], size: int) -> torch.Tensor:
    """Return spikes [T, 1, 1] at whole ms."""
    return torch.zeros(size, 1, 1, dtype=torch.float64).index_fill_(0, torch.tensor(step, dtype=torch.int64), 1.0)


CASES = json.loads((Path(__file__).parent / "golden" / "stdp.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{len(case['rule'])} numbers")
def test_changes_are_those_of_nest_and_brian(case: dict[str, Any]) -> None:
    """For pairs and for triplets, a synapse changes by what NEST and Brian2 change it by."""
    rule = STDPRule(**{name: value * (1e-3 if "tau" in name else 1) for name, value in case["rule"].items()})
    found = change_of(rule, times(case["sources"], 430), times(case["targets"], 430))
    for name, expected in case["change"].items():
        assert float(found) == pytest.approx(expected, rel=1e-9), name


@pytest.mark.parametrize("nearest", [False, True])
def test_changes_are_those_of_the_published_rule(*, nearest: bool) -> None:
    """Sums over pairs and triplets of single spikes, in float64 and without traces, give the same changes."""
    rule = STDPRule(a3_plus=0.02, a3_minus=0.015, tau_x=40e-3, tau_y=60e-3, tau_minus=30e-3, nearest=nearest)
    random = np.random.default_rng(1)
    sources, targets = random.random((120, 2, 3)) < 0.1, random.random((120, 2, 4)) < 0.1
    expected = np.zeros((4, 3))

    def trace(train: Any, before: int, tau: float) -> float:
        gaps = [before - step for step in np.flatnonzero(train) if step < before]
        shares = np.exp(-np.array(gaps[-1:] if nearest else gaps) * 1e-3 / tau)
        return float(shares.sum())

    for sample, n, k in itertools.product(range(2), range(4), range(3)):
        pre, post = sources[:, sample, k], targets[:, sample, n]
        for step in np.flatnonzero(post).tolist():
            r1 = 1.0 if pre[step] and nearest else trace(pre, step, rule.tau_plus) + pre[step]
            expected[n, k] += r1 * (rule.a_plus + rule.a3_plus * trace(post, step, rule.tau_y))
        for step in np.flatnonzero(pre).tolist():
            o1 = trace(post, step, rule.tau_minus)
            expected[n, k] -= o1 * (rule.a_minus + rule.a3_minus * trace(pre, step, rule.tau_x))
    found = change_of(rule, torch.from_numpy(sources).double(), torch.from_numpy(targets).double())
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


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
    assert not held._traces.sources.requires_grad


def test_refused() -> None:
    """Numbers out of range, formats without a grid of that kind and spikes of another size are errors."""
    options: list[dict[str, Any]] = [{"a_plus": -1.0}, {"tau_plus": 1e-4}, {"dt": math.nan}]
    options += [{"a3_plus": -0.1}, {"tau_y": 0.0}, {"a3_minus": math.inf}]
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
