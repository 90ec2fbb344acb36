"""``Schedule``: the program that a layer of N × K launches at each M; known before anything is compiled."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs

from q4_triton_kernels.configs import GemmTile, GemvTile, config_for
from q4_triton_kernels.layout import STEP, padded_row_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "GRADIENT_BYTES",
    "STEP_BYTES",
    "UNIT",
    "GradientSchedule",
    "Schedule",
    "Stretch",
    "gemm_tile",
    "gradient_schedule_for",
    "schedule_for",
]

UNIT = 16
"""Bytes that a thread of gemv loads, and in-features of x in its vectors."""
STEP_BYTES = STEP // 2
GRADIENT_BYTES = {"weights": 64, "blocks": 64, "wide": 32}
"""Bytes of a row of codes that a program of the input gradient takes, by family; see the kernel."""
_WAVES = 4
"""Blocks per multiprocessor that a split sum aims at."""
_LEAST_SPAN = 4
"""Steps that a split has at least: of 128 in-features in gemm, of a tile's out-features in the gradient."""
_MOST_SPLITS = 16
_LAST_CUTS = (16, 32, 64, 128, 256, 512, 1024)
"""Rows of x after which a gemm may stop to cut its sums. They are few, so that layers of many shapes are proven as one,
and end where a proof is still cheap; more rows give blocks enough but for a very small N."""
_MOST_PROBE_ROWS = 8


@attrs.frozen
class Stretch:
    """Numbers of rows of x that one program serves.

    Args:
        low: The lowest.
        high: The highest; None for no end.
        tile: How the program is cut.
        is_cut: Whether its sum over K is, so that a second program finishes it.
    """

    low: int
    high: int | None
    tile: GemvTile | GemmTile
    is_cut: bool

    def __str__(self) -> str:
        """Return the lowest number of rows, with ``+`` where the sum is cut."""
        return f"{self.low}{'+' * self.is_cut}"


