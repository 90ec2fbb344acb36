"""A safetensors file, mapped: its tensors are views of the page cache and cost no anonymous memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from q4_safetensors.header import read_header
from q4core import CheckpointError
from q4core.plugin_api import map_privately, open_regular, unreadable

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping
    from pathlib import Path

    from q4core import TensorInfo

__all__ = ["MappedFile"]


class MappedFile:
    """One safetensors file. Opening reads its header; the rest is mapped on first need.

    Args:
        path: The file.
        copy: Let the library read each tensor into memory, and map nothing.

    Raises:
        CheckpointError: The file can't be read, or its header is malformed.
    """

    def __init__(self, path: Path, *, copy: bool = False) -> None:
        self.path = path
        header = read_header(path)
        self.metadata: Mapping[str, str] = header.metadata
        self._tensors = header.tensors
        self.infos: dict[str, TensorInfo] = {name: tensor.info for name, tensor in header.tensors.items()}
        self._file = header.file if copy else None
        self._bytes = max((item.position + item.info.nbytes for item in header.tensors.values()), default=0)
        self._map: mmap.mmap | None = None

    def load(self, name: str) -> torch.Tensor:
        """Return one tensor as a view of the file; writing into it never reaches the file.

        It is copied where the file put it at an address that its dtype can't have.

        Raises:
            CheckpointError: The file can't be read any more.
        """
        tensor = self._tensors[name]
        info = tensor.info
        if not info.numel:
            return torch.empty(info.shape, dtype=info.dtype)
        if self._file is not None:
            try:
                loaded: torch.Tensor = self._file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise unreadable(self.path, error) from error
            return loaded
        flat = torch.frombuffer(self._mapping(), dtype=torch.uint8, count=info.nbytes, offset=tensor.position)
        if flat.data_ptr() % info.dtype.itemsize:
            flat = flat.clone()
        return flat.view(info.dtype).view(info.shape)

    def load_small(self, name: str) -> torch.Tensor:
        """Return one tensor in memory of its own: a mapping would make whole pages around it resident.

        Raises:
            CheckpointError: The file can't be read any more, or has become shorter.
        """
        tensor = self._tensors[name]
        info = tensor.info
        if not info.numel:
            return torch.empty(info.shape, dtype=info.dtype)
        try:
            with open_regular(self.path) as file:
                file.seek(tensor.position)
                stored = bytearray(file.read(info.nbytes))
        except OSError as error:
            raise unreadable(self.path, error) from error
        if len(stored) < info.nbytes:
            raise self._changed(self.path.stat().st_size)
        return torch.frombuffer(stored, dtype=torch.uint8).view(info.dtype).view(info.shape)

    def close(self) -> None:
        """Release the file; a mapping lives on while tensors are views of it."""
        self._map = None
        self._file = None

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            try:
                with open_regular(self.path) as file:
                    size = os.fstat(file.fileno()).st_size
                    if size != self._bytes:
                        raise self._changed(size)
                    self._map = map_privately(file)
            except OSError as error:
                raise unreadable(self.path, error) from error
        return self._map

    def _changed(self, size: int) -> CheckpointError:
        rule = f"{self._bytes} bytes, as when it was opened"
        return CheckpointError("safetensors file", name="size", rule=rule, value=size, where=str(self.path))
