"""Checkpoints that commands read, and those that they write: complete or absent."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

import q4core as q4

if sys.platform != "win32":  # there, two commands that write the same at once are not found
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

__all__ = ["GGUF", "SUFFIX", "Target", "config_of", "identity_of", "open_file", "own_metadata", "require_readable"]

SUFFIX, GGUF = ".safetensors", ".gguf"
_WEIGHT_FILES = (SUFFIX, ".index.json", ".bin", ".pt", ".pth", GGUF, ".onnx", ".h5", ".msgpack")
_DIALECT_KEYS = frozenset({"q4core.dialect", "tensor_names"})
_CONFIGS = frozenset(
    {
        *("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"),
        *("quantization_config.json", "recipe.yaml"),
    }
)
"""What says how the source was packed, of ModelOpt, GPTQ, AWQ, AutoRound and llm-compressor among others."""
_PART = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")
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
    force: bool = False
    source: Path | None = None

    @classmethod
    def check(cls, out: str, source: Path, *, force: bool, suffixes: tuple[str, ...] = (SUFFIX,)) -> Target:
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
            is_folder = path.is_dir() if existed else path.suffix not in suffixes
            has_home = path.absolute().parent.is_dir()
        except (OSError, ValueError) as error:
            refuse("a name that the system takes", str(error))
        if not existed and is_folder and path.suffix.lower() in _WEIGHT_FILES:
            names = " or ".join(suffixes)
            refuse(f"a folder or a {names} file", path.suffix, f"Name a folder, or a file that ends with {names}.")
        if not has_home:
            refuse("in a folder that is there", "a missing folder", f"Make {path.absolute().parent} first.")
        if existed and not is_folder and not path.is_file():
            refuse("a file or a folder", "something else")
        if existed and not force and (not is_folder or any(path.iterdir())):
            refuse("new", "an existing path", "Use --force to replace it.")
        if existed and _is_part(path, source):
            refuse("another one than IN", "the same", "Write to another path, then move the result.")
        return cls(path, is_folder, existed, force, source)

    @property
    def partial(self) -> Path:
        """A folder next to OUT, which the result leaves once it is whole."""
        return self.path.absolute().parent / f".{self.path.name}.q4-partial"

    @contextlib.contextmanager
    def locked(self, *, resumable: bool = False) -> Iterator[None]:
        """Hold the folder ``partial`` while OUT is written; one that is stopped leaves it if it can be gone on with.

        Raises:
            CheckpointError: Another command writes OUT, or the folder can't be made.
        """
        folder, is_stopped = self.partial, False
        try:
            folder.mkdir(exist_ok=True)
            lock = os.open(folder, os.O_RDONLY) if sys.platform != "win32" else None
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            if lock is not None:
                _lock(lock, str(self.path))
            yield
        except (KeyboardInterrupt, SystemExit):
            is_stopped = resumable
            raise
        except q4.CheckpointError as error:
            is_stopped = isinstance(error.__cause__, BlockingIOError)
            raise
        finally:
            if not is_stopped:
                shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)

    def _unwritable(self, error: OSError) -> q4.CheckpointError:
        rule, reason = "a folder that can be written", error.strerror or str(error)
        return q4.CheckpointError("output", name="OUT", rule=rule, value=reason, where=str(self.path))

    def write(  # noqa: PLR0913  # the facts of one checkpoint
        self,
        weights: Mapping[str, q4.PackedWeight],
        dense: Mapping[str, torch.Tensor],
        home: Path | None,
        *,
        dialect: str,
        metadata: Mapping[str, Any],
        config: Mapping[str, Any] | None,
        max_shard_bytes: int | None,
        files: Mapping[str, str] | None = None,
        resume: str | None = None,
    ) -> None:
        """Write everything within ``locked``; what was there stays as it is when that fails.

        A new file or folder is made in ``partial`` and takes its name when it is whole. In a folder that is there, the
        weights take their names first, and then the small files, which are copied from ``home``, or given by name and
        text in ``files``. Errors are those of ``q4core.save_checkpoint``.
        """
        in_place = self.existed and self.is_folder
        base = (
            self.path if in_place else self.partial / "out" if self.is_folder else self.partial / "out" / self.path.name
        )
        work = base if self.is_folder else base.parent
        staging = work / _STAGING
        try:
            if not in_place:
                _clear(work, is_all=resume is None)
            if self.is_folder:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir(parents=True)
                for item in _companions(home) if home is not None else ():
                    shutil.copyfile(item, staging / item.name)
                for name, text in (files or {}).items():
                    (staging / name).write_text(text, encoding="utf-8")
            main = q4.save_checkpoint(
                base,
                weights,
                dialect=dialect,
                dense=dense,
                metadata=metadata,
                config=config if self.is_folder else None,
                max_shard_bytes=max_shard_bytes,
                resume=resume,
            )
            if self.is_folder:
                _publish_companions(staging, work)
            if not in_place:
                self._publish(work, main)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            if in_place:
                shutil.rmtree(staging, ignore_errors=True)

    def _publish(self, work: Path, main: Path) -> None:
        if self.is_folder:
            work.replace(self.path)
            return
        home, stem = self.path.parent, self.path.stem
        items = sorted(work.iterdir(), key=lambda item: item.name == main.name)  # what opens it last
        for item in items:
            path = home / item.name
            is_own = self.source is not None and path.exists() and _is_part(path, self.source)
            if is_own or (path.exists() and not self.force):
                rule, value = ("another file than those of IN", "one") if is_own else ("new", "an existing file")
                hint = "Write to another path." if is_own else "Use --force to replace it."
                raise q4.CheckpointError("output", name="OUT", rule=rule, value=value, where=str(path), hint=hint)
        for item in items:
            item.replace(home / item.name)
        old = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(self.path.suffix)}(\.index\.json)?")
        for path in [*home.iterdir()] if self.force else ():
            is_stale = old.fullmatch(path.name) and path.name not in {item.name for item in items}
            if is_stale and not (self.source is not None and _is_part(path, self.source)):
                path.unlink()


def _is_part(path: Path, source: Path) -> bool:
    """Return whether a file that is there is one of those that IN, opened as ``source``, consists of."""
    if path.is_dir():
        return any(path.samefile(item) for item in (source, source.parent))
    names, text = [source.name], path.name.encode()
    if source.name.endswith(".index.json"):
        names += {*json.loads(source.read_text(encoding="utf-8"))["weight_map"].values()}
    elif _PART.search(source.name):
        names += [
            item.name for item in source.parent.iterdir() if _PART.sub("", item.name) == _PART.sub("", source.name)
        ]
    elif source.suffix == ".onnx" and path.parent.absolute().is_relative_to(source.parent.absolute()):
        with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            names += [os.path.relpath(path, source.parent)] if data.find(text) >= 0 else []  # it names external data
    found = [source.parent / name for name in names]
    return any(item.exists() and path.samefile(item) for item in found)


def _publish_companions(staging: Path, folder: Path) -> None:
    """Move the small files to their names, and remove what says how the model that was here before is packed."""
    new = sorted(item.name for item in staging.iterdir())
    for name in new:
        (staging / name).replace(folder / name)
    for name in _CONFIGS - {"config.json", *new}:
        (folder / name).unlink(missing_ok=True)
    staging.rmdir()


def _lock(descriptor: int, where: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        rule = "written by one command at a time"
        raise q4.CheckpointError("output", name="OUT", rule=rule, value="in use", where=where) from error


def _clear(folder: Path, *, is_all: bool) -> None:
    """Make a folder that holds nothing, or nothing but the temporary files of a writer that was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    for item in folder.iterdir():
        if item.is_dir() and not (item.name.startswith(".q4core-") and not is_all):
            shutil.rmtree(item)
        elif not item.is_dir():
            item.unlink()


