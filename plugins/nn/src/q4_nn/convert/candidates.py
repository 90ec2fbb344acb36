"""The linear layers of a model, and why one is left as it is."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

import attrs
from torch import nn
from torch.nn.utils import parametrize

from q4core import ConfigError
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Candidate", "find_candidates", "reasons_against", "skipped_by_caller"]

_WEIGHT_HOOKS = {"_backward_hooks": "gradient", "_post_accumulate_grad_hooks": "accumulated gradient"}


@attrs.frozen(eq=False)
class Candidate:
    """One linear layer: where it stands, and whether it is inside another one."""

    name: str
    parent: nn.Module
    attribute: str
    layer: nn.Linear
    inside: str | None


def skipped_by_caller(
    skip: Sequence[str] | Callable[[str, nn.Linear], bool], model: nn.Module, candidates: Sequence[Candidate]
) -> dict[str, str]:
    """Return why the caller wants layers left alone, by their names.

    Raises:
        ConfigError: ``skip`` is neither patterns nor a function, or a pattern of it matches nothing.
    """
    if callable(skip):
        chosen = [item.name for item in candidates if type(item.layer) is nn.Linear and skip(item.name, item.layer)]
        return dict.fromkeys(chosen, "skipped by the caller's function")
    patterns = [skip] if isinstance(skip, str) else skip
    if not isinstance(patterns, (list, tuple, set)) or not all(isinstance(pattern, str) for pattern in patterns):
        rule = "a list of names and patterns, or a function of name and layer"
        raise ConfigError("convert_linears_", name="skip", rule=rule, value=skip)
    names = [candidate.name for candidate in candidates]
    _check_patterns(patterns, names, model)
    found = {name: next((pattern for pattern in patterns if _matches(name, pattern)), None) for name in names}
    return {name: f"matches {pattern!r}" for name, pattern in found.items() if pattern is not None}


def _check_patterns(patterns: Sequence[str], names: Sequence[str], model: nn.Module) -> None:
    """Refuse a pattern that matches nothing: where it is a typo, what it was meant for would be converted."""
    holders = {name[:cut] for name in names for cut in range(len(name)) if name[cut] == "."}
    others = [name for name, _ in model.named_modules() if name and name not in holders]
    for pattern in patterns:
        if any(_matches(name, pattern) for name in (*names, *others)):
            continue
        if pattern in holders:
            hint = f"It is a module with linear layers inside: write {pattern + '.*'!r}."
        else:
            close = closest_name(pattern, {*names, *(name.rpartition(".")[2] for name in names)})
            hint = f"Did you mean {close!r}?" if close else "Leave it out, or give a function of name and layer."
        rule = "names and patterns that each match a layer of the model"
        raise ConfigError("convert_linears_", name="skip", rule=rule, value=pattern, hint=hint)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.rpartition(".")[2], pattern)


def find_candidates(model: nn.Module) -> list[Candidate]:
    """Return the ``nn.Linear`` layers of a model, subclasses too, in its own order."""
    found: dict[str, Candidate] = {}
    for parent_name, parent in model.named_modules():
        for attribute, child in parent.named_children():
            if isinstance(child, nn.Linear):
                name = f"{parent_name}.{attribute}" if parent_name else attribute
                inside = next((other for other in found if name.startswith(f"{other}.")), None)
                found[name] = Candidate(name, parent, attribute, child, inside)
    return list(found.values())


def reasons_against(candidate: Candidate, shared: dict[int, list[str]]) -> Iterator[str]:
    """Yield why a layer can't be replaced without a loss, what says most first.

    Args:
        candidate: The layer.
        shared: Identity of each parameter that several modules have → their names for it.
    """
    layer = candidate.layer
    if candidate.inside is not None:
        yield f"it is a part of {candidate.inside}, which may use it in its own way"
    if parametrize.is_parametrized(layer):
        names = ", ".join(layer.parametrizations)  # type: ignore[arg-type]  # a ModuleDict there
        yield f"its {names} is parametrized, which would be lost; remove the parametrization first"
    if type(layer) is not nn.Linear:
        kind = type(layer)
        yield f"it is a {kind.__module__}.{kind.__qualname__}, and what that adds to nn.Linear would be lost"
    entries = (*layer._parameters, *layer._buffers, *layer._modules)  # noqa: SLF001  # all that a module registers
    extra = [name for name in entries if name not in {"weight", "bias"}]
    if extra:
        yield f"it has {', '.join(extra)} beside weight and bias, which would be lost"
    if "forward" in vars(layer):
        yield "its forward was replaced on the layer itself, which would be lost"
    registered = [name for name, item in vars(layer).items() if name.endswith("_hooks") and item]  # torch's dicts
    hooks = [name.strip("_").removesuffix("_hooks").replace("_", " ") for name in registered]
    hooks += [word for name, word in _WEIGHT_HOOKS.items() if getattr(layer.weight, name, None)]
    if hooks:
        yield f"it has {', '.join(hooks)} hooks, which would be lost; remove them, and register them on the new layer"
    if id(layer.weight) in shared:
        others = [owner for owner in shared[id(layer.weight)] if owner != f"{candidate.name}.weight"]
        yield f"its weight is shared with {', '.join(others)}"
