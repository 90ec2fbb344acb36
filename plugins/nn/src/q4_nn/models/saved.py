"""Models in files: GGUF, Hugging Face folders, and folders of our own, which give back every bit that was saved.

A folder of our own holds ``config.json`` (``model_type`` ``q4_nn``, with a ``TransformerConfig`` or a description) and
``model.safetensors``. A tensor has the name that it has in the model before packing. A packed matrix ``x`` is
``x:spec`` (uint8, the JSON of ``WeightSpec``) and ``x:<field>`` for each tensor field of ``PackedWeight``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import q4core as q4
from q4_nn.blocks.packed import FilledLinear, Q4Conv2d, Q4Recurrent
from q4_nn.blocks.rotary import RotaryEmbedding
from q4_nn.models.architecture import build_decoder
from q4_nn.models.config import TransformerConfig
from q4_nn.models.hf import build_from_hf
from q4_nn.models.metadata import Metadata
from q4_nn.models.read_json import read_json
from q4_nn.models.transformer import PackedEmbedding, TransformerDecoder, TransformerEncoder, empty_transformer
from q4_nn.registry.description import build, describe
from q4_nn.registry.layer_type import set_options
from q4_nn.training.layers import STEConv2d, STELinear, STERecurrent
from q4_nn.training.packing import place_packed_
from q4core.plugin_api import resolve_device

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    Values = dict[str, q4.PackedWeight | torch.Tensor]

__all__ = ["load_model", "save_model"]

_KIND, _FACTORS = "q4_nn", "rope_freqs"


def save_model(model: nn.Module, folder: str | os.PathLike[str]) -> Path:
    """Write a model to a folder, from which ``load_model`` makes the same one; whole, or not at all.

    Args:
        model: A decoder or an encoder, or a model that ``describe`` tells (one layer becomes a model of one). Float
            layers keep their dtype, packed ones their bytes: codes, scales and layout.
        folder: Where; files of an older model there give way.

    Returns:
        The safetensors file.

    Raises:
        ConfigError: The model is none of these.
        InputError: A layer trains in four bits, but the config or description does not say so.
        CheckpointError: The model was changed beyond what they say, or the files can't be written.
    """
    if isinstance(model, (TransformerDecoder, TransformerEncoder)):
        told = {"config": model.config.to_dict()}
    else:
        model = model if isinstance(model, nn.Sequential) else nn.Sequential(model)
        told = {"description": describe(model)}
    values, again = _values_of(model), _empty(told, str(folder))
    _compare(again, values, str(folder))
    for name, module in model.named_modules():
        is_trained = isinstance(module, (STELinear, STEConv2d, STERecurrent))
        if is_trained and getattr(again.get_submodule(name), "format", None) != module.format:
            hint = "pack_ the model first; Trainer(checkpoint=...) keeps what goes on training."
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
    return q4.save_checkpoint(folder, {}, dialect="simple-nf4", dense=dense, config={"model_type": _KIND, **told})


def load_model(path: str | os.PathLike[str], session: q4.Session | None = None) -> nn.Module:
    """Build the model that a file or folder holds, in evaluation mode; a tokenizer is not needed.

    Args:
        path: A GGUF file, a folder in Hugging Face's form, or one of ``save_model``'s. Dense tensors
            become the session's ``compute_dtype``; unless told, float32, and of ours what they were.
        session: Makes the packed layers; the default session unless told.

    Returns:
        ``TransformerDecoder`` or ``TransformerEncoder``, or the ``nn.Sequential`` of a description.

    Raises:
        CheckpointError: A file is missing or malformed, the kind of model is not served, or tensors are missing, not
            expected, or of another shape; it names them.
        ConfigError: What ``config.json`` tells is not legal.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError: Nothing may serve a layer.
    """
    session = q4.default_session() if session is None else session
    where, told = str(path), read_json(Path(path) / "config.json")
    if Path(path).is_dir() and told.get("model_type") != _KIND:
        return build_from_hf(Path(path), session)
    with q4.open(path) as checkpoint:
        if not Path(path).is_dir():
            return build_decoder(checkpoint, session, Metadata(checkpoint.metadata, where))
        model, values = _empty(told, where), _stored(checkpoint.dense, where)
    _compare(model, values, where)
    device = resolve_device(q4.resolve_config(session.config), torch.device("cpu"))
    dtype = session.config.compute_dtype
    dense = {
        name: value.to(device, dtype if value.is_floating_point() else None)
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    factors = dense.pop(_FACTORS, None)
    model.load_state_dict(dense, strict=False, assign=True)
    if isinstance(model, TransformerDecoder):
        model.tie()
        if factors is not None:
            model.divide_frequencies(factors)
    place_packed_(model, {name: item for name, item in values.items() if isinstance(item, q4.PackedWeight)}, session)
    return model.eval()


def _empty(told: Mapping[str, Any], where: str) -> nn.Module:
    """Return the model that a ``config.json`` tells, before its values and before packing."""
    if isinstance(told.get("config"), dict):
        return empty_transformer(TransformerConfig.from_dict(told["config"]))
    given = told.get("description")
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
    skipped = (*heads, "lm_head.") if _is_tied(model) else (*heads,)
    values |= {name: value for name, value in model.state_dict().items() if not name.startswith(skipped)}
    rotaries = (module for module in model.modules() if isinstance(module, RotaryEmbedding))
    if (factors := next((item.factors for item in rotaries), None)) is not None:
        values[_FACTORS] = factors
    return values


def _is_tied(model: nn.Module) -> bool:
    return isinstance(model, TransformerDecoder) and model.config.tie_word_embeddings


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
    own = model.state_dict()
    known = {*values, "lm_head.weight"} if _is_tied(model) else {*values}
    problems = [f"{name} is missing" for name in own if name not in known]
    if _is_tied(model) and isinstance(values.get("lm_head.weight"), torch.Tensor):
        problems.append("lm_head.weight is unexpected, as the config ties it to the embedding")
    for name, value in values.items():
        if name not in own:
            problems += [] if name == _FACTORS and isinstance(model, TransformerDecoder) else [f"{name} is unexpected"]
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
