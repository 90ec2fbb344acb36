"""The reference quantiser gives, from the same dense weights, the bytes that public packages stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import q4core as q4
from q4_quantize.double_quant import dynamic_map
from tests.support.samples import bits

GOLDEN = Path(__file__).parents[3] / "conformance/src/q4_conformance/golden"
MANIFEST: dict[str, dict[str, Any]] = json.loads((GOLDEN / "manifest.json").read_text(encoding="utf-8"))
DOUBLE = q4.ScaleKind.DOUBLE_QUANT


def _cases(prefix: str, *, without: tuple[str, ...] = ()) -> list[str]:
    """Return golden layers that a library quantised by the rule that we follow, with the dense weight."""
    return [
        name
        for name, case in MANIFEST.items()
        if name.startswith(prefix) and not any(word in name for word in without) and "source" in _load(name)
    ]


def _load(name: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(GOLDEN / f"{name}.safetensors")


def _assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    ours, theirs = bits(actual).reshape(-1), bits(expected).reshape(-1)
    assert torch.equal(ours, theirs), f"{what}: {int((ours != theirs).sum())} of {ours.numel()} differ"


def _is_double(name: str) -> bool:
    return "proj.weight.nested_absmax" in _load(name)


BITSANDBYTES = _cases("bitsandbytes/")


@pytest.mark.parametrize("name", [name for name in BITSANDBYTES if not _is_double(name)])
def test_bitsandbytes_bytes(name: str) -> None:
    """NF4 and FP4 in rows or flat blocks: every byte that bitsandbytes stored, and its values."""
    case, stored = MANIFEST[name], _load(name)
    weight = q4.quantize(stored["source"], case["format"], block_size=case["block"])
    _assert_same(weight.qdata, stored["proj.weight"].view(torch.uint8), "codes")
    _assert_same(weight.scale, stored["proj.weight.absmax"], "absmax")
    _assert_same(q4.dequantize(weight), stored[f"expected.{case['dtype']}"], "values")


@pytest.mark.parametrize("name", [name for name in BITSANDBYTES if _is_double(name)])
def test_bitsandbytes_double_quantised_bytes(name: str) -> None:
    """Double quantisation: the codes of both levels.

    torch's ``mean`` and ``linspace``, which bitsandbytes calls, round differently on different vector units, so the
    mean and what hangs on it are compared to the error of a float32 sum, and the 8-bit map to two units in the last
    place (an edge and its product are rounded). The tests against the live library compare them to the bit.
    """
    case, stored = MANIFEST[name], _load(name)
    weight = q4.quantize(stored["source"], case["format"], block_size=case["block"], scale_kind=DOUBLE)
    assert weight.nested_scale is not None
    assert weight.nested_codebook is not None
    _assert_same(weight.qdata, stored["proj.weight"].view(torch.uint8), "codes")
    _assert_same(weight.scale, stored["proj.weight.absmax"], "absmax codes")
    slack = weight.scale.numel() * 2.0**-24 * float(stored["source"].abs().max())
    torch.testing.assert_close(weight.nested_scale, stored["proj.weight.nested_absmax"], rtol=0, atol=slack)
    apart = bits(weight.nested_codebook) - bits(stored["proj.weight.nested_quant_map"])
    assert int(apart.abs().max()) <= 2


TORCHAO = _cases("torchao/nvfp4", without=("swizzled", "quantize-api", "subnormal-global"))


@pytest.mark.parametrize("name", TORCHAO)
def test_torchao_nvfp4_bytes(name: str) -> None:
    """NVFP4 with one level and with two: every byte that torchao stored."""
    stored = _load(name)
    total = stored.get("proj._weight_per_tensor_scale")
    kind = q4.ScaleKind.E4M3 if total is None else q4.ScaleKind.E4M3_MUL
    weight = q4.quantize(stored["source"], "nvfp4", scale_kind=kind)
    _assert_same(weight.qdata, stored["proj._weight_qdata"], "codes")
    _assert_same(weight.scale, stored["proj._weight_scale"], "scales")
    if total is not None:
        assert weight.global_scale is not None
        _assert_same(weight.global_scale, total, "global")


@pytest.mark.parametrize("name", ["torchao/mxfp4-edges", "torchao/mxfp4-float32", "torchao/mxfp4-rceil"])
def test_torchao_mxfp4_bytes(name: str) -> None:
    """MXFP4 with the round-up scale: every byte that torchao stored."""
    stored = _load(name)
    weight = q4.quantize(stored["source"], "mxfp4")
    _assert_same(weight.qdata, stored["proj._weight_qdata"], "codes")
    _assert_same(weight.scale, stored["proj._weight_scale"], "scales")


@pytest.mark.parametrize("name", ["compressed-tensors/nvfp4-edges", "compressed-tensors/nvfp4-float32"])
def test_compressed_tensors_nvfp4_bytes(name: str) -> None:
    """NVFP4 with a global divisor: every byte that compressed-tensors stored for float32 weights."""
    stored = _load(name)
    weight = q4.quantize(stored["source"], "nvfp4", scale_kind=q4.ScaleKind.E4M3_DIV)
    assert weight.global_scale is not None
    _assert_same(weight.qdata, stored["proj.weight_packed"], "codes")
    _assert_same(weight.scale, stored["proj.weight_scale"], "scales")
    _assert_same(weight.global_scale, stored["proj.weight_global_scale"], "global")


@pytest.mark.parametrize("name", _cases("gguf/q"))
def test_ggml_bytes(name: str) -> None:
    """Q4_0, Q4_1 and Q8_0: every byte that gguf stored, block by block."""
    stored = _load(name)
    weight = q4.quantize(stored["source"], MANIFEST[name]["format"])
    n, blocks = weight.scale.shape
    numbers = [weight.scale] if weight.offset is None else [weight.scale, weight.offset]
    parts = [number[..., None].view(torch.uint8) for number in numbers]
    whole = torch.cat([*parts, weight.qdata.view(n, blocks, -1)], dim=-1)
    _assert_same(whole, stored["proj.weight"], "blocks")


def test_golden_layers_are_there() -> None:
    """The lists above are not empty, so that a moved folder can't pass for success."""
    assert len(BITSANDBYTES) >= 20
    assert len(TORCHAO) >= 6
    assert len(_cases("gguf/q")) >= 6


def test_dynamic_map_is_bitsandbytes_own() -> None:
    """The 256 levels are those that bitsandbytes stores, but for how torch rounds on an older vector unit."""
    ours = torch.tensor(dynamic_map())
    stored = _load("bitsandbytes/nf4-b64-double")["proj.weight.nested_quant_map"]
    assert int((bits(ours) - bits(stored)).abs().max()) <= 2
    assert ours.unique().numel() == 256
    assert (float(ours[127]), float(ours[255])) == (0.0, 1.0)
    assert torch.equal(ours, ours.sort().values)
