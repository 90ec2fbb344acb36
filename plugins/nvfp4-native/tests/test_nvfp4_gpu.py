"""What only a GPU shows: numbers of the real instructions, streams, graphs. Run by `nox -s gpu`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from q4_nvfp4_native import quantize_packed
from q4_nvfp4_native.native import FP4_ARCHITECTURES
from q4_nvfp4_native.quantizer import KINDS, quantize_parts
from q4core import (
    ActivationPrecision,
    BackendUnavailableError,
    ComputePath,
    Precision,
    ReasonCode,
    Session,
    SessionConfig,
    dequantize,
    error_bound,
    grid_activations,
    quantize,
)

if TYPE_CHECKING:
    from q4core import PackedWeight

pytestmark = pytest.mark.gpu

FP4 = SessionConfig(
    device="cuda",
    backend="nvfp4-native",
    activation_precision=ActivationPrecision.FP4,
    compute_path=ComputePath.KERNEL_ONLY,
)
ROWS = (1, 16, 17, 128, 129, 500)


def _has_fp4() -> bool:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor in FP4_ARCHITECTURES


def _weight(name: str) -> PackedWeight:
    return quantize(torch.randn(300, 640, generator=torch.Generator().manual_seed(1)), name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantiser_gives_the_cpu_s_bytes(name: str, dtype: torch.dtype) -> None:
    """Codes and scales made on the GPU equal the reference's, for every scale kind."""
    dense = torch.randn(257, 4096, generator=torch.Generator().manual_seed(2)).to(dtype)
    dense[3] = 0.0
    for kind in KINDS[name]:
        got, wanted = quantize_packed(dense.cuda(), name, scale_kind=kind), quantize(dense, name, scale_kind=kind)
        assert torch.equal(got.qdata.cpu(), wanted.qdata)
        assert torch.equal(got.scale.view(torch.uint8).cpu(), wanted.scale.view(torch.uint8))
        if wanted.global_scale is not None and got.global_scale is not None:
            assert torch.equal(got.global_scale.cpu(), wanted.global_scale)


def test_quantize_uses_it() -> None:
    """Weights on the GPU are quantised there, to the bytes that the CPU gives."""
    dense = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    assert torch.equal(quantize(dense.cuda(), "nvfp4").qdata.cpu(), quantize(dense, "nvfp4").qdata)


@pytest.mark.parametrize("name", KINDS)
def test_native_products_are_right(name: str) -> None:
    """On FP4 tensor cores every element lies within the float32 bound; elsewhere the refusal is of the hardware."""
    weight = _weight(name)
    if not _has_fp4():
        with pytest.raises(BackendUnavailableError) as caught:
            Session(FP4).linear(weight)
        reasons = [reason for item in caught.value.rejections for reason in item.reasons]
        assert ReasonCode.ARCH in {reason.code for reason in reasons}
        return
    layer = Session(FP4).linear(weight)
    exact_weight = dequantize(weight, torch.float64)
    for rows in ROWS:
        x = grid_activations(rows, 640, Precision.W4A4, dtype=torch.bfloat16, seed=rows)
        exact = x.to(torch.float64) @ exact_weight.T
        size = x.to(torch.float64).abs() @ exact_weight.abs().T
        error = (layer(x.cuda()).cpu().to(torch.float64) - exact).abs()
        assert bool((error <= error_bound(exact, size, 640, torch.bfloat16)).all()), rows


def test_native_products_in_a_graph_and_on_a_stream() -> None:
    """Captured once, a call replays with new activations; on another stream it gives the same bits."""
    if not _has_fp4():
        pytest.skip("this GPU has no FP4 tensor cores")
    layer = Session(FP4).linear(_weight("nvfp4"))
    x = torch.randn(17, 640, device="cuda", dtype=torch.bfloat16)
    wanted = layer(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        beside = layer(x)
    side.synchronize()
    assert torch.equal(beside, wanted)
    graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        out = layer(given)
    given.copy_(x)
    graph.replay()
    assert torch.equal(out, wanted)


def test_torch_agrees() -> None:
    """torch's own FP4 product of the same bytes, where cuBLAS has it, differs by its rounding alone."""
    if not _has_fp4():
        pytest.skip("this GPU has no FP4 tensor cores")
    dense = torch.randn(256, 512, device="cuda")
    x = torch.randn(128, 512, device="cuda", dtype=torch.bfloat16)
    left, right = quantize_parts(x, swizzle=True), quantize_parts(dense, swizzle=True)
    assert left.global_scale is not None
    assert right.global_scale is not None
    y = torch._scaled_mm(
        left.codes.view(torch.float4_e2m1fn_x2), right.codes.view(torch.float4_e2m1fn_x2).t(), left.scales,
        right.scales, out_dtype=torch.bfloat16,
    )  # fmt: skip
    ours = dequantize(quantize_packed(x), torch.float64) @ dequantize(quantize_packed(dense), torch.float64).T
    theirs = y.to(torch.float64) * (left.global_scale * right.global_scale).to(torch.float64)
    assert float((ours - theirs).abs().max()) <= 2.0**-7 * float(ours.abs().max())
