"""``CpuNative``: exact, w4a8 and w4i16 kernels over tiles of 16 rows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_cpu_native.isa import choose
from q4_cpu_native.layout import CHUNK, SMALL_BLOCK, TileMeta, matrix_of, source_arguments
from q4_cpu_native.tables import table_of, words_of
from q4core import (
    Capabilities,
    ConfigError,
    Feature,
    Form,
    KernelPath,
    NibbleOrder,
    PackedWeight,
    Packing,
    PathKind,
    Precision,
    PrepareContext,
    Prepared,
    PrepareError,
    Reason,
    ReasonCode,
    Request,
    ScaleKind,
    Support,
    Tier,
    pack_codes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4_cpu_native.program import NativeRunner
    from q4_programs import BoundLayer, Program

__all__ = ["CpuNative"]

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_EXACT, _A8, _A16 = 0, 1, 2
_NAMES = {_EXACT: "exact", _A8: "w4a8", _A16: "w4i16"}
_HUGE_PAGE = 2 << 20
# Where both products take as long, on AVX2 and AVX-512 alike: benchmarks/results/spikes.json.
_MOST_ONES_OF_ONE_ROW, _MOST_ONES = 0.3, 0.18
_LEVELS = frozenset({"nested_scale", "nested_offset"})
_FORMATS = ("nf4", "fp4", "nvfp4", "mxfp4", "q4_0", "q4_1", "iq4_nl", "int4", "int8", "q8_0", "q8_affine")


class CpuNative:
    """Kernels for x86 CPUs with AVX2 (the baseline), AVX-VNNI or AVX-512, and for Arm CPUs with NEON dot products.

    Args:
        isa: One of the names that the README lists. Defaults to the value of ``Q4_CPU_ISA``, or else to the best one
            of this machine that has run on hardware.
    """

    name: str = "cpu-native"
    api_version: tuple[int, int] = (2, 0)
    capabilities: Capabilities = Capabilities(
        formats=_FORMATS,
        scale_kinds=set(ScaleKind),
        devices={"cpu"},
        dtypes=_TYPES,
        ops={"linear", "program", "sparse", "tokens", "spikes"},
        precisions={Precision.W4A32, Precision.W4A16, Precision.W4A8, Precision.W4I16},
        features={
            Feature.OFFSET,
            Feature.ZERO_POINT,
            Feature.FLOAT_ZERO_POINT,
            Feature.TAIL_BLOCK,
            Feature.ROW_GLOBAL_SCALE,
            Feature.INPUT_PERMUTATION,
            Feature.INPUT_CHANNEL_SCALE,
            Feature.GRADIENTS,
        },
    )

    def __init__(self, isa: str | None = None) -> None:
        requested = os.environ.get("Q4_CPU_ISA", "") if isa is None else isa
        self._chosen = choose(requested.strip().lower())
        self._isa = self._chosen.number
        self._families = {name: family for family in _NAMES for name in self._ranges(family)}

    @property
    def isa(self) -> str | None:
        """Name of the instruction set that runs, or None."""
        return self._chosen.text if self._isa else None

    def _ranges(self, family: int) -> dict[str, tuple[int, int | None]]:
        """Return the rows of x that each path of a family serves: many rows have kernels of their own."""
        if not self._isa:
            return {}
        name = f"{_NAMES[family]}_{self._chosen.text.replace('-', '_')}"
        many = self._chosen.panels_from[family]
        return {name: (1, many - 1), f"{name}_panel": (many, None)} if many else {name: (1, None)}

    def check(self, request: Request) -> Support:
        """Offer the exact path and those of rounded activations, or report what is missing."""
        if not self._isa:
            return Support.no([Reason(self._chosen.code, self._chosen.text)], native_state="not usable")
        state = self._chosen.state
        reasons = []
        is_whole_row = request.block_size >= request.in_features
        if request.block_size != SMALL_BLOCK and request.block_size % CHUNK and not is_whole_row:
            rule = f"blocks must be of {SMALL_BLOCK}, a multiple of {CHUNK}, or a whole row"
            message = f"{rule}, got {request.block_size} of {request.in_features} in-features"
            reasons.append(Reason(ReasonCode.SHAPE, message))
        if request.out_dtype != request.dtype:
            reasons.append(Reason(ReasonCode.DTYPE, f"y must have x's dtype, asked for {request.out_dtype}"))
        if reasons:
            return Support.no(reasons, native_state=state)
        wide = Precision.W4A32 if request.dtype == torch.float32 else Precision.W4A16
        paths = [
            KernelPath(name, rows, PathKind.KERNEL, wide, Tier.GENERIC) for name, rows in self._ranges(_EXACT).items()
        ]
        values: dict[int, tuple[float, ...] | None] = {}
        if request.format.bits == 4 and request.format.form is Form.CODEBOOK:  # noqa: PLR2004  # or 8
            words = words_of(request.format.codebook)
            values = {_A8: table_of(request.format.codebook).values, _A16: words.values if words else None}
        # Where int16 was never measured, the default is exact.
        tiers = {_A8: Tier.TUNED, _A16: Tier.TUNED if self._chosen.was_run else Tier.DEQUANT_GEMM}
        paths += [
            KernelPath(name, rows, PathKind.KERNEL, precision, tiers[family], values.get(family))
            for family, precision in ((_A8, Precision.W4A8), (_A16, Precision.W4I16))
            for name, rows in self._ranges(family).items()
        ]
        return Support.yes(paths, native_state=state)

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        """Lay codes and numbers out in tiles, in one pass over the source."""
        del request
        meta = TileMeta.of(weight)
        matrix = matrix_of(meta)
        tiles = _room(context, matrix.prepared_bytes)
        arguments, sources = source_arguments(weight.with_plain_scale() if meta.is_resolved else weight, meta)
        matrix.pack(*arguments, tiles.data_ptr(), torch.get_num_threads())
        del sources
        sides = [context.keep(tensor) for name, tensor in weight.tensors() if name in meta.sides]
        return Prepared((tiles, *sides), meta)

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        """Return the weight, whole or the given rows: codes and numbers bit for bit, padding as zeros.

        Scales of two levels come back whole; of some rows they are plain ones, as ``PackedWeight.take_rows`` gives.
        """
        meta: TileMeta = prepared.meta
        spec = meta.spec
        count = spec.out_features if rows is None else rows.numel()
        codes = torch.empty((count, spec.in_features), dtype=torch.uint8)
        blocks = -(-spec.in_features // spec.block_size)
        scale = torch.empty((count, blocks), dtype=meta.scale_dtype)
        second = None if meta.second_dtype is None else torch.empty((count, blocks), dtype=meta.second_dtype)
        index = None if rows is None else rows.to("cpu", torch.int64).contiguous()
        matrix = matrix_of(meta)
        if prepared.tensors[0].nbytes != matrix.prepared_bytes:  # read from elsewhere, by a damaged description
            rule, got = f"{matrix.prepared_bytes} bytes long", prepared.tensors[0].nbytes
            raise ConfigError("cpu-native's prepared weight", name="tiles", rule=rule, value=got)
        matrix.unpack(
            prepared.tensors[0].data_ptr(),
            0 if index is None else index.data_ptr(),
            count,
            codes.data_ptr(),
            scale.data_ptr(),
            0 if second is None else second.data_ptr(),
            torch.get_num_threads(),
        )
        sides = dict(zip(meta.sides, prepared.tensors[1:], strict=True))
        own = {"qdata": _packed(codes, spec.packing), "scale": scale, "offset": second, "zero": second}
        if index is not None and meta.super_blocks:  # as many to a row
            for name in _LEVELS & sides.keys():
                sides[name] = sides[name].view(spec.out_features, -1)[index].view(-1)
        elif index is not None and meta.is_resolved:
            names = tuple(name for name in spec.fields if not name.startswith("nested_"))
            spec = attrs.evolve(spec, scale_kind=ScaleKind.PLAIN, fields=names)
            sides = {name: side for name, side in sides.items() if name not in {"scale", "offset"}}
        fields: dict[str, Any] = {name: sides.get(name, own.get(name)) for name in spec.fields}
        if index is not None and "global_scale" in fields and fields["global_scale"].numel() > 1:
            fields["global_scale"] = fields["global_scale"][index]
        return attrs.evolve(spec, out_features=count).build(tuple(fields.values()))

    def bind_program(
        self, program: Program, buffers: Sequence[torch.Tensor], layers: Sequence[BoundLayer]
    ) -> NativeRunner:
        """Bind a program to one native call."""
        from q4_cpu_native.program import NativeRunner  # noqa: PLC0415  # q4-programs, which calls this, may be missing

        if not self._isa:
            raise PrepareError([Reason(self._chosen.code, self._chosen.text)])
        return NativeRunner(program, buffers, layers, self._families, self._isa)

    def describe(self, meta: TileMeta) -> dict[str, Any]:
        """Return the layout as what JSON holds."""
        return meta.to_dict()

    def meta_from(self, facts: dict[str, Any]) -> TileMeta:
        """Return the layout that ``describe`` gave; a ``ConfigError`` or ``WeightError`` says what is invalid."""
        return TileMeta.from_dict(facts)

    def linear(
        self,
        prepared: Prepared,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        path: str,
    ) -> int:
        """Run one native call, and return how many rows of x had outliers."""
        call = prepared.meta.call
        tensors = prepared.tensors
        address = count = 0
        if call.place is not None:
            given = _global_scale(prepared)
            address, count = given.data_ptr(), given.numel()
        order, factor, factor_type = call.inputs_of(tensors) if call.has_inputs else (0, 0, 0)
        rows = x.shape[0]
        rows_with_outliers: int = call.linear(
            tensors[0].data_ptr(),
            address,
            count,
            call.divides,
            x.data_ptr(),
            rows,
            call.in_features if rows == 1 else x.stride(0),  # asking costs 0.14 µs
            out.data_ptr(),
            call.out_features,
            0 if bias is None else bias.data_ptr(),
            _TYPES[x.dtype],
            self._families[path],
            torch.get_num_threads(),
            self._isa,
            order,
            factor,
            factor_type,
        )
        return rows_with_outliers

    def spikes(self, prepared: Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None) -> None:
        """Run one native call, with the bits of the exact product.

        Raises:
            PrepareError: In-features have factors of their own, which spikes don't meet.
        """
        call = prepared.meta.call
        order, factor, _ = call.inputs_of(prepared.tensors) if call.has_inputs else (0, 0, 0)
        if factor:
            raise PrepareError([Reason(ReasonCode.FEATURE, "spikes don't meet factors of in-features")])
        given = None if call.place is None else _global_scale(prepared)
        call.matrix.spikes(
            prepared.tensors[0].data_ptr(),
            0 if given is None else given.data_ptr(),
            0 if given is None else given.numel(),
            call.divides,
            x.data_ptr(),
            x.shape[0],
            out.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            torch.get_num_threads(),
            self._isa,
            order,
        )

    def spike_limit(self, rows: int) -> float:
        """Return the share of ones up to which the zeros cost more than what the dense product shares among rows."""
        return _MOST_ONES_OF_ONE_ROW if rows == 1 else _MOST_ONES


def _global_scale(prepared: Prepared) -> torch.Tensor:
    given: torch.Tensor = prepared.tensors[prepared.meta.call.place]
    return given if given.dtype is torch.float32 else given.to(torch.float32)


def _room(context: PrepareContext, size: int) -> torch.Tensor:
    """Return room for tiles, uint8 [size], which starts where a huge page may: packing asks the system for those.

    What is left before the start is never written, so that it takes addresses and no memory.
    """
    if size < _HUGE_PAGE:
        return context.empty((size,), torch.uint8)
    room = context.empty((size + _HUGE_PAGE - 1,), torch.uint8)
    return room.narrow(0, -room.data_ptr() % _HUGE_PAGE, size)


def _packed(codes: torch.Tensor, packing: Packing) -> torch.Tensor:
    if packing.order is NibbleOrder.HALF_SPLIT:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % packing.group))
    return pack_codes(codes, packing)
