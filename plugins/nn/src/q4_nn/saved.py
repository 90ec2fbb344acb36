"""Folders of our own: models in files, restored bit for bit.

A folder holds ``config.json`` (``model_type`` ``q4_nn``, with a description, or with what another package says of a
model) and ``model.safetensors``. A tensor has the name that it has in the model before packing. A packed matrix ``x``
is ``x:spec`` (uint8, the JSON of ``WeightSpec``) and ``x:<field>`` for each tensor field of ``PackedWeight``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import q4core as q4
from q4_nn.blocks.embedding import PackedEmbedding
from q4_nn.blocks.packed import FilledLinear, Q4Conv2d, Q4Recurrent
from q4_nn.blocks.rotary import RotaryEmbedding
from q4_nn.layer_type import set_options
from q4_nn.registry.description import build, describe
from q4_nn.training.layers import STEConv2d, STELinear, STERecurrent
from q4_nn.training.packing import place_packed_
from q4core.plugin_api import read_object, resolve_device

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    Values = dict[str, q4.PackedWeight | torch.Tensor]

__all__ = ["KIND", "empty_model", "load_model", "read_folder", "save_model", "write_folder"]

KIND = "q4_nn"
"""``model_type`` of a folder of our own."""
_FACTORS = "rope_freqs"


def save_model(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a model to a folder, from which ``load_model`` makes the same one; whole, or not at all.

    ``q4_lm.save_model`` writes decoders and encoders, too.

    Args:
        model: One that ``describe`` accepts (one layer becomes a model of one). Float layers keep their dtype, packed
            ones their bytes: codes, scales and layout.
        folder: Where; files of an older model there are replaced.

    Returns:
        The safetensors file.

    Raises:
        ConfigError: A layer of the model has no description.
        InputError: A layer trains in four bits, but the description does not say so.
        CheckpointError: The model was changed beyond what it says, or the files can't be written.
    """
    model = model if isinstance(model, nn.Sequential) else nn.Sequential(model)
    facts = {"description": describe(model)}
    return write_folder(model, empty_model(facts, str(folder)), facts, folder)


def load_model(folder: str | os.PathLike[str], session: q4.Session | None = None) -> nn.Module:
    """Build the model that a folder of ``save_model``'s holds, in evaluation mode.

    ``q4_lm.load_model`` opens decoders and encoders, too, and the files of other tools.

    Args:
        folder: Where. Dense tensors become the session's ``compute_dtype``; without one they are as they were saved.
        session: Makes the packed layers. Defaults to the default session.

    Returns:
        The ``nn.Sequential`` of the description.

    Raises:
        CheckpointError: A file is missing or malformed, the folder holds no model of ours, or tensors are missing, not
            expected, or of another shape; it names them.
        ConfigError: The description is not legal.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError: No backend can run a layer.
    """
    where, facts = str(folder), read_object(Path(folder) / "config.json", "config.json")
    if facts.get("model_type") != KIND or "description" not in facts:
        rule, found = "a folder of q4_nn.save_model's, with a description", facts.get("model_type")
        hint = "q4_lm.load_model opens models of all kinds."
        raise q4.CheckpointError("load_model", name="folder", rule=rule, value=found, where=where, hint=hint)
    return read_folder(folder, empty_model(facts, where), q4.default_session() if session is None else session)


