"""``Gradient``: the launches of the input gradient of one layout on one device, made before the first one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import attrs
import torch

from q4_triton_kernels.factory import Factory, Layout, twin_table
from q4_triton_kernels.program import TYPES, Program
from q4_triton_kernels.schedule import GRADIENT_BYTES, GradientSchedule, gemm_tile, gradient_schedule_for
from q4_triton_kernels.tables import entries_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_triton_kernels.configs import GemmTile
    from q4_triton_kernels.layout import WeightMeta
    from q4_triton_kernels.target import Target

__all__ = ["Gradient", "gradient_for", "has_row_globals"]

_ALIGNMENT = 16
_E4M3 = 1
_E4M3_POST = 256.0
_INTEGER = 2


def has_row_globals(meta: WeightMeta, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Return whether each out-feature of a prepared weight has a global scale of its own."""
    return meta.global_dtype is not None and tensors[_global_place(meta)].numel() > 1


def _global_place(meta: WeightMeta) -> int:
    return 2 + (meta.second_dtype is not None)


@attrs.frozen(eq=False)
class _Code:
    """The programs of all layouts that differ in N and K alone.

    Args:
        layout: What they are specialised on.
        factory: Of the program that finishes cut sums, for the gradient's dtype in and x's dtype out.
        is_by_row: Whether each out-feature has a global scale of its own, which goes into the weights.
        made: The programs made so far, by tile and by whether N is a multiple of 16.
    """

    layout: Layout
    factory: Factory
    is_by_row: bool
    made: dict[tuple[GemmTile, bool], Program] = attrs.field(factory=dict)

    @property
    def family(self) -> str:
        """``wide``, ``weights`` where the gradient's dtype holds each weight, or ``blocks``."""
        family = self.layout.family(self.factory.dtype)
        return "blocks" if family == "weights" and self.is_by_row else family

    def program(self, tile: GemmTile, *, even: bool) -> Program:
        """Return the program of a tile, made once."""
        found = self.made.get((tile, even))
        if found is None:
            found = self.made[tile, even] = self._make(tile, even=even)
        return found

    def _make(self, tile: GemmTile, *, even: bool) -> Program:
        from q4_triton_kernels.kernels.gradient import gradient  # noqa: PLC0415  # needs Triton

        factory, layout = self.factory, self.layout
        is_short = self.family == "weights"
        pointers = {
            "d_ptr": f"*{TYPES[factory.dtype]}",
            "q_ptr": "*u8",
            "s_ptr": f"*{layout.scale_type}",
            "z_ptr": f"*{layout.second_type}",
            "g_ptr": "*fp32",
            "table_ptr": "*i32",
            "out_ptr": f"*{TYPES[factory.out_dtype]}",
            "part_ptr": "*fp32",
        }
        constants = {
            "BYTES": GRADIENT_BYTES[self.family],
            "BN": tile.bn,
            "BM": tile.bm,
            "HALF": layout.half,
            "BLOCK": layout.block or 1 << 30,
            "CODES": layout.codes,
            "BASE": layout.base,
            "WEIGHTS": is_short,
            "POST": _E4M3_POST if is_short and layout.scale == _E4M3 else 1.0,
            "SCALE": layout.scale,
            "SECOND": layout.second,
            "GLOBAL": layout.globals,
            "BY_ROW": self.is_by_row,
            "TABLE": "" if is_short or layout.codes == _INTEGER else self._table(),
        }
        signature = pointers | dict.fromkeys(("M", "N", "K", "row_bytes", "blocks", "splits", "span"), "i32")
        aligned = ("q_ptr", "row_bytes", *(("d_ptr", "N") if even else ()))
        return Program(gradient, signature, constants, aligned, factory.target, tile.warps, tile.stages)

    def _table(self) -> str:
        if self.factory.target.is_interpreted:
            return ""
        from q4_triton_kernels.kernels.decode import table_text  # noqa: PLC0415  # needs Triton

        return table_text(entries_of(self.layout.values, torch.float32))


