"""Saving checkpoints: one layer at a time, checked, and published in one step when everything is on the disk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from q4core.checkpoint.arguments import (
    checked_path,
    checked_tensor,
    checked_weight,
    require_config,
    require_names,
    require_texts,
)
from q4core.checkpoint.files import read_object
from q4core.checkpoint.shard import Shard, StagedText, sync_folder
from q4core.checkpoint.target import INDEX, SINGLE, Target
from q4core.dialect import Catalogue, find_dialect
from q4core.dialects_simple import SIMPLE_DIALECTS
from q4core.errors import CheckpointError, DialectError, WeightError
from q4core.schema import MARKER, detect_in, validate_in
from q4core.weight_spec import WeightSpec

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

    from q4core.dialect import Dialect, WrittenLayer
    from q4core.weight import PackedWeight

__all__ = ["save_checkpoint"]

_MATRIX = 2


def save_checkpoint(  # noqa: PLR0913  # the contract's arguments
    path: str | os.PathLike[str],
    weights: Mapping[str, PackedWeight],
    *,
    dialect: str,
    dense: Mapping[str, torch.Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int | None = None,
    lossy: bool = False,
    dialects: Iterable[Dialect] = SIMPLE_DIALECTS,
) -> Path:
    """Write packed weights, and other tensors, as a safetensors checkpoint in one dialect.

    Weights and tensors are taken from their mappings one at a time, so that lazy mappings never hold more than one.
    Whatever was at ``path`` stays until the new checkpoint is on the disk as a whole, and then gives way to it.

    Args:
        path: A file (``….safetensors``), or a folder, which also gets an entry in ``config.json`` where the dialect's
            own readers look for one.
        weights: Module → weight.
        dialect: Name of the dialect.
        dense: Name → tensor for everything else.
        metadata: Further header metadata, text by key; the dialect's own entries come before it.
        config: The model's ``config.json``, for a folder; None keeps the one that is there.
        max_shard_bytes: Start a new file before this many bytes of tensors; only for a folder.
        lossy: Allow what can't be expressed exactly to be rounded or left out.
        dialects: The dialects to look among.

    Returns:
        The file, or the index of the shards.

    Raises:
        DialectError: The dialect is unknown, or can't express a weight; the message names what.
        WeightError: A weight holds illegal numbers.
        CheckpointError: An argument is not what it must be, names collide, or the files can't be written. Nothing has
            changed then.
    """
    known = tuple(dialects)
    place = checked_path(path)
    for argument, given in (("weights", weights), ("dense", dense or {})):
        require_names(argument, given)
    require_texts("metadata", metadata or {})
    require_config(config or {})
    target = Target.at(place, config=config, max_shard_bytes=max_shard_bytes)
    writer = _Writer(target, find_dialect(dialect, known), dict(metadata or {}), lossy=lossy)
    try:
        for module in weights:
            writer.add_layer(module, checked_weight(module, weights[module]))
        for name in dense or {}:
            writer.add_dense(name, checked_tensor(name, (dense or {})[name]))
        writer.finish(known)
        return writer.publish()
    except OSError as error:
        raise CheckpointError(
            "save_checkpoint", name="file", rule="writable", value=error.strerror or str(error), where=str(path)
        ) from error
    finally:
        writer.discard()


class _Writer:
    """Collects the tensors of one checkpoint in shards, and publishes them together."""

    def __init__(self, target: Target, dialect: Dialect, metadata: Mapping[str, str], *, lossy: bool) -> None:
        self._target = target
        self._dialect = dialect
        self._metadata = metadata
        self._lossy = lossy
        self._shards: list[tuple[Shard, dict[str, WrittenLayer], list[str]]] = []
        self._homes: dict[str, int] = {}
        self._specs: dict[str, WeightSpec] = {}
        self._config: dict[str, Any] | None = None
        self._texts: list[StagedText] = []
        self._is_new_folder = not target.folder.exists()

    def add_layer(self, module: str, weight: PackedWeight) -> None:
        """Write one layer to the current shard."""
        try:
            weight.check_values()
        except WeightError as error:
            raise WeightError(
                f"save_checkpoint: layer {module!r}",
                name=error.name,
                rule=error.rule,
                value=error.value,
                hint="Nothing was written.",
            ) from error
        try:
            layer = self._dialect.write(module, weight)
        except DialectError:
            if not self._lossy:
                raise
            weight = self._dialect.approximate(weight)
            layer = self._dialect.write(module, weight)
        shard, layers, _ = self._shard_for(sum(item.numel() * item.element_size() for item in layer.tensors.values()))
        for name, tensor in layer.tensors.items():
            self._claim(name)
            shard.add(name, tensor)
        layers[module] = attrs.evolve(layer, tensors={})
        self._specs[module] = WeightSpec.of(weight)

    def add_dense(self, name: str, tensor: torch.Tensor) -> None:
        """Write one other tensor to the current shard."""
        shard, _, dense = self._shard_for(tensor.numel() * tensor.element_size())
        self._claim(name)
        shard.add(name, tensor)
        dense.append(name)

    def _shard_for(self, nbytes: int) -> tuple[Shard, dict[str, WrittenLayer], list[str]]:
        """Return the shard that takes so many bytes: the current one, unless that would grow too large."""
        limit = self._target.max_shard_bytes
        if self._shards:
            current = self._shards[-1][0]
            if limit is None or not current.infos or current.nbytes + nbytes <= limit:
                return self._shards[-1]
            if not self._dialect.metadata_spans_shards:
                self._finish_shard(self._shards[-1])
        else:
            self._target.folder.mkdir(parents=True, exist_ok=True)
        self._shards.append((Shard(self._target.folder), {}, []))
        return self._shards[-1]

    def _claim(self, name: str) -> None:
        if name in self._homes:
            raise CheckpointError("save_checkpoint", name="tensor name", rule="there once", value=name)
        self._homes[name] = len(self._shards) - 1

    def _finish_shard(self, part: tuple[Shard, dict[str, WrittenLayer], list[str]]) -> None:
        layers, dense = self._contents() if self._dialect.metadata_spans_shards else part[1:]
        part[0].finish(self._header_of(layers, dense))

    def _contents(self) -> tuple[dict[str, WrittenLayer], list[str]]:
        """Return the layers and the names of the other tensors of all shards."""
        layers = {module: layer for _, part, _ in self._shards for module, layer in part.items()}
        return layers, [name for _, _, names in self._shards for name in names]

    def _header_of(self, layers: Mapping[str, WrittenLayer], dense: list[str]) -> dict[str, str]:
        own = self._dialect.merge_metadata(layers, dense)
        if self._target.file is not None and self._dialect.shares_keys:
            own[MARKER] = self._dialect.name
        return {"format": "pt", **self._metadata, **own}

    def finish(self, dialects: tuple[Dialect, ...]) -> None:
        """Finish the last shard, and check that the whole will be read as it was meant."""
        if not self._shards:
            self._shard_for(0)
        for part in self._shards:
            self._finish_shard(part)  # those that are finished stay as they are
        self._config = self._new_config()
        infos = {name: info for shard, _, _ in self._shards for name, info in shard.infos.items()}
        layers, dense = self._contents()
        catalogue = Catalogue(infos, metadata=self._header_of(layers, dense), config=self._config)
        schema = detect_in(catalogue, dialects)
        found = {} if schema is None else {module: layer.dialect for module, layer in schema.layers.items()}
        problems = () if schema is None else (*validate_in(schema, catalogue, dialects), *schema.unsupported)
        if found != dict.fromkeys(layers, self._dialect.name) or problems:
            differing = sorted(set(found.items()) ^ set(dict.fromkeys(layers, self._dialect.name).items()))
            raise CheckpointError(
                "save_checkpoint",
                name="names and metadata",
                rule=f"such that each layer is read as {self._dialect.name} again",
                value="; ".join([*(f"{module} as {name}" for module, name in differing), *map(str, problems)][:4]),
                hint="Nothing was written. The tensors or metadata given beside the weights speak of other layers.",
            )

    def _new_config(self) -> dict[str, Any] | None:
        """Return what ``config.json`` will hold, or None where there will be none."""
        if self._target.file is not None:
            return None
        path = self._target.folder / "config.json"
        given = self._target.config
        base = dict(given) if given is not None else read_object(path, "config.json") if path.is_file() else {}
        base.pop("quantization_config", None)
        infos = {name: info for shard, _, _ in self._shards for name, info in shard.infos.items()}
        _, dense = self._contents()
        matrices = tuple(
            name.removesuffix(".weight")
            for name in dense
            if name.endswith(".weight") and len(infos[name].shape) == _MATRIX
        )
        entry = self._dialect.quantization_config(self._specs, matrices) if self._specs else None
        if entry is not None:
            base["quantization_config"] = entry
        return base if base or path.is_file() else None

    def publish(self) -> Path:
        """Give every file its name, what makes them a checkpoint last; remove what they replace."""
        folder = self._target.folder
        if self._target.file is not None:
            self._shards[0][0].publish(self._target.file)
            sync_folder(folder)
            return self._target.file
        old = set(self._target.members())
        if self._config is not None:
            self._texts.append(StagedText(folder / "config.json", json.dumps(self._config, indent=2) + "\n"))
        count = len(self._shards)
        names = [SINGLE] if count == 1 else self._target.free_names(count)
        main = folder / names[0]
        if len(names) > 1:
            main = folder / INDEX
            self._texts.append(StagedText(main, self._index(names)))
            self._publish_shards(names)
        for text in self._texts:
            text.publish()
        if len(names) == 1:
            self._publish_shards(names)
        sync_folder(folder)
        for path in sorted(old - {main, *(folder / name for name in names)}):
            path.unlink(missing_ok=True)
        return main

    def _publish_shards(self, names: list[str]) -> None:
        for (shard, _, _), name in zip(self._shards, names, strict=True):
            shard.publish(self._target.folder / name)
        sync_folder(self._target.folder)

    def _index(self, names: list[str]) -> str:
        total = sum(shard.nbytes for shard, _, _ in self._shards)
        weight_map = {tensor: names[index] for tensor, index in sorted(self._homes.items())}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"

    def discard(self) -> None:
        """Remove every temporary file; after ``publish`` there is none."""
        for text in self._texts:
            text.discard()
        for shard, _, _ in self._shards:
            shard.discard()
        if self._is_new_folder and self._target.folder.is_dir() and not any(self._target.folder.iterdir()):
            self._target.folder.rmdir()
