"""Layers on cpu-native alone, and the instruction sets that this machine has."""

from __future__ import annotations

from typing import Any

import torch

import q4core as q4
from q4_cpu_native import CpuNative
from tests.support.fakes import registry

__all__ = ["ISAS", "layer_on", "quantised", "random_weight"]

ISAS = [isa for isa in ("avx2", "avxvnni", "avx512") if CpuNative(isa).isa]


def layer_on(backend: CpuNative, weight: q4.PackedWeight, precision: str = "auto", **config: object) -> q4.Q4Linear:
    """Return a layer that this backend serves, without the reference."""
    settings = q4.SessionConfig(activation_precision=precision, **config)  # type: ignore[arg-type]
    return q4.Session(settings, registry=registry(backend, reference=False)).linear(weight)


def random_weight(format_: str = "nf4", rows: int = 40, columns: int = 256, seed: int = 1) -> q4.PackedWeight:
    """Return a weight of normal random numbers."""
    return quantised(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)), format_)


def quantised(dense: torch.Tensor, format_: str) -> q4.PackedWeight:
    """Return a weight near to a dense one, in formats to which no rule quantises, too."""
    form = q4.BUILTIN_FORMATS[format_]
    if form.rule:
        return q4.quantize(dense, format_)
    rows, columns = dense.shape
    blocks = dense.view(rows, -1, 32)
    low, high = blocks.amin(-1), blocks.amax(-1)
    fields: dict[str, Any] = {"scale": (high - low) / 255}
    if form.bits == 4:
        book = form.codebook_tensor()
        fields["scale"] = blocks.abs().amax(-1) / book.abs().max()
        codes = ((blocks / fields["scale"].unsqueeze(-1)).unsqueeze(-1) - book).abs().argmin(-1)
    else:
        codes = ((blocks - low.unsqueeze(-1)) / fields["scale"].unsqueeze(-1)).round()
        zero = (-low / fields["scale"]).round()
        fields |= {"offset": low} if form.has_offset else {"zero": zero.clamp(0, 255).to(torch.uint8)}
    qdata = q4.pack_codes(codes.to(torch.uint8).view(rows, columns), form.packing)
    return q4.PackedWeight(
        format=form, qdata=qdata, out_features=rows, in_features=columns, block_size=32, packing=form.packing, **fields
    )
