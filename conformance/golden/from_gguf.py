"""ggml's blocks as the ``gguf`` package packs and unpacks them: raw rows in safetensors, and two real GGUF files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
from case import Case, all_codes, dense, edges
from gguf import GGMLQuantizationType as Type

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIBRARY = "gguf"
BLOCKS = {Type.Q4_0: 32, Type.Q4_1: 32, Type.Q8_0: 32, Type.MXFP4: 32, Type.NVFP4: 64}


def _case(name: str, kind: Type, rows: np.ndarray, source: torch.Tensor | None, notes: str = "") -> Case:
    with np.errstate(over="ignore"):  # the largest e8m0 scale times 6 is infinite, as it should be
        result = gguf.quants.dequantize(rows, kind)
    return Case(
        dialect="gguf",
        name=name,
        format=kind.name.lower(),
        library=LIBRARY,
        tensors={"proj.weight": torch.from_numpy(rows.copy())},
        expected={"float32": torch.from_numpy(result.copy())},
        shape=tuple(result.shape),
        block=16 if kind is Type.NVFP4 else 32,
        dtype="float32",
        source=source,
        drops_negative_zero=kind in {Type.MXFP4, Type.NVFP4},
        notes=notes or "raw blocks [N, bytes per row]",
    )


def _halves(codes: torch.Tensor) -> np.ndarray:
    """Return codes [B, 2h] as bytes [B, h]: low nibbles are the first half."""
    half = codes.shape[1] // 2
    return (codes[:, :half] | (codes[:, half:] << 4)).numpy()


def _enumerated() -> Iterator[Case]:
    deltas = np.array(
        [0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, 0.1, -0.1, 1 / 3, 2.0, -2.0, 1e-3, -7.5],
        np.float16,
    )
    head = deltas.reshape(16, 1).view(np.uint8)
    tail = deltas[::-1].copy().reshape(16, 1).view(np.uint8)
    qs = _halves(all_codes(16, 32))
    note = "every code under enumerated half-precision scales"
    yield _case("q4_0-all-codes", Type.Q4_0, np.concatenate((head, qs), 1).reshape(4, 72), None, note)
    yield _case("q4_1-all-codes", Type.Q4_1, np.concatenate((head, tail, qs), 1).reshape(4, 80), None, note)
    bytes_ = np.arange(512, dtype=np.int64).astype(np.uint8).reshape(16, 32)
    yield _case("q8_0-all-codes", Type.Q8_0, np.concatenate((head, bytes_), 1).reshape(4, 136), None, note)
    exponents = np.concatenate((np.arange(255), [127])).astype(np.uint8).reshape(256, 1)
    rows = np.concatenate((exponents, _halves(all_codes(256, 32))), 1).reshape(16, 16 * 17)
    yield _case("mxfp4-all-scales", Type.MXFP4, rows, None, "every e8m0 scale from 0 to 254 under every code")
    levels = np.concatenate((np.arange(127), [126])).astype(np.uint8).reshape(32, 4)
    rows = np.concatenate((levels, _halves(all_codes(128, 16)).reshape(32, 32)), 1).reshape(8, 4 * 36)
    yield _case("nvfp4-all-scales", Type.NVFP4, rows, None, "every ue4m3 scale from 0 to 448 under every code")


def cases() -> Iterator[Case]:
    """Yield every case of the dialect."""
    for kind in (Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.MXFP4):
        name = kind.name.lower()
        source = dense(f"gguf {name}", 12, 96)
        yield _case(name, kind, gguf.quants.quantize(source.numpy(), kind), source)
        # Scales are half precision: 6e4 keeps them finite, 1e-12 rounds them to 0 with the codes still defined.
        rows = edges(f"gguf {name}", 32, 64, largest=6e4, smallest=1e-12)
        yield _case(
            f"{name}-edges", kind, gguf.quants.quantize(rows.numpy(), kind), rows, "zero, -0, large, tiny blocks"
        )
    yield from _enumerated()


def write_files(folder: Path) -> None:
    """Write ``blocks.gguf`` (every case of Q4_0, Q4_1, Q8_0, and dense tensors) and ``fp4.gguf`` (MXFP4, NVFP4)."""
    for name, kinds in (("blocks", (Type.Q4_0, Type.Q4_1, Type.Q8_0)), ("fp4", (Type.MXFP4, Type.NVFP4))):
        writer = gguf.GGUFWriter(str(folder / f"{name}.gguf"), "golden")
        for case in cases():
            kind = Type[case.format.upper()]
            if kind in kinds:
                rows = case.tensors["proj.weight"].numpy()
                writer.add_tensor(f"{case.name}.weight", rows, raw_dtype=kind)
        if name == "blocks":
            writer.add_tensor("dense_f32.weight", dense("gguf f32", 3, 8).numpy())
            writer.add_tensor("dense_f16.weight", dense("gguf f16", 3, 8).numpy().astype(np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
