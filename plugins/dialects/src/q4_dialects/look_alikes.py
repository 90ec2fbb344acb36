"""Layers that have another dialect's keys, dtypes and shapes, and mean something else: how they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4_dialects.compressed_tensors_config import stated_formats
from q4_dialects.mx_rows import E8M0, blocks_of

if TYPE_CHECKING:
    from q4core import Catalogue

__all__ = ["MXINT4", "has_rotation", "is_e5m3", "may_be_mxfp4", "may_be_mxint4"]

MXINT4 = "mxint4"
"""The name of AutoRound's sign-magnitude integers times 0.25, with MXFP4's scales."""
_NVFP4_BLOCK = 16
_WITHOUT_MXINT4 = ("compressed-tensors", "modelopt", "quark")


def is_e5m3(module: str, catalogue: Catalogue) -> bool:
    """Return whether codes have scales of the unsigned kind E5M3: bytes for blocks of 16, without a global scale.

    ``config.json`` names the format; where it does not, one byte for 16 codes is no power of two that is read.
    """
    if f"{module}.weight_global_scale" in catalogue:
        return False
    codes, scale = catalogue.get(f"{module}.weight_packed"), catalogue.get(f"{module}.weight_scale")
    if codes is None or scale is None or codes.dtype != torch.uint8 or scale.dtype.itemsize != 1:
        return False
    block = blocks_of(catalogue, f"{module}.weight_packed", f"{module}.weight_scale")
    is_stated = any("e5m3" in item for item in (*stated_formats(catalogue), *_packing_formats(catalogue)))
    return block == _NVFP4_BLOCK and (is_stated or scale.dtype in E8M0)


def may_be_mxint4(catalogue: Catalogue) -> bool:
    """Return whether layers with MXFP4's keys may be AutoRound's MXINT4, by ``config.json``."""
    kinds = _data_types(catalogue)
    is_stated = bool(stated_formats(catalogue)) or catalogue.quantization_config.get("quant_method") in _WITHOUT_MXINT4
    return any("mx_int" in kind for kind in kinds) or not (kinds or is_stated)


def may_be_mxfp4(catalogue: Catalogue) -> bool:
    """Return whether layers with MXFP4's keys may be MXFP4, by ``config.json``."""
    kinds = _data_types(catalogue)
    return not any("mx_int" in kind for kind in kinds) or any("mx_fp" in kind for kind in kinds)


def _data_types(catalogue: Catalogue) -> set[str]:
    """Return the ``data_type`` that AutoRound states for the weights of the file, and of single layers."""
    config = catalogue.quantization_config
    extra = config.get("extra_config")
    holders = [config, *(extra.values() if isinstance(extra, dict) else ())]
    found = (holder.get("data_type") for holder in holders if isinstance(holder, dict))
    return {item for item in found if isinstance(item, str) and item.startswith("mx_")}


def _packing_formats(catalogue: Catalogue) -> tuple[str, ...]:
    found = catalogue.quantization_config.get("packing_format")
    return (found,) if isinstance(found, str) else ()


def has_rotation(module: str, catalogue: Catalogue) -> bool:
    """Return whether a module has ParoQuant's rotations next to its weight, which any of these layouts may."""
    return f"{module}.theta" in catalogue and f"{module}.pairs" in catalogue
