"""A whole model from a plain description, and back: dicts of texts, numbers and lists, as TOML or JSON hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_nn.layer_type import find_layer_type, options_of
from q4core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_nn.layer_type import Shape

__all__ = ["build", "describe"]

_WHAT = "model description"


def build(description: Mapping[str, Any]) -> nn.Sequential:
    """Build a model of layers in sequence.

    Args:
        description: ``layers``: a list of dicts, each with ``type`` and that type's options. ``input``: sizes of one
            sample, the batch left out (-1 for any), which each layer's is checked against; optional.

    Returns:
        The layers; ``describe`` gives the description back.

    Raises:
        ConfigError: A type or option is unknown or refused, sizes don't chain (it names the layer and both sizes), or a
            layer's result has another shape than its type says.
    """
    unknown = set(description) - {"layers", "input"}
    layers = description.get("layers")
    if unknown or not isinstance(layers, list) or not layers:
        value = sorted(unknown) if unknown else layers
        raise ConfigError(_WHAT, name="description", rule="'layers' (a list), and perhaps 'input'", value=value)
    made = nn.Sequential()
    for number, item in enumerate(layers):
        if not isinstance(item, dict) or not isinstance(item.get("type"), str):
            raise ConfigError(_WHAT, name=f"layer {number}", rule="a dict with 'type'", value=item)
        options = {str(name): tuple(value) if isinstance(value, list) else value for name, value in item.items()}
        try:
            made.append(find_layer_type(str(options.pop("type"))).make(**options))
        except ConfigError as error:
            what = f"{_WHAT}: layer {number}"
            raise ConfigError(what, name=error.name, rule=error.rule, value=error.value, hint=error.hint) from error
    if "input" in description:
        _check(made, _sizes(description["input"]))
    object.__setattr__(made, "_q4_input", description.get("input"))
    return made


def describe(model: nn.Module) -> dict[str, Any]:
    """Return the description of a model that ``build`` or ``make`` made, without its weights.

    Raises:
        ConfigError: A layer of it was made otherwise.
    """
    layers = [*model.children()] if isinstance(model, nn.Sequential) else [model]
    described = []
    for number, layer in enumerate(layers):
        options = options_of(layer)
        if options is None:
            hint = "Make it with q4_nn.make, or give it a layer type by the hook q4_layers."
            rule = "made by q4_nn.make"
            raise ConfigError(_WHAT, name=f"layer {number}", rule=rule, value=type(layer).__name__, hint=hint)
        described.append({name: list(item) if isinstance(item, tuple) else item for name, item in options.items()})
    given = vars(model).get("_q4_input")
    return {"layers": described} if given is None else {"input": list(given), "layers": described}


def _sizes(value: Any) -> Shape:
    if not isinstance(value, (list, tuple)) or not all(isinstance(size, int) and size for size in value):
        raise ConfigError(_WHAT, name="input", rule="a list of sizes, -1 for any", value=value)
    return tuple(None if size < 0 else size for size in value)


def _check(model: nn.Sequential, shape: Shape) -> None:
    """Refuse sizes that don't chain, and a layer whose result is not what its type says."""
    was_training = model.training
    model.eval()
    layer_options = [options_of(layer) or {} for layer in model]
    x: Any = None
    before = "the input"
    for number, (layer, options) in enumerate(zip(model, layer_options, strict=True)):
        kind = find_layer_type(options.pop("type"))
        what = f"{_WHAT}: layer {number} ({kind.name!r})"
        taken = shape
        try:
            shape = tuple(kind.shape(taken, **options))
        except (ValueError, TypeError, IndexError) as error:
            raise ConfigError(what, name="input", rule=str(error), value=f"{_text_of(taken)} from {before}") from error
        if x is None:
            sizes = (1, *(3 if size is None else size for size in taken))
            x = torch.zeros(sizes, dtype=torch.int64 if kind.name == "embedding" else torch.get_default_dtype())
        try:
            with torch.no_grad():
                x = layer(x)
        except Exception as error:
            value = f"{type(error).__name__}: {error}"
            raise ConfigError(what, name="layer", rule=f"one that takes {_text_of(taken)}", value=value) from error
        found = tuple(x.shape[1:]) if isinstance(x, torch.Tensor) else None
        if found is not None and not _alike(found, shape):
            hint = "Its layer type says otherwise: fix the type's shape, or the layer."
            raise ConfigError(what, name="result", rule=f"of shape {_text_of(shape)}", value=list(found), hint=hint)
        before = f"layer {number} ({kind.name!r})"
    model.train(was_training)


def _alike(found: Shape, wanted: Shape) -> bool:
    return len(found) == len(wanted) and all(b is None or a == b for a, b in zip(found, wanted, strict=True))


def _text_of(shape: Shape) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
