"""The layers among the tensors of a file, for readers and writers of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4core.schema import Problem, Schema, detect_in, make_catalogue, problems_error, validate_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from q4core.checkpoint.contract import OpenRequest
    from q4core.schema import TensorInfo

__all__ = ["find_layers"]


def find_layers(  # noqa: PLR0913  # the facts of one file
    tensors: Mapping[str, TensorInfo],
    request: OpenRequest,
    *,
    metadata: Mapping[str, str],
    config: Mapping[str, Any] | None,
    load: Callable[[str], torch.Tensor] | None,
    path: Path,
) -> Schema:
    """Return what a file's tensors are: layers in a dialect of the request, and dense tensors.

    Args:
        tensors: Name → dtype and shape, in the order of the file.
        request: Dialects and options.
        metadata: The header's texts by key.
        config: The model's ``config.json``.
        load: Loads a small side tensor by name; None where no data are at hand.
        path: The file, for errors.

    Raises:
        SchemaError: Something is wrong with the layers; ``problems`` has everything.
        DialectError: The dialect's name, or an option's, is unknown.
    """
    catalogue = make_catalogue(tensors, metadata, config, load, request.options, request.dialects)
    schema = detect_in(catalogue, request.dialects, request.dialect)
    if schema is None:
        asked = [Problem("dialect", "dialect", "one of the file, which has no 4-bit layer", request.dialect)]
        schema = Schema(dense=tuple(tensors), problems=asked if request.dialect is not None else ())
    problems = validate_in(schema, catalogue, request.dialects)
    if problems:
        raise problems_error("checkpoint", problems, str(path), schema)
    return schema