def write_folder(model: nn.Module, empty: nn.Module, facts: Mapping[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Write a model and the facts that it is built again from.

    Args:
        model: The model.
        empty: What these facts build: the model before its values and before packing.
        facts: For ``config.json``.
        folder: Where.

    Returns:
        The safetensors file.

    Raises:
        InputError: A layer trains in four bits, but the facts do not say so.
        CheckpointError: The model was changed beyond what they say, or the files can't be written.
    """
    values = _values_of(model)
    _compare(empty, values, str(folder))
    for name, module in model.named_modules():
        is_trained = isinstance(module, (STELinear, STEConv2d, STERecurrent))
        if is_trained and getattr(empty.get_submodule(name), "format", None) != module.format:
            hint = "pack_ the model first; Trainer(checkpoint=...) stores a model that is still training."
            raise q4.InputError("save_model", name=f"layer {name!r}", rule="packed", value=module.format, hint=hint)
    dense: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if isinstance(value, q4.PackedWeight):
            text = q4.WeightSpec.of(value).to_json()
            dense[f"{name}:spec"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            dense |= {f"{name}:{field}": tensor for field, tensor in value.tensors()}
        else:
            dense[name] = value
    # No dialect holds every format; to a writer these are plain tensors, and any dialect will do.
    return q4.save_checkpoint(folder, {}, dialect="simple-nf4", dense=dense, config={"model_type": KIND, **facts})


def read_folder(folder: str | os.PathLike[str], model: nn.Module, session: q4.Session) -> nn.Module:
    """Fill the model that a folder's facts build, and return it in evaluation mode.

    Args:
        folder: Where the tensors are.
        model: The model before its values and before packing; parameters may be on the meta device.
        session: Makes the packed layers.

    Raises:
        CheckpointError: Tensors are missing, not expected, of another shape, or damaged.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError: No backend can run a layer.
    """
    with q4.open(folder) as checkpoint:
        values = _stored(checkpoint.dense, str(folder))
    _compare(model, values, str(folder))
    device = resolve_device(q4.resolve_config(session.config), torch.device("cpu"))
    dtype = session.config.compute_dtype
    dense = {
        name: value.to(device, dtype if value.is_floating_point() else None)
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    factors = dense.pop(_FACTORS, None)
    model.load_state_dict(dense, strict=False, assign=True)
    if getattr(model, "is_tied", False):
        model.tie()  # type: ignore[operator]  # a decoder
    if factors is not None:
        model.divide_frequencies(factors)  # type: ignore[operator]  # compared above: a decoder
    place_packed_(model, {name: item for name, item in values.items() if isinstance(item, q4.PackedWeight)}, session)
    return model.eval()


def empty_model(facts: Mapping[str, Any], where: str) -> nn.Module:
    """Return the model of a description, before its values are loaded and before packing."""
    given = facts.get("description")
    if not isinstance(given, dict) or not all(isinstance(layer, dict) for layer in given.get("layers", [None])):
        raise q4.CheckpointError("model folder", name="description", rule="a model's", value=given, where=where)
    layers = [{name: item for name, item in layer.items() if name != "trainable"} for layer in given["layers"]]
    model = build({**given, "layers": layers})
    for layer, options in zip(model, given["layers"], strict=True):
        set_options(layer, options)
    return model


def _rows(model: nn.Module) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield the names of layers that packing renamed, with the matrices whose rows they hold: how many, 0 for all."""
    module: Any
    for name, module in model.named_modules():
        at = f"{name}." if name else ""
        if isinstance(module, Q4Recurrent):
            for index, end in enumerate(module.ends):
                for key, kind in (("inputs", "ih"), ("states", "hh")):
                    yield f"{at}{key}.{index}", [(f"{at}inner.weight_{kind}{end}", 0)]
        elif isinstance(module, (FilledLinear, Q4Conv2d, PackedEmbedding)):
            yield f"{at}layer", [(f"{at}weight", 0)]
        for joined, parts in getattr(module, "joins", {}).items():
            names = iter(parts)
            for index, sizes in enumerate(getattr(getattr(module, joined), "parts", ())):
                yield f"{at}{joined}.layers.{index}", [(f"{at}{next(names)}.weight", size) for size in sizes]


def _values_of(model: nn.Module) -> Values:
    """Return a model's tensors and packed matrices by their names before packing."""
    rows, values, heads = dict(_rows(model)), {}, []
    for name, module in model.named_modules():
        if name not in rows and not isinstance(module, q4.Q4Linear):
            continue
        heads.append(f"{name}.")
        if isinstance(module, q4.Q4Linear):
            whole: Any = module.packed_weight().relabelled(dtype=module.dtype)  # in which the layer computes
        else:
            whole = module.weight.detach()
        start = 0
        for key, size in rows.get(name, [(f"{name}.weight", 0)]):
            count = size or whole.shape[0]
            values[key] = whole if count == whole.shape[0] else whole.narrow(0, start, count)
            if module.bias is not None:
                head, _, leaf = key.rpartition(".")
                values[f"{head}.{leaf.replace('weight', 'bias')}"] = module.bias.detach().narrow(0, start, count)
            start += count
    skipped = (*heads, "lm_head.") if getattr(model, "is_tied", False) else (*heads,)
    values |= {name: value for name, value in model.state_dict().items() if not name.startswith(skipped)}
    rotaries = (module for module in model.modules() if isinstance(module, RotaryEmbedding))
    if (factors := next((item.factors for item in rotaries), None)) is not None:
        values[_FACTORS] = factors
    return values


def _stored(dense: Mapping[str, torch.Tensor], where: str) -> Values:
    """Return the tensors and packed matrices of a file, in memory of their own."""
    values: Values = {}
    formats = q4.default_registry().formats().values()
    for name in dense:
        key, _, field = name.partition(":")
        if not field:
            values[name] = dense[name].clone()
        if field != "spec":
            continue
        try:
            text = bytes(dense[name].tolist()).decode()
            spec = q4.WeightSpec.from_json(text, formats=formats, where=name)
            parts = [dense[f"{key}:{item}"].clone() for item in spec.fields]
            values[key] = spec.build(parts, name=key.removesuffix(".weight"))
        except (KeyError, ValueError, TypeError) as error:  # WeightError among them
            rule = "a packed matrix"
            raise q4.CheckpointError("model", name=key, rule=rule, value=str(error), where=where) from error
    return values


def _compare(model: nn.Module, values: Values, where: str) -> None:
    """Refuse values that are not a model's, all of them at once."""
    own, is_decoder = model.state_dict(), hasattr(model, "divide_frequencies")
    is_tied = getattr(model, "is_tied", False)
    known = {*values, "lm_head.weight"} if is_tied else {*values}
    problems = [f"{name} is missing" for name in own if name not in known]
    if is_tied and isinstance(values.get("lm_head.weight"), torch.Tensor):
        problems.append("lm_head.weight is unexpected, as the config ties it to the embedding")
    for name, value in values.items():
        if name not in own:
            problems += [] if name == _FACTORS and is_decoder else [f"{name} is unexpected"]
            continue
        shape, found = list(own[name].shape), list(value.shape)
        if isinstance(value, q4.PackedWeight):  # whole blocks
            shape = list(own[name].flatten(1).shape)
            fits = found[0] == shape[0] and 0 <= found[1] - shape[1] < value.block_size
        else:
            fits = found == shape
        problems += [] if fits else [f"{name} is of shape {found}, not {shape}"]
    if problems:
        more = f"; and {len(problems) - 20} more" if len(problems) > 20 else ""  # noqa: PLR2004  # a screenful
        text, hint = "; ".join(problems[:20]) + more, "The weights and config.json are of different models."
        raise q4.CheckpointError("model", name="tensors", rule="the model's", value=text, where=where, hint=hint)
