"""Writing one safetensors file: tensors come one at a time, and the file appears under its name when it is whole.

The header stands before the data and needs every tensor's size. So the data is kept in a file beside the target until
the last tensor is there, and then copied behind the header, widest dtypes first, so that every tensor is aligned.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from typing import TYPE_CHECKING

import attrs
import torch

from q4core.checkpoint.header import DTYPE_NAMES, LENGTH_BYTES
from q4core.dialect import TensorInfo
from q4core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO

__all__ = ["Shard", "StagedText", "sync_folder"]

_CHUNK_BYTES = 1 << 23


@attrs.frozen
class _Kept:
    info: TensorInfo
    position: int


class Shard:
    """One file in the making.

    Args:
        folder: Where the file will be.

    Raises:
        OSError: The folder can't be written.
    """

    def __init__(self, folder: Path) -> None:
        self._data_path = folder / f".q4core-{os.getpid()}-{secrets.token_hex(8)}.data.tmp"
        self._file_path = self._data_path.with_name(self._data_path.name.replace(".data.tmp", ".tmp"))
        self._kept: dict[str, _Kept] = {}
        self.nbytes = 0
        self._data: BinaryIO | None = self._data_path.open("xb+")

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """dtype and shape of the tensors so far."""
        return {name: kept.info for name, kept in self._kept.items()}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append one tensor.

        Raises:
            CheckpointError: The name is taken or not legal, or the dtype has no name in the format.
            OSError: The disk is full.
        """
        if tensor.dtype not in DTYPE_NAMES or tensor.is_meta or tensor.layout is not torch.strided:
            raise CheckpointError(
                "save_checkpoint",
                name=name,
                rule=f"a strided tensor with data, of a dtype of the format ({', '.join(DTYPE_NAMES.values())})",
                value=f"{tensor.dtype}, {tensor.layout}, {tensor.device}",
            )
        if name in self._kept or name in {"", "__metadata__"}:
            raise CheckpointError("save_checkpoint", name="tensor name", rule="legal and there once", value=name)
        if self._data is None:
            raise CheckpointError("save_checkpoint", name="shard", rule="unfinished", value="finished")
        whole = tensor.detach().to("cpu").contiguous()
        self._kept[name] = _Kept(TensorInfo(whole.dtype, whole.shape), self.nbytes)
        size = whole.numel() * whole.element_size()
        if size:
            # The bytes of the tensor as they lie in memory: torch offers no buffer, and numpy is not there for certain.
            self._data.write(memoryview((ctypes.c_char * size).from_address(whole.data_ptr())))
        self.nbytes += size

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Write header and data to a temporary file, down to the disk; ``publish`` gives it its name."""
        if self._data is None:
            return
        order = sorted(self._kept.items(), key=lambda item: (-item[1].info.dtype.itemsize, item[0]))
        entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        start = 0
        for name, kept in order:
            end = start + kept.info.nbytes
            entries[name] = {
                "dtype": DTYPE_NAMES[kept.info.dtype],
                "shape": _header_shape(kept.info),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % LENGTH_BYTES)
        with self._file_path.open("xb") as file:
            file.write(len(text).to_bytes(LENGTH_BYTES, "little"))
            file.write(text)
            for _, kept in order:
                self._copy(self._data, kept, file)
            file.flush()
            os.fsync(file.fileno())
        self._drop_data()

    @staticmethod
    def _copy(data: BinaryIO, kept: _Kept, file: BinaryIO) -> None:
        data.seek(kept.position)
        left = kept.info.nbytes
        while left:
            chunk = data.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise OSError("the temporary file became shorter")
            file.write(chunk)
            left -= len(chunk)

    def publish(self, path: Path) -> None:
        """Give the finished file its name, in place of any file there, in one step."""
        self._file_path.replace(path)

    def discard(self) -> None:
        """Remove what is left of temporary files; after ``publish`` that is nothing."""
        self._drop_data()
        self._file_path.unlink(missing_ok=True)

    def _drop_data(self) -> None:
        if self._data is not None:
            self._data.close()
            self._data = None
        self._data_path.unlink(missing_ok=True)


def _header_shape(info: TensorInfo) -> list[int]:
    """Return the shape as the header counts it: two values to a byte for F4."""
    shape = list(info.shape)
    if info.dtype == torch.float4_e2m1fn_x2 and shape:
        shape[-1] *= 2
    return shape


class StagedText:
    """A small text file, down to the disk under a temporary name until it is published.

    Args:
        path: The name that it will have.
        text: What it holds.

    Raises:
        OSError: The folder can't be written.
    """

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._temporary = path.with_name(f".q4core-{os.getpid()}-{secrets.token_hex(8)}.tmp")
        try:
            with self._temporary.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            self.discard()
            raise

    def publish(self) -> Path:
        """Give the file its name, in place of any file there, in one step."""
        self._temporary.replace(self._path)
        return self._path

    def discard(self) -> None:
        """Remove the temporary file; after ``publish`` there is none."""
        self._temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries down to the disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
