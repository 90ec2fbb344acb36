"""``Factory``: the programs of one layout and one pair of dtypes, specialised on what the layout says."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_triton_kernels.configs import Config, GemmTile, GemvTile, config_for
from q4_triton_kernels.layout import has_regular_blocks
from q4_triton_kernels.program import TYPES, Program
from q4_triton_kernels.tables import code_base, codes_kind, entries_of, is_e2m1, pair_factor, values_of
from q4core import Feature, ScaleKind

if TYPE_CHECKING:
    from q4_triton_kernels.layout import WeightMeta
    from q4_triton_kernels.target import Target
    from q4core import Format, Request

__all__ = ["Factory", "Layout", "family_for", "twin_table"]

_FLOAT, _E4M3, _E8M0 = 0, 1, 2
_SCALES = {ScaleKind.PLAIN: _FLOAT, ScaleKind.E8M0: _E8M0}
_NONE, _OFFSET, _ZERO, _ZERO_IN_CODE = 0, 1, 2, 3
_INTEGER = 2
_TABLES = frozenset({0, 3})
_GLOBALS = {ScaleKind.E4M3_MUL: 1, ScaleKind.E4M3_DIV: 2}
_E4M3_POST = 256.0


@attrs.frozen(cache_hash=True)
class Layout:
    """What kernels are specialised on: the constants that a weight's layout gives, whatever N and K.

    Args:
        half: Codes in half a group.
        block: In-features per scale; 0 where one scale holds for the whole row and is of no regular size.
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
            block=spec.block_size if has_regular_blocks(spec.block_size) else 0,
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
def twin_table(values: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
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
    device: int | None = None
    _made: dict[Any, Program] = attrs.field(factory=dict)

    @property
    def config(self) -> Config:
        """The target's configurations."""
        return config_for(self.target.arch)

    def _matrix_signature(self, *, final: bool) -> dict[str, str]:
        x, out = TYPES[self.dtype], TYPES[self.out_dtype]
        pointers = {
            "x_ptr": f"*{x}",
            "x_stride": "i64",
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
        signature |= dict.fromkeys(("M", "N", "slabs", "g_stride", "out_stride", "has_bias"), "i32")
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
        return Program(kernel, signature, constants, aligned, self.target, *tile, device=self.device)
