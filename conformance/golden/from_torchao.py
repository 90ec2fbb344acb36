"""NVFP4 and MXFP4 as torchao's tensor subclasses are flattened into safetensors, and the simplified pair."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from case import DTYPE_NAMES, Case, all_codes, dense, edges
from torchao.core.config import config_to_dict
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.inference_workflow import MXDynamicActivationMXWeightConfig, NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.prototype.mx_formats.utils import to_blocked
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common import KernelPreference

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = "torchao"


def _config(kind: object) -> dict[str, object]:
    """Return ``config.json``'s entry, with the type as torchao itself writes it."""
    return {
        "quantization_config": {
            "include_input_output_embeddings": False,
            "modules_to_not_convert": None,
            "quant_method": "torchao",
            "quant_type": {"default": config_to_dict(kind)},
            "untie_embedding_weights": False,
        }
    }


NVFP4_CONFIG = _config(NVFP4WeightOnlyConfig())
MXFP4_CONFIG = _config(
    MXDynamicActivationMXWeightConfig(activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2)
)


def _case(
    name: str,
    weight: NVFP4Tensor | MXTensor,
    source: torch.Tensor | None,
    *,
    also: dict[str, torch.Tensor] | None = None,
    notes: str = "",
) -> Case:
    tensors, metadata = flatten_tensor_state_dict({"proj.weight": weight, **(also or {})})
    dtypes = dict.fromkeys((torch.float32, weight.orig_dtype))
    is_nvfp4 = isinstance(weight, NVFP4Tensor)
    return Case(
        dialect="torchao",
        name=name,
        format="nvfp4" if is_nvfp4 else "mxfp4",
        library=LIBRARY,
        tensors=tensors,
        expected={DTYPE_NAMES[dtype]: weight.dequantize(dtype) for dtype in dtypes},
        shape=tuple(weight.shape),
        block=weight.block_size,
        dtype=DTYPE_NAMES[weight.orig_dtype],
        source=source,
        metadata=metadata,
        config=NVFP4_CONFIG if is_nvfp4 else MXFP4_CONFIG,
        notes=notes,
    )


def _nvfp4(source: torch.Tensor, *, is_two_level: bool, is_swizzled: bool) -> NVFP4Tensor:
    scale = per_tensor_amax_to_scale(source.abs().max()) if is_two_level else None
    return NVFP4Tensor.to_nvfp4(source, per_tensor_scale=scale, is_swizzled_scales=is_swizzled)


def _nvfp4_cases() -> Iterator[Case]:
    for is_swizzled in (False, True):
        layout = "swizzled" if is_swizzled else "linear"
        for is_two_level in (False, True):
            level = "two-level" if is_two_level else "one-level"
            source = dense(f"ao {layout} {level}", 20, 80, torch.bfloat16)
            weight = _nvfp4(source, is_two_level=is_two_level, is_swizzled=is_swizzled)
            yield _case(f"nvfp4-{layout}-{level}", weight, source, notes="N % 128 and K % 64 are not 0")
    source = dense("ao float32", 16, 64)
    yield _case("nvfp4-linear-float32", _nvfp4(source, is_two_level=True, is_swizzled=False), source)
    source = dense("ao rows", 130, 48, torch.bfloat16)
    note = "a second, nearly empty tile of rows"
    yield _case("nvfp4-swizzled-130-rows", _nvfp4(source, is_two_level=True, is_swizzled=True), source, notes=note)
    source = dense("ao full", 128, 64, torch.bfloat16)
    note = "whole tiles: the swizzled scales have as many bytes as linear ones"
    yield _case("nvfp4-swizzled-whole-tiles", _nvfp4(source, is_two_level=True, is_swizzled=True), source, notes=note)
    rows = edges("ao nvfp4", 16, 64, largest=40.0, smallest=2.0**-20)
    for is_two_level in (False, True):
        level = "two-level" if is_two_level else "one-level"
        weight = _nvfp4(rows, is_two_level=is_two_level, is_swizzled=False)
        yield _case(f"nvfp4-edges-{level}", weight, rows, notes="zero, -0, tied and tiny blocks")
    far = "amax far from 1: the global carries the exponent"
    lost = "the global is subnormal and its reciprocal infinite: torchao saturates every code"
    for label, factor, note in (("huge", 1e37, far), ("small", 1e-30, far), ("subnormal-global", 1e-35, lost)):
        source = dense(f"ao {label}", 4, 64) * factor
        weight = _nvfp4(source, is_two_level=True, is_swizzled=False)
        yield _case(f"nvfp4-{label}", weight, source, notes=note)
    yield _quantised_module()


