"""Checkpoints of a training: everything that resuming needs, in one file that is written at once and whole."""

from __future__ import annotations

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

__all__ = ["gather_states", "load_states", "restore_random", "save_states", "take_random"]

_VERSION = 1


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
    """Let every generator go on from where it stood."""
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
    """Return the state of each part (name → what has ``state_dict``), tensors that processes share out made whole.

    Every process of a group calls it, since each holds a piece.
    """
    return {name: _whole(part.state_dict()) for name, part in parts.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _share_out(name: str, part: Any, state: Any) -> Any:
    """Return a state whose whole tensors are shared out as those of the part are."""
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


def save_states(path: Path, states: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """Write what ``gather_states`` returned, and plain values beside it; an older file stays until this one is whole.

    Raises:
        OSError: It can't be written.
    """
    content = {"version": _VERSION, **told, "parts": dict(states)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False) as file:
        temporary = Path(file.name)
        try:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    temporary.replace(path)


def load_states(path: Path, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Give some parts their states back, and return the plain values beside them.

    Nothing is changed where the file is not what it should be; no code of it is run.

    Raises:
        CheckpointError: The file is damaged, or of another model; it names what is missing or differs.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        states = content["parts"]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        value = f"{type(error).__name__}: {error}"
        raise _refusal(path, "file", "a whole checkpoint of a training", value) from error
    if content.get("version") != _VERSION:
        raise _refusal(path, "version", str(_VERSION), content.get("version"))
    if set(states) != set(parts):
        raise _refusal(path, "parts", ", ".join(sorted(parts)), ", ".join(sorted(states)))
    own, given = parts["model"].state_dict(), states["model"]
    for name in sorted({*own, *given}):
        one, other = (_shape(values.get(name)) for values in (own, given))
        if one != other:
            raise _refusal(path, f"tensor {name!r}", one, other, "It is the checkpoint of another model.")
    for name in sorted(parts, key="model".__eq__):  # the model last, of which nothing can be wrong any more
        try:
            parts[name].load_state_dict(_share_out(name, parts[name], states[name]))
        except (ValueError, KeyError, TypeError) as error:
            raise _refusal(path, name, "that of this training", str(error)) from error
    return dict(content)


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return "none" if value is None else "a value"


def _refusal(path: Path, name: str, rule: str, value: object, hint: str | None = None) -> CheckpointError:
    return CheckpointError("training checkpoint", name=name, rule=rule, value=value, where=str(path), hint=hint)
