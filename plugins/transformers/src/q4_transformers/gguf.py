"""GGUF files for models of transformers: the header and the names as q4_lm reads them, and packed weights.

transformers' own loader dequantises such a file, and ignores most of its header. Here what transformers' model of that
kind does not compute is an error. q4_lm's names say what each tensor is; rows of q and k that the file permutes are put
in transformers' order, packed as they are.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch
import transformers
from torch import nn

import q4core as q4
from q4_lm import config_from_gguf, config_to_hf
from q4_lm.models.gguf_names import names_of
from q4_lm.models.hf_names import to_hf_name
from q4_nn import RopeScaling
from q4_transformers.experts import place_experts
from q4_transformers.names import Names
from q4_transformers.places import Place, fitting_problem, raise_unfit, shape_of
from q4core import CheckpointError, ConfigError, PackedWeight, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from q4_lm import TransformerConfig
    from q4core import Checkpoint

__all__ = ["GgufFile", "config_of", "open_gguf"]

_KINDS = {
    **{name: name for name in ("bert", "gemma2", "granite", "llama", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")},
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "qwen3moe": "qwen3_moe",
}
"""Architecture → transformers' name, where both packages compute it, and its matrices are used unchanged."""
_PERMUTED = {".q_proj": "num_attention_heads", ".k_proj": "num_key_value_heads"}
_TURNED = "rope_freqs.weight"
_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
"""In the config, which has them from the file."""
_TOKENS = {"bos": ("bos",), "eos": ("eos", "eot", "eom"), "pad": ("padding",)}
"""Special token → the file's words for it; of several, each ends a text."""
_EXPERTS = ".mlp.experts."
_STACKED = 3
"""Dimensions of a tensor of all experts' matrices."""


@attrs.frozen
class GgufFile:
    """A GGUF file, and what of it goes where in one model.

    Args:
        path: The file.
        places: The place of each packed layer.
        heads: Layer whose rows the file interleaves → heads that it has.
        experts: Names of the experts' layers, packed or not.
    """

    path: Path
    places: tuple[Place, ...]
    heads: Mapping[str, int]
    experts: tuple[str, ...] = ()

    def weight(self, checkpoint: Checkpoint, stored: str) -> PackedWeight:
        """Return a layer's weight, with its rows in transformers' order."""
        weight = checkpoint[stored]
        return weight if stored not in self.heads else weight.take_rows(_order(weight.out_features, self.heads[stored]))


def _order(rows: int, heads: int) -> torch.Tensor:
    """Return the rows of a permuted matrix in transformers' order."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def open_gguf(path: Path) -> tuple[Any, type[Any], GgufFile, dict[str, torch.Tensor]]:
    """Return config, model class, places and dense tensors of a GGUF file; the latter are views of the file.

    A packed matrix of a module that is no linear layer (the embedding, in which rows are looked up; a router) becomes
    a dense one. Where the head shares the embedding, the head stays packed, and the two are no longer tied.

    Raises:
        CheckpointError: The file is malformed, or of an architecture that is not supported.
        SchemaError: A tensor has no place in the model, or is of a type that is not read.
    """
    with q4.open(path) as checkpoint:
        own, config = _configs_of(checkpoint)
        with torch.device("meta"):
            model = _auto(own).from_config(config, **_options(own))
        raise_unfit(model, checkpoint, checkpoint.schema.unsupported)
        if not checkpoint.schema.layers:
            _refuse(str(path), "layers", "packed, some of them at least", "dense ones alone")
        filling = _Filling(own, config, model, checkpoint)
        filling.fill()
        places, heads, experts = filling.places, filling.heads, filling.experts
        return config, type(model), GgufFile(path, tuple(places), heads, tuple(experts)), filling.state


def _auto(own: TransformerConfig) -> Any:
    return transformers.AutoModelForCausalLM if own.causal else transformers.AutoModel


def _options(own: TransformerConfig) -> dict[str, bool]:
    """Return arguments of the model's class beyond the config: a file of an encoder has no pooler."""
    return {} if own.causal else {"add_pooling_layer": False}


