"""``Plan``: every launch of one layout on one device, made before the first one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_triton_kernels.factory import Factory, Layout, twin_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_triton_kernels.configs import GemmTile, GemvTile
    from q4_triton_kernels.layout import WeightMeta
    from q4_triton_kernels.program import Program
    from q4_triton_kernels.target import Target

__all__ = ["Plan", "plan_for"]

_UNIT = 16
_STEP_BYTES = 64
_WAVES = 4
"""Blocks per multiprocessor that a split sum aims at."""
_LEAST_SPAN = 4
"""Steps of 128 in-features that a gemm's split has at least."""
_MOST_SPLITS = 16
_MOST_ROUTES = 4096
_INTERPRETED_PROCESSORS = 8


@attrs.frozen
class _Route:
    """How one number of rows is launched.

    Args:
        program: The program.
        is_even: Whether it loads rows of x in vectors, for which they must be aligned.
        blocks: Blocks of the grid.
        splits: Into how many parts the sum over K is cut.
        span: Length of a part.
    """

    program: Program
    is_even: bool
    blocks: int
    splits: int
    span: int


@functools.lru_cache(maxsize=256)
def _factory(layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, target: Target, device: int | None) -> Factory:
    del device  # loaded code belongs to one device
    return Factory(layout, dtype, out_dtype, target)


