"""Quantising of masters, by a backend's native quantiser that gives the reference's bytes, else by the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4core import Format, InputError, Rounding, default_registry, dequantize, find_format, quantize
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from q4core import PackedWeight

__all__ = ["check_master", "dequantize_packed", "named_format", "quantize_packed"]


def quantize_packed(
    master: torch.Tensor,
    format: str | Format = "nvfp4",  # noqa: A002  # the contract's name
    *,
    rounding: Rounding | str = Rounding.NEAREST,
    seed: int = 0,
) -> PackedWeight:
    """Return ``master`` in four bits: by a backend's native quantiser where there is one, else by the reference codec.

    Args:
        master: [N, K], float32, bfloat16 or float16.
        format: Name of the format, or a ``Format``.
        rounding: By chance only where a backend's quantiser declares it.
        seed: For rounding by chance, 0 … 2^31 - 1.

    Raises:
        InputError: ``master`` is no such tensor, holds NaN or infinity, or the seed is not legal.
        FormatError: The format is unknown, or does not take K.
        BackendUnavailableError: Nobody rounds by chance here.
    """
    check_master(master)
    return quantize(master.detach(), format, rounding=rounding, seed=seed)


def dequantize_packed(weight: PackedWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the dense weight [N, K], in ``dtype`` or the weight's own; the same as ``q4.dequantize``."""
    return dequantize(weight, dtype)


def named_format(format_: str | Format) -> Format:
    """Return a format by name, the plugins' among them."""
    return find_format(format_, default_registry().formats().values())


def check_master(master: torch.Tensor) -> None:
    """Refuse what can't be a master."""
    if not isinstance(master, torch.Tensor) or master.dim() != 2 or master.dtype not in FLOATS:  # noqa: PLR2004  # [N, K]
        value = f"{master.dtype} {list(master.shape)}" if isinstance(master, torch.Tensor) else type(master).__name__
        raise InputError(
            "training",
            name="master",
            rule="a float32, bfloat16 or float16 tensor [N, K]",
            value=value,
            hint="Integer tensors carry no gradients; keep the master in floating point.",
        )
