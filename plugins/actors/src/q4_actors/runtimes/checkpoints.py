"""Checkpoints: the tensors of a system at one instant, in one file."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import pathlib
import tempfile
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_actors.runtimes.errors import ActorError
from q4_actors.tensors.arguments import MutableMode, to_mode
from q4core import CheckpointError, InputError
from q4core.plugin_api import PLUGIN_FAULTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_actors.tensors.tensor import MutableTensor

__all__ = ["StoredTensor", "check_fits", "load", "save"]

_VERSION = 2
_ENDING = ".q4tmp"


@attrs.frozen(eq=False)
class StoredTensor:
    """One tensor of a checkpoint; ``source`` identifies what computes it."""

    tensor: torch.Tensor
    version: int
    mode: MutableMode
    source: str | None


def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, MutableTensor],
    sources: Mapping[str, str],
    timeout: float | None,
) -> dict[str, int]:
    """Write all tensors as they are at one instant; see ``ActorSystem.checkpoint``."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        # Versions only grow: if none has between the first copy and the last, all copies were true at one instant.
        taken = {name: tensor.snapshot() for name, tensor in tensors.items()}
        versions = {name: one.version for name, one in taken.items()}
        if all(tensor.version == versions[name] for name, tensor in tensors.items()):
            break
        if deadline is not None and time.monotonic() > deadline:
            hint = "Checkpoint while no actor writes: between two steps of the clock."
            raise ActorError(f"no checkpoint: some tensor changed all the time for {timeout} s", hint=hint)
    stored = {
        name: {
            "tensor": one.tensor.cpu(),
            "version": one.version,
            "mode": tensors[name].mode.value,
            "source": sources.get(name),
        }
        for name, one in taken.items()
    }
    target = pathlib.Path(path)
    prefix = f".{target.name}."
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=prefix, suffix=_ENDING, delete=False) as file:
            try:
                began = os.fstat(file.fileno()).st_mtime
                torch.save({"q4_actors": _VERSION, "tensors": stored, "digest": _digest(stored)}, file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, target)  # noqa: PTH105  # the name of an open file
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)  # noqa: PTH108  # as above
                raise
        for other in target.parent.glob(f"{glob.escape(prefix)}{'?' * 8}{_ENDING}"):
            with contextlib.suppress(OSError):
                if other.stat().st_mtime < began:  # of a killed process: no write takes that long
                    other.unlink()
    except (OSError, RuntimeError) as error:  # torch's, where the disk is full
        raise CheckpointError(f"the checkpoint can't be written: {error}", where=str(path)) from error
    return versions


def load(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return what ``save`` wrote.

    Raises:
        CheckpointError: It is no such file, or was changed since.
    """
    try:
        found: Any = dict(torch.load(path, weights_only=True))
        if found["q4_actors"] != _VERSION:
            raise CheckpointError(  # noqa: TRY301  # as all that the file may hold
                "checkpoint", name="q4_actors", rule=str(_VERSION), value=found["q4_actors"], where=str(path)
            )
        if found["digest"] != _digest(found["tensors"]):
            text = "the checkpoint's content is not what was written: its digest differs"
            raise CheckpointError(text, where=str(path), hint="Resume from another one.")  # noqa: TRY301  # as above
        return {
            name: StoredTensor(one["tensor"], one["version"], MutableMode(one["mode"]), one["source"])
            for name, one in found["tensors"].items()
        }
    except CheckpointError:
        raise
    except PLUGIN_FAULTS as error:  # torch's, of any file
        text = f"no checkpoint of an actor system: {type(error).__name__}: {error}"
        raise CheckpointError(text, where=str(path), hint="Give a file that ActorSystem.checkpoint wrote.") from error


def _digest(tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a digest of all that a checkpoint stores."""
    found = hashlib.sha256()
    for name, one in tensors.items():
        tensor: torch.Tensor = one["tensor"]
        facts = (name, str(tensor.dtype), [*tensor.shape], one["version"], one["mode"], one["source"])
        found.update(repr(facts).encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def check_fits(
    name: str, stored: StoredTensor, tensor: torch.Tensor, mode: MutableMode | str | None, source: str | None
) -> None:
    """Reject a tensor that differs from the checkpoint's.

    Raises:
        InputError: It has another shape, dtype, mode or source.
    """
    label = f"mutable tensor {name!r}"
    wanted = stored.mode if mode is None else to_mode(label, mode)
    pairs = {
        "shape": (tuple(stored.tensor.shape), tuple(tensor.shape)),
        "dtype": (stored.tensor.dtype, tensor.dtype),
        "mode": (stored.mode.value, wanted.value),
    }
    if source is not None:
        pairs["source"] = (stored.source, source)
    for what, (was, now) in pairs.items():
        if was != now:
            hint = "Resume with what the checkpoint was written with." if what == "source" else None
            raise InputError(label, name=what, rule=f"the checkpoint's {was}", value=now, hint=hint)