class _Filling:
    """Finds the place of every tensor of a file in a model on the meta device, whose experts it replaces."""

    def __init__(self, own: TransformerConfig, config: Any, model: Any, checkpoint: Checkpoint) -> None:
        self._own, self._config, self._model, self._checkpoint = own, config, model, checkpoint
        self._ours = names_of(own, checkpoint.metadata["general.architecture"]).ours
        self.state: dict[str, torch.Tensor] = {}
        self.places: list[Place] = []
        self.heads: dict[str, int] = {}
        self.experts: list[str] = []
        self._problems: list[Problem] = []
        self._merged: dict[str, torch.Tensor] = {}

    def fill(self) -> None:
        """Find all places, or raise the error that names each tensor without one, and each that is missing."""
        checkpoint, model = self._checkpoint, self._model
        self.experts = [
            self._name(name)
            for name in (*checkpoint, *self._dense_names())
            if _EXPERTS in self._name(name) and not name.endswith(".bias")
        ]
        self.experts = [name.removesuffix(".weight") for name in self.experts]
        place_experts(model, self.experts, Names(model))
        self._modules = dict(model.named_modules())
        for name in checkpoint.dense:
            if name not in {*_FACTORS, _TURNED}:
                self._take_dense(name)
        self._join_biases()
        for stored, layer in checkpoint.schema.layers.items():
            self._take_packed(stored, layer.shape)
        filled = {*self.state, *model.all_tied_weights_keys, *(f"{place.module}.weight" for place in self.places)}
        missing = [name for name in model.state_dict() if name not in filled]
        self._problems += [
            Problem("missing_key", name, f"in the file, as {type(model).__name__} has it") for name in missing
        ]
        raise_unfit(model, checkpoint, self._problems)

    def _dense_names(self) -> Iterator[str]:
        """Yield names of dense tensors, those of the experts one by one."""
        infos: Mapping[str, Any] = self._checkpoint.dense.infos
        for name, info in infos.items():
            if len(info.shape) == _STACKED:
                yield from (f"{name.removesuffix('.weight')}.{number}.weight" for number in range(info.shape[0]))
            else:
                yield name

    def _name(self, stored: str) -> str:
        """Return transformers' name of a tensor or module of the file."""
        name = to_hf_name(f"{self._ours(stored)}.", self._own).removesuffix(".")
        return name if self._config.model_type == "gpt_oss" else name.replace(".mlp.router", ".mlp.gate")

    def _take_dense(self, name: str) -> None:
        values, target = self._checkpoint.dense[name], self._name(name)
        if values.dim() == _STACKED:
            parts = {f"{name.removesuffix('.weight')}.{number}.weight": part for number, part in enumerate(values)}
            self.state |= {self._name(one): part for one, part in parts.items()}
            return
        if _EXPERTS in target and target.endswith(".bias"):
            self._merged[target] = values
            return
        parameter = self._model.state_dict().get(target)
        if parameter is None:
            self._problems.append(Problem("unknown_key", name, f"a tensor of {type(self._model).__name__}"))
            return
        if tuple(parameter.shape) != tuple(values.shape):
            rule = f"{list(parameter.shape)}, as in the model's config"
            self._problems.append(Problem("shape", name, rule, list(values.shape)))
            return
        heads = self._heads(target.rpartition(".")[0])
        if heads:
            values = values[_order(values.shape[0], heads)]
        if self._own.norm == "offset_rms" and target.endswith("norm.weight"):
            values = values.float() - 1  # which the file adds, as transformers does
        self.state[target] = values

    def _heads(self, module: str) -> int:
        """Return the heads whose rows the file interleaves, of a layer of transformers'; 0 of others."""
        found = next((name for end, name in _PERMUTED.items() if module.endswith(end)), None)
        return getattr(self._own, found) if found and self._own.rope_interleaved else 0

    def _join_biases(self) -> None:
        """Give the experts' biases, one tensor for each part, as transformers has them: gate and up by turns."""
        for name, down in self._merged.items():
            if name.endswith("down_proj.bias"):
                holder = name.removesuffix("down_proj.bias")
                self.state[f"{holder}down_proj_bias"] = down
                both = [self._merged.get(f"{holder}{part}_proj.bias") for part in ("gate", "up")]
                if all(part is not None for part in both):
                    self.state[f"{holder}gate_up_proj_bias"] = torch.stack(both, -1).flatten(1)  # type: ignore[arg-type]

    def _take_packed(self, stored: str, shape: tuple[int, int] | None) -> None:
        model, name = self._model, self._name(stored)
        module = self._modules.get(name)
        weight = getattr(module, "weight", None)
        if module is not None and shape_of(module) is None and weight is not None and tuple(weight.shape) == shape:
            self.state[f"{name}.weight"] = q4.dequantize(self._checkpoint[stored], torch.float32)
            if isinstance(module, nn.Embedding) and self._own.causal and self._config.tie_word_embeddings:
                head = next(name for name, item in self._modules.items() if item is model.get_output_embeddings())
                self.places.append(Place(stored, head, saved=head))
                self._config.tie_word_embeddings = False
            return
        problem = fitting_problem(stored, shape, name, self._modules, type(model).__name__)
        self._problems += [] if problem is None else [problem]
        self.places.append(Place(stored, name, saved=name))
        if heads := self._heads(name):
            self.heads[stored] = heads


