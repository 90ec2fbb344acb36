"""The native quantiser: dense weights to NVFP4 or MXFP4 on the GPU, or in Triton's interpreter."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core import BUILTIN_FORMATS, FormatError, InputError, PackedWeight, Packing, ScaleKind, find_format

if TYPE_CHECKING:
    from q4core import Format

__all__ = ["KINDS", "MOST_ELEMENTS", "Quantised", "quantize_packed", "quantize_parts", "swizzle_scales"]

KINDS: dict[str, dict[ScaleKind, int]] = {
    "nvfp4": {ScaleKind.E4M3: 0, ScaleKind.E4M3_MUL: 1, ScaleKind.E4M3_DIV: 2},
    "mxfp4": {ScaleKind.E8M0: 0},
}
"""The scale kinds that each format is quantised with, and the kernels' number for them."""
_SCALE_DTYPES = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ELEMENTS = 4096
"""Elements that a program takes at a time."""
_PARTS = 1024
_INFINITY = 0x7F800000
MOST_ELEMENTS = 1 << 33
"""Numbers of blocks, and of draws, are 31-bit."""
_SWIZZLE_ROWS, _SWIZZLE_COLUMNS, _SWIZZLE_BYTES = 128, 4, 512


@attrs.frozen(eq=False)
class Quantised:
    """What the kernels write.

    Args:
        codes: uint8 [N, K / 2], the even code in the lower nibble.
        scales: float8, [N, K / block]; or, swizzled, flat and padded with zeros to tiles of 128 rows by 4 scales.
        global_scale: float32 scalar; None where the scale kind has none.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return block scales in the order that cuBLAS' block-scaled products read, which ``swizzle=True`` writes at once.

    Args:
        scales: One-byte scales [N, C].

    Returns:
        Flat, of the same dtype, ceil(N / 128) · ceil(C / 4) tiles of 512 bytes; what lies past N and C is zero.
    """
    rows, columns = scales.shape
    up, left = -(-rows // _SWIZZLE_ROWS), -(-columns // _SWIZZLE_COLUMNS)
    padded = torch.zeros((up * _SWIZZLE_ROWS, left * _SWIZZLE_COLUMNS), dtype=torch.uint8, device=scales.device)
    padded[:rows, :columns] = scales.view(torch.uint8)
    tiles = padded.view(up, 4, 32, left, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def quantize_parts(  # noqa: PLR0913  # the choices that a format leaves open
    dense: torch.Tensor,
    format: str | Format = "nvfp4",  # noqa: A002  # the contract's name
    *,
    scale_kind: ScaleKind | None = None,
    stochastic: bool = False,
    seed: int = 0,
    swizzle: bool = False,
    is_finite: bool = False,
) -> Quantised:
    """Quantise a dense weight on its device.

    Rounded to nearest, the bytes are those of ``q4core.quantize`` on the CPU. With stochastic rounding, block scales
    are rounded up instead, so that nothing saturates, and each code is the one below or above its value with the
    probabilities that make its mean the value (to 2^-24, and to the roundings of the scaling); equal seeds give equal
    codes.

    Args:
        dense: float32, bfloat16 or float16 [N, K] with stride 1 along K (else it is copied), on a CUDA device, or on
            the CPU in Triton's interpreter; K a multiple of the block.
        format: ``"nvfp4"`` or ``"mxfp4"``.
        scale_kind: For NVFP4 E4M3, E4M3_MUL (the default) or E4M3_DIV; for MXFP4 E8M0.
        stochastic: Round codes stochastically.
        seed: For stochastic rounding: 0 … 2^31 - 1.
        swizzle: Write the scales in the order of ``swizzle_scales``.
        is_finite: The caller knows that all values are finite: nothing waits for the device.

    Raises:
        FormatError: Another format or scale kind.
        InputError: ``dense`` or ``seed`` is not as said, or ``dense`` holds NaN or infinity. Inside a CUDA-graph
            capture nothing can be said of its values: there they are the caller's to know.
    """
    kind = find_format(format)
    chosen = kind.scale_kind if scale_kind is None else scale_kind
    if kind.name not in KINDS or BUILTIN_FORMATS[kind.name] != kind:
        raise FormatError("native quantiser", name="format", rule="'nvfp4' or 'mxfp4'", value=kind.name)
    if chosen not in KINDS[kind.name]:
        rule = f"one of {', '.join(sorted(item.value for item in KINDS[kind.name]))}"
        raise FormatError(f"quantize to {kind}", name="scale_kind", rule=rule, value=str(scale_kind))
    _check(dense, kind, seed)
    values = dense.detach()
    values = values if values.stride(1) == 1 or values.shape[1] == 1 else values.contiguous()
    rows, columns = values.shape
    block = kind.block_size
    blocks = columns // block
    total = rows * blocks
    tile = _ELEMENTS // block
    device = values.device
    codes = torch.empty((rows, columns // 2), dtype=torch.uint8, device=device)
    if swizzle:
        size = -(-rows // _SWIZZLE_ROWS) * -(-blocks // _SWIZZLE_COLUMNS) * _SWIZZLE_BYTES
        scales = torch.zeros(size, dtype=torch.uint8, device=device)
    else:
        scales = torch.empty((rows, blocks), dtype=torch.uint8, device=device)
    programs = -(-total // tile)
    bad = torch.empty(programs, dtype=torch.int32, device=device)
    global_scale = None
    facts = (values.stride(0), blocks, total)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        if kind.name == "nvfp4":
            global_scale = _launch_nvfp4(
                values, codes, scales, bad, facts, KINDS["nvfp4"][chosen], stochastic, seed, swizzle
            )
        else:
            from q4_nvfp4_native.kernels import quantize  # noqa: PLC0415  # Triton may be missing

            launch: Any = quantize.quantize_mxfp4[(programs,)]
            launch(
                values, codes, scales, bad, *facts, seed, STOCHASTIC=stochastic, SWIZZLED=swizzle, TILE=tile,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    if not is_finite:
        _refuse_non_finite(bad, dense, kind)
    return Quantised(codes, scales.view(_SCALE_DTYPES[kind.name]), global_scale)


def _launch_nvfp4(  # noqa: PLR0913  # the facts of one launch
    values: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bad: torch.Tensor,
    facts: tuple[int, int, int],
    kind: int,
    stochastic: bool,  # noqa: FBT001  # passed on
    seed: int,
    swizzle: bool,  # noqa: FBT001  # passed on
) -> torch.Tensor | None:
    from q4_nvfp4_native.kernels import quantize  # noqa: PLC0415  # Triton may be missing

    tile = _ELEMENTS // 16
    parts = bad
    global_scale = None
    if kind:
        parts = torch.zeros(_PARTS, dtype=torch.int32, device=values.device)
        used = min(_PARTS, bad.numel())
        find: Any = quantize.largest_bits[(used,)]
        find(values, parts, *facts, used, BLOCK=16, TILE=tile, num_warps=4, enable_fp_fusion=False)
        global_scale = torch.empty((), dtype=torch.float32, device=values.device)
    launch: Any = quantize.quantize_nvfp4[(bad.numel(),)]
    launch(
        values, parts, codes, scales, bad if global_scale is None else global_scale, bad, *facts, seed, PARTS=_PARTS,
        KIND=kind, STOCHASTIC=stochastic, SWIZZLED=swizzle, TILE=tile, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return global_scale


def quantize_packed(  # noqa: PLR0913  # the choices that a format leaves open
    dense: torch.Tensor,
    format: str | Format = "nvfp4",  # noqa: A002  # the contract's name
    *,
    scale_kind: ScaleKind | None = None,
    stochastic: bool = False,
    seed: int = 0,
    is_finite: bool = False,
) -> PackedWeight:
    """Quantise a dense weight on its device, as ``quantize_parts`` does, into a ``PackedWeight``."""
    kind = find_format(format)
    parts = quantize_parts(dense, kind, scale_kind=scale_kind, stochastic=stochastic, seed=seed, is_finite=is_finite)
    rows, columns = dense.shape
    return PackedWeight(
        format=kind,
        qdata=parts.codes,
        scale=parts.scales,
        out_features=rows,
        in_features=columns,
        block_size=kind.block_size,
        scale_kind=kind.scale_kind if scale_kind is None else scale_kind,
        packing=Packing.LOW_FIRST,
        global_scale=parts.global_scale,
        dtype=dense.dtype,
    )


def _check(dense: torch.Tensor, kind: Format, seed: int) -> None:
    if not isinstance(dense, torch.Tensor):
        raise InputError("quantize", name="dense", rule="a tensor", value=type(dense).__name__)
    is_matrix = dense.dim() == 2 and dense.numel() > 0  # noqa: PLR2004  # [N, K]
    if not is_matrix or dense.dtype not in _DTYPES:
        rule = f"[N, K] of dtype {', '.join(map(str, _DTYPES))}"
        raise InputError("quantize", name="dense", rule=rule, value=f"{dense.dtype} {list(dense.shape)}")
    if dense.numel() > MOST_ELEMENTS:
        raise InputError("quantize", name="N * K", rule="at most 2^33", value=dense.numel())
    if dense.shape[1] % kind.block_size:
        rule = f"a multiple of the block size {kind.block_size}"
        raise InputError(f"quantize to {kind}", name="K", rule=rule, value=dense.shape[1])
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 31:
        raise InputError("quantize", name="seed", rule="in 0 … 2^31 - 1", value=seed)


def _refuse_non_finite(bad: torch.Tensor, dense: torch.Tensor, kind: Format) -> None:
    if bad.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if int(bad.max()) < _INFINITY:
        return
    places = (~torch.isfinite(dense)).nonzero()
    row, column = places[0].tolist()
    count = len(places)
    raise InputError(
        f"quantize to {kind}",
        name=f"dense[{row}, {column}]",
        rule="finite",
        value=float(dense[row, column]),
        hint=f"{count} of {dense.numel()} values are not finite.",
        count=count,
        index=(row, column),
    )
