"""Saving checkpoints: one layer at a time, checked, and published in one step when everything is on the disk."""

from __future__ import annotations

import collections
import json
import logging
from typing import TYPE_CHECKING, Any

import attrs
from safetensors import SafetensorError

from q4_safetensors.files import SUFFIX
from q4_safetensors.journal import Entry, Journal
from q4_safetensors.shard import Shard
from q4_safetensors.target import FOREIGN_SUFFIXES, INDEX, SINGLE, Target
from q4core import CheckpointError, DialectError, OpenRequest, SchemaError, WeightError, WeightSpec, default_registry
from q4core.plugin_api import DIALECT_KEY, Staging, emit, find_dialect, find_layers, read_object, sync

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from q4core import Dialect, PackedWeight, SaveRequest, TensorInfo, WrittenLayer

__all__ = ["SafetensorsWriter"]

_MATRIX = 2


class SafetensorsWriter:
    """Writes safetensors files, in one or in shards."""

    name = "safetensors"

    def accepts(self, path: Path) -> bool:
        """Return whether a path is a safetensors file's or a folder's, by its name or by what is there."""
        is_known = path.is_dir() or path.name.endswith(SUFFIX)
        return is_known or (path.suffix not in FOREIGN_SUFFIXES and not path.exists())

    def write(self, path: Path, weights: Mapping[str, PackedWeight], request: SaveRequest) -> Path:
        """Write a checkpoint, all of it or nothing; see ``q4core.save_checkpoint``.

        Raises:
            DialectError: The dialect is unknown, or can't express a weight; the message names what.
            WeightError: A weight holds illegal numbers.
            CheckpointError: An argument is not what it must be, names collide, or the files can't be written.
        """
        dense = request.dense or {}
        writer: _Writer | None = None
        is_stopped = False
        try:
            target = Target.of(path, request)
            writer = _Writer(target, find_dialect(request.dialect, request.dialects), request)
            for module in weights:
                if not writer.adopt(module, is_layer=True):
                    writer.add_layer(module, weights[module])
            for name in dense:
                if not writer.adopt(name, is_layer=False):
                    writer.add_dense(name, dense[name])
            writer.finish()
            return writer.publish()
        except (KeyboardInterrupt, SystemExit):
            is_stopped = request.resume is not None
            raise
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise CheckpointError(
                "save_checkpoint", name="file", rule="writable", value=reason, where=str(path)
            ) from error
        finally:
            if writer is not None:
                writer.discard(keep=is_stopped)


