"""Tensors that are views of a mapped GGUF file: bytes are read on first access."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_gguf.ggml import ALIKE_TYPES, DENSE_TYPES, FACT, PACKED_TYPES
from q4core import CheckpointError, Dialect, PackedWeight, ScaleKind, find_format, pack_codes
from q4core.plugin_api import map_privately, open_regular, unreadable

if TYPE_CHECKING:
    from pathlib import Path

    from q4_gguf.ggml import BlockLayout
    from q4_gguf.header import TensorEntry

__all__ = ["dense_tensor", "map_file", "outline", "packed_weight", "unpacked_tensor"]

_SMALLEST_HEADER_BYTES = 24
_CHUNK_ELEMENTS = 1 << 20


def map_file(path: Path, *, copy: bool = False) -> mmap.mmap:
    """Map a file privately: reading costs page cache alone, and writing into a view never reaches the file.

    Args:
        path: The file.
        copy: Read the file into memory instead.

    Raises:
        CheckpointError: The file can't be read, or it is shorter than the shortest header.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < _SMALLEST_HEADER_BYTES:
                raise CheckpointError(
                    "GGUF file",
                    name="size",
                    rule=f"at least {_SMALLEST_HEADER_BYTES} bytes",
                    value=size,
                    where=str(path),
                    hint="The file is truncated or not a GGUF file.",
                )
            if copy:
                memory = mmap.mmap(-1, size)
                if file.readinto(memory) != size:  # type: ignore[attr-defined]  # a buffered file has it
                    raise CheckpointError(
                        "GGUF file", name="size", rule="the same while it is read", value="less", where=str(path)
                    )
                return memory
            return map_privately(file)
    except OSError as error:
        raise unreadable(path, error) from error


def _bytes(data: mmap.mmap, entry: TensorEntry, step: int) -> torch.Tensor:
    """Return a tensor's bytes; copied only where a file of odd alignment would break ``step``."""
    flat = torch.frombuffer(data, dtype=torch.uint8, count=entry.nbytes or 0, offset=entry.position)
    return flat if flat.data_ptr() % step == 0 else flat.clone()


def dense_tensor(data: mmap.mmap, entry: TensorEntry) -> torch.Tensor:
    """Return a dense tensor in the file's own dtype, as a view of the file.

    Args:
        data: The mapped file.
        entry: A tensor of one of ``DENSE_TYPES``.
    """
    dtype = DENSE_TYPES[entry.type_name]
    return _bytes(data, entry, dtype.itemsize).view(dtype).view(entry.shape)


def unpacked_tensor(data: mmap.mmap, entry: TensorEntry) -> torch.Tensor:
    """Return the float32 values of a tensor of one of ``UNPACKED_TYPES``, as the package ``gguf`` computes them."""
    import gguf  # noqa: PLC0415  # of a third of a second, and for files that ask for it

    rows = _bytes(data, entry, 2).view(*entry.shape[:-1], -1)
    values = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(entry.type_number))
    return torch.from_numpy(values).view(entry.shape)


def packed_weight(
    data: mmap.mmap, entry: TensorEntry, *, name: str, expert: int | None = None, factor: torch.Tensor | None = None
) -> PackedWeight:
    """Return a packed weight [N, K] whose numbers are strided views of the file, wherever it stores them singly.

    Args:
        data: The mapped file.
        entry: A tensor of one of ``PACKED_TYPES`` and of shape [N, K], or [E, N, K] with ``expert``.
        name: The layer's name.
        expert: Which of the E weights; None for a matrix.
        factor: Global scale of an NVFP4 weight, float32 [].
    """
    layout = PACKED_TYPES[entry.type_name]
    kind = entry.type
    if kind is None:  # pragma: no cover  # PACKED_TYPES has known types only
        raise CheckpointError("GGUF tensor", name=name, rule="of a known type", value=entry.type_number)
    *_, rows, columns = entry.shape
    blocks = _bytes(data, entry, 2).view(-1, rows, columns // kind.block_size, kind.block_bytes)[expert or 0]
    parts = {field: part(blocks) for field, part in layout.parts.items()}
    fields: dict[str, Any] = {
        field: part.reshape(-1) if field.startswith("nested_") else part.reshape(rows, -1)
        for field, part in parts.items()
    }
    is_scaled = factor is not None
    if isinstance(layout.codes, tuple):
        first, last = layout.codes
        codes = blocks[..., first:last]
    else:
        codes = _packed_again(blocks, layout, columns)
    return PackedWeight(
        format=find_format(layout.format),
        qdata=codes,
        scale_kind=ScaleKind.E4M3_MUL if is_scaled else layout.scale_kind,
        global_scale=factor,
        nested_block_size=kind.block_size // layout.block_size if "nested_scale" in fields else 256,
        out_features=rows,
        in_features=columns,
        block_size=layout.block_size,
        packing=layout.packing,
        dtype=torch.float32,
        name=name,
        dialect="gguf",
        notes=(Dialect.stored_fact(FACT, entry.type_name),) if entry.type_name in ALIKE_TYPES else (),
        **fields,
    )


def outline(data: mmap.mmap, entry: TensorEntry, **labels: Any) -> PackedWeight:
    """Return what ``packed_weight`` does with the first row in place of all others: its facts, at no cost.

    Args:
        data: The mapped file.
        entry: As for ``packed_weight``.
        **labels: As for ``packed_weight``.
    """
    *_, rows, columns = entry.shape
    size = None if entry.type is None else columns // entry.type.block_size * entry.type.block_bytes
    weight = packed_weight(data, attrs.evolve(entry, shape=(1, columns), nbytes=size), **labels)
    fields: dict[str, Any] = {
        name: tensor.expand(rows, *tensor.shape[1:]) if tensor.dim() > 1 else tensor.repeat(rows)
        for name, tensor in weight.tensors()
        if name != "global_scale"
    }
    return attrs.evolve(weight, out_features=rows, **fields)


def _packed_again(blocks: torch.Tensor, layout: BlockLayout, columns: int) -> torch.Tensor:
    """Return the codes of blocks [N, S, bytes] as their format packs them, [N, P]; some rows at a time."""
    if isinstance(layout.codes, tuple):  # pragma: no cover  # they are used as they are stored
        raise TypeError(f"codes of {layout.format} are stored as they are used")
    rows = blocks.shape[0]
    result = torch.empty((rows, columns // layout.packing.codes_per_byte), dtype=torch.uint8)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        result[start : start + step] = pack_codes(layout.codes(blocks[start : start + step]), layout.packing)
    return result
