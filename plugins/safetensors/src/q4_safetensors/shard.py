"""``Shard``: a safetensors file under construction, to which tensors are appended one at a time.

The header precedes the data and needs every tensor's size. So the data are stored in a temporary file until the last
tensor is there. The library then writes from a mapping of that file, and none of it is held in memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from typing import TYPE_CHECKING

import attrs
import torch
from safetensors import TensorSpec, serialize_file

from q4_safetensors.header import DTYPES
from q4_safetensors.journal import DIGEST_BYTES
from q4core import CheckpointError, TensorInfo
from q4core.plugin_api import map_privately, sync

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO

__all__ = ["Shard"]

_METADATA = "__metadata__"


@attrs.frozen
class _Stored:
    info: TensorInfo
    position: int


class Shard:
    """One file under construction.

    Args:
        path: A temporary name for the file. What is there already, of a writer that was killed, is resumed: see
            ``adopt``.
        hashed: Whether ``add`` returns digests.

    Raises:
        OSError: The folder can't be written.
    """

    def __init__(self, path: Path, *, hashed: bool = False) -> None:
        self.path = path
        self._data_path = path.with_suffix(".data")
        self._stored: dict[str, _Stored] = {}
        self._hashed = hashed
        self.nbytes = 0
        self.is_finished = path.is_file() and not self._data_path.is_file()
        self._data: BinaryIO | None = None
        if not self.is_finished:
            is_there = self._data_path.is_file()
            self._data = self._data_path.open("rb+") if is_there else self._data_path.open("xb+")

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """dtype and shape of the tensors so far."""
        return {name: stored.info for name, stored in self._stored.items()}

    def adopt(self, name: str, info: TensorInfo) -> None:
        """Append a tensor whose bytes are there already, at their place."""
        self._stored[name] = _Stored(info, self.nbytes)
        self.nbytes += info.nbytes
        if self._data is not None:
            self._data.seek(self.nbytes)

    def add(self, name: str, tensor: torch.Tensor) -> str:
        """Append one tensor, and return the digest of its bytes.

        Raises:
            CheckpointError: The dtype has no name in the format.
            OSError: The disk is full.
        """
        if tensor.dtype not in DTYPES.values() or tensor.is_meta or tensor.layout is not torch.strided:
            raise CheckpointError(
                "save_checkpoint",
                name=name,
                rule=f"a strided tensor with data, of a dtype of the format ({', '.join(DTYPES)})",
                value=f"{tensor.dtype}, {tensor.layout}, {tensor.device}",
            )
        whole = tensor.detach().to("cpu").contiguous()
        self._stored[name] = _Stored(TensorInfo(whole.dtype, whole.shape), self.nbytes)
        size = whole.numel() * whole.element_size()
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        if size and self._data is not None:
            # The bytes of the tensor as they lie in memory; torch offers no buffer.
            view = memoryview((ctypes.c_char * size).from_address(whole.data_ptr()))
            self._data.write(view)
            if self._hashed:
                self._data.flush()
                digest.update(view)
        self.nbytes += size
        return digest.hexdigest()

    def finish(self, metadata: Mapping[str, str]) -> bool:
        """Let the library write the file, down to the disk; return False where it is there already."""
        if self._data is None:
            return False
        self._data.truncate(self.nbytes)
        self._data.flush()
        mapping = map_privately(self._data) if self.nbytes else bytearray(1)
        base = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive, and has its address
        tensors = {
            name: TensorSpec(
                dtype=str(stored.info.dtype).removeprefix("torch."),
                shape=stored.info.shape,
                data_ptr=base.data_ptr() + stored.position,
                data_len=stored.info.nbytes,
            )
            for name, stored in self._stored.items()
        }
        serialize_file(tensors, self.path, dict(metadata) or None)
        del base, mapping
        _sort_metadata(self.path)
        self.path.chmod(self._data_path.stat().st_mode & 0o777)  # the library's files are their owner's alone
        sync(self.path)
        self.close()
        return True

    def remove_data(self) -> None:
        """Remove the temporary file of the data, once the finished one is on record."""
        self._data_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the temporary file."""
        if self._data is not None:
            self._data.close()
            self._data = None


def _sort_metadata(path: Path) -> None:
    """Put the texts of a header in order: the library's own order differs from run to run."""
    with path.open("rb+") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        before = file.read(size)
        header = json.loads(before)
        if _METADATA not in header:
            return
        header[_METADATA] = dict(sorted(header[_METADATA].items()))
        after = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        if len(after) == size and after != before:
            file.seek(8)
            file.write(after)