def _quantised_module() -> Case:
    """Return a layer as ``quantize_`` leaves it in a model's state dict, with its bias."""
    model = torch.nn.ModuleDict({"proj": torch.nn.Linear(96, 32)}).to(torch.bfloat16)
    source = dense("ao module", 32, 96, torch.bfloat16)
    with torch.no_grad():
        model["proj"].weight.copy_(source)
        model["proj"].bias.copy_(torch.linspace(-1, 1, 32))
    quantize_(model, NVFP4WeightOnlyConfig())
    state = model.state_dict()
    return _case("nvfp4-quantize-api", state["proj.weight"], source, also={"proj.bias": state["proj.bias"]})


def _packed(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _enumerations() -> Iterator[Case]:
    levels = torch.cat((torch.arange(127), torch.tensor([126]))).to(torch.uint8).reshape(8, 16)
    qdata = _packed(all_codes(128, 16).reshape(8, 256))
    scale = levels.view(torch.float8_e4m3fn)
    note = "every e4m3 scale from 0 to 448 under every code"
    yield _case("nvfp4-all-scales-one-level", NVFP4Tensor(qdata, scale, 16, torch.bfloat16), None, notes=note)
    total = torch.tensor(0.0007440476329065859)
    weight = NVFP4Tensor(qdata, scale, 16, torch.bfloat16, per_tensor_scale=total)
    yield _case("nvfp4-all-scales-two-level", weight, None, notes=note)
    swizzled = to_blocked(scale).view(32, 64)
    weight = NVFP4Tensor(qdata, swizzled, 16, torch.bfloat16, per_tensor_scale=total, is_swizzled_scales=True)
    yield _case("nvfp4-all-scales-swizzled", weight, None, notes=note)
    exponents = torch.cat((torch.arange(255), torch.tensor([127]))).to(torch.uint8).reshape(16, 16)
    qdata = _packed(all_codes(256, 32).reshape(16, 512))
    weight = MXTensor(
        qdata,
        exponents.view(torch.float8_e8m0fnu),
        torch.float4_e2m1fn_x2,
        32,
        torch.float32,
        KernelPreference.EMULATED,
        None,
        False,
    )
    yield _case("mxfp4-all-scales", weight, None, notes="every e8m0 scale from 0 to 254 under every code")


def _mxfp4(source: torch.Tensor, mode: ScaleCalculationMode, *, is_swizzled: bool = False) -> MXTensor:
    return MXTensor.to_mx(source, torch.float4_e2m1fn_x2, 32, mode, is_swizzled_scales=is_swizzled)


def _mxfp4_cases() -> Iterator[Case]:
    for mode in (ScaleCalculationMode.RCEIL, ScaleCalculationMode.FLOOR, ScaleCalculationMode.EVEN):
        source = dense(f"ao mx {mode}", 12, 96, torch.bfloat16)
        yield _case(f"mxfp4-{mode.name.lower()}", _mxfp4(source, mode), source)
    source = dense("ao mx float32", 8, 64)
    yield _case("mxfp4-float32", _mxfp4(source, ScaleCalculationMode.RCEIL), source)
    source = dense("ao mx swizzled", 36, 160, torch.bfloat16)
    yield _case("mxfp4-swizzled", _mxfp4(source, ScaleCalculationMode.RCEIL, is_swizzled=True), source)
    rows = edges("ao mx", 32, 64)
    yield _case("mxfp4-edges", _mxfp4(rows, ScaleCalculationMode.RCEIL), rows, notes="zero, huge, subnormal blocks")


def _simple(case: Case, *, as_bytes: bool) -> Case:
    """Return the pair ``qdata``, ``scale`` that holds the same one-level layer."""
    scale = case.tensors["proj._weight_scale"]
    return Case(
        dialect="simple-nvfp4",
        name=case.name + ("" if as_bytes else "-float8"),
        format="nvfp4",
        library=LIBRARY,
        tensors={
            "proj.qdata": case.tensors["proj._weight_qdata"],
            "proj.scale": scale.view(torch.uint8) if as_bytes else scale,
        },
        expected={"float32": case.expected["float32"]},
        shape=case.shape,
        block=16,
        dtype=case.dtype,
        source=case.source,
        notes="torchao's linear one-level tensors under the simplified names; scales are e4m3 "
        + ("bytes" if as_bytes else "values"),
    )


def cases() -> Iterator[Case]:
    """Yield every case of the two dialects."""
    for case in (*_nvfp4_cases(), *_enumerations(), *_mxfp4_cases()):
        yield case
        if case.name in {"nvfp4-linear-one-level", "nvfp4-edges-one-level", "nvfp4-all-scales-one-level"}:
            data = json.loads(case.metadata["proj.weight"])["_data"]
            if data["is_swizzled_scales"]:
                raise RuntimeError("the simplified pair holds linear scales")
            yield _simple(case, as_bytes=True)
            yield _simple(case, as_bytes=False)
