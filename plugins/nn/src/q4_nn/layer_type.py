"""``LayerType``: a kind of layer by name, with checked options; plugins add further ones by ``q4_layers``."""

from __future__ import annotations

import inspect
import types
import typing
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

import attrs
from torch import nn

from q4core import ConfigError, Q4Error, default_registry
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "LayerExample",
    "LayerType",
    "Shape",
    "find_layer_type",
    "keep_options",
    "layer_types",
    "make",
    "options_of",
    "set_options",
]

Shape = tuple[int | None, ...]
"""Sizes of one sample, the batch left out; None for a size that may be any, such as the length of a text."""
_ATTRIBUTE = "q4_layer"


def _unchanged(shape: Shape, **_: Any) -> Shape:
    return shape


@attrs.frozen
class LayerExample:
    """A small layer of a type, by which ``q4 conform NAME --profile layer`` judges the type.

    Args:
        shape: Sizes of one sample; a few of each, because every gradient is compared with differences.
        options: The type's own.
        integers: Inputs are int64 below this, such as token numbers; None for floats.
        straight_through: Whether the parameters' gradients are those of quantised ones, which no difference shows.
        surrogate: Whether the result are spikes, whose gradient is a surrogate's, which no difference shows.
    """

    shape: tuple[int, ...]
    options: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    integers: int | None = None
    straight_through: bool = False
    surrogate: bool = False


@attrs.frozen
class LayerType:
    """A kind of layer.

    Args:
        name: What a description calls it.
        build: Takes the options by name and returns the module. Its signature says which options there are: their
            names, their types by annotation, and their defaults.
        shape: Takes the input's shape, then the options by name, and returns the result's shape;
            raises ``ValueError`` with the rule where the layer does not take that shape. Defaults to the same shape.
        summary: One line for people.
        examples: Layers by which the type can be certified.
        emit: Emits the operations of a layer, for programs: ``emit(module, builder, *values)``, as ``ProgramBuilder``
            says; None where its class does, or nothing.
    """

    name: str
    build: Callable[..., nn.Module]
    shape: Callable[..., Shape] = _unchanged
    summary: str = ""
    examples: tuple[LayerExample, ...] = ()
    emit: Callable[..., Any] | None = None

    def options(self) -> Mapping[str, inspect.Parameter]:
        """Return the options by name."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(self.build, eval_str=False).parameters
        return {name: item for name, item in parameters.items() if item.kind in kinds}

    def make(self, **options: Any) -> nn.Module:
        """Return a layer.

        Raises:
            ConfigError: An option is unknown, missing, of another type, or refused by the layer itself.
        """
        known = self.options()
        for name in options:
            if name not in known:
                close = closest_name(name, known)
                hint = f"Did you mean {close!r}?" if close else f"It has {', '.join(known) or 'none'}."
                rule = f"one that a layer {self.name!r} has"
                raise ConfigError(f"layer {self.name!r}", name="option", rule=rule, value=name, hint=hint)
        hints = _hints(self.build)
        for name, parameter in known.items():
            if name in options:
                if name in hints and not _fits(options[name], hints[name]):
                    rule = f"of type {_type_name(hints[name])}"
                    raise ConfigError(f"layer {self.name!r}", name=name, rule=rule, value=options[name])
            elif parameter.default is inspect.Parameter.empty:
                raise ConfigError(f"layer {self.name!r}", name=name, rule="given", value=None)
        try:
            made: object = self.build(**options)
        except Q4Error:
            raise
        except Exception as error:
            rule = "ones that the layer takes"
            value = f"{type(error).__name__}: {error}"
            raise ConfigError(f"layer {self.name!r}", name="options", rule=rule, value=value) from error
        if not isinstance(made, nn.Module):
            rule, value = "a function that returns an nn.Module", type(made).__name__
            raise ConfigError(f"layer type {self.name!r}", name="build", rule=rule, value=value)
        set_options(made, {"type": self.name, **options})
        return made


def layer_types() -> Mapping[str, LayerType]:
    """Return every layer type by name, those of all plugins."""
    return default_registry().items("q4_layers")


def find_layer_type(name: str) -> LayerType:
    """Return a layer type.

    Raises:
        ConfigError: No plugin adds one of that name.
    """
    known = layer_types()
    if name not in known:
        close = closest_name(str(name), known)
        hint = f"Did you mean {close!r}?" if close else f"There are {', '.join(known)}."
        raise ConfigError("layer", name="type", rule="one that a plugin adds", value=name, hint=hint)
    found: LayerType = known[name]
    return found


def make(type: str, /, **options: Any) -> nn.Module:  # noqa: A002  # the key in descriptions
    """Return a layer by the name of its type: ``make("linear", in_features=64, out_features=8, format="q4_0")``.

    Args:
        type: Name of a layer type; ``q4 doctor`` lists them.
        **options: The type's own.

    Raises:
        ConfigError: There is no such type, or an option is unknown, missing, of another type, or refused.
    """
    return find_layer_type(type).make(**options)


def options_of(module: nn.Module) -> dict[str, Any] | None:
    """Return type and options that a layer was made with, or None of one that ``make`` did not make."""
    found = vars(module).get(_ATTRIBUTE)
    return None if found is None else dict(found)


def set_options(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Store type and options that a layer is described by."""
    object.__setattr__(module, _ATTRIBUTE, dict(options))


def keep_options(old: nn.Module, new: nn.Module, **further: Any) -> nn.Module:
    """Return a layer that takes another's place, described as that one was, and by further options."""
    if (options := options_of(old)) is not None:
        set_options(new, {**options, **further})
    return new


def _hints(build: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function, or of a class's ``__init__``; none that can't be resolved."""
    function = build.__init__ if inspect.isclass(build) else build
    try:
        return typing.get_type_hints(function)
    except Exception:  # noqa: BLE001  # names that exist for type checkers alone
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type; True for types that are not plain."""
    origin = get_origin(hint)
    if origin in {Union, types.UnionType}:
        return any(_fits(value, item) for item in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin in {tuple, list}:
        return isinstance(value, (tuple, list))
    if hint in {int, float}:
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in {str, bool, type(None)} else True


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
