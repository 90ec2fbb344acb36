"""Everything that is wrong with layers: keys, dtypes and shapes, and the values of the tensors that are at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4core.errors import SchemaError
from q4core.schema.catalogue import Problem
from q4core.schema.detection import Schema, detect_in, make_catalogue
from q4core.schema.dialect import find_dialect
from q4core.schema.renewal import renewed
from q4core.schema.simple_dialects import SIMPLE_DIALECTS
from q4core.schema.values import number_problems, weight_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from q4core.schema.catalogue import Catalogue, LayerSchema
    from q4core.schema.dialect import Dialect

__all__ = ["detect_or_fail", "problems_error", "validate", "validate_in"]


def detect_or_fail(  # noqa: PLR0913  # the contract's arguments
    tensors: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    dialect: str | None = None,
    load: Callable[[str], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    dialects: Iterable[Dialect] = SIMPLE_DIALECTS,
) -> Schema:
    """Return what a mapping of names to tensors holds, once nothing is wrong with it.

    Arguments are those of ``detect``.

    Raises:
        SchemaError: No layer can be read, or something is wrong; ``problems`` has everything at once, illegal numbers
            of the tensors that hold data as well.
        DialectError: The dialect's name, or an option's, is unknown.
        ConfigError: An argument is not what it must be.
    """
    known = tuple(dialects)
    catalogue = make_catalogue(tensors, metadata, config, load, options, known)
    schema = detect_in(catalogue, known, dialect)
    if schema is None:
        names = ", ".join(sorted(item.name for item in known))
        raise SchemaError(
            "schema",
            name="tensors",
            rule=f"a checkpoint with at least one layer in a known dialect ({names})",
            value=f"{len(tensors)} tensors without one",
        )
    problems = validate_in(schema, catalogue, known)
    if problems or not schema.layers:
        raise problems_error("schema", problems or schema.unsupported)
    return schema


def problems_error(
    what: str, problems: Sequence[Problem], where: str | None = None, schema: Schema | None = None
) -> SchemaError:
    """Return the error that says how many problems there are, and each of them."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return SchemaError(f"{what}: {count}", problems=problems, where=where, schema=schema)


def validate(  # noqa: PLR0913  # the contract's arguments
    schema: Schema,
    tensors: Mapping[str, Any],
    *,
    metadata: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    load: Callable[[str], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    dialects: Iterable[Dialect] = SIMPLE_DIALECTS,
) -> tuple[Problem, ...]:
    """Return every problem of a schema over tensors, or () when all is well.

    These are the problems that ``detect_or_fail`` has with the tensors, and what of the schema they do not hold.

    Args:
        schema: What ``detect`` gave, for these tensors or for others with the same names. Which dialect each layer is
            in is taken from it; all else is looked at anew.
        tensors: Name → tensor, meta tensor or ``TensorInfo``.
        metadata: As for ``detect``.
        config: As for ``detect``.
        load: As for ``detect``.
        options: As for ``detect``.
        dialects: As for ``detect``.

    Raises:
        DialectError: The schema names a dialect that is not among the dialects.
        SchemaError: ``schema`` is no schema, or ``tensors`` no mapping of names to tensors.
        ConfigError: Another argument is not what it must be.
    """
    if not isinstance(schema, Schema):
        raise SchemaError("validate", name="schema", rule="a Schema, as detect gives it", value=type(schema).__name__)
    known = tuple(dialects)
    catalogue = make_catalogue(tensors, metadata, config, load, options, known)
    return validate_in(renewed(schema, catalogue, known), catalogue, known)


def validate_in(schema: Schema, catalogue: Catalogue, dialects: Sequence[Dialect]) -> tuple[Problem, ...]:
    """Return every problem of a schema that was made from a catalogue: of keys, shapes, dtypes and values at hand."""
    problems = list(schema.problems)
    layers = [(find_dialect(layer.dialect, dialects), layer) for layer in schema.layers.values()]
    sound = []
    illegal = list(number_problems(layers, catalogue))
    bad_keys = {problem.key for problem in illegal}
    for dialect, layer in layers:
        found = _layer_problems(dialect, layer, catalogue)
        if not found and bad_keys.isdisjoint(layer.keys.values()):
            sound.append((dialect, layer))
        problems += found
    problems += illegal
    for dialect, layer in sound:
        problems += weight_problems(dialect, layer, catalogue)
    return tuple(dict.fromkeys(problems))


def _layer_problems(dialect: Dialect, layer: LayerSchema, catalogue: Catalogue) -> list[Problem]:
    """Return the problems of keys, shapes and dtypes of one layer."""
    problems = list(layer.problems)
    told = {problem.key for problem in problems}
    problems += [
        Problem("missing_key", key, f"there, as the {role} of {layer.module!r} in {layer.dialect}")
        for role, key in layer.keys.items()
        if key not in catalogue and key not in told
    ]
    if not any(problem.code == "ambiguous" for problem in problems):
        problems += dialect.validate(layer, catalogue)
    return problems
