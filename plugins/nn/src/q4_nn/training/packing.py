"""``pack_``: a trained model's four-bit layers become packed ones, with exactly the numbers that training saw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4_nn.blocks.packed import FilledLinear, Q4Conv2d, Q4Recurrent
from q4_nn.models.place import Part, place_linears_
from q4_nn.training.layers import STEConv2d, STELinear, STERecurrent, pack_matrix
from q4core import InputError, default_session

if TYPE_CHECKING:
    from torch import nn

    from q4core import Session

__all__ = ["pack_"]


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
    made: dict[str, nn.Module] = {}
    parts: dict[str, Part] = {}
    for name, module in found.items():  # all of them, before the first is replaced
        if isinstance(module, STELinear):
            weight = pack_matrix(module.weight, module.format)
            if weight.shape[1] == module.in_features:
                parts[name] = Part(name, weight, _plain(module.bias))
            else:
                layer = owner.linear(weight, _plain(module.bias), name=name)
                made[name] = FilledLinear(layer, module.in_features)
        elif isinstance(module, STEConv2d):
            weight = pack_matrix(module.weight.flatten(1), module.format)
            made[name] = Q4Conv2d(owner.linear(weight, _plain(module.bias), name=name), module)
        else:
            made[name] = _recurrent(name, module, owner)
    place_linears_(model, parts, owner)
    for name, replacement in made.items():
        model.set_submodule(name, replacement.train(found[name].training))
    return [*found]


def _plain(bias: Any) -> Any:
    return None if bias is None else bias.detach()


def _recurrent(name: str, module: STERecurrent, owner: Session) -> Q4Recurrent:
    values = dict(module.inner.named_parameters())

    def layer_of(kind: str, end: str) -> nn.Module:
        weight = pack_matrix(values[f"weight_{kind}{end}"], module.format)
        return owner.linear(weight, _plain(values.get(f"bias_{kind}{end}")), name=f"{name}.weight_{kind}{end}")

    ends = [key.removeprefix("weight_ih") for key in values if key.startswith("weight_ih")]
    return Q4Recurrent([(layer_of("ih", end), layer_of("hh", end)) for end in ends], module.inner)
