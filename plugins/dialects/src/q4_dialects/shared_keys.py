"""The keys that ModelOpt and ComfyUI share, with opposite nibble orders, and the rules that distinguish the two.

A marker of ComfyUI's decides first, ``config.json`` next, and then the shape of the block scales. Where a weight fills
whole tiles, both shapes are the same: the caller must name the dialect.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import torch

from q4_dialects.nvfp4 import BLOCK, E4M3, matrix_shape, multiplied_levels
from q4_dialects.swizzle import tiles
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4core import Catalogue, Dialect, PackedWeight

__all__ = [
    "COMFY_KEY",
    "COMFY_METADATA",
    "comfy_marker",
    "fits_rows",
    "fits_tiles",
    "has_shared_keys",
    "stored_scales",
]

COMFY_KEY = "comfy_quant"
COMFY_METADATA = "_quantization_metadata"


def has_shared_keys(module: str, catalogue: Catalogue) -> bool:
    """Return whether a module has the shared keys, and is not one of ModelOpt's other formats."""
    codes, scale = catalogue.get(f"{module}.weight"), catalogue.get(f"{module}.weight_scale")
    if codes is not None and scale is not None and codes.shape and scale.shape:
        is_int4 = scale.dtype in FLOATS and codes.shape[0] * 2 == scale.shape[0]  # two rows share a byte there
        if is_int4:
            return False
    if f"{module}.weight_scale_2" in catalogue:
        return True
    return codes is not None and codes.dtype == torch.uint8 and scale is not None and scale.dtype == E4M3


def fits_rows(module: str, catalogue: Catalogue) -> bool:
    """Return whether the block scales have ModelOpt's shape [N, K / 16]."""
    shape, scale = matrix_shape(catalogue.get(f"{module}.weight")), catalogue.get(f"{module}.weight_scale")
    return shape is not None and scale is not None and scale.shape == (shape[0], shape[1] // BLOCK)


def fits_tiles(module: str, catalogue: Catalogue) -> bool:
    """Return whether codes and block scales have ComfyUI's shapes: N and K in whole blocks, scales in whole tiles."""
    shape, scale = matrix_shape(catalogue.get(f"{module}.weight")), catalogue.get(f"{module}.weight_scale")
    if shape is None or scale is None or shape[0] % BLOCK:
        return False
    high, wide = tiles(shape[0], shape[1] // BLOCK)
    return scale.shape == (high * 128, wide * 4)


def comfy_marker(module: str, catalogue: Catalogue) -> dict[str, Any] | None:
    """Return what ComfyUI says of a layer, in the metadata or in a tensor of JSON; None where it says nothing.

    Where only names are at hand, the tensor's presence stands for ``{"format": "nvfp4"}``.
    """
    found = _marked_layers(catalogue.metadata.get(COMFY_METADATA, "")).get(module)
    if isinstance(found, dict):
        return found
    key = f"{module}.{COMFY_KEY}"
    if key not in catalogue:
        return None
    stored = catalogue.load_small(key)
    if stored is None:
        return {"format": "nvfp4"}
    return _json(bytes(stored.reshape(-1).view(torch.uint8).tolist()).decode("utf-8", "replace"))


def stored_scales(dialect: Dialect, module: str, weight: PackedWeight) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return block scales (float8) by row, and the numbers by suffix; a single level gets the global scale 1.

    Raises:
        DialectError: The weight's levels are not of that kind, and can't be turned into it without rounding.
    """
    scale, factor = multiplied_levels(dialect, module, weight)
    numbers = {"weight_scale_2": torch.ones((), dtype=torch.float32) if factor is None else factor}
    if weight.activation_scale is not None:
        numbers["input_scale"] = weight.activation_scale.to(torch.float32)
    if weight.dialect != dialect.name:
        numbers = {suffix: number.reshape(()) for suffix, number in numbers.items()}
    return scale, numbers


@functools.lru_cache(maxsize=8)  # asked for each module of a file
def _marked_layers(text: str) -> Mapping[str, Any]:
    layers = _json(text).get("layers")
    return layers if isinstance(layers, dict) else {}


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
