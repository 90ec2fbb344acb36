"""The checkpoint's activation scale is a fact that the core knows; FP4 paths are proven under it, whatever its size."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch

import q4core as q4
from tests.support.fakes import FakeBackend, registry

SCALES = (2.0**-100, 2.0**-20, 2.0**-14, 0.0173, 1.0, 37.5, 2.0**100)
PATH = q4.KernelPath("static", (1, None), q4.PathKind.KERNEL, q4.Precision.W4A4, 30)
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
WISH = q4.SessionConfig(activation_precision="fp4")


def _weight(scale: float | None, columns: int = 64) -> q4.PackedWeight:
    weight = q4.quantize(torch.randn(24, columns, generator=torch.Generator().manual_seed(1)), "nvfp4")
    return attrs.evolve(weight, activation_scale=None if scale is None else torch.tensor(scale))


def _rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return x in FP4 under a static scale: blocks of 16 with e4m3 scales over the next power of two."""
    power = 2.0 ** math.ceil(math.log2(scale))
    blocks = (x.to(torch.float64) / power).unflatten(1, (-1, 16))
    share = (blocks.abs().amax(-1, keepdim=True) / 6).clamp(max=448.0).to(torch.float32)
    step = share.to(torch.float8_e4m3fn).to(torch.float64)
    sizes = torch.where(step > 0, blocks.abs() / step, 0.0).to(torch.float32)
    codes = LEVELS[torch.bucketize(sizes, (LEVELS[1:] + LEVELS[:-1]) / 2)].to(torch.float64)
    rounded: torch.Tensor = (codes * blocks.sign() * step * power).flatten(1)
    return rounded


class Static(FakeBackend):
    """A w4a4 backend that takes the static scale where there is one, and its values as they are elsewhere."""

    def __init__(self, **facts: Any) -> None:
        super().__init__("static", paths=(PATH,), dtypes={torch.float32, torch.bfloat16, torch.float16}, **facts)

    def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
        """Round activations, then multiply exactly."""
        weight = prepared.meta.build(prepared.tensors)
        wide = x.to(torch.float64) if weight.activation_scale is None else _rounded(x, float(weight.activation_scale))
        y = wide @ q4.dequantize(weight, torch.float64).T
        out.copy_(y if bias is None else y + bias)


def test_a_request_says_whether_there_is_an_activation_scale() -> None:
    """The fact comes from the weight, and no request has it by default."""
    assert q4.Request.for_weight(_weight(0.01)).has_activation_scale
    assert not q4.Request.for_weight(_weight(None)).has_activation_scale


@pytest.mark.parametrize("scale", SCALES)
def test_activations_are_drawn_on_the_grid_of_the_scale(scale: float) -> None:
    """They are E2M1 values times a power of two that an e4m3 block scale over the next power of two reaches."""
    x = q4.grid_activations(5, 64, q4.Precision.W4A4, activation_scale=scale)
    peak = float(x.abs().max())
    assert bool((x.unflatten(1, (-1, 16)).abs().amax(-1) == peak).all())
    assert set((x.abs() / (peak / 6)).unique().tolist()) == set(LEVELS.tolist())
    block_scale = math.log2(peak / 6) - math.ceil(math.log2(scale))
    assert block_scale == int(block_scale)
    assert -6 <= block_scale <= 8
    assert torch.equal(_rounded(x, scale).to(torch.float32), x)


def test_scales_of_ordinary_size_change_no_draw() -> None:
    """Where the usual activations lie on the grid of the scale, they are the draw; other precisions ignore it."""
    for precision, scale in ((q4.Precision.W4A4, 0.0173), (q4.Precision.W4A8, 1e-9), (q4.Precision.W4A32, 1e9)):
        plain = q4.grid_activations(3, 64, precision)
        assert torch.equal(q4.grid_activations(3, 64, precision, activation_scale=scale), plain)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_path_under_the_static_scale_is_proven(scale: float, dtype: torch.dtype) -> None:
    """A path that rounds activations under the checkpoint's scale passes its probe, however small or large that is."""
    backend = Static()
    config = attrs.evolve(WISH, compute_dtype=dtype)
    layer = q4.Session(config, registry=registry(backend)).linear(_weight(scale))
    assert layer.diagnostics().backend == "static"
    assert backend.requests[-1].has_activation_scale


def test_a_proof_without_the_scale_is_none_with_it() -> None:
    """Another code rounds under a static scale, so each kind of weight has a probe of its own."""

    class Careless(Static):
        def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
            super().linear(prepared, x, out, bias=bias, path=path)
            if prepared.meta.build(prepared.tensors).activation_scale is not None:
                out += 1.0

    session = q4.Session(WISH, registry=registry(Careless()))
    assert session.linear(_weight(None)).diagnostics().backend == "static"
    with pytest.warns(q4.Q4ProbeWarning, match="wrong numbers"), pytest.raises(q4.BackendUnavailableError):
        session.linear(_weight(0.01))


def test_a_dtype_that_holds_no_such_activations_is_reported() -> None:
    """float16 has no numbers near 2^-60: nothing is proven with zeros, the reason names the scale."""
    config = attrs.evolve(WISH, compute_dtype=torch.float16)
    with pytest.raises(q4.ConfigError, match="activation_scale"):
        q4.grid_activations(3, 64, q4.Precision.W4A4, dtype=torch.float16, activation_scale=2.0**-60)
    with pytest.warns(q4.Q4ProbeWarning, match="activation_scale"), pytest.raises(q4.BackendUnavailableError):
        q4.Session(config, registry=registry(Static())).linear(_weight(2.0**-60))


@pytest.mark.parametrize("wish", ["exact", "int8"])
def test_weight_only_paths_ignore_it(wish: str) -> None:
    """Activations that stay as they are, or become integers, know nothing of an FP4 scale."""
    config = q4.SessionConfig(activation_precision=wish, compute_path="auto")
    precision = q4.Precision.W4A32 if wish == "exact" else q4.Precision.W4A8
    path = attrs.evolve(PATH, name="other", precision=precision)
    x = torch.randn(3, 64)
    answers = [
        q4.Session(config, registry=registry(FakeBackend(paths=(path,)))).linear(_weight(scale))(x)
        for scale in (None, 2.0**-20)
    ]
    assert torch.equal(*answers)