@attrs.frozen(eq=False)
class Plan:
    """The launches of one prepared layout with one pair of dtypes on one device."""

    meta: WeightMeta
    factory: Factory
    processors: int
    _gemv_routes: dict[int, _Route] = attrs.field(factory=dict)
    _gemm_routes: dict[int, _Route] = attrs.field(factory=dict)
    _has: tuple[bool, bool] = attrs.field(
        init=False,
        default=attrs.Factory(
            lambda self: (self.meta.second_dtype is not None, self.meta.global_dtype is not None), takes_self=True
        ),
    )

    @property
    def family(self) -> str:
        """Which family of gemm serves."""
        return self.factory.layout.family(self.factory.dtype)

    def load(self, kinds: frozenset[str], m: tuple[int, int | None]) -> None:
        """Compile and load every program that the given kinds of path may launch for M in a range.

        Args:
            kinds: Of ``"gemv"``, ``"gemm"``, ``"dequant"``.
            m: Lowest and highest number of rows; None for no end.
        """
        low, high = m
        config = self.factory.config
        if "gemv" in kinds:
            for tile in self._gemv_tiles():
                splits = self._gemv_splits(tile)[0]
                self._load_matrix(self.factory.gemv, tile, _UNIT, {splits == 1})
        if "gemm" in kinds:
            first = low
            for cut in config.gemm[self.family]:
                last = cut.m if high is None or cut.m is None else min(cut.m, high)
                if last is None or last >= first:
                    finals = {self._gemm_splits(cut, rows)[0] == 1 for rows in (first, last or first)}
                    self._load_matrix(
                        self.factory.gemm, cut, self.meta.half, finals | ({True} if last is None else set())
                    )
                first = max(first, (cut.m or first) + 1)
        if "dequant" in kinds:
            self.factory.dense.load()
            self.factory.finish.load()

    def _load_matrix(self, make: Any, tile: Any, unit: int, finals: set[bool]) -> None:
        for final in finals:
            make(tile, even=self._is_even(unit), final=final).load()
        if False in finals:
            self.factory.finish.load()

    def _gemv_splits(self, tile: GemvTile) -> tuple[int, int]:
        """Return how many splits of K a gemv has, and the units of each."""
        units = self.meta.row_bytes // _UNIT
        blocks = -(-self.meta.spec.out_features // tile.r)
        return _splits(units, tile.t, blocks, self.processors)

    def _gemm_splits(self, tile: GemmTile, rows: int) -> tuple[int, int]:
        """Return how many splits of K a gemm has, and the steps of each."""
        steps = self.meta.row_bytes // _STEP_BYTES
        blocks = -(-self.meta.spec.out_features // tile.bn) * -(-rows // tile.bm)
        return _splits(steps, _LEAST_SPAN, blocks, self.processors)

    def gemv(
        self, tensors: tuple[torch.Tensor, ...], x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Launch the gemv path."""
        rows = x.shape[0]
        route = self._gemv_routes.get(rows)
        if route is None:
            tile = next(tile for tile in self._gemv_tiles() if rows <= tile.rows)
            blocks = -(-self.meta.spec.out_features // tile.r)
            route = self._route(self.factory.gemv, tile, _UNIT, blocks, self._gemv_splits(tile))
            self._gemv_routes[rows] = route
        self._launch(route, torch.float32, tensors, x, out, bias)

    def gemm(
        self, tensors: tuple[torch.Tensor, ...], x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Launch the gemm path."""
        rows = x.shape[0]
        route = self._gemm_routes.get(rows)
        if route is None:
            tile = next(tile for tile in self.factory.config.gemm[self.family] if tile.m is None or rows <= tile.m)
            blocks = -(-self.meta.spec.out_features // tile.bn) * -(-rows // tile.bm)
            route = self._route(self.factory.gemm, tile, self.meta.half, blocks, self._gemm_splits(tile, rows))
            if len(self._gemm_routes) >= _MOST_ROUTES:
                self._gemm_routes.clear()
            self._gemm_routes[rows] = route
        self._launch(route, self.factory.dtype, tensors, x, out, bias)

    def _route(self, make: Any, tile: Any, unit: int, blocks: int, cut: tuple[int, int]) -> _Route:
        splits, span = cut
        even = self._is_even(unit)
        return _Route(make(tile, even=even, final=splits == 1), even, blocks, splits, span)

    def _is_even(self, unit: int) -> bool:
        return self.meta.spec.in_features % unit == 0

    def _gemv_tiles(self) -> Iterator[GemvTile]:
        """Yield the tiles of gemv; where x is loaded number by number, half as many out-features fit the registers."""
        for tile in self.factory.config.gemv:
            yield tile if self._is_even(_UNIT) else attrs.evolve(tile, r=max(1, tile.r // 2))

    def dequant(
        self, tensors: tuple[torch.Tensor, ...], x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Make the weights dense, multiply by the library, and finish in float32."""
        meta, factory = self.meta, self.factory
        codes, scale, second, factor, stride = self._numbers(tensors)
        n, k = meta.spec.out_features, meta.spec.in_features
        weights = torch.empty((factory.terms, n, 2 * meta.row_bytes), dtype=x.dtype, device=x.device)
        grid = (-(-n // factory.config.dense_rows), meta.row_bytes // _STEP_BYTES, 1)
        table = self._table(torch.float32, codes)
        factory.dense(grid, codes, scale, second, table, weights, n, k, meta.row_bytes, meta.blocks)
        sums = torch.empty((factory.terms, x.shape[0], n), dtype=torch.float32, device=x.device)
        for term, part in zip(weights, sums, strict=True):
            dense = term[:, :k].T
            if x.is_cuda:
                torch.mm(x, dense, out_dtype=torch.float32, out=part)
            else:  # the interpreter's twin: torch's CPU has no such product
                torch.mm(x.to(torch.float32), dense.to(torch.float32), out=part)
        self._finish(sums, factor, stride, out, bias)

    def _launch(  # noqa: PLR0913  # the operands of one product
        self,
        route: _Route,
        table_dtype: torch.dtype,
        tensors: tuple[torch.Tensor, ...],
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        """Launch a program, and where the sum is cut, the one that finishes it."""
        codes, scale, second, factor, g_stride = self._numbers(tensors)
        meta, splits = self.meta, route.splits
        rows, stride = x.shape[0], x.stride(0)
        if route.is_even and ((stride % _UNIT and rows > 1) or x.data_ptr() % _UNIT):
            x = x.clone(memory_format=torch.contiguous_format)  # rows that lie awkwardly
            stride = x.stride(0)
        n = meta.spec.out_features
        place = out
        if splits > 1:
            place = torch.empty((splits, rows, n), dtype=torch.float32, device=x.device)
        route.program(
            (route.blocks, splits, 1),
            x,
            stride,
            codes,
            scale,
            second,
            factor,
            self._table(table_dtype, codes),
            out if bias is None else bias,
            place,
            rows,
            n,
            meta.spec.in_features,
            meta.row_bytes,
            meta.blocks,
            route.span,
            g_stride,
            int(bias is not None),
        )
        if splits > 1:
            self._finish(place, factor, g_stride, out, bias)

    def _finish(
        self, sums: torch.Tensor, factor: torch.Tensor, stride: int, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        slabs, rows, n = sums.shape
        program = self.factory.finish
        config = self.factory.config
        grid = (-(-rows // config.finish_rows), -(-n // config.finish_columns), 1)
        program(grid, sums, factor, out if bias is None else bias, out, rows, n, slabs, stride, int(bias is not None))

    def _numbers(
        self, tensors: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Return codes, scale, second number, global scale and its stride; codes stand for what there is none of."""
        codes = tensors[0]
        has_second, has_global = self._has
        second = tensors[2] if has_second else codes
        factor = tensors[2 + has_second] if has_global else codes
        return codes, tensors[1], second, factor, int(has_global and factor.numel() > 1)

    def _table(self, dtype: torch.dtype, codes: torch.Tensor) -> torch.Tensor:
        return twin_table(self.factory.layout.values, dtype) if self.factory.target.is_interpreted else codes


def _splits(length: int, least: int, blocks: int, processors: int) -> tuple[int, int]:
    """Return into how many equal parts a sum is cut so that the device is full, and the length of each."""
    wanted = max(1, min(_WAVES * processors // max(1, blocks), length // least, _MOST_SPLITS))
    span = -(-length // wanted)
    return -(-length // span), span


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=4096)
def plan_for(
    meta: WeightMeta, dtype: torch.dtype, out_dtype: torch.dtype, target: Target, device: torch.device
) -> Plan:
    """Return the plan of a layout; equal layouts share it, and layouts that differ in N or K alone share programs."""
    factory = _factory(Layout.of(meta), dtype, out_dtype, target, device.index)
    return Plan(meta, factory, _processors(device))
