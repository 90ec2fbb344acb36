"""Connectors: which neurons of two populations are joined, drawn from a seed.

Each returns the indices of sources and of targets, int64 [S] each, for ``SparseProjection``. They need memory for the
synapses that exist, never for all pairs. Names and meanings are NEST's and PyNN's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from q4_snn.population import Population
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["bernoulli", "by_distance", "fixed_in_degree", "fixed_out_degree", "fixed_total_number", "one_to_one"]

Pairs = tuple[torch.Tensor, torch.Tensor]
_PAIRS_AT_ONCE = 1 << 20


def one_to_one(sources: int | Population, targets: int | Population) -> Pairs:
    """Return synapses from each source to the target of the same index.

    Args:
        sources: A population, or its size.
        targets: Likewise, of the same size.

    Raises:
        ConfigError: Sizes differ, or one is no positive whole number.
    """
    count = _size("one_to_one", "sources", sources)
    if (other := _size("one_to_one", "targets", targets)) != count:
        raise ConfigError("one_to_one", name="targets", rule=f"{count}, as many as sources", value=other)
    index = torch.arange(count)
    return index, index.clone()


def bernoulli(
    sources: int | Population,
    targets: int | Population,
    probability: float,
    *,
    generator: torch.Generator,
    autapses: bool = True,
) -> Pairs:
    """Return each pair with a probability, on its own.

    Args:
        sources: A population, or its size.
        targets: Likewise.
        probability: From 0 to 1.
        generator: Source of the random numbers.
        autapses: Whether a neuron may reach itself, where sources and targets are the same population.

    Raises:
        ConfigError: A number is not legal, or autapses are refused between populations of different sizes.
    """
    rows, columns = _sizes("bernoulli", sources, targets, autapses)
    _check_probability("bernoulli", probability)
    total = rows * columns
    if probability in {0.0, 1.0}:
        found = torch.arange(total if probability else 0)
    else:  # the gaps between pairs that exist are geometric
        rate, last = math.log1p(-probability), -1
        parts = []
        while last < total - 1:
            count = int((total - last) * probability * 1.1) + 64
            uniform = 1 - torch.rand(min(count, _PAIRS_AT_ONCE), generator=generator, dtype=torch.float64)
            gaps = (uniform.log() / rate).floor().clamp(max=float(total)).long() + 1
            parts.append(gaps.cumsum(0) + last)
            last = int(parts[-1][-1])
        found = torch.cat(parts)
        found = found[found < total]
    return _without((found // columns, found % columns), autapses)


def fixed_in_degree(  # noqa: PLR0913  # one argument per option
    sources: int | Population,
    targets: int | Population,
    degree: int,
    *,
    generator: torch.Generator,
    autapses: bool = True,
    multapses: bool = True,
) -> Pairs:
    """Return as many synapses into each target, from random sources.

    Args:
        sources: A population, or its size.
        targets: Likewise.
        degree: Synapses of each target, 0 or more.
        generator: Source of the random numbers.
        autapses: As of ``bernoulli``.
        multapses: Whether two synapses may join the same pair.

    Raises:
        ConfigError: A number is not legal, or there are fewer sources than a target needs.
    """
    rows, columns = _sizes("fixed_in_degree", sources, targets, autapses)
    return _fixed("fixed_in_degree", columns, rows, degree, generator, autapses, multapses)


def fixed_out_degree(  # noqa: PLR0913  # one argument per option
    sources: int | Population,
    targets: int | Population,
    degree: int,
    *,
    generator: torch.Generator,
    autapses: bool = True,
    multapses: bool = True,
) -> Pairs:
    """Return as many synapses from each source, to random targets; arguments are those of ``fixed_in_degree``.

    Raises:
        ConfigError: A number is not legal, or there are fewer targets than a source needs.
    """
    rows, columns = _sizes("fixed_out_degree", sources, targets, autapses)
    target, source = _fixed("fixed_out_degree", rows, columns, degree, generator, autapses, multapses)
    return source, target


def fixed_total_number(
    sources: int | Population,
    targets: int | Population,
    count: int,
    *,
    generator: torch.Generator,
    autapses: bool = True,
) -> Pairs:
    """Return a number of synapses, each between a random source and a random target; several may join the same two.

    Args:
        sources: A population, or its size.
        targets: Likewise.
        count: How many, 0 or more.
        generator: Source of the random numbers.
        autapses: As of ``bernoulli``.

    Raises:
        ConfigError: A number is not legal.
    """
    rows, columns = _sizes("fixed_total_number", sources, targets, autapses)
    _check_count("fixed_total_number", "count", count)
    if not autapses and rows == 1 and count:
        raise ConfigError("fixed_total_number", name="autapses", rule="True between single neurons", value=False)
    source = torch.randint(rows, (count,), generator=generator)
    if autapses:
        return source, torch.randint(columns, (count,), generator=generator)
    return source, (source + torch.randint(1, columns, (count,), generator=generator)) % columns


def by_distance(  # noqa: PLR0913  # one argument per option
    sources: torch.Tensor,
    targets: torch.Tensor,
    probability: Callable[[torch.Tensor], torch.Tensor],
    *,
    generator: torch.Generator,
    period: float | None = None,
    autapses: bool = True,
) -> Pairs:
    """Return each pair with a probability that depends on its distance, on its own.

    Pairs are looked at some sources at a time: memory is that of the synapses and of a million pairs.

    Args:
        sources: float [n, D], where sources are.
        targets: float [m, D], where targets are.
        probability: Returns probabilities from distances, of the same shape.
        generator: Source of the random numbers.
        period: Space repeats after it in each dimension, so that it has no border; None for a space with borders.
        autapses: As of ``bernoulli``.

    Raises:
        ConfigError: ``period`` is not above 0, or autapses are refused between populations of different sizes.
        InputError: Positions are no such tensors, or probabilities are of another shape or beyond 0 to 1.
    """
    for name, given in (("sources", sources), ("targets", targets)):
        if given.dim() != 2 or not len(given) or not bool(given.isfinite().all()) or given.shape[1] != sources.shape[1]:  # noqa: PLR2004  # [n, D]
            raise InputError("by_distance", name=name, rule="finite positions [n, D] of one D", value=[*given.shape])
    if period is not None and not 0 < period < math.inf:
        raise ConfigError("by_distance", name="period", rule="above 0, or None", value=period)
    rows, columns = _sizes("by_distance", len(sources), len(targets), autapses)
    parts = []
    for first in range(0, rows, at_once := max(1, _PAIRS_AT_ONCE // columns)):
        near = sources[first : first + at_once]
        squares = torch.zeros(len(near), columns, dtype=torch.float64)
        for axis in range(sources.shape[1]):
            apart = (near[:, None, axis].double() - targets[None, :, axis].double()).abs()
            if period is not None:
                apart = apart.remainder(period)
                apart = torch.minimum(apart, period - apart)
            squares += apart * apart
        share = probability(squares.sqrt())
        if share.shape != squares.shape or not bool(((share >= 0) & (share <= 1)).all()):
            rule, value = f"from 0 to 1, of shape {[*squares.shape]}", f"{[*share.shape]}"
            if share.shape == squares.shape:
                value = f"{float(share.min()):g} … {float(share.max()):g}"
            raise InputError("by_distance", name="probability", rule=rule, value=value)
        drawn = torch.rand(share.shape, generator=generator, dtype=torch.float64) < share
        source, target = drawn.nonzero(as_tuple=True)
        parts.append((source + first, target))
    source, target = (torch.cat(items) for items in zip(*parts, strict=True))
    return _without((source, target), autapses)


def _fixed(  # noqa: PLR0913  # one argument per option
    what: str,
    each: int,
    pool: int,
    degree: int,
    generator: torch.Generator,
    autapses: bool,  # noqa: FBT001  # private
    multapses: bool,  # noqa: FBT001  # private
) -> Pairs:
    """Return for each of some neurons ``degree`` members of a pool [each · degree], and the neurons."""
    _check_count(what, "degree", degree)
    owner = torch.arange(each)
    choices = pool if autapses else pool - 1  # without the neuron itself
    if degree > choices and (not choices or not multapses):
        rule = f"at most {choices}, as each pair is joined once" if choices else "0, as there is nobody to join"
        raise ConfigError(what, name="degree", rule=rule, value=degree)
    if multapses:
        chosen = torch.randint(max(choices, 1), (each, degree), generator=generator)
    else:
        chosen = _distinct(each, choices, degree, generator)
    if not autapses:
        chosen += chosen >= owner[:, None]
    return chosen.reshape(-1), owner.repeat_interleave(degree)


def _distinct(rows: int, pool: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return for each row a random set of a pool, [rows, count]: what occurs twice is drawn again."""
    if 2 * count > pool:  # those that are left out are fewer
        parts = []
        for first in range(0, rows, at_once := max(1, _PAIRS_AT_ONCE // max(pool, 1))):
            number = min(at_once, rows - first)
            left_out = _distinct(number, pool, pool - count, generator)
            is_in = torch.ones(number, pool, dtype=torch.bool).scatter_(1, left_out, value=False)
            parts.append(is_in.nonzero()[:, 1].view(number, count))
        return torch.cat(parts)
    found = torch.randint(max(pool, 1), (rows, count), generator=generator)
    todo = torch.arange(rows)
    while len(todo):
        some = found[todo].sort(1).values
        twice = torch.zeros_like(some, dtype=torch.bool)
        twice[:, 1:] = some[:, 1:] == some[:, :-1]
        some[twice] = torch.randint(max(pool, 1), (int(twice.sum()),), generator=generator)
        found[todo] = some
        todo = todo[twice.any(1)]
    return found


def _without(pairs: Pairs, autapses: bool) -> Pairs:  # noqa: FBT001  # private
    if autapses:
        return pairs
    differ = pairs[0] != pairs[1]
    return pairs[0][differ], pairs[1][differ]


def _sizes(what: str, sources: int | Population, targets: int | Population, autapses: bool) -> tuple[int, int]:  # noqa: FBT001  # private
    rows, columns = _size(what, "sources", sources), _size(what, "targets", targets)
    if not autapses and rows != columns:
        rule = "True between populations of different sizes"
        raise ConfigError(what, name="autapses", rule=rule, value=False)
    return rows, columns


def _size(what: str, name: str, given: int | Population) -> int:
    size = given.size if isinstance(given, Population) else given
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(what, name=name, rule="a population, or a positive whole number", value=given)
    return size


def _check_count(what: str, name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(what, name=name, rule="a whole number, 0 or more", value=value)


def _check_probability(what: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ConfigError(what, name="probability", rule="from 0 to 1", value=value)
