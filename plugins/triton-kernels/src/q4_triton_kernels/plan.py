"""``Plan``: every launch of one layout on one device, made before the first one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_triton_kernels.configs import Config, GemmTile, GemvTile, config_for
from q4_triton_kernels.program import TYPES, Program
from q4_triton_kernels.tables import code_base, codes_kind, entries_of, is_e2m1, pair_factor, values_of
from q4core import Feature, ScaleKind

if TYPE_CHECKING:
    from q4_triton_kernels.layout import WeightMeta
    from q4_triton_kernels.target import Target
    from q4core import Format, Request

__all__ = ["Plan", "family_for", "plan_for"]

_FLOAT, _E4M3, _E8M0 = 0, 1, 2
_SCALES = {ScaleKind.PLAIN: _FLOAT, ScaleKind.E8M0: _E8M0}
_NONE, _OFFSET, _ZERO, _ZERO_IN_CODE = 0, 1, 2, 3
_INTEGER = 2
_TABLES = frozenset({0, 3})
_GLOBALS = {ScaleKind.E4M3_MUL: 1, ScaleKind.E4M3_DIV: 2}
_E4M3_POST = 256.0
_UNIT = 16
_STEP_BYTES = 64
_WAVES = 4
"""Blocks per multiprocessor that a split sum aims at."""
_LEAST_SPAN = 4
"""Steps of 128 in-features that a gemm's split has at least."""
_MOST_SPLITS = 16
_INTERPRETED_PROCESSORS = 8


@attrs.frozen(cache_hash=True)
class Layout:
    """What kernels are specialised on: the constants that a weight's layout gives, whatever N and K.

    Args:
        half: Codes in half a group.
        block: In-features per scale; 0 where one scale holds for the whole row.
        codes: The kernels' CODES.
        base: The kernels' BASE.
        scale: The kernels' SCALE.
        second: The kernels' SECOND for gemv and dense.
        globals: The kernels' GLOBAL.
        scale_type: Triton's name of the stored scales' dtype.
        second_type: The same of the second number; ``"u8"`` where there is none.
        values: Value of each code.
        family_16: Families of gemm for float16 and bfloat16.
    """

    half: int
    block: int
    codes: int
    base: int
    scale: int
    second: int
    globals: int
    scale_type: str
    second_type: str
    values: tuple[float, ...]
    family_16: tuple[str, str]

    @classmethod
    def of(cls, meta: WeightMeta) -> Layout:
        """Return what kernels need to know of a prepared weight's layout."""
        spec = meta.spec
        scale = _SCALES.get(spec.scale_kind, _E4M3)
        return cls(
            half=meta.half,
            block=0 if spec.block_size >= spec.in_features else spec.block_size,
            codes=codes_kind(spec),
            base=code_base(spec) or 0,
            scale=scale,
            second={None: _NONE, "offset": _OFFSET, "zero": _ZERO}[meta.second_field],
            globals=_GLOBALS.get(spec.scale_kind, 0),
            scale_type=TYPES[meta.scale_dtype] if scale == _FLOAT else "u8",
            second_type="u8" if meta.second_dtype is None else TYPES[meta.second_dtype],
            values=values_of(spec),
            family_16=(
                _family(spec.format, spec.scale_kind, torch.float16, has_second=meta.second_field is not None),
                _family(spec.format, spec.scale_kind, torch.bfloat16, has_second=meta.second_field is not None),
            ),
        )

    def family(self, dtype: torch.dtype) -> str:
        """Return which family of gemm serves an x: ``wide``, ``weights`` or ``blocks``."""
        if dtype is torch.float32:
            return "wide"
        return self.family_16[dtype is torch.bfloat16]

    @property
    def matrix_second(self) -> int:
        """The kernels' SECOND for a gemm over codes: zero points of 8 bits are taken from the codes."""
        is_small = self.second == _ZERO and self.second_type in {"u8", "i8"}
        return _ZERO_IN_CODE if is_small and self.codes == _INTEGER else self.second


def family_for(request: Request) -> str:
    """Return which family of gemm serves a request."""
    second = {Feature.OFFSET, Feature.ZERO_POINT, Feature.FLOAT_ZERO_POINT} & request.features
    return _family(request.format, request.scale_kind, request.dtype, has_second=bool(second))


def _family(kind: Format, scale_kind: ScaleKind, dtype: torch.dtype, *, has_second: bool) -> str:
    """Return ``wide``, ``weights`` where dtype holds scale × code exactly, or ``blocks``."""
    if dtype is torch.float32:
        return "wide"
    is_power = scale_kind is ScaleKind.E8M0 and dtype is torch.bfloat16
    is_short = scale_kind in {ScaleKind.E4M3, ScaleKind.E4M3_MUL, ScaleKind.E4M3_DIV}
    is_exact = is_e2m1(kind) and not has_second and (is_power or is_short)
    return "weights" if is_exact else "blocks"


