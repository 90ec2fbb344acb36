"""Checkpoints: the tensors of a system at one instant, in one file."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
import time
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_actors.arguments import MutableMode, to_mode
from q4_actors.errors import ActorError
from q4core import CheckpointError, InputError
from q4core.plugin_api import PLUGIN_FAULTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_actors.tensor import MutableTensor

__all__ = ["Kept", "check_fits", "load", "save"]

_VERSION = 1


@attrs.frozen(eq=False)
class Kept:
    """One tensor of a checkpoint."""

    tensor: torch.Tensor
    version: int
    mode: MutableMode


def save(path: str | os.PathLike[str], tensors: Mapping[str, MutableTensor], timeout: float | None) -> dict[str, int]:
    """Write all tensors as they are at one instant; see ``ActorSystem.checkpoint``."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        # Versions only grow: if none has between the first copy and the last, all copies were true at one instant.
        taken = {name: tensor.snapshot() for name, tensor in tensors.items()}
        versions = {name: one.version for name, one in taken.items()}
        if all(tensor.version == versions[name] for name, tensor in tensors.items()):
            break
        if deadline is not None and time.monotonic() > deadline:
            hint = "Checkpoint where nobody writes: between two steps of the clock."
            raise ActorError(f"no checkpoint: some tensor changed all the time for {timeout} s", hint=hint)
    kept = {
        name: {"tensor": one.tensor.cpu(), "version": one.version, "mode": tensors[name].mode.value}
        for name, one in taken.items()
    }
    target = pathlib.Path(path)
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            try:
                torch.save({"q4_actors": _VERSION, "tensors": kept}, file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, target)  # noqa: PTH105  # the name of an open file
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)  # noqa: PTH108  # as above
                raise
    except (OSError, RuntimeError) as error:  # torch's, where the disk is full
        raise CheckpointError(f"the checkpoint can't be written: {error}", where=str(path)) from error
    return versions


def load(path: str | os.PathLike[str]) -> dict[str, Kept]:
    """Return what ``save`` wrote.

    Raises:
        CheckpointError: It is no such file.
    """
    try:
        found: Any = dict(torch.load(path, weights_only=True))
        if found["q4_actors"] != _VERSION:
            raise CheckpointError(  # noqa: TRY301  # as all that the file may hold
                "checkpoint", name="q4_actors", rule=str(_VERSION), value=found["q4_actors"], where=str(path)
            )
        return {
            name: Kept(one["tensor"], int(one["version"]), MutableMode(one["mode"]))
            for name, one in found["tensors"].items()
        }
    except CheckpointError:
        raise
    except PLUGIN_FAULTS as error:  # torch's, of any file
        text = f"no checkpoint of an actor system: {type(error).__name__}: {error}"
        raise CheckpointError(text, where=str(path), hint="Give a file that ActorSystem.checkpoint wrote.") from error


def check_fits(name: str, kept: Kept, tensor: torch.Tensor, mode: MutableMode | str | None) -> None:
    """Refuse a tensor that is not like the checkpoint's.

    Raises:
        InputError: It has another shape, dtype or mode.
    """
    label = f"mutable tensor {name!r}"
    wanted = kept.mode if mode is None else to_mode(label, mode)
    pairs = {
        "shape": (tuple(kept.tensor.shape), tuple(tensor.shape)),
        "dtype": (kept.tensor.dtype, tensor.dtype),
        "mode": (kept.mode.value, wanted.value),
    }
    for what, (was, now) in pairs.items():
        if was != now:
            raise InputError(label, name=what, rule=f"the checkpoint's {was}", value=now)
