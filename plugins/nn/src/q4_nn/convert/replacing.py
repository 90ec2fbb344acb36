"""``convert_linears_``: packing of all layers, then their replacement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4_nn.convert.candidates import (
    find_candidates,
    reasons_against,
    reasons_by_layer,
    replace_layers_,
    skipped_by_caller,
)
from q4_nn.convert.table import Conversion, ConversionTable, row_of, table_of
from q4_nn.layer_type import keep_options
from q4_nn.quantising import named_format
from q4core import (
    BackendUnavailableError,
    InputError,
    PolicyConflictError,
    Q4Error,
    Request,
    Session,
    default_session,
    dequantize,
    quantize,
    resolve_config,
    select,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4core import Format

__all__ = ["convert_linears_"]


def convert_linears_(  # noqa: PLR0913  # one argument per option
    model: nn.Module,
    *,
    format: str | Format,  # noqa: A002  # the contract's name
    skip: Sequence[str] | Callable[[str, nn.Linear], bool] = (),
    session: Session | None = None,
    block_size: int | None = None,
    strict: bool = False,
) -> ConversionTable:
    """Replace the ``nn.Linear`` layers of a model by ``Q4Linear`` ones, in place.

    A layer stays as it is, with the reason in the table, where more would be lost than its weight is rounded: a weight
    that another module shares (a tied head), hooks, parametrizations, subclasses of ``nn.Linear`` and what is inside
    them. So does a layer whose shape the format or the backends don't support. After any error the model is as it was:
    the old weights stay until all new ones are made, so that both take memory for a while.

    Args:
        model: Any module but an ``nn.Linear`` itself, which can't replace itself.
        format: Name of the format, or a ``Format``.
        skip: Names or glob patterns (matched against the full name and its last part), each of which must match some
            layer; or a function of name and layer.
        session: Whose policy. Defaults to the default session.
        block_size: In-features per scale. Defaults to the format's.
        strict: Raise at the first layer that can't be converted.

    Returns:
        A table of what was done.

    Raises:
        InputError: ``model`` is no module, or a bare ``nn.Linear``, or ``session`` is no session.
        ConfigError: A pattern of ``skip`` matches nothing, or the session's device is not there.
        FormatError: The format is unknown, or the block size is not legal for it.
        LifecycleError: The session is closed.
        UnknownBackendError, PolicyConflictError: The session asks for a backend that is not there, or that its policy
            rules out for every layer.
        Q4Error: With ``strict``, the first error that prevents the conversion of a layer.
    """
    if isinstance(model, nn.Linear) or not isinstance(model, nn.Module):
        raise InputError(
            "convert_linears_",
            name="model",
            rule="a module that contains nn.Linear layers",
            value=f"{type(model).__module__}.{type(model).__name__}",
            hint="Use session.linear(q4.quantize(layer.weight, format=…), layer.bias).",
        )
    if session is not None and not isinstance(session, Session):
        raise InputError("convert_linears_", name="session", rule="a Session or None", value=type(session).__name__)
    owner = default_session() if session is None else session
    candidates = find_candidates(model)
    chosen = skipped_by_caller("convert_linears_", skip, model, candidates)
    shared = _shared_parameters(model)
    reasons = reasons_by_layer(
        candidates, lambda item: chosen.get(item.name) or next(reasons_against(item, shared), None)
    )
    layers: list[Any] = [item.layer for item in candidates]
    _check_call(owner, format, block_size, [layer for layer in layers if layer not in reasons])
    rows: dict[nn.Module, Conversion] = {}
    made: dict[nn.Module, nn.Module] = {}
    for candidate, layer in zip(candidates, layers, strict=True):
        name, reason = candidate.name, reasons.get(layer)
        if layer in rows:
            continue
        if reason is not None:
            rows[layer] = row_of(name, layer, "skipped", reason)
            continue
        try:
            weight = quantize(layer.weight.detach(), format, block_size=block_size, name=name)
            replacement = owner.linear(weight, layer.bias, name=name)
        except Q4Error as error:
            if strict:
                raise
            rows[layer] = row_of(name, layer, "failed", str(error))
            continue
        made[layer] = keep_options(layer, replacement.train(layer.training))
        dense = layer.weight.detach().to(torch.float32)
        error_norm = float(torch.linalg.vector_norm(dense - dequantize(weight, torch.float32)))
        norm = float(torch.linalg.vector_norm(dense))
        rows[layer] = row_of(
            *(name, layer, "converted"),
            bytes_after=weight.nbytes,
            relative_error=error_norm / norm if norm else 0.0,
            backend=replacement.diagnostics().backend,
        )
    replace_layers_(model, made)
    return table_of(((item.name, item.layer) for item in candidates), rows)


def _check_call(
    owner: Session,
    format: str | Format,  # noqa: A002  # as the caller wrote it
    block_size: int | None,
    layers: Sequence[nn.Linear],
) -> None:
    """Refuse what is wrong for every layer alike, so that it is one error and not a table full of failures.

    Raises:
        LifecycleError, FormatError, ConfigError, UnknownBackendError, PolicyConflictError: One of session, format and
            block size, or the session's options.
    """
    owner.__enter__()  # only looks whether the session is open
    kind = named_format(format)
    is_legal = isinstance(block_size, int) and block_size in kind.block_sizes
    columns = block_size if is_legal and block_size is not None else kind.block_size
    sample = quantize(torch.zeros(1, columns, dtype=torch.float32), format, block_size=block_size)
    asked = Request.for_weight(sample, dtype=resolve_config(owner.config).compute_dtype or sample.dtype)
    requests = {attrs.evolve(asked, out_features=layer.out_features, in_features=layer.in_features) for layer in layers}
    conflict = None
    for request in requests or {asked}:
        try:
            select(request, owner.config, registry=owner.registry)
        except PolicyConflictError as error:
            conflict = error
        except BackendUnavailableError:
            return  # so far as known this concerns one layer alone: the table reports it
        else:
            return
    if conflict is not None:
        raise conflict


def _shared_parameters(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter that several modules have; a module under several names counts once."""
    owners: dict[int, list[str]] = {}
    for holder, module in model.named_modules():
        for name, parameter in module.named_parameters(holder, recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in owners.items() if len(names) > 1}
