"""The layers of a model that a conversion may replace, and the reasons why one is left as it is."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

import attrs
from torch import nn
from torch.nn.utils import parametrize

from q4_nn.convert.reads import weight_reads
from q4core import ConfigError
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from q4_nn.convert.reads import Read

__all__ = [
    "Candidate",
    "additions",
    "avoid_fast_path_",
    "find_candidates",
    "reasons_against",
    "reasons_by_layer",
    "replace_layers_",
    "skipped_by_caller",
]

_WEIGHT_HOOKS = {"_backward_hooks": "gradient", "_post_accumulate_grad_hooks": "accumulated gradient"}


@attrs.frozen(eq=False)
class Candidate:
    """One layer: its place, the replaceable class, the candidate that it is part of, and reads of its weight."""

    name: str
    parent: nn.Module
    layer: nn.Module
    kind: type[nn.Module]
    inside: str | None
    read: Read | None


def skipped_by_caller(
    what: str,
    skip: Sequence[str] | Callable[[str, Any], bool],
    model: nn.Module,
    candidates: Sequence[Candidate],
) -> dict[str, str]:
    """Return why the caller wants layers left alone, by their names; ``what`` is the function that the caller called.

    Raises:
        ConfigError: ``skip`` is neither patterns nor a function, or a pattern of it matches nothing.
    """
    if callable(skip):
        chosen = [item.name for item in candidates if type(item.layer) is item.kind and skip(item.name, item.layer)]
        return dict.fromkeys(chosen, "skipped by the caller's function")
    patterns = [skip] if isinstance(skip, str) else skip
    if not isinstance(patterns, (list, tuple, set)) or not all(isinstance(pattern, str) for pattern in patterns):
        rule = "a list of names and patterns, or a function of name and layer"
        raise ConfigError(what, name="skip", rule=rule, value=skip)
    names = [candidate.name for candidate in candidates]
    _check_patterns(what, patterns, names, model)
    found = {name: next((pattern for pattern in patterns if _matches(name, pattern)), None) for name in names}
    return {name: f"matches {pattern!r}" for name, pattern in found.items() if pattern is not None}


def _check_patterns(what: str, patterns: Sequence[str], names: Sequence[str], model: nn.Module) -> None:
    """Refuse a pattern that matches nothing: where it is a typo, the intended layer would be converted."""
    holders = {name[:cut] for name in names for cut in range(len(name)) if name[cut] == "."}
    named = model.named_modules(remove_duplicate=False)
    others = [name for name, _ in named if name and name not in holders]
    for pattern in patterns:
        if any(_matches(name, pattern) for name in (*names, *others)):
            continue
        if pattern in holders:
            hint = f"It is a module with layers inside: write {pattern + '.*'!r}."
        else:
            close = closest_name(pattern, {*names, *(name.rpartition(".")[2] for name in names)})
            hint = f"Did you mean {close!r}?" if close else "Leave it out, or give a function of name and layer."
        rule = "names and patterns that each match a layer of the model"
        raise ConfigError(what, name="skip", rule=rule, value=pattern, hint=hint)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.rpartition(".")[2], pattern)


def find_candidates(model: nn.Module, kinds: tuple[type[nn.Module], ...] = (nn.Linear,)) -> list[Candidate]:
    """Return the layers of a model that are of some classes, subclasses too, in its order, under all their names."""
    found: dict[str, Candidate] = {}
    reads = weight_reads(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, layer in modules.items():
        kind = next((kind for kind in kinds if isinstance(layer, kind)), None)
        if name and kind is not None:
            parent = modules[name.rpartition(".")[0]]
            inside = next((other for other in found if name.startswith(f"{other}.")), None)
            found[name] = Candidate(name, parent, layer, kind, inside, reads.get(name))
    return list(found.values())


def reasons_by_layer(
    candidates: Sequence[Candidate], reason_of: Callable[[Candidate], str | None]
) -> dict[nn.Module, str]:
    """Return why layers are left as they are; what holds under one of a layer's names holds under all."""
    found: dict[nn.Module, str] = {}
    for candidate in candidates:
        reason = reason_of(candidate)
        if reason is not None:
            found.setdefault(candidate.layer, reason)
    return found


