"""Launch configurations: data per architecture, in ``configs.json``."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

import attrs

__all__ = ["Config", "GemmTile", "GemvTile", "config_for"]


@attrs.frozen(cache_hash=True)
class GemvTile:
    """How a gemv for up to ``rows`` rows of x is cut: ``r`` out-features × ``t`` units of 16 bytes at a time."""

    rows: int
    r: int
    t: int
    warps: int
    stages: int


@attrs.frozen(cache_hash=True)
class GemmTile:
    """How a gemm for up to ``m`` rows of x (None: any number) is cut: ``bn`` out-features × ``bm`` rows of x."""

    m: int | None
    bn: int
    bm: int
    warps: int
    stages: int


@attrs.frozen(kw_only=True)
class Config:
    """The configurations of one architecture.

    Args:
        measured: Whether tiles were chosen by measurements on a device; otherwise they run, and others may be faster.
        gemv: By rising number of rows.
        gemm: Family → tiles by rising M. Families: ``weights`` (scale × code in 16 bits, one sum), ``blocks`` (a sum
            per block), ``wide`` (x in float32).
        gradient: Family → tiles of the input gradient by rising M; there ``bn`` is the out-features of one step of the
            sum, and in-features are not cut by data. Its family ``blocks`` cuts weights into three bfloat16.
        dequant_above: Family → the M above which dense weights and a library GEMM were measured to be faster; a family
            that is missing has no such record.
        dense_rows: Out-features per program of the kernel that makes weights dense.
        dense_warps: Its warps.
        finish_rows: Rows of y per program of the kernel that finishes sums.
        finish_columns: Out-features per program of it.
        finish_warps: Its warps.
    """

    measured: bool
    gemv: tuple[GemvTile, ...]
    gemm: dict[str, tuple[GemmTile, ...]]
    gradient: dict[str, tuple[GemmTile, ...]]
    dequant_above: dict[str, int]
    dense_rows: int
    dense_warps: int
    finish_rows: int
    finish_columns: int
    finish_warps: int


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files("q4_triton_kernels").joinpath("configs.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _tiles(facts: dict[str, Any]) -> dict[str, tuple[GemmTile, ...]]:
    return {family: tuple(GemmTile(**tile) for tile in tiles) for family, tiles in facts.items()}


@functools.cache
def config_for(arch: int | None) -> Config:
    """Return the configurations of an architecture of the list; None is the interpreter."""
    facts = _table()["interpreted" if arch is None else str(arch)]
    return Config(
        measured=facts["measured"],
        gemv=tuple(GemvTile(**tile) for tile in facts["gemv"]),
        gemm=_tiles(facts["gemm"]),
        gradient=_tiles(facts["gradient"]),
        dequant_above=facts["dequant_above"],
        dense_rows=facts["dense"]["r"],
        dense_warps=facts["dense"]["warps"],
        finish_rows=facts["finish"]["bm"],
        finish_columns=facts["finish"]["bn"],
        finish_warps=facts["finish"]["warps"],
    )
