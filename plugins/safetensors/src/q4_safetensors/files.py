"""Files of a checkpoint: one file, the shards of an index, or the contents of a model's folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from q4_safetensors.mapped import MappedFile
from q4core import CheckpointError
from q4core.plugin_api import is_there, read_object, unreadable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from q4core import TensorInfo

__all__ = ["INDEX_SUFFIX", "SUFFIX", "FileSet", "find_files", "read_index"]

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_DEFAULT = "model"


@attrs.frozen
class FileSet:
    """The mapped files of one checkpoint, their tensors by name and their merged metadata."""

    path: Path
    homes: Mapping[str, MappedFile]
    infos: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]

    def load(self, name: str) -> torch.Tensor:
        """Return one tensor as a view of its file."""
        return self.homes[name].load(name)

    def load_small(self, name: str) -> torch.Tensor:
        """Return one tensor in memory of its own."""
        return self.homes[name].load_small(name)

    def close(self) -> None:
        """Release every file."""
        for file in set(self.homes.values()):
            file.close()


def _fail(path: Path, name: str, rule: str, value: object, hint: str | None = None) -> NoReturn:
    raise CheckpointError("checkpoint", name=name, rule=rule, value=value, where=str(path), hint=hint)


def read_index(path: Path) -> dict[str, str]:
    """Return tensor → shard from an index, whose shards are in the same folder.

    Raises:
        CheckpointError: The index is malformed, or names something other than a file of its own folder.
    """
    found = read_object(path, "index")
    shards = found.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        _fail(path, "weight_map", "an object of at least one tensor", shards)
    for name, shard in shards.items():
        if not isinstance(shard, str) or not _is_plain(shard):
            _fail(path, f"weight_map[{name!r}]", "the name of a safetensors file in the index's own folder", shard)
    return shards


def _is_plain(shard: str) -> bool:
    return shard.endswith(SUFFIX) and not set(shard) & set("/\\:\0") and shard == shard.strip()


def find_files(path: Path, *, copy: bool = False) -> FileSet:
    """Return the files of a checkpoint, with every header read.

    Args:
        path: A safetensors file, an index, or a folder that holds one or the other.
        copy: Read tensors into memory instead of mapping the files.

    Raises:
        CheckpointError: There is no checkpoint, there are several, or a file is malformed.
    """
    target = _in_folder(path) if path.is_dir() else path
    if target.name.endswith(".json"):
        return _sharded(target, read_index(target), copy=copy)
    file = MappedFile(target, copy=copy)
    return FileSet(target, dict.fromkeys(file.infos, file), file.infos, file.metadata)


def _in_folder(folder: Path) -> Path:
    """Return the one file or index of a folder; the usual names come before others."""
    usual = [item for item in (folder / f"{_DEFAULT}{SUFFIX}", folder / f"{_DEFAULT}{INDEX_SUFFIX}") if is_there(item)]
    try:
        names = sorted(item.name for item in folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error
    indices = [folder / name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(usual) == 2 and set(read_index(usual[1]).values()) == {usual[0].name}:  # noqa: PLR2004  # MLX writes both
        return usual[1]
    found = usual or indices or [folder / name for name in names if name.endswith(SUFFIX)]
    if len(found) != 1:
        _fail(
            folder,
            "folder",
            f"one with {_DEFAULT}{SUFFIX}, or an index, or a single safetensors file",
            ", ".join(item.name for item in found) or "none of them",
            "Open the file that you mean by its own path." if found else None,
        )
    return found[0]


def _sharded(index: Path, shards: Mapping[str, str], *, copy: bool) -> FileSet:
    files: dict[str, MappedFile] = {}
    for name, shard in shards.items():
        if shard in files:
            continue
        path = index.parent / shard
        if not is_there(path):
            _fail(index, f"weight_map[{name!r}]", "a file that is there", shard, "Download the missing shard.")
        files[shard] = MappedFile(path, copy=copy)
    homes: dict[str, MappedFile] = {}
    for shard, file in files.items():
        for name in file.infos:
            if shards.get(name, shard) != shard:
                continue  # another shard's tensor, by the index
            if name in homes:
                _fail(index, f"tensor {name!r}", "in one shard, or in the index", f"{homes[name].path.name}, {shard}")
            homes[name] = file
    for name, shard in shards.items():
        if name not in homes:
            _fail(index, f"weight_map[{name!r}]", "the shard that holds the tensor", shard)
    infos = {name: file.infos[name] for name, file in homes.items()}
    return FileSet(index, homes, infos, _merge(index, files))


def _merge(index: Path, files: Mapping[str, MappedFile]) -> dict[str, str]:
    """Return the shards' metadata as one: lists are joined, objects united."""
    merged: dict[str, str] = {}
    for shard, file in files.items():
        for key, text in file.metadata.items():
            if merged.get(key, text) == text:
                merged[key] = text
            else:
                merged[key] = _join(merged[key], text, key, index, shard)
    return merged


def _join(first: str, second: str, key: str, index: Path, shard: str) -> str:
    """Return two shards' texts as one; where they are not both JSON lists or objects, the first shard's."""
    try:
        one, two = json.loads(first), json.loads(second)
    except (ValueError, RecursionError):
        return first
    if isinstance(one, list) and isinstance(two, list):
        by_text = {json.dumps(item, sort_keys=True): item for item in (*one, *two)}
        return json.dumps(list(by_text.values()))
    if isinstance(one, dict) and isinstance(two, dict):
        return json.dumps(_united(one, two, key, index, shard))
    return first


def _united(one: dict[str, Any], two: dict[str, Any], key: str, index: Path, shard: str) -> dict[str, Any]:
    united = dict(one)
    for name, value in two.items():
        mine = united.get(name, value)
        if isinstance(mine, dict) and isinstance(value, dict):
            united[name] = _united(mine, value, f"{key}.{name}", index, shard)
        elif mine != value:
            _fail(index, f"metadata {key}.{name} of {shard}", f"{mine!r}, as in another shard", value)
        else:
            united[name] = value
    return united
