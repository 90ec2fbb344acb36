"""A safetensors file, mapped: its tensors are views of the page cache and cost no anonymous memory."""

from __future__ import annotations

import mmap
import os
import sys
from typing import TYPE_CHECKING

import torch

from q4core.checkpoint.access import open_regular, unreadable
from q4core.checkpoint.header import read_header
from q4core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from q4core.dialect import TensorInfo

__all__ = ["MappedFile"]

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class MappedFile:
    """One safetensors file. Opening reads its header; the rest is mapped on first need.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file can't be read, or its header is malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                self._bytes = os.fstat(file.fileno()).st_size
                header = read_header(file, self._bytes, str(path))
        except OSError as error:
            raise unreadable(path, error) from error
        self.metadata: Mapping[str, str] = header.metadata
        self._tensors = header.tensors
        self.infos: dict[str, TensorInfo] = {name: tensor.info for name, tensor in header.tensors.items()}
        self._map: mmap.mmap | None = None

    def load(self, name: str) -> torch.Tensor:
        """Return one tensor as a view of the file; writing into it never reaches the file.

        It is copied only where the file put it at an address that its dtype can't have.
        """
        tensor = self._tensors[name]
        info = tensor.info
        if not info.numel:
            return torch.empty(info.shape, dtype=info.dtype)
        flat = torch.frombuffer(self._mapping(), dtype=torch.uint8, count=info.nbytes, offset=tensor.position)
        if flat.data_ptr() % info.dtype.itemsize:
            flat = flat.clone()
        return flat.view(info.dtype).view(info.shape)

    def close(self) -> None:
        """Let go of the mapping; it lives on while tensors look into it."""
        self._map = None

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            try:
                with open_regular(self.path) as file:
                    size = os.fstat(file.fileno()).st_size
                    if size != self._bytes:
                        raise CheckpointError(
                            "safetensors file",
                            name="size",
                            rule=f"{self._bytes} bytes, as when it was opened",
                            value=size,
                            where=str(self.path),
                        )
                    self._map = _map(file.fileno())
            except (OSError, ValueError) as error:
                if isinstance(error, CheckpointError):
                    raise
                raise unreadable(self.path, error) from error
        return self._map


def _map(descriptor: int) -> mmap.mmap:
    """Map a file privately."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    # torch wants writable memory. Without MAP_NORESERVE the kernel counts a private writable mapping as if all of it
    # were going to be written, and refuses a file larger than the machine's memory.
    flags = mmap.MAP_PRIVATE | _NO_RESERVE
    return mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
