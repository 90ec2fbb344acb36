"""Opening through the cache: a file that fits is mapped, any other is written again; no opening fails for it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import glob
import hashlib
import logging
import os
import platform
import re
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch

import q4core as q4
from q4_lm.models.saved import load_model
from q4_lm.models.transformer import TransformerDecoder, TransformerEncoder
from q4_lm.prepared.model import export_model, restore_model
from q4_lm.prepared.store import open_store
from q4_lm.tokenizers.hf_tokenizer import read_engine, tokenizer_from_hf
from q4_lm.tokenizers.tokenizer import Tokenizer
from q4core.plugin_api import describe_exception, emit, open_regular, warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import nn

    from q4_lm.prepared.container import Container
    from q4_lm.prepared.store import Store

__all__ = ["CacheWarning", "CachedModel", "open_folder", "opening"]

_T = TypeVar("_T")
_VERSION = 6
_HEAD_BYTES = 1 << 18
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
"""Name of a part of a split model."""
_OPTIONS = ("device", "backend", "compute_path", "activation_precision", "gradients", "unified_memory", "compute_dtype")
_IGNORED = {"Q4_LOG", "Q4_CACHE", "Q4_CACHE_LIMIT"}
"""Variables that change nothing of what is prepared; the others, such as ``Q4_CPU_ISA``, are part of the key."""
_DAMAGE = (q4.Q4Error, OSError, KeyError, TypeError, ValueError, IndexError, AttributeError)
"""Errors from a header that is not ours: its digest is right, so it is forged or of another version."""


class CacheWarning(q4.Q4Warning):
    """A prepared file could not be used or written; the model was opened without it."""


@attrs.define
class CachedModel:
    """One model's place in the cache, for one session.

    Args:
        store: The cache.
        source: The model's file or folder.
        session: What its layers are prepared under.
        export: What is stored of a model: what JSON holds, and tensors. A ``LifecycleError`` says that it can't be.
        restore: The model again, of the header, the open file and the session.
        asked: Further options that the source is read with; each choice of them has a file of its own.
        software: Versions of what else takes part in reading; another one makes the file stale.
    """

    store: Store
    source: Path
    session: q4.Session
    export: Callable[[Any], tuple[dict[str, Any], list[torch.Tensor]]] = export_model
    restore: Callable[[dict[str, Any], Container, q4.Session], Any] = restore_model
    asked: Mapping[str, str] = attrs.field(kw_only=True, factory=dict)
    software: Mapping[str, str] = attrs.field(kw_only=True, factory=dict)
    state: str = attrs.field(init=False, default="not asked")
    """``opened`` or ``written``, or why neither."""
    _before: dict[str, Any] | None = attrs.field(init=False, default=None)
    """The facts before the source was read: what is written must be of that source."""

    @property
    def path(self) -> Path:
        """The path of the model's file, whether or not there is one."""
        environment = {key: value for key, value in os.environ.items() if key.startswith("Q4_") and key not in _IGNORED}
        key = {"source": str(self.source.resolve()), "machine": _machine(), "environment": environment}
        return self.store.path_of({**key, **self._options()})

    def _is_served(self) -> bool:
        """Return whether a mapped file fits the requested memory: unified memory is allocated separately."""
        policy = q4.resolve_config(self.session.config).unified_memory
        if policy in {None, q4.UnifiedMemoryPolicy.DISABLED}:
            return True
        self.state = f"not cached: unified memory is asked for ({policy})"
        return False

    def _options(self) -> dict[str, str]:
        config = q4.resolve_config(self.session.config)
        return {**{name: str(getattr(config, name)) for name in _OPTIONS}, **self.asked}

    def _facts(self) -> dict[str, Any]:
        """Return everything that makes a file stale when it changes."""
        registry = self.session.registry
        plugins = {record.name: record.source for record in registry.records() if record.state == "loaded"}
        software = {"version": _VERSION, "q4core": q4.__version__, "torch": torch.__version__, "plugins": plugins}
        software |= self.software
        return {
            "source": _identity(self.source),
            "options": self._options(),
            "software": software,
            "machine": _machine(),
        }

    def open(self, use: Callable[[Any, dict[str, Any], memoryview], _T]) -> _T | None:
        """Return what ``use`` makes of the model and what else was stored; None, with a warning, where no file fits."""
        path = self.path
        if not self._is_served():
            return None
        try:
            self._before = self._facts()
            container = self.store.open(path)
            with _paused_collection():
                return self._restored(container, use)
        except FileNotFoundError:
            return None
        except _DAMAGE as error:
            self._warn(path, f"can't be used: {describe_exception(error)}")
            return None
        finally:
            _give_memory_back()

    def _restored(self, container: Container, use: Callable[[Any, dict[str, Any], memoryview], _T]) -> _T | None:
        facts, header = self._before or {}, container.header
        if header["facts"] != facts:
            self._warn(container.path, f"is stale: {_changes(header['facts'], facts)}")
            return None
        text = container.checked_bytes(header["text"])
        found = use(self.restore(header["model"], container, self.session), header["extra"], text)
        self._emit("opened", bytes=container.nbytes)
        return found

    def write(self, model: Any, extra: dict[str, Any], text: bytes = b"null") -> None:
        """Write the model's file; a warning says why it can't be written.

        Args:
            model: The model, prepared.
            extra: What else to store, as what JSON holds.
            text: JSON that is parsed only when it is needed.
        """
        path = self.path
        if not self._is_served():
            return
        try:
            model_header, tensors = self.export(model)
            state = "not cached: the source changed while it was read"
            if self._facts() == self._before:
                header = {"facts": self._before, "model": model_header, "extra": extra, "text": len(tensors)}
                self.store.write(path, header, [*tensors, torch.frombuffer(bytearray(text), dtype=torch.uint8)])
                state = "written"
        except q4.LifecycleError as error:  # such as a backend that exports nothing, which is no error
            self._emit(f"not cached: {error}")
        except (OSError, q4.CheckpointError) as error:  # the latter of a file next to the weights that can't be read
            self._warn(path, f"can't be written: {error}")
        else:
            self._emit(state)

    def _emit(self, state: str, *, level: int = logging.INFO, **facts: Any) -> None:
        self.state = state
        emit("q4.cache", level=level, state=state, path=str(self.path), source=str(self.source), **facts)

    def _warn(self, path: Path, why: str) -> None:
        self._emit(f"not cached: the file {why}", level=logging.WARNING)
        warn_once((str(path), why), CacheWarning, f"prepared file {path} of {self.source} {why}")