def config_of(checkpoint: Checkpoint) -> Any:
    """Return transformers' config of a GGUF file's model, with all that the header says of what is computed.

    Raises:
        CheckpointError: The architecture is not supported, or transformers' model of it computes something else.
    """
    return _configs_of(checkpoint)[1]


def _configs_of(checkpoint: Checkpoint) -> tuple[TransformerConfig, Any]:
    where = str(checkpoint.path)
    architecture = checkpoint.metadata.get("general.architecture")
    if architecture not in _KINDS:
        _refuse(where, "general.architecture", f"one of {', '.join(_KINDS)}", architecture)
    own = config_from_gguf(checkpoint.path)
    if own.norm_position == "both":  # Gemma, whose norms lose the 1 that the file adds, as transformers adds it
        own = attrs.evolve(own, norm="offset_rms", attention_scale=own.attention_scale or own.head_dim**-0.5)
    if architecture == "granite":
        own = attrs.evolve(own, attention_scale=own.attention_scale or own.head_dim**-0.5)
    if own.rope_dim != own.head_dim and architecture != "phi3":
        key, rule = f"{architecture}.rope.dimension_count", f"{own.head_dim}, as transformers turns the whole head"
        _refuse(where, key, rule, own.rope_dim)
    if _TURNED in checkpoint.dense:
        own = attrs.evolve(own, rope_scaling=_llama3(checkpoint, own))
    kind = _kind(architecture, own)
    try:
        facts = config_to_hf(own, kind)
    except ConfigError as error:
        _refuse(where, "header", str(error.rule), kind)
    if kind == "phi3":
        facts["original_max_position_embeddings"] = own.rope_scaling.original_context or own.max_position_embeddings
    try:
        return own, transformers.AutoConfig.for_model(**facts, **_special_tokens(checkpoint.metadata))
    except Exception as error:  # noqa: BLE001  # transformers' own check of a config, of a class that depends on the release
        _refuse(where, "header", f"a config of transformers ({error})", kind)


def _kind(architecture: str, own: TransformerConfig) -> str:
    """Return transformers' name of what an architecture's file holds."""
    if architecture == "llama" and own.num_experts:
        return "mixtral"
    sliding = {"llama": "mistral", "olmo2": "olmo3"} if own.sliding_layers else {}
    return sliding.get(architecture, _KINDS[architecture])


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of special tokens for the config; of several that end a text, all."""
    result: dict[str, Any] = {}
    for name, words in _TOKENS.items():
        keys = [f"tokenizer.ggml.{word}_token_id" for word in words]
        found = list(dict.fromkeys(metadata[key] for key in keys if key in metadata))
        result[f"{name}_token_id"] = found if len(found) > 1 else next(iter(found), None)
    return result


def _llama3(checkpoint: Checkpoint, own: TransformerConfig) -> RopeScaling:
    """Return the scaling of Llama 3 whose divisors of the frequencies a file has, as it does not say the scaling."""
    divisors = checkpoint.dense[_TURNED].float()
    plain = RopeScaling().frequencies(own.rope_dim, own.rope_theta, 1)
    factor = float(divisors.max()) if divisors.dim() == 1 and len(divisors) == len(plain) else 0.0
    make = functools.partial(RopeScaling, kind="llama3", factor=round(factor, 3))
    for context in (2**power for power in range(4, 21) if factor > 1 and own.rope_scaling == RopeScaling()):
        scaling = make(original_context=context)
        if torch.allclose(plain / scaling.frequencies(own.rope_dim, own.rope_theta, 1), divisors, rtol=1e-4):
            return scaling
    rule = "the divisors of a scaling of Llama 3, which is all that transformers computes of it"
    return _refuse(str(checkpoint.path), _TURNED, rule, list(divisors.shape))


def _refuse(where: str, name: str, rule: str, value: object) -> NoReturn:
    hint = "q4_lm.LanguageModel.open(path) may support it."
    raise CheckpointError("GGUF file", name=name, rule=rule, value=value, where=where, hint=hint)