@attrs.frozen(eq=False)
class Gradient:
    """The input gradient of one prepared layout.

    Args:
        meta: The layout.
        code: Its programs.
        schedule: Which of them serves how many rows.
    """

    meta: WeightMeta
    code: _Code
    schedule: GradientSchedule

    @property
    def tiles(self) -> tuple[GemmTile, ...]:
        """The tiles, by rising M."""
        return self.code.factory.config.gradient[self.code.family]

    def programs(self, m: tuple[int, int | None]) -> Iterator[Program]:
        """Yield every program that may be launched for M in a range."""
        low, high = m
        is_cut = False
        for item in self.schedule.stretches("gradient"):
            if (item.high is None or item.high >= low) and (high is None or item.low <= high):
                is_cut |= item.is_cut
                yield self.code.program(gemm_tile(item.tile), even=self._is_even)
        if is_cut:
            yield self.code.factory.finish

    def load(self, m: tuple[int, int | None]) -> None:
        """Compile and load every program that may be launched for M in a range.

        Raises:
            PrepareError: One does not compile, or the driver does not load it.
        """
        for program in self.programs(m):
            program.load()

    @property
    def _is_even(self) -> bool:
        return self.meta.spec.out_features % _ALIGNMENT == 0

    def __call__(self, tensors: tuple[torch.Tensor, ...], grad: torch.Tensor, out: torch.Tensor) -> None:
        """Launch on the current stream: out [M, K] = grad [M, N] @ w, both contiguous."""
        meta, factory = self.meta, self.code.factory
        rows, (n, k) = grad.shape[0], (meta.spec.out_features, meta.spec.in_features)
        stretch = self.schedule.at("gradient", rows)
        if self._is_even and grad.data_ptr() % _ALIGNMENT:
            grad = grad.clone()
        codes = tensors[0]
        second = tensors[2] if meta.second_dtype is not None else codes
        scale_of_all = tensors[_global_place(meta)] if meta.global_dtype is not None else codes
        blocks = self.schedule.blocks(stretch.tile, rows)
        splits, span = self.schedule.parts(stretch, rows)
        part = out
        if splits > 1:
            part = torch.empty((splits, rows, k), dtype=torch.float32, device=out.device)
        table = twin_table(self.code.layout.values, torch.float32) if factory.target.is_interpreted else codes
        sizes = (rows, n, k, meta.row_bytes, meta.blocks, splits, span)
        program = self.code.program(gemm_tile(stretch.tile), even=self._is_even)
        program((blocks, splits, 1), grad, codes, tensors[1], second, scale_of_all, table, out, part, *sizes)
        if splits > 1:
            config = factory.config
            grid = (-(-rows // config.finish_rows), -(-k // config.finish_columns), 1)
            factory.finish(grid, part, scale_of_all, out, out, rows, k, splits, 0, k, 0)


@functools.lru_cache(maxsize=4096)
def gradient_for(  # noqa: PLR0913  # what code depends on
    meta: WeightMeta,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    target: Target,
    device: torch.device,
    *,
    is_by_row: bool,
) -> Gradient:
    """Return the input gradient of a layout; equal layouts share it, and those that differ in N or K alone share code.

    Args:
        meta: The layout.
        dtype: dtype of the gradient to y.
        out_dtype: dtype of the gradient to x.
        target: What runs it.
        device: Where.
        is_by_row: ``has_row_globals``.
    """
    code = _code(Layout.of(meta), dtype, out_dtype, target, device.index, is_by_row)
    spec = meta.spec
    schedule = gradient_schedule_for(target.arch, code.family, spec.out_features, spec.in_features, target.processors)
    return Gradient(meta, code, schedule)


@functools.lru_cache(maxsize=256)
def _code(  # noqa: PLR0913  # as above
    layout: Layout,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    target: Target,
    device: int | None,
    is_by_row: bool,  # noqa: FBT001  # a key of the cache
) -> _Code:
    del device  # loaded code belongs to one device
    finishing = attrs.evolve(layout, globals=0) if is_by_row else layout
    return _Code(layout, Factory(finishing, dtype, out_dtype, target), is_by_row)
