"""ModelOpt's experts of three dimensions, which its exporter leaves transposed.

Experts that a model multiplies as ``x @ w[e]`` (Llama4TextExperts, GptOssExperts) keep that order: ``<name>`` uint8
[E, K / 2, N] packs two in-features of one column into a byte, ``<name>_weight_scale`` is e4m3 [E, K / 16, N],
``<name>_weight_scale_2`` float32 [] or [E], and ``<name>_input_scale`` float32 []. ``w[e].T`` of each is what a matrix
[N, K] has. The exporter drops a leading 1 from scales, but not from codes.

Reference:
    nvidia-modelopt 0.47.0: torch/export/unified_export_hf.py (_export_quantized_weight, _maybe_squeeze_scale),
    torch/export/quant_utils.py (maybe_transpose_expert_weight_dimensions).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4_dialects.experts import has_experts
from q4_dialects.nvfp4 import BLOCK, E4M3, number_problems
from q4core import Problem
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4core import Catalogue, Dialect, LayerSchema

__all__ = ["FUSED", "expert_keys", "expert_problems", "key_problems", "nvfp4_experts", "one_expert"]

FUSED = ("gate_up_proj", "down_proj")
_SUFFIXES = {
    "qdata": "",
    "scale": "_weight_scale",
    "global_scale": "_weight_scale_2",
    "activation_scale": "_input_scale",
}
_REQUIRED = ("qdata", "scale", "global_scale")
_TAILS = tuple(f"{name}{_SUFFIXES[role]}" for name in FUSED for role in _REQUIRED)


def nvfp4_experts(catalogue: Catalogue) -> Iterator[str]:
    """Yield each parameter of NVFP4 experts, complete or not; experts in ModelOpt's other formats are none."""
    names = (name for name in catalogue.tensors if name.endswith(_TAILS))
    stems = (name.removesuffix("_2").removesuffix("_weight_scale") for name in names)
    for name in dict.fromkeys(stems):
        codes, scale = catalogue.get(name), catalogue.get(f"{name}_weight_scale")
        is_other = scale is not None and scale.dtype in FLOATS  # INT4 and FP8
        if is_other or (codes is not None and not has_experts(catalogue, name)):
            continue
        is_pair = codes is not None and codes.dtype == torch.uint8 and scale is not None and scale.dtype == E4M3
        if is_pair or f"{name}_weight_scale_2" in catalogue:
            yield name


def expert_keys(name: str, catalogue: Catalogue) -> dict[str, str]:
    """Return role → key of what the experts have, and of what they must have."""
    keys = {role: f"{name}{suffix}" for role, suffix in _SUFFIXES.items()}
    return {role: key for role, key in keys.items() if role in _REQUIRED or key in catalogue}


def key_problems(name: str, catalogue: Catalogue) -> Iterator[Problem]:
    """Yield scales that are no part of the experts, and experts that are not transposed."""
    holder, _, parameter = name.rpartition(".")
    strangers = catalogue.unknown_scales(holder, (f"{parameter}{suffix}" for suffix in _SUFFIXES.values()))
    yield from (problem for problem in strangers if problem.key.startswith(f"{name}_"))
    codes, scale = catalogue.get(name), catalogue.get(f"{name}_weight_scale")
    if codes is not None and scale is not None and len(scale.shape) == len(codes.shape):
        *rows, width = codes.shape
        if scale.shape == (*rows, width * 2 // BLOCK):
            rule = "transposed, [E, K / 2, N] with scales [E, K / 16, N], as ModelOpt exports experts"
            yield Problem("unsupported", name, rule, list(codes.shape))


def expert_problems(dialect: Dialect, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
    """Yield every problem of dtype and shape."""
    keys = layer.keys
    codes, scale = catalogue.get(keys["qdata"]), catalogue.get(keys["scale"])
    yield from dialect.expect(catalogue, keys["qdata"], dtypes={torch.uint8}, shape=(None, None, None))
    shape: tuple[int | None, ...] = (None, None, None)
    if codes is not None:
        experts, half, rows = codes.shape
        if half * 2 % BLOCK:
            rule = f"[E, K / 2, N] with K a multiple of {BLOCK}"
            yield Problem("shape", keys["qdata"], rule, list(codes.shape))
        shape = (experts, half * 2 // BLOCK, rows)
        if experts == 1 and scale is not None and scale.shape == shape[1:]:
            shape = shape[1:]
    yield from dialect.expect(catalogue, keys["scale"], dtypes={E4M3}, shape=shape)
    first = codes or scale
    yield from number_problems(layer, catalogue, experts=None if first is None else first.shape[:1])


def one_expert(stored: torch.Tensor, expert: int) -> torch.Tensor:
    """Return the matrix [N, …] of one expert, as a view of what is stored transposed."""
    return (stored[expert] if stored.dim() > 2 else stored).T  # noqa: PLR2004  # a single expert's, squeezed
