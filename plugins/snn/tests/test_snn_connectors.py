"""Connectors: the numbers of synapses, their distribution, memory, and what is refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from scipy import stats

from q4_snn import LIF, Population, SparseProjection
from q4_snn.connectors import (
    bernoulli,
    by_distance,
    fixed_in_degree,
    fixed_out_degree,
    fixed_total_number,
    one_to_one,
)
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator."""
    return torch.Generator().manual_seed(seed)


def uniform(counts: torch.Tensor) -> float:
    """Return the p-value of counts that are to be equal but for chance."""
    expected = counts.double().mean().expand(len(counts))
    return float(stats.chisquare(counts.numpy(), expected.numpy()).pvalue)


PLACES = torch.rand(200, 2, generator=seeded())
MAKE: dict[str, Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]] = {
    "bernoulli": lambda g: bernoulli(200, 200, 0.1, generator=g),
    "in": lambda g: fixed_in_degree(200, 200, 20, generator=g),
    "in, once": lambda g: fixed_in_degree(200, 200, 20, generator=g, multapses=False),
    "out": lambda g: fixed_out_degree(200, 200, 20, generator=g),
    "out, mostly": lambda g: fixed_out_degree(200, 200, 150, generator=g, multapses=False),
    "total": lambda g: fixed_total_number(200, 200, 4000, generator=g),
    "distance": lambda g: by_distance(
        torch.rand(200, 2, generator=seeded()),
        torch.rand(200, 2, generator=seeded(1)),
        lambda d: 0.1 + 0 * d,
        generator=g,
    ),
}


@pytest.mark.parametrize("name", MAKE)
def test_seeds_and_indices(name: str) -> None:
    """The same seed gives the same synapses, another one others; indices are int64 of the populations."""
    make = MAKE[name]
    source, target = make(seeded(3))
    for index in (source, target):
        assert index.dtype is torch.int64
        assert int(index.min()) >= 0
        assert int(index.max()) < 200
    assert all(torch.equal(a, b) for a, b in zip((source, target), make(seeded(3)), strict=True))
    other = make(seeded(4))
    assert len(other[0]) != len(source) or not torch.equal(torch.stack(other), torch.stack((source, target)))


@pytest.mark.parametrize("name", MAKE)
def test_every_pair_is_equally_likely(name: str) -> None:
    """Over many draws no source, no target and no diagonal of pairs is preferred (χ² tests, 1 of 10⁵)."""
    counts = {"source": torch.zeros(200), "target": torch.zeros(200), "apart": torch.zeros(200)}
    generator = seeded(11)
    for _ in range(20):
        source, target = MAKE[name](generator)
        for kind, index in (("source", source), ("target", target), ("apart", (source - target) % 200)):
            counts[kind] += torch.bincount(index, minlength=200)
    for kind, found in counts.items():
        if float(found.std()) > 0:  # else the number is fixed
            assert uniform(found) > 1e-5, kind


def test_numbers_of_synapses() -> None:
    """Fixed numbers are exact; Bernoulli's is binomial, for each pair on its own."""
    source, target = fixed_in_degree(50, 30, 7, generator=seeded())
    assert torch.bincount(target, minlength=30).eq(7).all()
    assert len(source) == 210
    source, target = fixed_out_degree(50, 30, 7, generator=seeded())
    assert torch.bincount(source, minlength=50).eq(7).all()
    assert len(fixed_total_number(50, 30, 999, generator=seeded())[0]) == 999
    totals = torch.tensor([len(bernoulli(40, 60, 0.2, generator=seeded(seed))[0]) for seed in range(400)]).double()
    mean, variance = 2400 * 0.2, 2400 * 0.2 * 0.8
    assert abs(float(totals.mean()) - mean) < 5 * math.sqrt(variance / 400)
    assert float(totals.var()) == pytest.approx(variance, rel=5 * math.sqrt(2 / 400))
    pairs = torch.stack(bernoulli(40, 60, 0.2, generator=seeded()))
    assert pairs.unique(dim=1).shape == pairs.shape
    assert len(bernoulli(3, 4, 1.0, generator=seeded())[0]) == 12
    assert len(bernoulli(3, 4, 0.0, generator=seeded())[0]) == 0
    assert [item.tolist() for item in one_to_one(3, 3)] == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("degree", [0, 1, 5, 10, 13, 19, 20])
def test_no_pair_twice(degree: int) -> None:
    """Without multapses no pair is joined twice, and without autapses no neuron reaches itself."""
    for autapses in (True, False):
        if degree == 20 and not autapses:
            continue
        for make in (fixed_in_degree, fixed_out_degree):
            pairs = torch.stack(make(20, 20, degree, generator=seeded(), autapses=autapses, multapses=False))
            assert pairs.unique(dim=1).shape == pairs.shape == (2, 20 * degree)
            assert autapses or not bool((pairs[0] == pairs[1]).any())


