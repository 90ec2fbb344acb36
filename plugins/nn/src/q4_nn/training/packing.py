"""``pack_``: packing of a trained model's four-bit layers, with exactly the numbers that training saw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from torch import nn

from q4_nn.blocks.embedding import PackedEmbedding
from q4_nn.blocks.packed import FilledLinear, Q4Conv2d, Q4Recurrent
from q4_nn.blocks.place import Part, place_linears_
from q4_nn.convert.candidates import (
    additions,
    avoid_fast_path_,
    find_candidates,
    reasons_against,
    reasons_by_layer,
    replace_layers_,
)
from q4_nn.convert.table import Conversion, ConversionTable, row_of, table_of
from q4_nn.layer_type import keep_options
from q4_nn.training.layers import DENSE_KINDS, STEConv2d, STELinear, STERecurrent, pack_matrix
from q4core import InputError, default_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from q4_nn.convert.candidates import Candidate
    from q4core import PackedWeight, Session

__all__ = ["pack_", "place_packed_"]

_KINDS = (STELinear, STEConv2d, STERecurrent)


def pack_(model: nn.Module, session: Session | None = None) -> ConversionTable:
    """Replace every straight-through layer of a model by a packed one, in place.

    A packed layer holds the very bytes that the last forward pass dequantised. Masters are given back; what else the
    model has (norms, biases, embeddings) stays. Layers that share their x are joined where their format allows. A layer
    goes on in four bits over its master, with the reason in the table, where hooks, a forward of its own,
    parametrizations or what a subclass adds would be lost. The table lists dense layers too, which did not train in
    four bits; a model that has no others is left as it is. After an error the model is as it was.

    Args:
        model: A module that contains ``STELinear``, ``STEConv2d`` or ``STERecurrent`` layers.
        session: Makes the layers. Defaults to the default session.

    Returns:
        A table of what was done; its ``names`` are those of the layers that were packed.

    Raises:
        InputError: ``model`` is no module, or such a layer itself, which can't replace itself; or a master holds NaN or
            infinity.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError: No backend can run a layer.
    """
    if isinstance(model, (*_KINDS, *DENSE_KINDS)) or not isinstance(model, nn.Module):
        rule = "a module that contains STELinear, STEConv2d or STERecurrent layers"
        hint = "Put a single layer into an nn.Sequential; convert_linears_ packs layers that were trained without."
        raise InputError("pack_", name="model", rule=rule, value=type(model).__name__, hint=hint)
    owner = default_session() if session is None else session
    found = find_candidates(model, (*_KINDS, *DENSE_KINDS))
    candidates = [item for item in found if not isinstance(item.parent, STERecurrent)]  # whose part is its own
    reasons = reasons_by_layer(candidates, lambda item: next(_reasons_against(item), None))
    weights: dict[str, PackedWeight] = {}
    names: dict[nn.Module, str] = {}  # of each layer the first one
    rows: dict[nn.Module, Conversion] = {}
    for candidate in candidates:  # all of them, before the first is replaced
        name, module = candidate.name, candidate.layer
        if module in rows:
            continue
        if module in reasons:
            rows[module] = row_of(name, module, "skipped", reasons[module])
            continue
        packed = _packed(name, module)
        names[module] = name
        weights |= packed
        rows[module] = row_of(name, module, "converted", bytes_after=sum(item.nbytes for item in packed.values()))
    place_packed_(model, weights, owner)
    replace_layers_(model, {module: made for module, name in names.items() if (made := _at(model, name)) is not None})
    return table_of(((item.name, item.layer) for item in candidates), rows)


def _packed(name: str, module: Any) -> dict[str, PackedWeight]:
    """Return the packed matrices of a layer by the names of its parameters."""
    at, inner = (f"{name}.inner", module.inner) if isinstance(module, STERecurrent) else (name, module)
    return {
        f"{at}.{leaf}": pack_matrix(value.flatten(1), module.format)
        for leaf, value in inner.named_parameters()
        if value.dim() > 1
    }


def _at(model: nn.Module, name: str) -> nn.Module | None:
    """Return the replacement of a layer; None where it was joined with others."""
    parent, _, attribute = name.rpartition(".")
    found: nn.Module | None = getattr(model.get_submodule(parent), attribute)
    return found


def _reasons_against(candidate: Candidate) -> Iterator[str]:
    """Yield why a layer can't be packed without a loss."""
    if not isinstance(candidate.layer, _KINDS):
        yield "it did not train in four bits: to_ste_ enables it, and convert_linears_ packs linear layers as they are"
        return
    if not isinstance(candidate.layer, STERecurrent):
        yield from reasons_against(attrs.evolve(candidate, read=None), None)  # a read was of the master, to train it
        return
    yield from additions(candidate.layer, STERecurrent, ("inner",))
    inner = candidate.layer.inner
    yield from additions(inner, next(kind for kind in (nn.RNN, nn.LSTM, nn.GRU) if isinstance(inner, kind)))


def place_packed_(model: nn.Module, weights: Mapping[str, PackedWeight], session: Session) -> None:
    """Replace the layers of a model whose matrices are given packed; biases and all else are the model's.

    Args:
        model: The model before packing.
        weights: Parameter's name → its matrix, of whole blocks.
        session: Makes the layers.
    """
    made: dict[str, nn.Module] = {}
    parts: dict[str, Part] = {}
    for key, weight in weights.items():
        name = key.rpartition(".")[0]
        module: Any = model.get_submodule(name)
        if isinstance(module, nn.RNNBase):
            if (name := name.removesuffix(".inner")) not in made:
                made[name] = _recurrent(name, module, weights, session)
        elif isinstance(module, nn.Linear) and weight.shape[1] == module.in_features:
            parts[name] = Part(name, weight, _plain(module.bias))
        else:
            layer = session.linear(weight, _plain(getattr(module, "bias", None)), name=name)
            if isinstance(module, nn.Conv2d):
                made[name] = Q4Conv2d(layer, module)
            elif isinstance(module, nn.Embedding):
                made[name] = PackedEmbedding(layer, layer.dtype)
                made |= {
                    other: layer
                    for other, head in model.named_modules()
                    if type(head) is nn.Linear and head.weight is module.weight  # a tied head
                }
            else:
                made[name] = FilledLinear(layer, module.in_features)
    place_linears_(model, parts, session)
    for name, replacement in made.items():
        old = model.get_submodule(name)
        model.set_submodule(name, keep_options(old, replacement.train(old.training)))
    avoid_fast_path_(model)


def _plain(bias: Any) -> Any:
    return None if bias is None else bias.detach()


def _recurrent(name: str, inner: nn.RNNBase, weights: Mapping[str, PackedWeight], session: Session) -> Q4Recurrent:
    values = dict(inner.named_parameters())

    def layer_of(kind: str, end: str) -> nn.Module:
        weight, bias = weights[f"{name}.inner.weight_{kind}{end}"], values.get(f"bias_{kind}{end}")
        return session.linear(weight, _plain(bias), name=f"{name}.weight_{kind}{end}")

    ends = [key.removeprefix("weight_ih") for key in values if key.startswith("weight_ih")]
    return Q4Recurrent([(layer_of("ih", end), layer_of("hh", end)) for end in ends], inner)
