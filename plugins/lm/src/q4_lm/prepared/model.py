"""A model's file: its modules and prepared layers as JSON, and all of its tensors in one container; or layers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4_lm.models.config import TransformerConfig
from q4_lm.models.transformer import TransformerDecoder, empty_transformer
from q4_nn.blocks.embedding import PackedEmbedding
from q4_nn.blocks.joined import JoinedLinear
from q4_nn.blocks.rotary import RotaryEmbedding
from q4core import CheckpointError, LifecycleError, Q4Linear, adopt_prepared, export_prepared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from q4_lm.models.transformer import Transformer
    from q4_lm.prepared.container import Container
    from q4core import Session

__all__ = ["export_layers", "export_model", "restore_layers", "restore_model"]


@attrs.define(eq=False)
class _Tensors:
    """The tensors of a file; one that is met again is stored once."""

    stored: list[torch.Tensor] = attrs.field(factory=list)
    numbers: dict[Any, int] = attrs.field(factory=dict)

    def add(self, tensor: torch.Tensor) -> int:
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()) if tensor.numel() else id(tensor)
        if key not in self.numbers:
            self.numbers[key] = len(self.stored)
            self.stored.append(tensor.detach().contiguous())
        return self.numbers[key]


def export_model(model: Transformer) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return a decoder or an encoder as what JSON holds, with tensors that ``restore_model`` makes the same one from.

    Raises:
        LifecycleError: A part of it can't be stored: a layer whose backend does not describe its layout or that is not
            on the CPU, or a module that no loader of ours places.
    """
    tensors = _Tensors()
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = {path: module for path, module in modules.items() if type(module) is Q4Linear}
    joined: dict[str, Any] = {}
    embeddings: dict[str, str] = {}
    dense: dict[str, int] = {}
    plain = dict(empty_transformer(model.config).named_modules(remove_duplicate=False))
    exported = _export(layers, tensors)
    for path, module in modules.items():
        if path in layers:
            continue
        if type(module) is JoinedLinear:
            joined[path] = [list(sizes) for sizes in module.parts]
        elif type(module) is PackedEmbedding:
            embeddings[path] = str(module.dtype).removeprefix("torch.")
        elif type(module) not in {type(plain.get(path)), nn.Linear, nn.ModuleList}:
            raise LifecycleError(f"module {path!r} can't be stored: it is a {type(module).__name__}")
        for name, parameter in module.named_parameters(path, recurse=False):
            dense[name] = tensors.add(parameter)
    factors = next((module.factors for module in model.modules() if isinstance(module, RotaryEmbedding)), None)
    header = {
        "config": model.config.to_dict(),
        **exported,
        "joined": joined,
        "embeddings": embeddings,
        "dense": dense,
        "factors": None if factors is None else tensors.add(factors),
    }
    return header, tensors.stored


def export_layers(layers: Mapping[str, Q4Linear]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return prepared layers by their names, as what JSON holds and tensors that ``restore_layers`` reads.

    Raises:
        LifecycleError: One can't be stored: its backend does not describe its layout, or it is not on the CPU.
    """
    tensors = _Tensors()
    return _export(layers, tensors), tensors.stored


def _export(layers: Mapping[str, Q4Linear], tensors: _Tensors) -> dict[str, Any]:
    """Return layers, each once, and which of them has which names."""
    numbers: dict[int, int] = {}
    kinds: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    for layer in layers.values():
        if id(layer) not in numbers:
            numbers[id(layer)] = len(entries)
            entries.append(_export_layer(layer, kinds, tensors))
    return {"kinds": kinds, "layers": entries, "places": {name: numbers[id(layer)] for name, layer in layers.items()}}


def _export_layer(layer: Q4Linear, kinds: list[dict[str, Any]], tensors: _Tensors) -> dict[str, Any]:
    """Return one layer; what layers of one shape share is stored once among the kinds."""
    header, prepared = export_prepared(layer)
    if layer.device.type != "cpu":
        raise LifecycleError(f"layer {layer.name!r} can't be stored: it is on {layer.device}")
    own = {"name": header.pop("name"), "notes": list(header.pop("notes"))}
    if header not in kinds:
        kinds.append(header)
    entry = {"kind": kinds.index(header), "tensors": [tensors.add(item) for item in prepared], **own}
    return entry | {"bias": None if layer.bias is None else tensors.add(layer.bias)}


def restore_layers(header: dict[str, Any], container: Container, session: Session) -> dict[str, Q4Linear]:
    """Return the layers of ``export_layers``, over the container's tensors; errors are ``restore_model``'s."""
    tensors = [container.tensor(index) for index in range(len(container))]
    return _restored(header, tensors, session)


def _restored(header: dict[str, Any], tensors: Sequence[torch.Tensor], session: Session) -> dict[str, Q4Linear]:
    """Return the layers by their names; a bias is a tensor of the file as it is."""
    layers = []
    for entry in header["layers"]:
        whole = {**header["kinds"][entry["kind"]], "name": entry["name"], "notes": entry["notes"]}
        bias = None if entry["bias"] is None else tensors[entry["bias"]]
        layers.append(adopt_prepared(whole, [tensors[index] for index in entry["tensors"]], session, bias=bias))
    return {name: layers[number] for name, number in header["places"].items()}


def restore_model(header: dict[str, Any], container: Container, session: Session) -> Transformer:
    """Return the model of ``export_model``, over the container's mapped tensors, in evaluation mode.

    Raises:
        LifecycleError: A layer was prepared for another backend than the one that the session selects here.
        CheckpointError, ConfigError, KeyError, TypeError, ValueError, IndexError, AttributeError: The header is not one
            that ``export_model`` gave.
    """
    tensors = [container.tensor(index) for index in range(len(container))]
    parameters = [nn.Parameter(item, requires_grad=False) if item.is_floating_point() else None for item in tensors]
    model = empty_transformer(TransformerConfig.from_dict(header["config"]))
    placed: dict[str, Any] = {**_restored(header, tensors, session)}
    dense = {name: parameters[number] for name, number in header["dense"].items()}
    for path, parts in header["joined"].items():
        owner, name = _owner(model, path)
        inner = [
            placed.pop(f"{path}.layers.{index}", None) or _linear(dense, f"{path}.layers.{index}")
            for index in range(len(parts))
        ]
        for part in owner.joins[name]:
            setattr(owner, part, None)
        setattr(owner, name, JoinedLinear(inner, [tuple(sizes) for sizes in parts]))
    for path, dtype in header["embeddings"].items():
        owner, name = _owner(model, path)
        setattr(owner, name, PackedEmbedding(placed.pop(f"{path}.layer"), getattr(torch, dtype)))
    for path, layer in placed.items():
        owner, name = _owner(model, path)
        setattr(owner, name, layer)
    for path, parameter in dense.items():
        owner, name = _owner(model, path)
        setattr(owner, name, parameter)
    if header["factors"] is not None and isinstance(model, TransformerDecoder):
        model.divide_frequencies(tensors[header["factors"]])
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise CheckpointError("prepared file", name=name, rule="present", where=str(container.path))
    return model.eval()


def _owner(model: nn.Module, path: str) -> tuple[Any, str]:
    parent, _, name = path.rpartition(".")
    return model.get_submodule(parent), name


def _linear(dense: dict[str, nn.Parameter], path: str) -> nn.Linear:
    """Return a dense layer among joined ones; its parameters are set with all others."""
    rows, columns = dense[f"{path}.weight"].shape
    with torch.device("meta"):
        return nn.Linear(columns, rows, bias=f"{path}.bias" in dense)