class _Writer:
    """Collects the tensors of one checkpoint in shards, and publishes them together."""

    def __init__(self, target: Target, dialect: Dialect, request: SaveRequest) -> None:
        self._target = target
        self._dialect = dialect
        self._request = request
        self._staging: Staging | None = None
        self._journal: Journal | None = None
        self._done: collections.deque[Entry] = collections.deque()
        self._shards: list[tuple[Shard, dict[str, WrittenLayer], list[str]]] = []
        self._homes: dict[str, int] = {}
        self._specs: dict[str, WeightSpec] = {}
        self._config: dict[str, Any] | None = None
        self._is_new_folder = not target.folder.exists()
        if request.resume is not None:
            self._journal = Journal(self._open_staging().path)
            self._done.extend(self._journal.entries)

    def adopt(self, name: str, *, is_layer: bool) -> bool:
        """Take a layer or tensor as a killed writer stored it, or return False; from the first one on all are new."""
        entry = self._done.popleft() if self._done else None
        if entry is None:
            return False
        infos = entry.infos
        part = self._shard_for(sum(info.nbytes for info in infos.values()))
        if (entry.name, entry.metadata is not None, entry.shard) != (name, is_layer, len(self._shards) - 1):
            raise CheckpointError("save_checkpoint", name="resume", rule="a text for each result", value=entry.name)
        for key, info in infos.items():
            self._claim(key)
            part[0].adopt(key, info)
        if is_layer:
            part[1][name] = entry.layer
            self._specs[name] = WeightSpec.from_json(entry.spec, formats=default_registry().formats().values())
        else:
            part[2].append(name)
        return True

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
                hint="Quantise the layer again; nothing was written.",
            ) from error
        try:
            layer = self._dialect.write(module, weight)
        except DialectError as error:
            if not self._request.lossy:
                raise
            emit("q4.approximate", level=logging.WARNING, layer=module, dialect=self._dialect.name, why=error.summary)
            weight = self._dialect.approximate(weight)
            layer = self._dialect.write(module, weight)
        shard, layers, _ = self._shard_for(sum(item.numel() * item.element_size() for item in layer.tensors.values()))
        layers[module] = attrs.evolve(layer, tensors={})
        self._specs[module] = WeightSpec.of(weight)
        stored = {name: self._store(shard, name, tensor) for name, tensor in layer.tensors.items()}
        spec = self._specs[module].to_json()
        self._note(Entry(module, len(self._shards) - 1, stored, dict(layer.metadata), spec))

    def add_dense(self, name: str, tensor: torch.Tensor) -> None:
        """Write one other tensor to the current shard."""
        shard, _, dense = self._shard_for(tensor.numel() * tensor.element_size())
        dense.append(name)
        self._note(Entry(name, len(self._shards) - 1, {name: self._store(shard, name, tensor)}))

    def _store(self, shard: Shard, name: str, tensor: torch.Tensor) -> tuple[str, list[int], str]:
        self._claim(name)
        digest = shard.add(name, tensor)
        return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest

    def _note(self, entry: Entry) -> None:
        if self._journal is not None:
            self._journal.add(entry)

    def _shard_for(self, nbytes: int) -> tuple[Shard, dict[str, WrittenLayer], list[str]]:
        """Return the shard for a tensor of that size: the current one, unless it would grow too large."""
        limit = self._request.max_shard_bytes
        if self._shards:
            current = self._shards[-1][0]
            if limit is None or not current.infos or current.nbytes + nbytes <= limit:
                return self._shards[-1]
            if not self._dialect.metadata_spans_shards:
                self._finish_shard(self._shards[-1])
        path = self._open_staging().path / f"{len(self._shards)}.safetensors"
        self._shards.append((Shard(path, hashed=self._journal is not None), {}, []))
        return self._shards[-1]

    def _open_staging(self) -> Staging:
        if self._staging is None:
            self._target.folder.mkdir(parents=True, exist_ok=True)
            self._staging = Staging(self._target.folder, self._request.resume)
        return self._staging

    def _claim(self, name: str) -> None:
        if name in self._homes or name == "__metadata__":
            raise CheckpointError("save_checkpoint", name="tensor name", rule="legal and there once", value=name)
        self._homes[name] = len(self._shards) - 1

    def _finish_shard(self, part: tuple[Shard, dict[str, WrittenLayer], list[str]]) -> None:
        layers, dense = self._contents() if self._dialect.metadata_spans_shards else part[1:]
        if part[0].finish(self._header_of(layers, dense)) and self._journal is not None:
            self._journal.finish(self._shards.index(part))
        part[0].remove_data()

    def _contents(self) -> tuple[dict[str, WrittenLayer], list[str]]:
        """Return the layers and the names of the other tensors of all shards."""
        layers = {module: layer for _, part, _ in self._shards for module, layer in part.items()}
        return layers, [name for _, _, names in self._shards for name in names]

    def _header_of(self, layers: Mapping[str, WrittenLayer], dense: list[str]) -> dict[str, str]:
        own = self._dialect.merge_metadata(layers, dense)
        if self._target.file is not None and self._dialect.shares_keys:
            own[DIALECT_KEY] = self._dialect.name
        return {"format": "pt", **(self._request.metadata or {}), **own}

    def finish(self) -> None:
        """Finish the last shard, and check that the whole will be read as it was meant."""
        if not self._shards:
            self._shard_for(0)
        for part in self._shards:
            self._finish_shard(part)  # those that are finished stay as they are
        self._config = self._new_config()
        self._check()

    def _check(self) -> None:
        """Check that each layer will be read in its dialect again.

        Raises:
            CheckpointError: One would not be, or another would be there too.
        """
        layers, dense = self._contents()
        wanted = dict.fromkeys(layers, self._dialect.name)
        found: dict[str, str] = {}
        problems: tuple[Any, ...] = ()
        try:
            schema = find_layers(
                self._infos(),
                OpenRequest(dialects=self._request.dialects),
                metadata=self._header_of(layers, dense),
                config=self._config,
                load=None,
                path=self._target.folder,
            )
            found = {module: layer.dialect for module, layer in schema.layers.items()}
            problems = schema.unsupported
        except SchemaError as error:
            found, problems = wanted, error.problems
        if found != wanted or problems:
            differing = sorted(set(found.items()) ^ set(wanted.items()))
            raise CheckpointError(
                "save_checkpoint",
                name="names and metadata",
                rule=f"such that each layer is read as {self._dialect.name} again",
                value="; ".join([*(f"{module} as {name}" for module, name in differing), *map(str, problems)][:4]),
                hint="Leave out tensors and metadata of other layers, or name a folder: its config.json says more.",
            )

    def _infos(self) -> dict[str, TensorInfo]:
        return {name: info for shard, _, _ in self._shards for name, info in shard.infos.items()}

    def _new_config(self) -> dict[str, Any] | None:
        """Return what ``config.json`` will hold, or None where there will be none."""
        if self._target.file is not None:
            return None
        path = self._target.folder / "config.json"
        given = self._request.config
        base = dict(given) if given is not None else read_object(path, "config.json") if path.is_file() else {}
        for name in ("quantization_config", "quantization"):  # the second is MLX's
            base.pop(name, None)
        infos = self._infos()
        _, dense = self._contents()
        matrices = tuple(
            name.removesuffix(".weight")
            for name in dense
            if name.endswith(".weight") and len(infos[name].shape) == _MATRIX
        )
        entry = self._dialect.quantization_config(self._specs, matrices) if self._specs else None
        if entry is not None:
            base.update(dict.fromkeys(self._dialect.config_names, entry))
        return base if base or path.is_file() else None

    def publish(self) -> Path:
        """Give every file its name, what makes them a checkpoint last; remove what they replace."""
        folder, staging = self._target.folder, self._staging
        if self._target.file is not None or staging is None:
            main = self._target.file or folder
            self._shards[0][0].path.replace(main)
            sync(folder)
            return main
        old = set(self._target.members())
        texts: list[tuple[Path, Path]] = []
        if self._config is not None:
            text = json.dumps(self._config, indent=2) + "\n"
            texts.append((staging.write_text("config.json", text), folder / "config.json"))
        count = len(self._shards)
        names = [SINGLE] if count == 1 else self._target.free_names(count)
        main = folder / names[0]
        if len(names) > 1:
            main = folder / INDEX
            texts.append((staging.write_text("index.json", self._index(names)), main))
            self._publish_shards(names)
        for temporary, final in texts:
            temporary.replace(final)
        if len(names) == 1:
            self._publish_shards(names)
        sync(folder)
        for path in sorted(old - {main, *(folder / name for name in names)}):
            path.unlink(missing_ok=True)
        return main

    def _publish_shards(self, names: list[str]) -> None:
        for (shard, _, _), name in zip(self._shards, names, strict=True):
            shard.path.replace(self._target.folder / name)
        sync(self._target.folder)

    def _index(self, names: list[str]) -> str:
        total = sum(shard.nbytes for shard, _, _ in self._shards)
        weight_map = {tensor: names[index] for tensor, index in sorted(self._homes.items())}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"

    def discard(self, *, keep: bool = False) -> None:
        """Remove every temporary file, or leave them to the next writer; after ``publish`` there is none."""
        for shard, _, _ in self._shards:
            shard.close()
        if self._journal is not None:
            self._journal.close()
        if self._staging is not None:
            (self._staging.release if keep else self._staging.discard)()
        if self._is_new_folder and self._target.folder.is_dir() and not any(self._target.folder.iterdir()):
            self._target.folder.rmdir()
