"""One golden case, and the source weights and block patterns that the makers share."""

from __future__ import annotations

import importlib.metadata
import zlib
from typing import TYPE_CHECKING, Any

import attrs
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DTYPE_NAMES", "Case", "all_codes", "dense", "edges", "versions_of"]

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@attrs.frozen(kw_only=True)
class Case:
    """A stored layer, and what the library that stored it says it means.

    Args:
        dialect: Folder of the case: how the layer is stored.
        name: File name without its ending.
        format: Name of the format.
        library: Distribution that made it, or several joined by ``+``.
        tensors: Stored tensors by the key that they have on disk for the module ``proj``.
        expected: The library's own dequantised weight [N, K], by dtype name.
        shape: (N, K).
        block: In-features per scale.
        dtype: dtype name of the dense weight.
        source: The dense weight [N, K]; None where the stored bytes are an enumeration.
        metadata: Header metadata of the dialect.
        config: ``config.json`` that goes with the file.
        drops_negative_zero: The library decodes code 8 as +0, where E2M1 has -0.
        notes: What the case is for.
    """

    dialect: str
    name: str
    format: str
    library: str
    tensors: Mapping[str, torch.Tensor]
    expected: Mapping[str, torch.Tensor]
    shape: tuple[int, int]
    block: int
    dtype: str
    source: torch.Tensor | None = None
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    config: Mapping[str, Any] = attrs.field(factory=dict)
    drops_negative_zero: bool = False
    notes: str = ""


def versions_of(library: str) -> str:
    """Return ``"1.2.3"``, or ``"1.2.3+4.5.6"`` for several distributions."""
    return "+".join(importlib.metadata.version(item) for item in library.split("+"))


def dense(name: str, n: int, k: int, dtype: torch.dtype = torch.float32, scale: float = 0.05) -> torch.Tensor:
    """Return a normal weight [n, k] whose seed is the name's checksum, with one outlier per row."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    weight = torch.randn(n, k, generator=generator) * scale
    column = torch.randint(k, (n, 1), generator=generator)
    weight.scatter_(1, column, weight.gather(1, column) * 6)
    return weight.to(dtype)


def edges(name: str, block: int, k: int, *, largest: float = 3e38, smallest: float = 1e-42) -> torch.Tensor:
    """Return float32 rows [9, k] that a quantiser or a decoder may get wrong.

    Rows: all +0; all -0; one zero block among others; huge; subnormal; halfway between codes; one value per block;
    negative only; two exact powers of two.
    """
    noise = dense(name, 9, k)
    rows = torch.zeros(9, k)
    rows[1] = -0.0
    rows[2] = noise[2]
    rows[2, :block] = 0.0
    rows[3] = noise[3].sign() * largest * (0.5 + 0.5 * (noise[3].abs() / noise[3].abs().max()))
    rows[4] = noise[4].sign() * smallest * (1.0 + (noise[4].abs() / noise[4].abs().max()).round())
    halves = torch.tensor([6.0, 0.25, -0.25, 0.75, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, -5.0, -6.0, 0.5, -0.0, 3.0, 4.0])
    rows[5] = halves.repeat(k // 16 + 1)[:k]
    rows[6, ::block] = torch.linspace(-2.0, 3.0, len(rows[6, ::block]))
    rows[7] = -noise[7].abs()
    rows[8] = torch.where(noise[8] > 0, 0.5, -2.0)
    return rows


def all_codes(blocks: int, block: int) -> torch.Tensor:
    """Return codes [blocks, block] (uint8) in which every code meets every place of a byte."""
    index = torch.arange(block)
    return torch.stack([(index * 5 + index // 16 + row) % 16 for row in range(blocks)]).to(torch.uint8)
