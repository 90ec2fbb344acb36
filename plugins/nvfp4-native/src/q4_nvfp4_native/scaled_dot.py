"""``tl.dot_scaled`` on sm_100 and sm_103, used only where the installed Triton is seen to make it a native instruction."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from q4_triton_kernels import Compiled, compile_for

if TYPE_CHECKING:
    from q4_nvfp4_native.operands import OperandMeta

__all__ = ["NATIVE_TEXT", "TILE", "compiled", "multiply", "problem"]

TILE = {"BM": 128, "BN": 128, "BK": 128}
NATIVE_TEXT = {"nvfp4": "kind::mxf4nvf4", "mxfp4": "kind::mxf4"}
"""What the PTX of a native product contains; ``mxf8f6f4`` would run FP4 at half the rate."""
_SIGNATURE = {
    "a_ptr": "*u8", "a_scale_ptr": "*u8", "row_ptr": "*fp32", "b_ptr": "*u8", "b_scale_ptr": "*u8", "global_ptr": "*fp32",
    "bias_ptr": "*bf16", "out_ptr": "*bf16", "M": "i32", "N": "i32", "K": "i32", "global_step": "i32",
    "has_bias": "i32",
}  # fmt: skip
_ALIGNED = ("a_ptr", "a_scale_ptr", "b_ptr", "b_scale_ptr", "K")
_WARPS, _STAGES = 8, 3


def _constants(block: int, kind: int) -> dict[str, int]:
    return {**TILE, "BLOCK": block, "GLOBAL": kind}


@functools.cache
def compiled(arch: int, format_name: str) -> Compiled:
    """Return the product kernel of a format for an architecture.

    Raises:
        Whatever Triton raises where it can't compile it.
    """
    from q4_nvfp4_native import scaled_dot_kernel  # noqa: PLC0415  # Triton may be missing

    block, kind = (16, 1) if format_name == "nvfp4" else (32, 0)
    return compile_for(
        scaled_dot_kernel.multiply, _SIGNATURE, _constants(block, kind), arch, aligned=_ALIGNED,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip


@functools.cache
def problem(arch: int, format_name: str) -> str | None:
    """Return why Triton makes no native FP4 product here, or None."""
    try:
        text = compiled(arch, format_name).ptx
    except Exception as error:  # noqa: BLE001  # a compiler's error of any type means the same here
        first = str(error).strip().splitlines() or [""]
        return f"Triton can't compile dot_scaled for sm_{arch}: {type(error).__name__}: {first[0]}"
    if NATIVE_TEXT[format_name] not in text:
        return f"this Triton makes no {NATIVE_TEXT[format_name]} of dot_scaled on sm_{arch}"
    return None


def multiply(  # noqa: PLR0913  # the facts of one call
    activations: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    weight: tuple[torch.Tensor, ...],
    global_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    meta: OperandMeta,
) -> None:
    """Launch the product on the current stream.

    Args:
        activations: Codes, scale bytes, and row scales as bytes.
        weight: Codes and scale bytes.
        global_scale: float32 [1] or [N], or None.
        bias: [N] of out's dtype, or None.
        out: [M, N].
        meta: The weight's layout.
    """
    from q4_nvfp4_native import scaled_dot_kernel  # noqa: PLC0415  # Triton may be missing

    rows, columns = out.shape
    grid = (-(-rows // TILE["BM"]) * -(-columns // TILE["BN"]),)
    row_scales = activations[2].view(torch.float32)
    kind = 0 if global_scale is None else 2 if meta.global_divides else 1
    launch: Any = scaled_dot_kernel.multiply[grid]
    launch(
        activations[0], activations[1], row_scales, weight[0], weight[1],
        row_scales if global_scale is None else global_scale, out if bias is None else bias, out, rows, columns,
        meta.padded, int(global_scale is not None and global_scale.numel() > 1), int(bias is not None),
        num_warps=_WARPS, num_stages=_STAGES, **_constants(meta.spec.block_size, kind),
    )  # fmt: skip
