"""``tl.dot_scaled`` on sm_100 and sm_103, used only where the installed Triton compiles it to native instructions.

The PTX is checked: where Triton has no native instruction it silently compiles the same source to a product in bf16.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from q4_triton_kernels.program import TYPES, Program
from q4_triton_kernels.target import Target
from q4core import ScaleKind

if TYPE_CHECKING:
    from q4_nvfp4_native.operands import OperandMeta

__all__ = ["GLOBAL_KINDS", "NATIVE_TEXT", "Product", "problem", "product"]

GLOBAL_KINDS = {ScaleKind.E8M0: 0, ScaleKind.E4M3: 0, ScaleKind.E4M3_MUL: 1, ScaleKind.E4M3_DIV: 2}
"""What the kernel does with the global scale: nothing, multiply, divide."""
NATIVE_TEXT = {"nvfp4": "kind::mxf4nvf4", "mxfp4": "kind::mxf4."}
"""What the PTX of a native product contains; ``mxf8f6f4`` would run FP4 at half the rate."""
_BLOCKS = {"nvfp4": 16, "mxfp4": 32}
_BM, _BN, _BK = 128, 128, 128
_WARPS, _STAGES = 8, 3
_ALIGNED = ("a_ptr", "a_scale_ptr", "row_ptr", "b_ptr", "b_scale_ptr", "K")


def product(arch: int | None, format_name: str, kind: int, out_dtype: torch.dtype) -> Product:
    """Return the product of a format for an architecture, not loaded yet.

    Args:
        arch: Compute capability × 10; None for the interpreter, where ``tl.dot`` takes the place of ``dot_scaled``.
        format_name: ``"nvfp4"`` or ``"mxfp4"``.
        kind: One of ``GLOBAL_KINDS``.
        out_dtype: dtype of y and of the bias.
    """
    from q4_nvfp4_native.kernels import scaled_dot  # noqa: PLC0415  # Triton may be missing

    out = f"*{TYPES[out_dtype]}"
    signature = {
        "a_ptr": "*u8", "a_scale_ptr": "*u8", "row_ptr": "*fp32", "b_ptr": "*u8", "b_scale_ptr": "*u8",
        "global_ptr": "*fp32", "bias_ptr": out, "out_ptr": out, "M": "i32", "N": "i32", "K": "i32",
        "global_step": "i32", "has_bias": "i32",
    }  # fmt: skip
    constants = {"BM": _BM, "BN": _BN, "BK": _BK, "BLOCK": _BLOCKS[format_name], "GLOBAL": kind}
    constants["NATIVE"] = arch is not None
    return Product(Program(scaled_dot.multiply, signature, constants, _ALIGNED, Target(arch), _WARPS, _STAGES))


@functools.cache
def problem(arch: int, format_name: str) -> str | None:
    """Return why Triton makes no native FP4 product on an architecture, or None; compiles it."""
    try:
        text = product(arch, format_name, 1 if format_name == "nvfp4" else 0, torch.bfloat16).program.compile().ptx
    except Exception as error:  # noqa: BLE001  # a compiler's error of any type means the same here
        first = str(error).strip().splitlines() or [""]
        return f"Triton can't compile dot_scaled for sm_{arch}: {type(error).__name__}: {first[0]}"
    if NATIVE_TEXT[format_name] not in text:
        return f"this Triton makes no {NATIVE_TEXT[format_name].rstrip('.')} of dot_scaled on sm_{arch}"
    return None


class Product:
    """One product kernel.

    Args:
        program: The kernel with its constants.
    """

    def __init__(self, program: Program) -> None:
        self.program = program

    def load(self) -> None:
        """Compile it and load it onto the current device.

        Raises:
            PrepareError: Triton does not compile it (``TOOLCHAIN``), or the driver does not load it (``DRIVER``).
        """
        self.program.load()

    def __call__(  # noqa: PLR0913  # the facts of one call
        self,
        activations: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        weight: tuple[torch.Tensor, ...],
        global_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        meta: OperandMeta,
    ) -> None:
        """Launch it on the current stream.

        Args:
            activations: Codes, scale bytes, and row scales as bytes.
            weight: Codes and scale bytes.
            global_scale: float32 [1] or [N], or None.
            bias: [N] of out's dtype, or None.
            out: [M, N].
            meta: The weight's layout.
        """
        rows, columns = out.shape
        row_scales = activations[2].view(torch.float32)
        self.program(
            (-(-rows // _BM) * -(-columns // _BN), 1, 1),
            activations[0], activations[1], row_scales, weight[0], weight[1],
            row_scales if global_scale is None else global_scale, out if bias is None else bias, out, rows, columns,
            meta.padded, int(global_scale is not None and global_scale.numel() > 1), int(bias is not None),
        )  # fmt: skip