@attrs.frozen(cache_hash=True)
class Schedule:
    """The programs of one shape on one device.

    Args:
        arch: Compute capability × 10; None in the interpreter.
        family: Of gemm.
        out_features: N.
        in_features: K.
        half: H of the layout.
        processors: Multiprocessors of the device.
    """

    arch: int | None
    family: str
    out_features: int
    in_features: int
    half: int
    processors: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of codes."""
        return padded_row_bytes(self.in_features)

    def is_even(self, kind: str) -> bool:
        """Return whether a program loads rows of x in vectors."""
        return self.in_features % (UNIT if kind == "gemv" else self.half) == 0

    def stretches(self, kind: str) -> tuple[Stretch, ...]:
        """Return the programs of ``"gemv"``, ``"gemm"`` or, in its own schedule, ``"gradient"``, by rising M."""
        return _stretches(self, kind)

    def at(self, kind: str, rows: int) -> Stretch:
        """Return the program that serves a number of rows."""
        return next(item for item in self.stretches(kind) if item.high is None or rows <= item.high)

    def probe_rows(self, kind: str) -> tuple[int, ...]:
        """Return the lowest number of rows of each program, and the highest ones as far as there is room.

        The last program, which has no highest one, is given a number that takes three of its blocks of rows.
        """
        stretches = self.stretches(kind)
        rows = [item.low for item in stretches]
        last = stretches[-1]
        if isinstance(last.tile, GemmTile) and 2 * last.tile.bm + 1 > last.low:
            rows.append(2 * last.tile.bm + 1)
        rows += [item.high for item in stretches if item.high is not None and item.high not in rows]
        return tuple(rows[:_MOST_PROBE_ROWS])

    def variant(self, kind: str) -> str:
        """Return what distinguishes the programs of two shapes: where each one begins, and whether its sum is split."""
        return " ".join(map(str, self.stretches(kind)))

    def splits(self, tile: GemvTile | GemmTile, rows: int) -> tuple[int, int]:
        """Return into how many parts a tile's sum would be cut so that the device is full, and the length of each.

        A gemv's parts are units of 16 bytes, a gemm's steps of 128 in-features.
        """
        if isinstance(tile, GemvTile):
            return _splits(self.row_bytes // UNIT, tile.t, -(-self.out_features // tile.r), self.processors)
        return _splits(self.row_bytes // STEP_BYTES, _LEAST_SPAN, self.blocks(tile, rows), self.processors)

    def parts(self, stretch: Stretch, rows: int) -> tuple[int, int]:
        """Return into how many parts a sum is cut, and the length of each."""
        whole = self.row_bytes // (UNIT if isinstance(stretch.tile, GemvTile) else STEP_BYTES)
        return self.splits(stretch.tile, rows) if stretch.is_cut else (1, whole)

    def blocks(self, tile: GemvTile | GemmTile, rows: int) -> int:
        """Return how many blocks cover y."""
        if isinstance(tile, GemvTile):
            return -(-self.out_features // tile.r)
        return -(-self.out_features // tile.bn) * -(-rows // tile.bm)


@functools.lru_cache(maxsize=4096)
def schedule_for(  # noqa: PLR0913  # the facts of one shape
    arch: int | None, family: str, out_features: int, in_features: int, half: int, processors: int
) -> Schedule:
    """Return the schedule of a shape; its arguments are those of ``Schedule``."""
    return Schedule(arch, family, out_features, in_features, half, processors)


@attrs.frozen(cache_hash=True)
class GradientSchedule(Schedule):
    """The programs of the input gradient of one shape, whose sums run over out-features."""

    def splits(self, tile: GemvTile | GemmTile, rows: int) -> tuple[int, int]:
        """Return as ``Schedule.splits``; a part is steps of a tile's out-features."""
        return _splits(self._steps(tile), _LEAST_SPAN, self.blocks(tile, rows), self.processors)

    def parts(self, stretch: Stretch, rows: int) -> tuple[int, int]:
        """Return into how many parts a sum is cut, and the length of each."""
        return self.splits(stretch.tile, rows) if stretch.is_cut else (1, self._steps(stretch.tile))

    def blocks(self, tile: GemvTile | GemmTile, rows: int) -> int:
        """Return how many blocks cover the gradient to x."""
        return self.row_bytes // GRADIENT_BYTES[self.family] * -(-rows // gemm_tile(tile).bm)

    def _steps(self, tile: GemvTile | GemmTile) -> int:
        return -(-self.out_features // gemm_tile(tile).bn)


def gemm_tile(tile: GemvTile | GemmTile) -> GemmTile:
    """Return a tile that is one of a gemm's, as those of an input gradient are."""
    if not isinstance(tile, GemmTile):
        raise TypeError(f"an input gradient has tiles of a gemm, got {tile}")
    return tile


@functools.lru_cache(maxsize=4096)
def gradient_schedule_for(
    arch: int | None, family: str, out_features: int, in_features: int, processors: int
) -> GradientSchedule:
    """Return the schedule of the input gradient of a shape; its arguments are those of ``Schedule``."""
    return GradientSchedule(arch, family, out_features, in_features, 0, processors)


@functools.lru_cache(maxsize=4096)
def _stretches(schedule: Schedule, kind: str) -> tuple[Stretch, ...]:
    if kind == "gemv":
        return tuple(_gemv(schedule))
    config = config_for(schedule.arch)
    if kind == "gemm":
        return tuple(_tiled(schedule, config.gemm[schedule.family], config.gemv[-1].rows + 1))
    return tuple(_tiled(schedule, config.gradient[schedule.family], 1))


def _gemv(schedule: Schedule) -> Iterator[Stretch]:
    low = 1
    for given in config_for(schedule.arch).gemv:
        # Where x is loaded number by number, half as many out-features fit the registers.
        tile = given if schedule.is_even("gemv") else attrs.evolve(given, r=max(1, given.r // 2))
        yield Stretch(low, tile.rows, tile, is_cut=schedule.splits(tile, low)[0] > 1)
        low = tile.rows + 1


def _tiled(schedule: Schedule, tiles: tuple[GemmTile, ...], low: int) -> Iterator[Stretch]:
    for tile in tiles:
        last = _last_cut(schedule, tile, low)
        if last:
            yield Stretch(low, last, tile, is_cut=True)
            low = last + 1
        if tile.m is None or low <= tile.m:
            yield Stretch(low, tile.m, tile, is_cut=False)
            low = (tile.m or low) + 1


def _last_cut(schedule: Schedule, tile: GemmTile, low: int) -> int:
    """Return the highest number of rows for which a tile's sum is cut; 0 where it never is."""
    ends = {rows for rows in _LAST_CUTS if tile.m is None or rows < tile.m} | ({tile.m} if tile.m else set())
    return max((rows for rows in ends if rows >= low and schedule.splits(tile, rows)[0] > 1), default=0)


def _splits(length: int, least: int, blocks: int, processors: int) -> tuple[int, int]:
    """Return into how many equal parts a sum is cut so that the device is full, and the length of each."""
    wanted = max(1, min(_WAVES * processors // max(1, blocks), length // least, _MOST_SPLITS))
    span = -(-length // wanted)
    return -(-length // span), span