def reasons_against(candidate: Candidate, shared: Mapping[int, list[str]] | None) -> Iterator[str]:
    """Yield why a layer can't be replaced without a loss, what says most first.

    Args:
        candidate: The layer.
        shared: Identity of each parameter that several modules have → their names for it. None where the new layer
            has the same parameters, with their hooks and the modules that share them.
    """
    if candidate.inside is not None:
        yield f"it is a part of {candidate.inside}, which may use it in its own way"
    yield from additions(candidate.layer, candidate.kind)
    if candidate.read is not None and candidate.read.pass_reason is not None:
        yield candidate.read.pass_reason
    if shared is None:
        return
    layer: Any = candidate.layer
    hooks = [word for name, word in _WEIGHT_HOOKS.items() if getattr(layer.weight, name, None)]
    if hooks:
        yield _hook_reason(hooks)
    if id(layer.weight) in shared:
        others = [owner for owner in shared[id(layer.weight)] if owner != f"{candidate.name}.weight"]
        yield f"its weight is shared with {', '.join(others)}"


def additions(layer: nn.Module, kind: type[nn.Module], parts: Sequence[str] = ("weight", "bias")) -> Iterator[str]:
    """Yield what a layer has in addition to its class and its parts; a new layer would lose all of it."""
    if parametrize.is_parametrized(layer):
        names = ", ".join(layer.parametrizations)  # type: ignore[arg-type]  # a ModuleDict there
        yield f"its {names} is parametrized, which would be lost; remove the parametrization first"
    if type(layer) is not kind:
        own = type(layer)
        base = f"{'nn.' if kind.__module__.startswith('torch.') else ''}{kind.__name__}"
        yield f"it is a {own.__module__}.{own.__qualname__}, and what that adds to {base} would be lost"
    entries = (*layer._parameters, *layer._buffers, *layer._modules)  # noqa: SLF001  # all that a module registers
    extra = [name for name in entries if name not in {*parts, *getattr(layer, "_flat_weights_names", ())}]
    if extra:
        yield f"it has {', '.join(extra)} in addition to {' and '.join(parts)}, which would be lost"
    if "forward" in vars(layer):
        yield "its forward was replaced on the layer itself, which would be lost"
    registered = [name for name, item in vars(layer).items() if name.endswith("_hooks") and item]  # torch's dicts
    if registered:
        yield _hook_reason([name.strip("_").removesuffix("_hooks").replace("_", " ") for name in registered])


def _hook_reason(hooks: Sequence[str]) -> str:
    return f"it has {', '.join(hooks)} hooks, which would be lost; remove them, and register them on the new layer"


def replace_layers_(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> None:
    """Replace old layers by new ones, under every name that a model has for them."""
    for parent in [*model.modules()]:
        for name, child in [*parent._modules.items()]:  # noqa: SLF001  # named_children() leaves out the second name of one
            if child is not None and child in made:
                setattr(parent, name, made[child])
    avoid_fast_path_(model)


def avoid_fast_path_(model: nn.Module) -> None:
    """Make torch's encoder layers call linear layers that are not torch's own, instead of reading their weights.

    Their fast path, in evaluation without gradients, computes with ``linear1.weight`` itself. It is for ReLU and GELU
    alone, so a layer whose activation counts as another one takes the path of training, with the same numbers.
    """
    changed = set()
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not {type(module.linear1), type(module.linear2)} <= {
            nn.Linear
        }:
            module.activation_relu_or_gelu = 0
            changed.add(module)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and not changed.isdisjoint(module.layers):
            module.use_nested_tensor = False  # which that path takes alone
