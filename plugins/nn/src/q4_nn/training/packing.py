"""``pack_``: a trained model's four-bit layers become packed ones, with exactly the numbers that training saw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from q4_nn.blocks.packed import FilledLinear, Q4Conv2d, Q4Recurrent
from q4_nn.models.place import Part, place_linears_
from q4_nn.models.transformer import PackedEmbedding, TransformerDecoder
from q4_nn.registry.layer_type import keep_options
from q4_nn.training.layers import STEConv2d, STELinear, STERecurrent, pack_matrix
from q4core import InputError, default_session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4core import PackedWeight, Session

__all__ = ["pack_", "place_packed_"]


def pack_(model: nn.Module, session: Session | None = None) -> list[str]:
    """Replace every straight-through layer of a model by a packed one, in place.

    A packed layer holds the very bytes that the last forward pass dequantised. Masters are given back; what else the
    model has (norms, biases, embeddings) stays. Layers that share their x are joined where their format allows.

    Args:
        model: A module that contains ``STELinear``, ``STEConv2d`` or ``STERecurrent`` layers.
        session: Makes the layers; the default session unless told.

    Returns:
        The names of the layers that were packed.

    Raises:
        InputError: The model contains no such layer, or a master holds NaN or infinity; the model is as it was.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError: Nothing may serve a layer.
    """
    owner = default_session() if session is None else session
    kinds = (STELinear, STEConv2d, STERecurrent)
    found = {name: module for name, module in model.named_modules() if name and isinstance(module, kinds)}
    if not found:
        rule = "a module that contains STELinear, STEConv2d or STERecurrent layers"
        hint = "to_ste_ makes them; convert_linears_ packs nn.Linear layers that were trained without."
        raise InputError("pack_", name="model", rule=rule, value=type(model).__name__, hint=hint)
    weights: dict[str, PackedWeight] = {}
    for name, module in found.items():  # all of them, before the first is replaced
        at, inner = (f"{name}.inner", module.inner) if isinstance(module, STERecurrent) else (name, module)
        for leaf, value in inner.named_parameters():
            if value.dim() > 1:
                weights[f"{at}.{leaf}"] = pack_matrix(value.flatten(1), module.format)
    place_packed_(model, weights, owner)
    return [*found]


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
                if isinstance(model, TransformerDecoder) and model.config.tie_word_embeddings:
                    model.lm_head = layer
            else:
                made[name] = FilledLinear(layer, module.in_features)
    place_linears_(model, parts, session)
    for name, replacement in made.items():
        old = model.get_submodule(name)
        model.set_submodule(name, keep_options(old, replacement.train(old.training)))


def _plain(bias: Any) -> Any:
    return None if bias is None else bias.detach()


def _recurrent(name: str, inner: nn.RNNBase, weights: Mapping[str, PackedWeight], session: Session) -> Q4Recurrent:
    values = dict(inner.named_parameters())

    def layer_of(kind: str, end: str) -> nn.Module:
        weight, bias = weights[f"{name}.inner.weight_{kind}{end}"], values.get(f"bias_{kind}{end}")
        return session.linear(weight, _plain(bias), name=f"{name}.weight_{kind}{end}")

    ends = [key.removeprefix("weight_ih") for key in values if key.startswith("weight_ih")]
    return Q4Recurrent([(layer_of("ih", end), layer_of("hh", end)) for end in ends], inner)
