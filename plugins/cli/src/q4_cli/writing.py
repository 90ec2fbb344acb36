"""Where ``quantize`` and ``convert`` put their result: checked before the work begins, complete or not there at all."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["Target", "parse_size"]

SUFFIX = ".safetensors"
_WEIGHT_FILES = (
    SUFFIX,
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
)
_DIALECT_KEYS = frozenset({"q4core.dialect", "tensor_names"})
_MOST_COMPANION_BYTES = 256 << 20
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def parse_size(text: str) -> int:
    """Return a number of bytes from ``5GB``, ``500 MiB`` or a plain number.

    Raises:
        ConfigError: It is no such text, or too small for a shard.
    """
    match = re.fullmatch(r"\s*(\d{1,12})\s*([kmg]i?)?b?\s*", text, re.IGNORECASE)
    size = int(match[1]) * _UNITS[(match[2] or "").lower()] if match else 0
    if size < 1:
        raise q4.ConfigError("option", name="--shard-size", rule="a size such as 5GB or 500MiB", value=text)
    return size


@attrs.frozen
class Target:
    """A file (named ``*.safetensors``) or a model folder that a command will write.

    Args:
        path: What the user typed.
        is_folder: Whether it is a folder.
        existed: Whether it was there before.
    """

    path: Path
    is_folder: bool
    existed: bool

    @classmethod
    def check(cls, out: str, source: Path, *, force: bool) -> Target:
        """Return the target for OUT, before any work is done.

        Args:
            out: A name that ends with ``.safetensors``, or a folder.
            source: What is read.
            force: Whether something that is there may be replaced.

        Raises:
            CheckpointError: OUT is standard output, is there already, is what is read, or has no folder to lie in.
        """

        def refuse(rule: str, value: object, hint: str | None = None) -> q4.CheckpointError:
            return q4.CheckpointError("output", name="OUT", rule=rule, value=value, where=out, hint=hint)

        if out in {"-", ""}:
            raise refuse("a file or a folder", out, "A checkpoint is written out of order, which a pipe can't take.")
        path = Path(out)
        try:
            existed = path.exists()
            is_folder = path.is_dir() if existed else path.suffix != SUFFIX
            has_home = path.absolute().parent.is_dir()
        except (OSError, ValueError) as error:
            raise refuse("a name that the system takes", str(error)) from error
        if not existed and is_folder and path.suffix:
            hint = "Name a folder, or a file that ends with .safetensors."
            raise refuse(f"a folder or a {SUFFIX} file", path.suffix, hint)
        if not has_home:
            raise refuse("in a folder that is there", "a missing folder", f"Make {path.absolute().parent} first.")
        if existed and not is_folder and not path.is_file():
            raise refuse("a file or a folder", "something else")
        if existed and not force and (not is_folder or any(path.iterdir())):
            raise refuse("new", "something that is there", "Use --force to replace it.")
        if existed and any(path.samefile(item) for item in (source, source.parent if is_folder else source)):
            raise refuse("another one than IN", "the same", "Write beside it, then move it.")
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
        """Write everything, with the small files of a model folder; nothing new is left when that fails.

        Raises:
            CheckpointError, DialectError, WeightError: See ``q4core.save_checkpoint``.
        """
        home = source.path if source.path.is_dir() else source.path.parent
        with contextlib.ExitStack() as stack:
            if self.is_folder and not self.existed:
                stack.callback(shutil.rmtree, self.path, ignore_errors=True)
            try:
                if self.is_folder:
                    self.path.mkdir(exist_ok=True)
                    for item in _companions(home):
                        shutil.copyfile(item, self.path / item.name)
            except OSError as error:
                rule, reason = "a folder that can be written", error.strerror or str(error)
                raise q4.CheckpointError("output", name="OUT", rule=rule, value=reason, where=str(self.path)) from error
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
            stack.pop_all()


def _companions(home: Path) -> list[Path]:
    """Return a model folder's tokenizer and other small files; weights and config.json are written anew."""
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
    """Return the header's texts but those that tell how a layer was stored: the new dialect writes its own."""
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
