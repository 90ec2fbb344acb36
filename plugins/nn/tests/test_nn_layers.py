"""Norm, rotary embedding, attention and cache against plain float64 restatements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q4_nn.blocks.attention import attend
from q4_nn.blocks.cache import KVCache
from q4_nn.blocks.norm import OffsetRMSNorm, RMSNorm
from q4_nn.blocks.rotary import RopeScaling, RotaryEmbedding
from q4_programs.cache_rows import narrowed, widened
from q4core import ConfigError, InputError


def close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether a float32 result is within a few float32 roundings of a float64 one, relative to its scale."""
    scale = max(float(expected.abs().max()), 1e-30)
    return float((result.to(torch.float64) - expected).abs().max()) <= 32 * torch.finfo(torch.float32).eps * scale


def attend_ref(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention written out with loops: query [T, heads, d], keys and values [S, kv_heads, d]."""
    count, heads, size = query.shape
    seen, kv_heads, _ = keys.shape
    out = torch.zeros_like(query)
    for t in range(count):
        visible = seen - count + t + 1
        for head in range(heads):
            kv = head // (heads // kv_heads)
            scores = keys[:visible, kv] @ query[t, head] / math.sqrt(size)
            weights = torch.exp(scores - scores.max())
            out[t, head] = (weights / weights.sum()) @ values[:visible, kv]
    return out


@settings(deadline=None, max_examples=60)
@given(
    past=st.integers(0, 9),
    count=st.integers(1, 7),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_attention(past: int, count: int, kv_heads: int, group: int, seed: int) -> None:
    """Grouped-query attention, with and without a past, equals the loops in float64."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(count, kv_heads * group, 8, generator=generator)
    keys = torch.randn(past + count, kv_heads, 8, generator=generator)
    values = torch.randn(past + count, kv_heads, 8, generator=generator)
    result = attend(query[None], keys[None].transpose(1, 2), values[None].transpose(1, 2))
    assert close(result[0], attend_ref(query.double(), keys.double(), values.double()))


@pytest.mark.parametrize("epsilon", [1e-5, 0.3])
@pytest.mark.parametrize("kind", [RMSNorm, OffsetRMSNorm])
@pytest.mark.parametrize("size", [48, (3, 48)])
def test_norm(kind: type[RMSNorm], epsilon: float, size: int | tuple[int, ...]) -> None:
    """The norm divides by the root of mean square plus epsilon, and multiplies by the weight, or by one plus it."""
    x, norm = torch.randn(5, 3, 48), kind(size, eps=epsilon)
    weight = torch.nn.init.normal_(norm.weight).detach().double() + (kind is OffsetRMSNorm)
    mean = x.double().pow(2).mean(-1 if size == 48 else (1, 2), keepdim=True)
    assert close(norm(x).detach(), x.double() / (mean + epsilon).sqrt() * weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"eps": 1e-6}, {"eps": 1e-6, "elementwise_affine": False}])