def test_sets_are_uniform() -> None:
    """Each of the sets of two or of four out of five sources is drawn as often as any other."""
    for degree in (2, 4):
        source, _ = fixed_in_degree(5, 20_000, degree, generator=seeded(5), multapses=False)
        codes = (1 << source.view(-1, degree)).sum(1)
        counts = torch.bincount(codes)
        assert int((counts > 0).sum()) == math.comb(5, degree)
        assert uniform(counts[counts > 0]) > 1e-5


def test_no_autapses() -> None:
    """Without autapses all others are equally likely."""
    for pairs in (
        bernoulli(30, 30, 0.5, generator=seeded(), autapses=False),
        fixed_in_degree(30, 30, 2000, generator=seeded(), autapses=False),
        fixed_total_number(30, 30, 60_000, generator=seeded(), autapses=False),
    ):
        assert not bool((pairs[0] == pairs[1]).any())
        counts = torch.bincount((pairs[0] - pairs[1]) % 30, minlength=30)[1:]
        assert uniform(counts) > 1e-5


def test_distance() -> None:
    """The share of pairs that are joined at a distance is its probability; a period joins across the border."""
    a, b = torch.rand(600, 2, generator=seeded(1)), torch.rand(700, 2, generator=seeded(2))
    source, target = by_distance(a, b, lambda d: (-d / 0.2).exp(), generator=seeded(3))
    every, joined = torch.cdist(a.double(), b.double()), torch.zeros(600, 700)
    joined[source, target] = 1
    for low in torch.linspace(0, 0.9, 10).tolist():
        inside = (every >= low) & (every < low + 0.1)
        wanted = (-every[inside] / 0.2).exp()
        spread = float((wanted * (1 - wanted)).sum().sqrt())
        assert abs(float(joined[inside].sum()) - float(wanted.sum())) < 5 * spread
    line = torch.tensor([[0.0], [0.3], [0.9]])
    near = by_distance(line, line, lambda d: (d < 0.2).double(), generator=seeded(), period=1.0, autapses=False)
    assert torch.stack(near).T.tolist() == [[0, 2], [2, 0]]


def test_memory_is_that_of_the_synapses() -> None:
    """Two populations of 200,000, 4 · 10¹⁰ pairs, are joined by some synapses in memory for these."""
    size = 200_000
    make: Any
    for make in (
        lambda: bernoulli(size, size, 1e-5, generator=seeded()),
        lambda: fixed_in_degree(size, size, 2, generator=seeded(), multapses=False),
        lambda: fixed_total_number(size, size, 400_000, generator=seeded()),
    ):
        source, _ = make()
        assert 350_000 < len(source) < 450_000


def test_synapses_of_a_connector() -> None:
    """A projection takes what a connector gives, with one weight and one delay for all, and populations as sizes."""
    a, b = Population("a", 40, LIF(1e-2)), Population("b", 30, LIF(1e-2))
    made = SparseProjection(*fixed_in_degree(a, b, 5, generator=seeded()), 0.5, 3, sources=a, targets=b)
    target, weight, delay = made.synapses_of(torch.arange(40))
    assert torch.bincount(target).eq(5).all()
    assert weight.eq(0.5).all()
    assert delay.eq(3).all()
    with pytest.raises(InputError, match="delay must be in 1 … 255"):
        SparseProjection(*one_to_one(3, 3), 0.5, 0, sources=3, targets=3)


def test_refused() -> None:
    """What can't be is an error that names the argument."""
    g = seeded()
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: one_to_one(3, 4), "targets"),
        (lambda: one_to_one(0, 0), "sources"),
        (lambda: bernoulli(3, True, 0.5, generator=g), "targets"),
        (lambda: bernoulli(3, 4, 1.5, generator=g), "probability"),
        (lambda: bernoulli(3, 4, math.nan, generator=g), "probability"),
        (lambda: bernoulli(3, 4, 0.5, generator=g, autapses=False), "autapses"),
        (lambda: fixed_in_degree(3, 3, 4, generator=g, multapses=False), "degree"),
        (lambda: fixed_in_degree(3, 3, 3, generator=g, multapses=False, autapses=False), "degree"),
        (lambda: fixed_in_degree(1, 1, 2, generator=g, autapses=False), "degree"),
        (lambda: fixed_out_degree(3, 3, -1, generator=g), "degree"),
        (lambda: fixed_total_number(3, 3, 0.5, generator=g), "count"),  # type: ignore[arg-type]  # wrong on purpose
        (lambda: fixed_total_number(1, 1, 5, generator=g, autapses=False), "autapses"),
        (lambda: by_distance(torch.zeros(2, 1), torch.zeros(2, 1), lambda d: d, generator=g, period=0.0), "period"),
    ]
    for call, name in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.name == name
    place = torch.zeros(2, 1)
    for sources, function, name in (
        (torch.zeros(2), lambda d: d, "sources"),
        (torch.full((2, 1), math.inf), lambda d: d, "sources"),
        (torch.zeros(2, 3), lambda d: d, "targets"),
        (place, lambda d: d + 2, "probability"),
        (place, lambda d: d * math.nan, "probability"),
        (place, lambda d: d[0], "probability"),
    ):
        with pytest.raises(InputError) as wrong:
            by_distance(sources, place, function, generator=g)
        assert wrong.value.name == name
