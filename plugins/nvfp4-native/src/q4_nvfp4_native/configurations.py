"""Tilings of the FP4 kernels by rows of x: data, from ``configurations.json``.

``python -m q4_nvfp4_native.configurations`` writes the C++ form of it after a change.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CUDA_FOLDER", "Configuration", "configurations", "header", "is_measured", "rows_served"]

CUDA_FOLDER = Path(__file__).with_name("cuda")
_DEPTH = 128
_EVERY_ROW = 2**31 - 1


@attrs.frozen(kw_only=True)
class Configuration:
    """One tiling: a block of threads computes ``bm`` × ``bn`` elements of y.

    Args:
        name: Such as ``"m16"``; part of the path's name.
        bm: Rows of x.
        bn: Out-features.
        wm: Warps along the rows of x.
        wn: Warps along the out-features.
        wk: Groups of warps that split K.
        stages: Tiles of K that are in shared memory at a time.
    """

    name: str
    bm: int
    bn: int
    wm: int
    wn: int
    wk: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.wm * self.wn * self.wk

    def shared_bytes(self, block_size: int) -> int:
        """Return the shared memory of a block of threads, for scales of ``block_size`` in-features."""
        stage = self.wk * (self.bm + self.bn) * (_DEPTH // 2 + _DEPTH // block_size)
        return max(self.stages * stage, (self.wk - 1) * self.bm * self.bn * 4)

    def blocks(self, rows: int, out_features: int) -> int:
        """Return how many blocks of threads compute y [rows, out_features]."""
        return -(-rows // self.bm) * -(-out_features // self.bn)


@functools.cache
def _data() -> Mapping[str, Any]:
    return json.loads((CUDA_FOLDER / "configurations.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@functools.cache
def configurations() -> Mapping[str, Configuration]:
    """Return every tiling by name."""
    return {name: Configuration(name=name, **numbers) for name, numbers in _data()["tiles"].items()}


def rows_served(arch: int) -> Mapping[str, tuple[int, int | None]]:
    """Return name → (lowest, highest) rows of x on an architecture; None for no upper end."""
    return {name: (low, high) for name, (low, high) in _data()["rows"][f"sm_{arch}"].items()}


def is_measured(arch: int) -> bool:
    """Return whether the choice for an architecture comes from measurements that were recorded on one of its kind."""
    return bool(_data()["measured"][f"sm_{arch}"])


def header() -> str:
    """Return ``configurations.cuh``: the same data for C++, with the row limits of sm_120."""
    lines = [
        "// Made from configurations.json by `python -m q4_nvfp4_native.configurations`.",
        "// Name, most rows of x, then BM, BN, warps along M, N and K, stages.",
    ]
    for name, (_, high) in rows_served(120).items():
        own = configurations()[name]
        numbers = (_EVERY_ROW if high is None else high, own.bm, own.bn, own.wm, own.wn, own.wk, own.stages)
        lines.append(f"Q4_CONFIGURATION({name}, {', '.join(map(str, numbers))})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (CUDA_FOLDER / "configurations.cuh").write_text(header(), encoding="utf-8")