def test_norm_and_its_gradients_are_torchs(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Value and gradients are those of torch's own norm, rows of zeros included."""
    x = torch.randn(4, 7, 33, dtype=dtype)
    x[1, 2] = 0.0
    size = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if dtype is not torch.float64 else 0.0)
    results = []
    for norm in (RMSNorm(33, dtype=dtype, **options), torch.nn.RMSNorm(33, dtype=dtype, **options)):
        given = x.clone().requires_grad_()
        y = norm(given)
        (y * torch.linspace(-1.0, 2.0, 33, dtype=dtype)).sum().backward()
        results.append([y.detach(), given.grad, *(parameter.grad for parameter in norm.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == theirs.dtype
        assert bool(((ours - theirs).abs() <= 32 * size * theirs.abs().amax(-1, keepdim=True)).all())


@pytest.mark.parametrize("dimensions", [16, 8])
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("start", [0, 11])
def test_rotation_is_the_usual_one_on_permuted_rows(dimensions: int, scale: float, start: int) -> None:
    """Turning neighbours of permuted features is turning halves of the original ones; the rest is left alone."""
    heads, head_dim, base = 3, 16, 1000.0
    x = torch.randn(1, 6, heads, head_dim)
    half = dimensions // 2
    turned = x[..., :dimensions].double()
    place = (torch.arange(start, start + 6).double() / scale)[:, None, None]
    angle = place * base ** (-2 * torch.arange(half).double() / dimensions)
    first, second = turned[..., :half], turned[..., half:]
    expected = torch.cat(
        (
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
            x[..., dimensions:].double(),
        ),
        -1,
    )
    order = [*torch.arange(dimensions).view(2, half).t().flatten().tolist(), *range(dimensions, head_dim)]
    scaling = RopeScaling(kind="linear", factor=scale)
    rotary = RotaryEmbedding(dimensions, base, scaling=scaling, interleaved=True)
    # The angle itself is rounded to float32, so the bound grows with it.
    error = (rotary(x[..., order], start).double() - expected[..., order]).abs().max()
    assert float(error) <= 8 * torch.finfo(torch.float32).eps * max(1.0, (start + 6) / scale) * float(x.abs().max())


def test_rotation_factors() -> None:
    """Factors divide the frequencies, pair by pair."""
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    with_factors, plain = RotaryEmbedding(8, 100.0, factors=factors), RotaryEmbedding(8, 100.0)
    assert torch.equal(with_factors.frequencies(1), plain.frequencies(1) / factors)


def test_rotary_table_grows_and_keeps() -> None:
    """A table of more positions has the same first ones; one of fewer is not made anew."""
    rotary, cpu = RotaryEmbedding(8, 100.0), torch.device("cpu")
    before = rotary.table(4, cpu)
    assert torch.equal(rotary.table(9, cpu)[:4], before)
    assert rotary.table(2, cpu) is rotary.table(9, cpu)


def test_cache_is_written_in_place() -> None:
    """Writing returns views of the same memory, layer by layer, and never moves it."""
    cache = KVCache(2, 3, 4, capacity=6)
    address = cache.keys.data_ptr()
    first, second = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4)
    cache.write(0, first, first)
    cache.write(1, -first, -first)
    cache.advance(2)
    keys, values = cache.write(1, second, 2 * second)
    assert keys.shape == (1, 3, 3, 4)
    assert torch.equal(keys, torch.cat((-first, second), 1).transpose(1, 2))
    assert torch.equal(values, torch.cat((-first, 2 * second), 1).transpose(1, 2))
    assert (cache.keys.data_ptr(), keys.untyped_storage().data_ptr()) == (address, address)
    assert cache.nbytes == 2 * 2 * 3 * 6 * 4 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_a_narrow_cache_gives_what_it_holds(dtype: torch.dtype) -> None:
    """Keys and values come back rounded, new ones as well, those of a window too; memory is what their numbers need."""
    cache = KVCache(2, 3, 8, capacity=12, windows=(None, 3), dtype=dtype)
    parts = [torch.randn(2, 1, count, 3, 8) for count in (2, 1, 4, 1)]
    for part in parts:
        for layer in range(2):
            keys, values = cache.write(layer, *part)
            whole = torch.cat(parts, 2)[:, :, : cache.length + part.shape[2]].transpose(2, 3)
            expected = widened(narrowed(whole, dtype), torch.float32)[..., -keys.shape[2] :, :]
            assert keys.dtype is torch.float32
            assert torch.equal(torch.stack((keys, values)), expected)
            assert keys.shape[2] >= (min(3, whole.shape[3]) if layer else whole.shape[3])
        cache.advance(part.shape[2])
    row = {torch.int8: 8 + 4}.get(dtype, 16)
    assert cache.nbytes == 2 * 3 * (12 + 6) * row


def test_a_cache_of_whole_numbers() -> None:
    """Only int8 has scales."""
    with pytest.raises(ConfigError, match="dtype must be a floating dtype, or int8"):
        KVCache(1, 1, 4, capacity=3, dtype=torch.int32)


def test_cache_has_an_end() -> None:
    """More positions than the capacity are refused; a cleared cache takes them again."""
    cache = KVCache(1, 1, 4, capacity=3)
    cache.advance(2)
    cache.require(1)
    with pytest.raises(InputError, match="at most 1 more"):
        cache.require(2)
    cache.clear()
    cache.require(3)