def identity_of(path: Path, **facts: Any) -> str:
    """Return a text that is the same as long as the files of a checkpoint and the facts of a command are.

    The external data of an ONNX file may have any name, so that every file next to it counts.
    """
    is_several = path.is_dir() or path.name.endswith(".index.json") or "-of-" in path.name
    home = path if path.is_dir() else path.parent
    found = [item for item in home.iterdir() if item.is_file()]
    several = ("",) if path.suffix == ".onnx" else (*_WEIGHT_FILES, "config.json") if is_several else ()
    files = [item for item in found if item == path or item.name in _CONFIGS or item.name.endswith(several)]
    states = [[str(item.absolute()), item.stat().st_size, item.stat().st_mtime_ns] for item in sorted(files)]
    return json.dumps({"files": states, "version": q4.__version__, **facts}, sort_keys=True)


def _companions(home: Path) -> list[Path]:
    """Return a model folder's tokenizer and other small files; weights and config.json are written separately."""
    if not (home / "config.json").is_file():
        return []
    return [
        item
        for item in sorted(home.iterdir())
        if not item.name.startswith(".")
        and item.name not in _CONFIGS
        and not item.name.endswith(_WEIGHT_FILES)
        and item.is_file()
        and item.stat().st_size <= _MOST_COMPANION_BYTES
    ]


def own_metadata(source: q4.Checkpoint) -> dict[str, str]:
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


def config_of(home: Path) -> dict[str, Any] | None:
    """Return the folder's ``config.json``, which was well-formed when the checkpoint was opened."""
    path = home / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