@functools.lru_cache(maxsize=256)
def _twin_table(values: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the table that the interpreter looks up."""
    return torch.tensor(entries_of(values, dtype), dtype=torch.int64).to(torch.int32)


def _text(values: tuple[float, ...], dtype: torch.dtype, target: Target) -> str:
    if target.is_interpreted:
        return ""
    from q4_triton_kernels.kernels.decode import table_text  # noqa: PLC0415  # needs Triton

    return table_text(entries_of(values, dtype))


@attrs.define(eq=False, slots=False)
class Factory:
    """Makes programs for one (layout, dtypes, target, device); equal programs are made once."""

    layout: Layout
    dtype: torch.dtype
    out_dtype: torch.dtype
    target: Target
    _made: dict[Any, Program] = attrs.field(factory=dict)

    @property
    def config(self) -> Config:
        """The target's configurations."""
        return config_for(self.target.arch)

    def _matrix_signature(self, *, final: bool) -> dict[str, str]:
        x, out = TYPES[self.dtype], TYPES[self.out_dtype]
        pointers = {
            "x_ptr": f"*{x}",
            "x_stride": "i32",
            "q_ptr": "*u8",
            "s_ptr": f"*{self.layout.scale_type}",
            "z_ptr": f"*{self.layout.second_type}",
            "g_ptr": "*fp32",
            "table_ptr": "*i32",
            "bias_ptr": f"*{out}",
            "out_ptr": f"*{out}" if final else "*fp32",
        }
        sizes = ("M", "N", "K", "row_bytes", "blocks", "span", "g_stride", "has_bias")
        return pointers | dict.fromkeys(sizes, "i32")

    def gemv(self, tile: GemvTile, *, even: bool, final: bool) -> Program:
        """Return the gemv of a tile; ``even`` says that K is a multiple of 16 and that x's rows are aligned."""
        key = (tile, even, final)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._gemv(tile, even=even, final=final)
        return found

    def gemm(self, tile: GemmTile, *, even: bool, final: bool) -> Program:
        """Return the gemm of a tile; ``even`` says that K is a multiple of H and that x's rows are aligned."""
        key = (tile, even, final)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = self._gemm(tile, even=even, final=final)
        return found

    @functools.cached_property
    def dense(self) -> Program:
        """The kernel that writes dense weights in x's dtype, as one term or as two."""
        return self._dense()

    @functools.cached_property
    def finish(self) -> Program:
        """The kernel that turns float32 sums into y."""
        return self._finish()

    def _block(self) -> int:
        return self.layout.block or 1 << 30

    def _gemv(self, tile: GemvTile, *, even: bool, final: bool) -> Program:
        from q4_triton_kernels.kernels.gemv import gemv  # noqa: PLC0415  # needs Triton

        layout = self.layout
        constants = {
            "ROWS": tile.rows,
            "R": tile.r,
            "T": tile.t,
            "HALF": layout.half,
            "BLOCK": self._block(),
            "SCALE": layout.scale,
            "SECOND": layout.second,
            "GLOBAL": layout.globals,
            "EVEN": even,
            "TABLE": _text(layout.values, torch.float32, self.target),
            "FINAL": final,
        }
        return self._program(gemv, self._matrix_signature(final=final), constants, (tile.warps, tile.stages), even=even)

    def _gemm(self, tile: GemmTile, *, even: bool, final: bool) -> Program:
        from q4_triton_kernels.kernels.gemm import gemm  # noqa: PLC0415  # needs Triton

        layout, family = self.layout, self.layout.family(self.dtype)
        post = 1.0
        if family == "weights" and layout.scale == _E4M3:
            post = _E4M3_POST
        elif family == "blocks" and layout.codes in _TABLES:
            post = 1.0 / pair_factor(layout.values, self.dtype)
        looks_up = family == "wide" or layout.codes in _TABLES
        is_direct = family == "blocks" and layout.codes == _INTEGER
        constants = {
            "BN": tile.bn,
            "BM": tile.bm,
            "GROUP": 8,
            "HALF": layout.half,
            "BLOCK": self._block(),
            "CODES": layout.codes,
            "BASE": layout.base,
            "WEIGHTS": family != "blocks",
            "POST": post,
            "SCALE": layout.scale,
            "SECOND": layout.matrix_second if is_direct else layout.second,
            "GLOBAL": layout.globals,
            "EVEN": even,
            "TABLE": _text(layout.values, self.dtype, self.target) if looks_up else "",
            "FINAL": final,
        }
        return self._program(gemm, self._matrix_signature(final=final), constants, (tile.warps, tile.stages), even=even)

    def _dense(self) -> Program:
        from q4_triton_kernels.kernels.dense import dense  # noqa: PLC0415  # needs Triton

        layout = self.layout
        pointers = {
            "q_ptr": "*u8",
            "s_ptr": f"*{layout.scale_type}",
            "z_ptr": f"*{layout.second_type}",
            "table_ptr": "*i32",
            "out_ptr": f"*{TYPES[self.dtype]}",
        }
        constants = {
            "R": self.config.dense_rows,
            "HALF": layout.half,
            "BLOCK": self._block(),
            "TERMS": self.terms,
            "SCALE": layout.scale,
            "SECOND": layout.second,
            "TABLE": _text(layout.values, torch.float32, self.target),
        }
        signature = pointers | dict.fromkeys(("N", "K", "row_bytes", "blocks"), "i32")
        return self._program(dense, signature, constants, (self.config.dense_warps, 1), even=False)

    def _finish(self) -> Program:
        from q4_triton_kernels.kernels.dense import finish  # noqa: PLC0415  # needs Triton

        out = f"*{TYPES[self.out_dtype]}"
        signature = {"part_ptr": "*fp32", "g_ptr": "*fp32", "bias_ptr": out, "out_ptr": out}
        signature |= dict.fromkeys(("M", "N", "slabs", "g_stride", "has_bias"), "i32")
        constants = {"BM": self.config.finish_rows, "BN": self.config.finish_columns, "GLOBAL": self.layout.globals}
        return self._program(finish, signature, constants, (self.config.finish_warps, 1), even=False)

    @property
    def terms(self) -> int:
        """How many numbers of x's dtype a dense weight is the sum of."""
        return 1 if self.layout.family(self.dtype) == "weights" else 2

    def _program(
        self, kernel: Any, signature: dict[str, str], constants: dict[str, Any], tile: tuple[int, int], *, even: bool
    ) -> Program:
        hints = ("q_ptr", "row_bytes", *(("x_ptr", "x_stride") if even else ()))
        aligned = tuple(name for name in hints if name in signature)
        return Program(kernel, signature, constants, aligned, self.target, *tile)


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
            for tile in config.gemv:
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
        for even in {False, self.meta.spec.in_features % unit == 0}:
            for final in finals:
                make(tile, even=even, final=final).load()
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
        tile = next(tile for tile in self.factory.config.gemv if x.shape[0] <= tile.rows)
        splits, span = self._gemv_splits(tile)
        x, even = self._fitting(x, _UNIT)
        program = self.factory.gemv(tile, even=even, final=splits == 1)
        blocks = -(-self.meta.spec.out_features // tile.r)
        self._matrix(program, (blocks, splits, 1), torch.float32, tensors, x, out, bias, span)

    def gemm(
        self, tensors: tuple[torch.Tensor, ...], x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Launch the gemm path."""
        rows = x.shape[0]
        tile = next(tile for tile in self.factory.config.gemm[self.family] if tile.m is None or rows <= tile.m)
        splits, span = self._gemm_splits(tile, rows)
        x, even = self._fitting(x, self.meta.half)
        program = self.factory.gemm(tile, even=even, final=splits == 1)
        blocks = -(-self.meta.spec.out_features // tile.bn) * -(-rows // tile.bm)
        self._matrix(program, (blocks, splits, 1), self.factory.dtype, tensors, x, out, bias, span)

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

    def _matrix(  # noqa: PLR0913  # the operands of one product
        self,
        program: Program,
        grid: tuple[int, int, int],
        table_dtype: torch.dtype,
        tensors: tuple[torch.Tensor, ...],
        x: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        span: int,
    ) -> None:
        codes, scale, second, factor, stride = self._numbers(tensors)
        meta, splits = self.meta, grid[1]
        n = meta.spec.out_features
        place = out
        if splits > 1:
            place = torch.empty((splits, x.shape[0], n), dtype=torch.float32, device=x.device)
        program(
            grid,
            x,
            x.stride(0),
            codes,
            scale,
            second,
            factor,
            self._table(table_dtype, codes),
            out if bias is None else bias,
            place,
            x.shape[0],
            n,
            meta.spec.in_features,
            meta.row_bytes,
            meta.blocks,
            span,
            stride,
            int(bias is not None),
        )
        if splits > 1:
            self._finish(place, factor, stride, out, bias)

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
        codes, scale, *rest = tensors
        second = rest.pop(0) if self.meta.second_dtype is not None else codes
        factor = rest.pop(0) if self.meta.global_dtype is not None else codes
        return codes, scale, second, factor, int(factor is not codes and factor.numel() > 1)

    def _table(self, dtype: torch.dtype, codes: torch.Tensor) -> torch.Tensor:
        return _twin_table(self.factory.layout.values, dtype) if self.factory.target.is_interpreted else codes

    def _fitting(self, x: torch.Tensor, unit: int) -> tuple[torch.Tensor, bool]:
        """Return x, and whether its rows may be loaded in vectors; rows that lie awkwardly are copied first."""
        if self.meta.spec.in_features % unit:
            return x, False
        if (x.stride(0) % _UNIT and x.shape[0] > 1) or x.data_ptr() % _UNIT:
            x = x.clone(memory_format=torch.contiguous_format)
        return x, True


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
