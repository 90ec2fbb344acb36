"""The laws of sampling."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q4_lm.generation.sampling import Sampler
from q4core import ConfigError, InputError

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.5, 3.5, 0.0, -2.0])
vectors = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40).map(torch.tensor)


def test_greedy_is_the_default() -> None:
    """Without a temperature the likeliest token is chosen, the first of equals."""
    assert Sampler()(LOGITS) == 5
    assert Sampler()(torch.tensor([1.0, 4.0, 4.0])) == 1
    assert Sampler(top_k=3, top_p=0.1, seed=9)(LOGITS) == 5


def test_a_greatest_logit_that_is_known() -> None:
    """Greedy takes the given index, but no NaN or infinity; drawing ignores it."""
    assert Sampler()(LOGITS, 5) == 5
    for value in (math.nan, math.inf):
        with pytest.raises(InputError, match="finite"):
            Sampler()(torch.tensor([0.0, value]), 1)
    drawn = [Sampler(1.0, seed=4)(LOGITS, best) for best in (None, 5)]
    assert drawn[0] == drawn[1]


@settings(max_examples=100)
@given(logits=vectors, temperature=st.floats(0.05, 5))
def test_temperature_divides_logits(logits: torch.Tensor, temperature: float) -> None:
    """Probabilities are the softmax of logits over temperature."""
    expected = (logits.double() / temperature).softmax(-1)
    result = Sampler(temperature=temperature).probabilities(logits)
    assert torch.allclose(result.double(), expected, rtol=1e-3, atol=1e-6)


@settings(max_examples=100)
@given(logits=vectors, k=st.integers(1, 40))
def test_top_k_keeps_the_likeliest(logits: torch.Tensor, k: int) -> None:
    """At least k tokens stay (all that tie with the last one too), none of them less likely than one that went."""
    left = Sampler(temperature=1.0, top_k=k).probabilities(logits) > 0
    least = logits.sort(descending=True).values[min(k, logits.numel()) - 1]
    # Probabilities too small for float32 are zero whatever k is.
    possible = (logits - logits.max()).softmax(-1) > 0
    assert torch.equal(left, (logits >= least) & possible)


@settings(max_examples=100)
@given(logits=vectors, p=st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_that_reach_p(logits: torch.Tensor, p: float) -> None:
    """The remaining probabilities reach p, and without the least of them they would not."""
    full = logits.softmax(-1)
    left = full[Sampler(temperature=1.0, top_p=p).probabilities(logits) > 0].sort().values.double()
    assert left.numel() >= 1
    assert float(left.sum()) >= p - 1e-5
    assert float(left[1:].sum()) < p + 1e-5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.95, 0.999])
@pytest.mark.parametrize(("k", "temperature"), [(0, 0.8), (300, 0.8), (0, 50.0)])
def test_a_large_vocabulary_is_cut_as_a_sort_of_all_would(p: float, k: int, temperature: float) -> None:
    """Of 50,000 tokens those are kept whose likelier ones have less than p, in float64 over all of them."""
    logits = 3 * torch.randn(50_000, generator=torch.Generator().manual_seed(7))
    left = Sampler(temperature, top_k=k, top_p=p).probabilities(logits) > 0
    shares, order = (logits.double() / temperature).sort(descending=True).values, logits.argsort(descending=True)
    shares = shares[: k or None].softmax(-1)
    before = shares.cumsum(-1) - shares
    at_the_edge = order[: k or None][(before - p).abs() < 1e-5]
    expected = torch.zeros_like(left).index_fill_(0, order[: k or None][before < p], value=True)
    assert not (left != expected).index_fill_(0, at_the_edge, value=False).any()
    assert left.any()


def test_drawing_is_left_to_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile neither this thread's number afterwards nor that of a thread which begins is another one."""
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)
    real = torch.searchsorted

    def look(*given: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        return real(*given)

    monkeypatch.setattr(torch, "searchsorted", look)
    try:
        Sampler(temperature=1.0)(LOGITS)
        assert (seen, torch.get_num_threads()) == ([1, 3], 3)
        with pytest.raises(InputError):
            Sampler(temperature=1.0)(LOGITS * math.nan)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@given(logits=vectors)
def test_probabilities_sum_to_one(logits: torch.Tensor) -> None:
    """Whatever was left out, the rest is a distribution."""
    for sampler in (Sampler(temperature=0.7, top_k=3, top_p=0.8), Sampler(temperature=1e-4), Sampler()):
        assert math.isclose(float(sampler.probabilities(logits).sum()), 1.0, rel_tol=1e-5)


def test_seed_fixes_the_draws() -> None:
    """The same seed gives the same tokens; another one gives others."""
    draws = [[sampler(LOGITS) for _ in range(50)] for sampler in map(make, (4, 4, 5))]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def make(seed: int) -> Sampler:
    """Return a warm sampler."""
    return Sampler(temperature=1.0, seed=seed)


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_the_least_temperature_is_as_good_as_greedy(options: dict[str, Any]) -> None:
    """A divisor that float32 can't hold makes no NaN."""
    for temperature in (5e-324, 1e-46, 1e-38):
        assert Sampler(temperature, **options)(LOGITS) == 5


def test_draws_follow_the_probabilities() -> None:
    """Frequencies of 5,000 draws lie within five standard deviations of the probabilities."""
    sampler, count = Sampler(temperature=1.3, top_k=5, seed=1), 5_000
    shares = sampler.probabilities(LOGITS).double()
    drawn = torch.bincount(torch.tensor([sampler(LOGITS) for _ in range(count)]), minlength=LOGITS.numel()).double()
    deviation = (count * shares * (1 - shares)).sqrt()
    assert bool(((drawn - count * shares).abs() <= 5 * deviation).all())
    assert drawn[shares == 0].sum() == 0


def test_half_precision_logits() -> None:
    """bfloat16 logits are drawn from in float32."""
    assert Sampler(temperature=1.0).probabilities(LOGITS.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_must_be_finite(bad: float) -> None:
    """A wrong number in the logits is an error and never a token."""
    logits = LOGITS.clone()
    logits[3] = bad
    for sampler in (Sampler(), Sampler(temperature=1.0)):
        with pytest.raises(InputError, match="logits must be finite"):
            sampler(logits)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_illegal_values(name: str, value: Any) -> None:
    """A value out of range is refused by name and rule."""
    with pytest.raises(ConfigError) as caught:
        Sampler(**{name: value})
    assert (caught.value.name, caught.value.value) == (name, value)
