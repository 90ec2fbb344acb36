"""GGUF files for models of transformers: its own tables of names, q4_lm's reading of the header, and packed weights.

transformers' loader dequantises such a file, and ignores most of its header. The header is read by q4_lm
here, and what transformers' model of that kind does not compute is an error. transformers' tables say what the parts
are called and how the file orders rows of q and k; with these, packed rows are put in order as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch
import transformers
from torch import nn
from transformers import modeling_gguf_pytorch_utils as tables

import q4core as q4
from q4_lm import config_from_gguf, config_to_hf
from q4_transformers.places import Place, fitting_problem, raise_unfit
from q4core import CheckpointError, ConfigError, PackedWeight, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from q4core import Checkpoint

__all__ = ["GgufFile", "config_of", "open_gguf"]

_KINDS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma3": "gemma3_text"}
"""Architecture → transformers' name, where both packages compute it, and its matrices are used unchanged."""
_PERMUTED = (".attn_q", ".attn_k")
_TURNED = "rope_freqs.weight"
_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
"""In the config, which has them from the file."""
_TOKENS = {"bos": ("bos",), "eos": ("eos", "eot", "eom"), "pad": ("padding",)}
"""Special token → the file's words for it; of several, each ends a text."""


@attrs.frozen
class GgufFile:
    """A GGUF file, and what of it goes where in one model.

    Args:
        path: The file.
        places: The place of each packed layer.
        heads: Layer whose rows the file interleaves → heads that it has.
    """

    path: Path
    places: tuple[Place, ...]
    heads: Mapping[str, int]

    def weight(self, checkpoint: Checkpoint, stored: str) -> PackedWeight:
        """Return a layer's weight, with its rows in transformers' order."""
        weight = checkpoint[stored]
        if stored not in self.heads:
            return weight
        rows = torch.arange(weight.out_features).view(self.heads[stored], -1, 2)
        return weight.take_rows(rows.transpose(1, 2).reshape(-1))


def open_gguf(path: Path) -> tuple[Any, type[Any], GgufFile, dict[str, torch.Tensor]]:
    """Return config, model class, places and dense tensors of a GGUF file; the latter are views of the file.

    A packed embedding becomes a dense one, in which transformers looks rows up; where the head shares its weight, the
    head stays packed, and the two are no longer tied.

    Raises:
        CheckpointError: The file is malformed, or of an architecture that is not supported.
        SchemaError: A tensor has no place in the model, or is of a type that is not read.
    """
    with q4.open(path) as checkpoint:
        config, architecture = config_of(checkpoint), checkpoint.metadata["general.architecture"]
        kind = tables.TENSOR_PROCESSORS.get(architecture, tables.TensorProcessor)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        raise_unfit(model, checkpoint, checkpoint.schema.unsupported)
        if not checkpoint.schema.layers:
            _refuse(str(path), "layers", "packed, some of them at least", "dense ones alone")
        processor = kind(config=config.to_dict())
        names: dict[str, str] = tables.get_gguf_hf_weights_map(model, processor, architecture)
        modules = dict(model.named_modules())
        state: dict[str, torch.Tensor] = {}
        places, problems = [], []
        for name in checkpoint.dense:
            if name in names:
                values = checkpoint.dense[name]
                found = processor.process(
                    weights=values.float().numpy(), name=name, tensor_key_mapping=names, parsed_parameters={}
                )
                state[names[name]] = torch.from_numpy(found.weights)
            elif name not in _FACTORS:
                problems.append(Problem("unknown_key", name, f"a tensor of {type(model).__name__}"))
        for stored, layer in checkpoint.schema.layers.items():
            module = names.get(f"{stored}.weight", "").removesuffix(".weight")
            if isinstance(modules.get(module), nn.Embedding):
                state[f"{module}.weight"] = q4.dequantize(checkpoint[stored], torch.float32)
                if config.tie_word_embeddings:
                    head = next(name for name, item in modules.items() if item is model.get_output_embeddings())
                    places.append(Place(stored, head))
                    config.tie_word_embeddings = False
                continue
            problem = fitting_problem(stored, layer.shape, module, modules, type(model).__name__)
            problems += [] if problem is None else [problem]
            places.append(Place(stored, module))
        filled = {*state, *model.all_tied_weights_keys, *(f"{place.module}.weight" for place in places)}
        missing = [name for name in model.state_dict() if name not in filled]
        problems += [Problem("missing_key", name, f"in the file, as {type(model).__name__} has it") for name in missing]
        raise_unfit(model, checkpoint, problems)
        heads = {}
        if issubclass(kind, tables.LlamaTensorProcessor):
            q, k = config.num_attention_heads, config.num_key_value_heads
            heads = {
                place.stored: q if place.stored.endswith(_PERMUTED[0]) else k
                for place in places
                if place.stored.endswith(_PERMUTED)
            }
    return config, type(model), GgufFile(path, tuple(places), heads), state


def config_of(checkpoint: Checkpoint) -> Any:
    """Return transformers' config of a GGUF file's model, with all that the header says of what is computed.

    Raises:
        CheckpointError: The architecture is not supported, or transformers' model of it computes something else.
    """
    where = str(checkpoint.path)
    architecture = checkpoint.metadata.get("general.architecture")
    if architecture not in _KINDS:
        _refuse(where, "general.architecture", f"one of {', '.join(_KINDS)}", architecture)
    if _TURNED in checkpoint.dense:
        shape = list(checkpoint.dense.infos[_TURNED].shape)
        _refuse(where, _TURNED, "absent, as transformers passes over it", shape)
    own = config_from_gguf(checkpoint.path)
    if architecture == "gemma3":  # whose norms lose the 1 that the file adds, as transformers adds it
        own = attrs.evolve(own, norm="offset_rms", attention_scale=own.attention_scale or own.head_dim**-0.5)
    if own.rope_dim != own.head_dim and architecture != "phi3":
        key, rule = f"{architecture}.rope.dimension_count", f"{own.head_dim}, as transformers turns the whole head"
        _refuse(where, key, rule, own.rope_dim)
    kind = "mistral" if architecture == "llama" and own.sliding_layers else _KINDS[architecture]
    try:
        facts = config_to_hf(own, kind)
    except ConfigError as error:
        _refuse(where, "header", str(error.rule), kind)
    if kind == "phi3":
        facts["original_max_position_embeddings"] = own.rope_scaling.original_context or own.max_position_embeddings
    for name, words in _TOKENS.items():
        keys = [f"tokenizer.ggml.{word}_token_id" for word in words]
        found = list(dict.fromkeys(checkpoint.metadata[key] for key in keys if key in checkpoint.metadata))
        facts[f"{name}_token_id"] = found if len(found) > 1 else next(iter(found), None)
    try:
        return transformers.AutoConfig.for_model(**facts)
    except Exception as error:  # noqa: BLE001  # transformers' own check of a config, of a class that depends on the release
        _refuse(where, "header", f"a config of transformers ({error})", kind)


def _refuse(where: str, name: str, rule: str, value: object) -> NoReturn:
    hint = "q4_lm.LanguageModel.open(path) may support it."
    raise CheckpointError("GGUF file", name=name, rule=rule, value=value, where=where, hint=hint)
