"""``Plan``: every launch of one layout on one device, made before the first one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_triton_kernels.factory import Factory, Layout, twin_table
from q4_triton_kernels.schedule import STEP_BYTES, UNIT, schedule_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_triton_kernels.layout import WeightMeta
    from q4_triton_kernels.program import Program
    from q4_triton_kernels.schedule import Schedule, Stretch
    from q4_triton_kernels.target import Target

__all__ = ["Plan", "plan_for"]

_MOST_ROUTES = 4096
_DENSE_BYTES = 256 << 20
"""What a product by way of dense weights may take for these and for their sums, for as long as it runs."""
_DENSE_STEP = 128
"""Out-features that are made dense at a time, at least and as a multiple."""


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
    return Factory(layout, dtype, out_dtype, target, device)


@attrs.frozen(eq=False)
class Plan:
    """The launches of one prepared layout with one pair of dtypes on one device."""

    meta: WeightMeta
    factory: Factory
    schedule: Schedule
    _gemv_routes: dict[int, _Route] = attrs.field(factory=dict)
    _gemm_routes: dict[int, _Route] = attrs.field(factory=dict)
    _has: tuple[bool, bool] = attrs.field(
        init=False,
        default=attrs.Factory(
            lambda self: (self.meta.second_dtype is not None, self.meta.global_dtype is not None), takes_self=True
        ),
    )

    def load(self, kinds: frozenset[str], m: tuple[int, int | None]) -> None:
        """Compile and load every program that the given kinds of path may launch for M in a range.

        Args:
            kinds: Of ``"gemv"``, ``"gemm"``, ``"dequant"``.
            m: Lowest and highest number of rows; None for no end.
        """
        for kind in kinds:
            for program in self.programs(kind, m):
                program.load()

    def programs(self, kind: str, m: tuple[int, int | None]) -> Iterator[Program]:
        """Yield every program that a kind of path may launch for M in a range; some more than once."""
        if kind == "dequant":
            yield from (self.factory.dense, self.factory.finish)
            return
        low, high = m
        for stretch in self.schedule.stretches(kind):
            if (high is None or stretch.low <= high) and (stretch.high is None or low <= stretch.high):
                yield self._program(kind, stretch)
                if stretch.is_cut:
                    yield self.factory.finish

    def _program(self, kind: str, stretch: Stretch) -> Program:
        make: Any = self.factory.gemv if kind == "gemv" else self.factory.gemm
        program: Program = make(stretch.tile, even=self.schedule.is_even(kind), final=not stretch.is_cut)
        return program

    def gemv(
        self, tensors: tuple[torch.Tensor, ...], x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Launch the gemv path."""
        route = self._gemv_routes.get(x.shape[0]) or self._route("gemv", x.shape[0], self._gemv_routes)
        self._launch(route, torch.float32, tensors, x, out, bias)

    def gemm(
        self, tensors: tuple[torch.Tensor, ...], x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Launch the gemm path."""
        route = self._gemm_routes.get(x.shape[0]) or self._route("gemm", x.shape[0], self._gemm_routes)
        self._launch(route, self.factory.dtype, tensors, x, out, bias)

    def _route(self, kind: str, rows: int, known: dict[int, _Route]) -> _Route:
        schedule = self.schedule
        stretch = schedule.at(kind, rows)
        splits, span = schedule.parts(stretch, rows)
        program = self._program(kind, stretch)
        route = _Route(program, schedule.is_even(kind), schedule.blocks(stretch.tile, rows), splits, span)
        if len(known) >= _MOST_ROUTES:
            known.clear()
        known[rows] = route
        return route

    def dequant(
        self, tensors: tuple[torch.Tensor, ...], x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Make the weights dense, multiply by the library, and finish in float32: some out-features at a time."""
        meta, factory = self.meta, self.factory
        codes, scale, second, factor, stride = self._numbers(tensors)
        n, k, terms, rows = meta.spec.out_features, meta.spec.in_features, factory.terms, x.shape[0]
        per_feature = terms * (2 * meta.row_bytes * x.element_size() + 4 * rows)
        most = min(n, max(1, _DENSE_BYTES // (per_feature * _DENSE_STEP)) * _DENSE_STEP)
        weights = torch.empty(terms * most * 2 * meta.row_bytes, dtype=x.dtype, device=x.device)
        sums = torch.empty(terms * most * rows, dtype=torch.float32, device=x.device)
        table = self._table(torch.float32, codes)
        for first in range(0, n, most):
            count = min(most, n - first)
            dense = weights[: terms * count * 2 * meta.row_bytes].view(terms, count, -1)
            parts = sums[: terms * rows * count].view(terms, rows, count)
            grid = (-(-count // factory.config.dense_rows), meta.row_bytes // STEP_BYTES, 1)
            numbers = codes[first:], scale[first:], second[first:]
            factory.dense(grid, *numbers, table, dense, count, k, meta.row_bytes, meta.blocks)
            for term, part in zip(dense, parts, strict=True):
                if x.is_cuda:
                    torch.mm(x, term[:, :k].T, out_dtype=torch.float32, out=part)
                else:  # the interpreter's twin: torch's CPU has no such product
                    torch.mm(x.to(torch.float32), term[:, :k].T.to(torch.float32), out=part)
            own_factor = factor[first:] if stride else factor
            self._finish(parts, own_factor, stride, out[:, first:], None if bias is None else bias[first:])

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
        if route.is_even and ((stride % UNIT and rows > 1) or x.data_ptr() % UNIT):
            x = x.clone(memory_format=torch.contiguous_format)  # rows that are not aligned
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
        program(
            grid,
            sums,
            factor,
            out if bias is None else bias,
            out,
            rows,
            n,
            slabs,
            stride,
            out.stride(0),
            int(bias is not None),
        )

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


@functools.lru_cache(maxsize=4096)
def plan_for(
    meta: WeightMeta, dtype: torch.dtype, out_dtype: torch.dtype, target: Target, device: torch.device
) -> Plan:
    """Return the plan of a layout; equal layouts share it, and layouts that differ in N or K alone share programs."""
    factory = _factory(Layout.of(meta), dtype, out_dtype, target, device.index)
    spec, family = meta.spec, factory.layout.family(dtype)
    shape = (spec.out_features, spec.in_features, meta.half, target.processors)
    return Plan(meta, factory, schedule_for(target.arch, family, *shape))
