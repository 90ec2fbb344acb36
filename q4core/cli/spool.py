"""Packed weights parked in an unnamed temporary file, so that a model of any size is quantised once, layer by layer.

A safetensors header stands before the data and needs every size, so a writer must know all layers before it writes the
first; keeping them in memory would take the whole packed model. The file has no name: nothing is left of it, whatever
happens to the process.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import torch

from q4core.errors import CheckpointError
from q4core.weight import PackedWeight
from q4core.weight_spec import WeightSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Spool"]

_ALIGNMENT = 64


@attrs.frozen
class _Place:
    position: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Spool(Mapping[str, PackedWeight]):
    """Module → ``PackedWeight``, as views of the temporary file; filled by ``add``, then only read.

    Args:
        folder: Where the file lies: the folder of the output, so that a full disk is noticed early.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, tuple[WeightSpec, tuple[_Place, ...]]] = {}
        self._end = 0
        self._map: mmap.mmap | None = None
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # closed by close()
        except OSError as error:
            raise self._refuse(error) from error

    def _refuse(self, error: OSError) -> CheckpointError:
        rule = "a folder with room for the packed layers"
        reason = error.strerror or str(error)
        return CheckpointError("temporary file", name="folder", rule=rule, value=reason, where=str(self._folder))

    def add(self, name: str, weight: PackedWeight) -> None:
        """Park a weight, which may be let go afterwards.

        Raises:
            CheckpointError: The disk is full.
        """
        places = []
        try:
            for _, tensor in weight.tensors():
                flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
                self._end = -(-self._end // _ALIGNMENT) * _ALIGNMENT
                self._file.seek(self._end)
                self._file.write(_bytes_of(flat))
                places.append(_Place(self._end, flat.numel(), tensor.dtype, tuple(tensor.shape)))
                self._end += flat.numel()
            self._file.flush()
        except OSError as error:
            raise self._refuse(error) from error
        self._entries[name] = WeightSpec.of(weight), tuple(places)
        self._map = None

    def __getitem__(self, name: str) -> PackedWeight:
        """Return a weight as views of the file."""
        spec, places = self._entries[name]
        if self._map is None:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        tensors = []
        for place in places:
            flat = torch.frombuffer(self._map, dtype=torch.uint8, count=place.nbytes, offset=place.position)
            tensors.append(flat.view(place.dtype).view(place.shape))
        return spec.build(tensors, name=name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the order in which they were added."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of weights."""
        return len(self._entries)

    def close(self) -> None:
        """Let go of the file; weights already given stay valid."""
        self._map = None
        self._file.close()


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """Return a uint8 vector's own memory; torch gives it to numpy only, which the core does not need."""
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr()))
