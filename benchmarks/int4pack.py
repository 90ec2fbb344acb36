"""The operands of torch's int4 product on the CPU, for benchmarks and tests."""

from __future__ import annotations

import torch

__all__ = ["int4pack_operands"]


def int4pack_operands(
    codes: torch.Tensor, scale: torch.Tensor, added: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``_weight_int4pack_mm_for_cpu`` takes for the weight ``(code - 8) * scale + added``.

    Args:
        codes: int32 [N, K], 0 … 15.
        scale: [N, groups].
        added: [N, groups], in the weight's own unit.
        dtype: dtype of x, in which scales are stored, too.

    Returns:
        The packed codes, and [groups, N, 2] of ``dtype``.

    Raises:
        RuntimeError: torch does not pack such a shape.
    """
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)  # noqa: SLF001  # its only name
    numbers = torch.stack([scale, added], dim=-1).to(dtype)
    return packed, numbers.transpose(0, 1).contiguous()
