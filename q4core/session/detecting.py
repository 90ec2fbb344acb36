"""``detect``, ``detect_all``, ``detect_or_fail`` and ``validate``: a mapping of tensors in the installed dialects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4core.errors import SchemaError
from q4core.schema import Schema, catalogue_of, countable, detect_in, problems_error, readings, validate_in
from q4core.session.functions import dialects as installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from q4core.schema import Catalogue, Dialect, LayerSchema, Problem


def _catalogue(
    tensors: Mapping[str, Any], dialects: Iterable[Dialect] | None, **facts: Any
) -> tuple[Catalogue, tuple[Dialect, ...]]:
    return catalogue_of(tensors, installed() if dialects is None else dialects, **facts)


def detect(  # noqa: PLR0913  # the contract's arguments
    tensors: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    dialect: str | None = None,
    load: Callable[[str], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    dialects: Iterable[Dialect] | None = None,
) -> Schema | None:
    """Return what a mapping of names to tensors holds, or None where nothing in it is packed.

    Layers may carry problems; ``validate`` and ``detect_or_fail`` say all of them, those of values too.

    Args:
        tensors: Name → tensor, meta tensor or ``TensorInfo``.
        metadata: Header metadata (text by key).
        config: The model's ``config.json``.
        dialect: Name of the dialect to prefer wherever the keys allow several.
        load: Loads a small side tensor by name; None takes them from the tensors that hold data.
        options: Reader options by name, such as ``{"nibble_order": "low_first"}``.
        dialects: The dialects to look for; None for the two simplified ones and the installed plugins'.

    Raises:
        DialectError: The dialect's name, or an option's, is unknown.
        SchemaError, ConfigError: As ``Catalogue``.
    """
    catalogue, known = _catalogue(tensors, dialects, metadata=metadata, config=config, load=load, options=options)
    return detect_in(catalogue, known, dialect)


def detect_all(  # noqa: PLR0913  # the contract's arguments
    tensors: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    load: Callable[[str], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    dialects: Iterable[Dialect] | None = None,
) -> tuple[LayerSchema, ...]:
    """Return every reading of every layer; a module whose keys fit several dialects comes once for each.

    Arguments and errors are those of ``detect``.
    """
    catalogue, known = _catalogue(tensors, dialects, metadata=metadata, config=config, load=load, options=options)
    return tuple(layer for group in readings(catalogue, known).values() for layer in countable(group))


def detect_or_fail(  # noqa: PLR0913  # the contract's arguments
    tensors: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    dialect: str | None = None,
    load: Callable[[str], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    dialects: Iterable[Dialect] | None = None,
) -> Schema:
    """Return what a mapping of names to tensors holds, once nothing is wrong with it.

    Arguments are those of ``detect``.

    Raises:
        SchemaError: No layer can be read, or something is wrong; ``problems`` has everything at once, illegal numbers
            of the tensors that hold data as well.
        DialectError: The dialect's name, or an option's, is unknown.
        ConfigError: An argument is not what it must be.
    """
    catalogue, known = _catalogue(tensors, dialects, metadata=metadata, config=config, load=load, options=options)
    schema = detect_in(catalogue, known, dialect)
    if schema is None:
        names = ", ".join(sorted(item.name for item in known))
        rule = f"a checkpoint with at least one layer in a known dialect ({names})"
        raise SchemaError("schema", name="tensors", rule=rule, value=f"{len(tensors)} tensors without one")
    problems = validate_in(schema, catalogue, known)
    if problems or not schema.layers:
        raise problems_error("schema", problems or schema.unsupported)
    return schema


def validate(  # noqa: PLR0913  # the contract's arguments
    schema: Schema,
    tensors: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    load: Callable[[str], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    dialects: Iterable[Dialect] | None = None,
) -> tuple[Problem, ...]:
    """Return every problem of what ``detect`` gave for these tensors, or () when all is well.

    These are the problems that ``detect_or_fail`` has with the tensors. Other arguments and errors are those of
    ``detect``.

    Raises:
        DialectError: The schema names a dialect that is not among the dialects.
        SchemaError: ``schema`` is no schema.
    """
    if not isinstance(schema, Schema):
        raise SchemaError("validate", name="schema", rule="a Schema, as detect gives it", value=type(schema).__name__)
    catalogue, known = _catalogue(tensors, dialects, metadata=metadata, config=config, load=load, options=options)
    return validate_in(schema, catalogue, known)