@contextlib.contextmanager
def opening(
    source: Path, config: q4.SessionConfig | None, cache: str | os.PathLike[str]
) -> Iterator[tuple[q4.Session, CachedModel | None]]:
    """Yield a session for a model of a source, and its cache if there is one; an error inside closes the session."""
    store, session = open_store(cache), q4.Session(config)
    try:
        yield session, None if store is None else CachedModel(store, source, session)
    except BaseException:
        session.close()
        raise


def open_folder(folder: Path, session: q4.Session, cached: CachedModel | None) -> tuple[nn.Module, Tokenizer]:
    """Return the model and the tokenizer of a folder: mapped where its file is in the cache, else loaded, and cached.

    Raises:
        CheckpointError: There is no tokenizer, or it can't be read; else as ``load_model``.
    """

    def restored(model: nn.Module, extra: dict[str, Any], _: memoryview) -> tuple[nn.Module, Tokenizer]:
        return model, Tokenizer(lambda: read_engine(folder), **extra["tokenizer"])

    found = None if cached is None else cached.open(restored)
    if found is not None:
        return found
    tokenizer, model = tokenizer_from_hf(folder), load_model(folder, session)
    if cached is not None and isinstance(model, (TransformerDecoder, TransformerEncoder)):
        cached.write(model, {"tokenizer": tokenizer.ends})
    return model, tokenizer


def _changes(before: Any, now: Any) -> str:
    """Return what is different: names with their values, or what is in one of two lists alone."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return ", ".join(f"{name} {_changes(before.get(name), now.get(name))}" for name in names)
    if isinstance(before, list) and isinstance(now, list):  # rows of files, whose first item is the path, or features
        rows = [*(row for row in now if row not in before), *(row for row in before if row not in now)]
        named = dict.fromkeys(str(row[0] if isinstance(row, list) and row else row) for row in rows)
        return f"({', '.join(named)}) changed"
    return f"changed from {before} to {now}"


def _machine() -> list[str]:
    return [platform.machine(), *q4.machine_facts().cpu_features]


def _identity(source: Path) -> list[list[Any]]:
    """Return path, size, time, inode and digest of the first 256 KiB of each file that a model is read from."""
    files = [source]
    if source.is_dir():
        files = sorted(item for item in source.iterdir() if item.suffix in {".json", ".safetensors"} and item.is_file())
    elif part := _PART.fullmatch(source.name):
        files = sorted(source.parent.glob(f"{glob.escape(part[1])}-*-of-{part[2]}.gguf"))
    found = []
    for path in files:
        facts = path.stat()
        with open_regular(path) as file:
            digest = hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()
        found.append([str(path.resolve()), facts.st_size, facts.st_mtime_ns, facts.st_dev, facts.st_ino, digest])
    return found


@contextlib.contextmanager
def _paused_collection() -> Iterator[None]:
    """Pause Python's garbage collection: it would walk all that imports made, a third of an opening."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _give_memory_back() -> None:
    """Make glibc return to the system what the header's JSON and the probes allocated and freed."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
