"""The caller's floating-point mode changes no result, and no call changes the caller's mode."""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import TYPE_CHECKING

import attrs
import pytest
import torch

from q4_cpu_native import CpuNative
from tests.support.cpu_layers import ISAS, layer_on, random_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    import q4core as q4

_UPWARD = 0x800  # FE_UPWARD of x86


@pytest.fixture
def flushes() -> Iterator[None]:
    """Let this thread take subnormal numbers for zero."""
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.fixture
def rounds_up() -> Iterator[None]:
    """Let this thread round upwards."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    assert libm.fesetround(_UPWARD) == 0
    try:
        yield
        assert libm.fegetround() == _UPWARD
    finally:
        libm.fesetround(0)


def _layer(isa: str, precision: str) -> q4.Q4Linear:
    """Return a layer whose scales are 2^-127, a subnormal number."""
    weight = random_weight("mxfp4", 40, 96)
    weight = attrs.evolve(weight, scale=torch.zeros_like(weight.scale.view(torch.uint8)).view(weight.scale.dtype))
    return layer_on(CpuNative(isa), weight, precision)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("precision", ["exact", "int16", "int8"])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("mode", ["flushes", "rounds_up"])
def test_a_callers_float_mode_changes_nothing(
    isa: str, precision: str, rows: int, mode: str, request: pytest.FixtureRequest
) -> None:
    """Where subnormal numbers are flushed, or sums rounded upwards, every bit is the same."""
    layer = _layer(isa, precision)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(2)) * 2.0**3
    with torch.no_grad():
        expected, out = layer(x), torch.empty(rows, 40)
        assert expected.count_nonzero() == expected.numel()
        request.getfixturevalue(mode)
        layer(x, out=out)
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


def test_the_callers_mode_is_given_back(request: pytest.FixtureRequest) -> None:
    """A thread that flushed subnormal numbers before a call does so after it."""
    layer, x = _layer(ISAS[0], "exact"), torch.randn(3, 96)
    layer(x)
    request.getfixturevalue("flushes")
    layer(x)
    assert float(torch.tensor([1e-39]) * 1.0) == 0.0
