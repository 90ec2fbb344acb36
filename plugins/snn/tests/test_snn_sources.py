"""Sources: the same bits for any chunks, the rates and times that were asked for, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from q4_snn import Poisson, PoissonInput, Regular, SpikeTimes
from q4_snn.sources import uniform_words
from q4core import ConfigError, InputError

SOURCES = {
    "poisson": lambda **options: Poisson(70, 200.0, dt=1e-3, **options),
    "rates": lambda **options: Poisson(70, torch.linspace(0, 1000, 70), dt=1e-3, **options),
    "input": lambda **options: PoissonInput(70, torch.linspace(0, 3000, 70), 0.5, dt=1e-3, **options),
    "regular": lambda **options: Regular(70, torch.linspace(1e-3, 0.02, 70), dt=1e-3, **options),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_the_same_spikes_for_any_chunks(kind: str) -> None:
    """Chunks of any length, single steps, and the iterator give the spikes of one call; so does a longer batch."""
    make: Any = SOURCES[kind]
    whole = make(batch=3, seed=7).draw(0, 150)
    assert whole.shape == (150, 3, 70)
    for cuts in ([0, 1, 2, 64, 65, 150], [0, 37, 150], [*range(151)]):
        parts = [make(batch=3, seed=7).draw(a, b - a) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(torch.stack([*itertools.islice(make(batch=3, seed=7), 150)]), whole)
    assert torch.equal(make(batch=5, seed=7).draw(20, 9)[:, :3], whole[20:29])
    assert not torch.equal(make(batch=3, seed=8).draw(0, 150), whole)
    assert not torch.equal(whole[:, 0], whole[:, 1])


@pytest.mark.parametrize("size", [1, 63, 64, 65, 130])
def test_bits_are_the_spikes(size: int) -> None:
    """Bit i of word w is neuron 64 w + i; what is beyond the neurons is 0."""
    source = Poisson(size, 300.0, dt=1e-3, batch=2, seed=1)
    words, spikes = source.bits(5, 11), source.draw(5, 11)
    assert (words.dtype, words.shape) == (torch.int64, (11, 2, -(-size // 64)))
    for neuron in range(64 * words.shape[-1]):
        bit = words[..., neuron // 64] >> (neuron % 64) & 1
        assert torch.equal(bit.float(), spikes[..., neuron] if neuron < size else torch.zeros(11, 2))


def test_the_rates_are_those_of_a_poisson_process() -> None:
    """Counts have the mean and the variance of independent trials, neurons and steps are uncorrelated."""
    rates, dt, steps = torch.tensor([0.0, 5.0, 100.0, 900.0, 1000.0]), 1e-3, 40_000
    spikes = Poisson(5, rates, dt=dt, batch=4, seed=3).draw(0, steps).double()
    share = spikes.mean((0, 1))
    for neuron, rate in enumerate(rates.tolist()):
        p, trials = rate * dt, steps * 4
        assert abs(float(share[neuron]) - p) <= 5 * math.sqrt(p * (1 - p) / trials)
    flat = spikes[:, 0] - spikes[:, 0].mean(0)
    pairs = [(flat[:, 2], flat[:, 3]), (flat[1:, 2], flat[:-1, 2]), (flat[8:, 3], flat[:-8, 3])]
    pairs.append((flat[:, 3], spikes[:, 1, 3] - spikes[:, 1, 3].mean()))
    for a, b in pairs:
        correlation = float((a * b).mean() / (a.std() * b.std()))
        assert abs(correlation) < 5 / math.sqrt(steps)
    gaps = spikes[:, 0, 2].nonzero().flatten().diff().double()  # geometric: standard deviation = mean · √(1 - p)
    assert float(gaps.std() / gaps.mean()) == pytest.approx(math.sqrt(0.9), abs=5 / math.sqrt(len(gaps)))


@pytest.mark.parametrize("rates", [1, 8, 100])
def test_input_of_many_sources_has_poisson_numbers(rates: int) -> None:
    """Each number is the quantile of its 32 random bits, whether it is looked up or counted."""
    size, steps, dt = 200, 1000, 1e-3
    rate = torch.linspace(0, 4000, rates).repeat(-(-size // rates))[:size] if rates > 1 else torch.tensor(1600.0)
    weight = torch.linspace(-2, 2, size)
    found = PoissonInput(size, rate if rates > 1 else 1600.0, weight, dt=dt, seed=5).draw(3, steps)[:, 0]
    uniform = (uniform_words(5, 0, 3, steps, size) + 0.5) * 2.0**-32
    for neuron in range(size):
        mean = float(rate.expand(size)[neuron]) * dt
        chances = np.cumsum([math.exp(-mean) * mean**k / math.factorial(k) for k in range(60)])
        wanted = np.searchsorted(chances, uniform[:, neuron], side="right").astype(np.float32) * np.float32(
            weight[neuron]
        )
        assert np.array_equal(found[:, neuron].numpy(), wanted), neuron


def test_input_of_many_sources_has_their_mean_and_variance() -> None:
    """Over many steps, as of a Poisson process whose rate is the sum of all rates; neurons are not correlated."""
    rates = torch.tensor([0.0, 20.0, 1280.0, 23_200.0, 1_280_000.0])
    found = PoissonInput(5, rates, dt=1e-4, batch=2, seed=1).draw(0, 60_000).double()
    means, count = rates * 1e-4, 2 * 60_000
    for neuron, mean in enumerate(means.tolist()):
        numbers = found[..., neuron]
        assert abs(float(numbers.mean()) - mean) <= 5 * math.sqrt(mean / count)
        assert abs(float(numbers.var()) - mean) <= 5 * math.sqrt((2 * mean**2 + mean) / count)
    assert abs(float(torch.corrcoef(found[:, 0, 1:].T)[0, 1:].abs().max())) < 5 / math.sqrt(60_000)
    with pytest.raises(InputError, match="single spikes"):
        PoissonInput(5, rates).bits(0, 1)


def test_random_numbers_are_numpys_philox() -> None:
    """A spike is a number of Philox4x64-10 below rate · dt, by a counter that the step alone decides."""
    source = Poisson(11, 250.0, dt=1e-3, batch=3, seed=0x1234567890ABCDEF)
    raw = np.random.Philox(key=np.array([0x1234567890ABCDEF, 2], np.uint64), counter=2 * 9).random_raw(8)
    numbers = [int(word) >> shift & 0xFFFFFFFF for word in raw for shift in (0, 32)][:11]
    assert source.draw(9, 1)[0, 2].tolist() == [float(number < 0.25 * 2**32) for number in numbers]


def test_regular_spikes_come_at_their_times() -> None:
    """Spike k is in step ⌊(start + k · interval) / dt⌋, also where that is a whole number but for rounding."""
    for interval, start, dt in ((0.01, 0.0, 1e-3), (0.0037, 0.002, 1e-4), (1e-3, 0.0, 1e-3), (0.3, 0.1, 0.1)):
        found = Regular(1, interval, start=start, dt=dt).draw(0, 500).flatten().nonzero().flatten().tolist()
        times = [round(start * 1e6) + k * round(interval * 1e6) for k in range(501)]  # whole microseconds
        assert found == [step for step in (time // round(dt * 1e6) for time in times) if step < 500]
    drawn = Regular(4000, 0.05, dt=1e-3, seed=2).draw(0, 100)[:, 0]
    assert drawn.sum(0).eq(2).all()
    first = drawn.argmax(0).double()
    assert float(first.mean()) == pytest.approx(24.5, abs=5 * math.sqrt(50**2 / 12 / 4000))


def test_stated_times() -> None:
    """Spikes are where they were stated, for each sample; two of a neuron in one step are one."""
    source = SpikeTimes(3, [[0.0, 0.0042, 0.0043, 0.002], [0.003]], [[0, 2, 2, 1], [0]], dt=1e-3)
    assert (source.batch, source.steps) == (2, 5)
    expected = torch.zeros(6, 2, 3)
    expected[0, 0, 0] = expected[4, 0, 2] = expected[2, 0, 1] = expected[3, 1, 0] = 1
    assert torch.equal(source.draw(0, 6), expected)
    assert torch.equal(source.draw(3, 2), expected[3:5])
    one = SpikeTimes(3, torch.tensor([1e-3]), torch.tensor([2]), dt=1e-3)
    assert one.draw(0, 2).nonzero().tolist() == [[1, 0, 2]]


def test_refused() -> None:
    """Numbers out of range are errors that name the argument."""
    options: list[tuple[Any, dict[str, Any], str]] = [
        (Poisson, {"size": 0, "rate": 1.0}, "size"),
        (Poisson, {"size": 2, "rate": 10_001.0}, "rate"),
        (Poisson, {"size": 2, "rate": -1.0}, "rate"),
        (Poisson, {"size": 2, "rate": torch.tensor([1.0, math.nan])}, "rate"),
        (Poisson, {"size": 2, "rate": torch.ones(3)}, "rate"),
        (Poisson, {"size": 2, "rate": 1.0, "seed": -1}, "seed"),
        (Poisson, {"size": 2, "rate": 1.0, "seed": 1 << 64}, "seed"),
        (Poisson, {"size": 2, "rate": 1.0, "dt": 0.0}, "dt"),
        (Poisson, {"size": 2, "rate": 1.0, "batch": True}, "batch"),
        (PoissonInput, {"size": 2, "rate": 1_300_000.0}, "rate"),
        (PoissonInput, {"size": 2, "rate": math.nan}, "rate"),
        (PoissonInput, {"size": 2, "rate": 1.0, "weight": math.inf}, "weight"),
        (PoissonInput, {"size": 2, "rate": 1.0, "weight": torch.ones(3)}, "weight"),
        (Regular, {"size": 2, "interval": 1e-5}, "interval"),
        (Regular, {"size": 2, "interval": 1.0, "start": -1.0}, "start"),
        (SpikeTimes, {"size": 2, "times": [0.1], "neurons": [2]}, "neurons"),
        (SpikeTimes, {"size": 2, "times": [0.1], "neurons": [0.0]}, "neurons"),
        (SpikeTimes, {"size": 2, "times": [math.nan], "neurons": [0]}, "times"),
        (SpikeTimes, {"size": 2, "times": [0.1, 0.2], "neurons": [0]}, "neurons"),
        (SpikeTimes, {"size": 2, "times": [[0.1], [0.2]], "neurons": [[0]]}, "neurons"),
    ]
    for make, given, name in options:
        with pytest.raises(ConfigError) as caught:
            make(**given)
        assert caught.value.name == name, given
    for first, steps, name in ((-1, 1, "first"), (0, -1, "steps"), (0.0, 1, "first")):
        for source in (Poisson(2, 1.0), PoissonInput(2, 1.0)):
            with pytest.raises(InputError) as wrong:
                source.draw(first, steps)  # type: ignore[arg-type]  # wrong on purpose
            assert wrong.value.name == name
