"""Checkpoints of a training: everything that resuming needs, in one file that is written at once and whole.

It is a file of ``torch.save``, whose zip comment is ``sha256`` and the digest of all bytes before it.
"""

from __future__ import annotations

import contextlib
import copy
import glob
import hashlib
import os
import pickle
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from q4core import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import IO

__all__ = ["gather_states", "load_states", "restore_random", "save_states", "take_random"]

_VERSION = 2
_ENDING = ".tmp"
_COMMENT_BYTES = len("sha256 ") + 2 * hashlib.sha256().digest_size


def take_random(loader: Any) -> dict[str, Any]:
    """Return the states of every generator that a loader or a model may draw from."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()  # the one that others share
        found["numpy"] = [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached]
    for owner, generator in _generators(loader).items():
        found[owner] = generator.get_state()
    return found


def restore_random(states: Mapping[str, Any], loader: Any) -> None:
    """Restore the state of every generator."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))  # as above
    for owner, generator in _generators(loader).items():
        if owner in states:
            generator.set_state(states[owner])


def _generators(loader: Any) -> dict[str, torch.Generator]:
    """Return the generators that a loader and its sampler have of their own."""
    owners = {"loader": loader, "sampler": getattr(loader, "sampler", None)}
    found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
    return {name: item for name, item in found.items() if isinstance(item, torch.Generator)}


def gather_states(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of each part (name → what has ``state_dict``), tensors sharded over processes gathered.

    Every process of a group calls it, since each holds a piece.
    """
    return {name: _whole(part.state_dict()) for name, part in parts.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _share_out(name: str, part: Any, state: Any) -> Any:
    """Return a state whose tensors are sharded as those of the part are."""
    if name == "model":
        own = part.state_dict()
        return {key: _shared_as(own[key], value) for key, value in state.items()}
    if name == "optimizer":
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        held = {
            number: {key: _shared_as(parameters[number], value) for key, value in items.items()}
            for number, items in state["state"].items()
        }
        return {**state, "state": held}
    return state


def _shared_as(own: Any, value: Any) -> Any:
    if not hasattr(own, "full_tensor") or not isinstance(value, torch.Tensor) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  # slow to import, and rarely needed

    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)


def save_states(path: Path, parts: Mapping[str, Any], states: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Write what ``gather_states`` returned of some parts, and plain values; an older file stays until this is whole.

    Raises:
        CheckpointError: It can't be written.
    """
    content = {"version": _VERSION, **plain, "kinds": _kinds(parts), "parts": dict(states)}
    prefix = f".{path.name}."
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=prefix, suffix=_ENDING, delete=False) as file:
            temporary = Path(file.name)
            try:
                began = temporary.stat().st_mtime
                torch.save(content, file)
                _append_digest(file)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        temporary.replace(path)
    except (OSError, RuntimeError, AttributeError, TypeError, pickle.PicklingError) as error:
        # RuntimeError is torch's where the disk is full, and the last ones are those of states that can't be pickled.
        raise CheckpointError(f"the training checkpoint can't be written: {error}", where=str(path)) from error
    for other in path.parent.glob(f"{glob.escape(prefix)}{'?' * 8}{_ENDING}"):
        with contextlib.suppress(OSError):
            if other.stat().st_mtime < began:  # of a process that was killed while it wrote
                other.unlink()


def _kinds(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return the classes of all parts but the model, which is known by its tensors."""
    return {name: type(part).__name__ for name, part in parts.items() if name != "model"}


def _append_digest(file: IO[bytes]) -> None:
    end = file.seek(0, os.SEEK_END)
    comment = b"sha256 " + _digest(file, end - 2).encode()
    file.seek(end - 2)  # the length of a comment, 0, ends the file
    file.write(len(comment).to_bytes(2, "little") + comment)


def _digest(file: IO[bytes], count: int) -> str:
    """Return the digest of a file's first bytes."""
    found = hashlib.sha256()
    file.seek(0)
    while count and (piece := file.read(min(count, 1 << 20))):
        found.update(piece)
        count -= len(piece)
    return found.hexdigest()


def load_states(path: Path, parts: Mapping[str, Any], loader: Any) -> dict[str, Any]:
    """Return the content of a checkpoint, once parts and generators have the states that it holds.

    The generators are as they were before the epoch that was interrupted. After an error everything is as before; no
    code of the file is run.

    Raises:
        CheckpointError: The file is damaged, or of another training; it names what is missing or differs.
    """
    content = _read(path)
    if content["version"] != _VERSION:
        raise _refusal(path, "version", str(_VERSION), content["version"])
    states, kinds, own_kinds = content["parts"], content["kinds"], _kinds(parts)
    for name in sorted({*kinds, *own_kinds}):
        if kinds.get(name) != own_kinds.get(name):
            hint = "Go on with what the checkpoint was written with."
            raise _refusal(path, name, kinds.get(name, "none"), own_kinds.get(name), hint)
    _require_generators(path, content["epoch_random"], loader)
    own, given = parts["model"].state_dict(), states["model"]
    for name in sorted({*own, *given}):
        one, other = (_shape(values.get(name)) for values in (own, given))
        if one != other:
            raise _refusal(path, f"tensor {name!r}", one, other, "It is the checkpoint of another model.")
    before = {name: copy.deepcopy(parts[name].state_dict()) for name in own_kinds}
    generated = take_random(loader)
    try:
        for name in own_kinds:
            parts[name].load_state_dict(_share_out(name, parts[name], states[name]))
        name = "random"
        restore_random(content["epoch_random"], loader)
        name = "model"  # last, as nothing can be wrong with it any more
        parts[name].load_state_dict(_share_out(name, parts[name], states[name]))
    except Exception as error:
        for other_name, state in before.items():
            parts[other_name].load_state_dict(state)
        restore_random(generated, loader)
        raise _refusal(path, name, "that of this training", f"{type(error).__name__}: {error}") from error
    return content


def _require_generators(path: Path, states: Mapping[str, Any], loader: Any) -> None:
    """Refuse states of generators that are not here."""
    generators = [set(states) & {"loader", "sampler"}, set(_generators(loader))]
    if generators[0] != generators[1]:
        rule, value = ("one with " + (", ".join(sorted(item)) or "none") for item in generators)
        raise _refusal(path, "loader", f"{rule} among the generators of its own", value)
    gpus = len(states.get("cuda", ()))
    if torch.cuda.is_available() and gpus > torch.cuda.device_count():
        hint = "Make as many visible (CUDA_VISIBLE_DEVICES)."
        raise _refusal(path, "GPUs", f"{gpus} at least, whose random states it has", torch.cuda.device_count(), hint)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file that has the digest that it was written with."""
    try:
        with path.open("rb") as file:
            start = max(file.seek(0, os.SEEK_END) - _COMMENT_BYTES - 2, 0)
            file.seek(start)
            comment = b"sha256 " + _digest(file, start).encode()
            file.seek(start)
            if file.read() != len(comment).to_bytes(2, "little") + comment:
                value = "another digest, or none"
                raise _refusal(path, "file", "a whole checkpoint of a training, as it was written", value)
            file.seek(0)
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError) as error:
        raise _refusal(path, "file", "readable by torch.load(weights_only=True)", str(error)) from error
    return content


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return "none" if value is None else "a value"


def _refusal(path: Path, name: str, rule: str, value: object, hint: str | None = None) -> CheckpointError:
    return CheckpointError("training checkpoint", name=name, rule=rule, value=value, where=str(path), hint=hint)
