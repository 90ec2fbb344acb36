"""Layers on cpu-native alone, and the instruction sets that this machine has."""

from __future__ import annotations

import torch

import q4core as q4
from q4_cpu_native import CpuNative
from tests.support.fakes import registry

__all__ = ["ISAS", "layer_on", "random_weight"]

ISAS = [isa for isa in ("avx2", "avxvnni", "avx512") if CpuNative(isa).isa]


def layer_on(backend: CpuNative, weight: q4.PackedWeight, precision: str = "auto", **config: object) -> q4.Q4Linear:
    """Return a layer that this backend serves, without the reference."""
    settings = q4.SessionConfig(activation_precision=precision, **config)  # type: ignore[arg-type]
    return q4.Session(settings, registry=registry(backend, reference=False)).linear(weight)


def random_weight(format_: str = "nf4", rows: int = 40, columns: int = 256, seed: int = 1) -> q4.PackedWeight:
    """Return a weight of normal random numbers."""
    return q4.quantize(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)), format_)
