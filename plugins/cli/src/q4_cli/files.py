"""Checkpoints that commands read, and those that they write: complete or absent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["Target", "open_file", "require_readable"]

SUFFIX = ".safetensors"
_WEIGHT_FILES = (SUFFIX, ".index.json", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
_DIALECT_KEYS = frozenset({"q4core.dialect", "tensor_names"})
_MOST_COMPANION_BYTES = 256 << 20
_STAGING = ".q4-companions.tmp"


def open_file(file: str, *, dialect: str | None = None) -> q4.Checkpoint:
    """Open a checkpoint by what the user typed; errors are those of ``q4core.open``."""
    if file == "-":
        hint = "A checkpoint is mapped into memory, which a pipe can't be; save it to a file first."
        raise q4.CheckpointError("checkpoint", name="FILE", rule="a file or a folder", value=file, hint=hint)
    return q4.open(file, dialect=dialect)


def require_readable(checkpoint: q4.Checkpoint, what: str) -> None:
    """Raise ``CheckpointError`` for a checkpoint of which a part can't be read, before it is rewritten."""
    for problem in checkpoint.schema.unsupported:
        hint = f"{problem}, for example, and can't be copied. Pack the original weights by `q4 quantize` instead."
        raise q4.CheckpointError(what, name="IN", rule="readable as a whole", where=str(checkpoint.path), hint=hint)


@attrs.frozen
class Target:
    """A file (named ``*.safetensors``) or a model folder that a command will write."""

    path: Path
    is_folder: bool
    existed: bool

    @classmethod
    def check(cls, out: str, source: Path, *, force: bool) -> Target:
        """Return the target for OUT, or raise ``CheckpointError`` before any work; ``source`` is what is read."""

        def refuse(rule: str, value: object, hint: str | None = None) -> NoReturn:
            raise q4.CheckpointError("output", name="OUT", rule=rule, value=value, where=out, hint=hint)

        if out in {"-", ""}:
            refuse("a file or a folder", out, "Name a file; a pipe can't take what is written out of order.")
        path = Path(out)
        if "\0" in out:
            refuse("a name that the system takes", out, "Leave the NUL character out.")
        try:
            existed = path.exists()
            is_folder = path.is_dir() if existed else path.suffix != SUFFIX
            has_home = path.absolute().parent.is_dir()
        except (OSError, ValueError) as error:
            refuse("a name that the system takes", str(error))
        if not existed and is_folder and path.suffix:
            hint = "Name a folder, or a file that ends with .safetensors."
            refuse(f"a folder or a {SUFFIX} file", path.suffix, hint)
        if not has_home:
            refuse("in a folder that is there", "a missing folder", f"Make {path.absolute().parent} first.")
        if existed and not is_folder and not path.is_file():
            refuse("a file or a folder", "something else")
        if existed and not force and (not is_folder or any(path.iterdir())):
            refuse("new", "an existing path", "Use --force to replace it.")
        if existed and any(path.samefile(item) for item in (source, source.parent if is_folder else source)):
            refuse("another one than IN", "the same", "Write to another path, then move the result.")
        return cls(path, is_folder, existed)

    def write(  # noqa: PLR0913  # the facts of one checkpoint
        self,
        weights: Mapping[str, q4.PackedWeight],
        dense: Mapping[str, torch.Tensor],
        source: q4.Checkpoint,
        *,
        dialect: str,
        max_shard_bytes: int | None,
        lossy: bool = False,
    ) -> None:
        """Write everything, with the small files of a model folder; what was there stays as it is when that fails.

        The small files are copied to a folder of their own first, and take their names once the weights have theirs. A
        run that was killed leaves that folder, and the next one removes it. Errors are those of
        ``q4core.save_checkpoint``.
        """
        home = source.path if source.path.is_dir() else source.path.parent
        staging = self.path / _STAGING
        try:
            if self.is_folder:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
                for item in _companions(home):
                    shutil.copyfile(item, staging / item.name)
            q4.save_checkpoint(
                self.path,
                weights,
                dialect=dialect,
                dense=dense,
                metadata=_own_metadata(source),
                config=_read_config(home) if self.is_folder else None,
                max_shard_bytes=max_shard_bytes,
                lossy=lossy,
            )
            for item in sorted(staging.iterdir()) if self.is_folder else ():
                item.replace(self.path / item.name)
        except BaseException as error:
            if self.is_folder and not self.existed:
                shutil.rmtree(self.path, ignore_errors=True)
            if isinstance(error, OSError):
                rule, reason = "a folder that can be written", error.strerror or str(error)
                raise q4.CheckpointError("output", name="OUT", rule=rule, value=reason, where=str(self.path)) from error
            raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _companions(home: Path) -> list[Path]:
    """Return a model folder's tokenizer and other small files; weights and config.json are written separately."""
    if not (home / "config.json").is_file():
        return []
    return [
        item
        for item in sorted(home.iterdir())
        if not item.name.startswith(".")
        and item.name not in {"config.json", "hf_quant_config.json"}
        and not item.name.endswith(_WEIGHT_FILES)
        and item.is_file()
        and item.stat().st_size <= _MOST_COMPANION_BYTES
    ]


def _own_metadata(source: q4.Checkpoint) -> dict[str, str]:
    """Return the header's texts without those on how a layer was stored: the new dialect writes its own."""
    if source.reader != "safetensors":
        return {}
    layers = source.schema.layers.items()
    stems = {module.rpartition(".")[0] for module, layer in layers if "expert" in dict(layer.extras)}
    heads = tuple(f"{module}." for module in (*source.schema.layers, *stems))
    return {
        key: text
        for key, text in source.metadata.items()
        if key not in _DIALECT_KEYS | stems and not (heads and key.startswith(heads))
    }


def _read_config(home: Path) -> dict[str, Any] | None:
    """Return the folder's ``config.json``, which was well-formed when the checkpoint was opened."""
    path = home / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
