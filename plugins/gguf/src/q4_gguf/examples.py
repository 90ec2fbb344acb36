"""Files that the package ``gguf`` writes, by which q4-conformance judges the reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4core import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

__all__ = ["make_file", "make_parts"]


def make_file(path: Path, tensors: Mapping[str, torch.Tensor], **split: int) -> None:
    """Write a file of dense tensors, with the facts of a split model where there are any.

    Raises:
        CheckpointError: It can't be written.
    """
    import gguf  # noqa: PLC0415  # of a third of a second, and for the kit alone

    try:
        writer = gguf.GGUFWriter(path, "llama")
        for name, value in split.items():
            key = f"split.{name.replace('_', '.')}"
            (writer.add_int32 if name == "tensors_count" else writer.add_uint16)(key, value)
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError("GGUF file", name="file", rule="writable", value=reason, where=str(path)) from error


def make_parts(folder: Path, tensors: Mapping[str, torch.Tensor]) -> list[Path]:
    """Write a model in three files, and return them."""
    paths = [folder / f"x-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        own = dict(list(tensors.items())[number::3])
        make_file(path, own, no=number, count=3, tensors_count=len(tensors))
    return paths
