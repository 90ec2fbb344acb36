"""A Hugging Face folder's model as a GGUF file: its names, its order of rows, its facts and its vocabulary as metadata.

Reference:
    Keys of the GGUF specification; which rows and norms are changed is what llama.cpp's converter does.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NoReturn, cast

import attrs
import torch

from q4_lm.exchange.gguf_to_hf import LazyItems
from q4_lm.exchange.vocabulary_to_gguf import vocabulary_keys
from q4_lm.models.architecture import architectures
from q4_lm.models.gguf_rope import FACTORS, LONG, SHORT
from q4_lm.models.hf import IGNORED, has_other_head
from q4_lm.models.hf_config import config_from_hf
from q4_lm.models.hf_names import from_hf_name, fused_parts
from q4_lm.models.metadata import Metadata
from q4_lm.models.read_json import read_json
from q4_lm.models.transformer import empty_transformer
from q4_nn.blocks.rotary import RopeScaling
from q4core import CheckpointError, Schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from q4_lm.models.config import TransformerConfig
    from q4core import Checkpoint, PackedWeight

__all__ = ["GgufModel", "to_gguf"]

_KINDS = {
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen3_moe": "qwen3moe",
}
"""Hugging Face's kind of model → GGUF's, where it has another name."""
_EXPERT = re.compile(r"layers\.\d+\.mlp\.experts\.(\d+)\.\w+_proj(?:\.weight|\.bias)?")
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq|.*\.masked_bias|.*\.attn\.bias")
_UNNAMED = re.compile(r"^blk\.\d+\.(?:mlp|self_attn)\.|layernorm")
"""Names that a file has no other for, so that they stay ours."""
_WIDE = re.compile(r".*ffn_gate_inp\.weight")
"""Matrices that files have in float32."""
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CLOSE = 1e-6


@attrs.frozen
class GgufModel:
    """What a file holds, lazily.

    Args:
        weights: Module → packed weight, its rows in the file's order; experts by their numbers.
        dense: Name → tensor.
        stored: Module → its name in the folder.
        metadata: Key → value.
    """

    weights: Mapping[str, PackedWeight]
    dense: Mapping[str, torch.Tensor]
    stored: Mapping[str, str]
    metadata: Mapping[str, Any]


def to_gguf(checkpoint: Checkpoint, home: Path) -> GgufModel:
    """Return an opened checkpoint's model as a GGUF file.

    Args:
        checkpoint: The checkpoint of the folder.
        home: The folder, with ``config.json`` and, for the vocabulary, ``tokenizer.json``.

    Raises:
        CheckpointError: The kind of model has no GGUF architecture that computes the same, or its vocabulary has no
            equal in such files; the message names what.
    """
    config = config_from_hf(home)
    given = read_json(home / "config.json")
    name = str((given.get("text_config") or given).get("model_type", given.get("model_type")))
    if name == "gemma3":
        name = "gemma3_text"
    kind = _KINDS.get(name, name)
    where = str(home / "config.json")
    known = architectures()
    if kind not in known or not config.causal:
        rule = f"one of {', '.join(sorted(known.keys() - {'bert'}))}, by GGUF's names"
        raise CheckpointError("GGUF metadata", name="model_type", rule=rule, value=name, where=where)
    if config.tie_word_embeddings and has_other_head(checkpoint, config):
        config = attrs.evolve(config, tie_word_embeddings=False)
    writer = _Writer(checkpoint, config, kind, where)
    metadata = {
        "general.architecture": kind,
        "general.name": str(given.get("_name_or_path") or "") or home.resolve().name,
        **{f"{kind}.{key}": value for key, value in writer.facts().items()},
        **vocabulary_keys(home, config.vocab_size),
    }
    return writer.contents(metadata)


class _Writer:
    """The names, tensors and facts of one model in a GGUF file."""

    def __init__(self, checkpoint: Checkpoint, config: TransformerConfig, kind: str, where: str) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._where = where
        self._architecture = architectures()[kind]
        self._names = self._architecture.names(config)
        self._scaling = self._rope_tensors()
        self._is_permuted = False

    def _fail(self, name: str, rule: str, value: object) -> NoReturn:
        hint = f"A GGUF file of kind {self._architecture.name!r} can't say it; llama.cpp would compute something else."
        raise CheckpointError("GGUF metadata", name=name, rule=rule, value=value, where=self._where, hint=hint)

    def contents(self, metadata: Mapping[str, Any]) -> GgufModel:
        weights: dict[str, str] = {}
        dense: dict[str, list[str]] = {}
        for source in (*self._checkpoint, *self._checkpoint.dense):
            ours = from_hf_name(source, self._config)
            if self._is_idle(source, ours):
                continue
            theirs, expert = self._names.theirs(ours), _EXPERT.fullmatch(ours)
            if source not in self._checkpoint:
                dense.setdefault(theirs, []).append(source)
            elif expert is None:
                weights[theirs] = source
            else:
                weights[f"{theirs}.{expert[1]}"] = source
        self._check_names()
        tensors = {name: "\n".join(sorted(sources, key=_natural)) for name, sources in dense.items()}
        self._check(metadata, weights, tensors)
        found = LazyItems({**tensors, **dict.fromkeys(self._scaling, "")}, self._tensor)
        return GgufModel(LazyItems(weights, self._weight), found, weights, metadata)

    def _check_names(self) -> None:
        """Refuse a folder with tensors that the model does not have, or without some that it has."""
        config, there = self._config, set()
        wanted = {*empty_transformer(config).state_dict()}
        if config.tie_word_embeddings:
            wanted -= {name for name in wanted if name.startswith("lm_head.")}
        for source in (*self._checkpoint, *self._checkpoint.dense):
            ours = from_hf_name(source, config)
            stem, leaf = (ours, "weight") if source in self._checkpoint else ours.rpartition(".")[::2]
            there |= (found := {f"{part}.{leaf}" for part in fused_parts(stem, config)})
            is_named = _UNNAMED.search(self._names.theirs(ours)) is None
            if not (found <= wanted and is_named) and not self._is_idle(source, ours):
                self._fail("tensor", f"one that a model of kind {self._architecture.name!r} has", source)
        if missing := sorted(wanted - there):
            self._fail("tensor", "present", f"{len(missing)} missing: {', '.join(missing[:3])}")

    def _is_idle(self, source: str, ours: str) -> bool:
        """Return whether a tensor is left out: a head that is the embedding, or a buffer."""
        is_tied_head = self._config.tie_word_embeddings and ours.startswith("lm_head")
        return is_tied_head or source.startswith(IGNORED) or _BUFFERS.fullmatch(source) is not None

    def _order(self, name: str, count: int) -> torch.Tensor | None:
        """Return the order of rows of q or k in which the members of a pair are neighbours, where the kind has that."""
        config = self._config
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if not self._is_permuted or part not in heads:
            return None
        if config.rope_dim != config.head_dim:
            self._fail("partial_rotary_factor", "1 for a kind whose rows are reordered", config.rope_dim)
        return torch.arange(count).view(heads[part], 2, -1).transpose(1, 2).reshape(-1)

    def _weight(self, name: str, source: str) -> PackedWeight:
        found = self._checkpoint[source]
        order = self._order(name, found.out_features)
        return found if order is None else found.take_rows(order)

    def _tensor(self, name: str, source: str) -> torch.Tensor:
        if name in self._scaling:
            return self._scaling[name]
        parts = [self._checkpoint.dense[part] for part in source.split("\n")]
        found = parts[0] if len(parts) == 1 else torch.stack(parts)
        order = self._order(name, found.shape[0])
        if order is not None:
            found = found[order]
        if found.dim() == 1 or _WIDE.fullmatch(name) or found.dtype not in _FLOATS:
            found = found.to(torch.float32)
        is_norm = found.dim() == 1 and name.endswith("norm.weight")
        return found + 1 if is_norm and self._config.norm == "offset_rms" else found

    def _rope_tensors(self) -> dict[str, torch.Tensor]:
        """Return the divisors of rotary frequencies that the file has as tensors."""
        config, scaling = self._config, self._config.rope_scaling
        if scaling.kind == "llama3":
            plain = RopeScaling().frequencies(config.rope_dim, config.rope_theta, 1)
            return {FACTORS: plain / scaling.frequencies(config.rope_dim, config.rope_theta, 1)}
        if scaling.kind == "longrope":
            return {LONG: torch.tensor(scaling.long_factor), SHORT: torch.tensor(scaling.short_factor)}
        return {}

    def facts(self) -> dict[str, Any]:
        """Return what the metadata says of the model, without the kind before each key."""
        config, kind = self._config, self._architecture.name
        found: dict[str, Any] = {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "attention.layer_norm_rms_epsilon": float(config.norm_eps),
            "rope.dimension_count": config.rope_dim,
            "rope.freq_base": float(config.rope_theta),
            "vocab_size": config.vocab_size,
        }
        if config.num_experts:
            found |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
            found |= {"expert_feed_forward_length": config.intermediate_size} if kind == "qwen3moe" else {}
        if config.sliding_window and config.sliding_layers:
            found["attention.sliding_window"] = config.sliding_window
            if config.local_rope_theta not in {None, 10_000.0}:
                found["rope.freq_base_swa"] = float(config.local_rope_theta or 0)
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(config, name) is not None:
                found[name] = float(getattr(config, name))
        if kind == "granite":
            found |= {"embedding_scale": float(config.embedding_scale), "logit_scale": 1 / config.logit_scale}
            found |= {"residual_scale": float(config.residual_scale), "attention.scale": self._attention_scale(config)}
        return found | self._scaling_facts()

    def _scaling_facts(self) -> dict[str, Any]:
        scaling, prefix = self._config.rope_scaling, "rope.scaling."
        if scaling.kind in {"default", "llama3"}:
            return {}
        if scaling.kind == "linear":
            return {f"{prefix}type": "linear", f"{prefix}factor": float(scaling.factor)}
        original = {f"{prefix}original_context_length": scaling.original_context}
        if scaling.kind == "longrope":
            return original | {f"{prefix}attn_factor": float(scaling.amplitude())}
        if scaling.kind != "yarn":
            self._fail("rope_scaling.rope_type", "default, linear, yarn, longrope or llama3", scaling.kind)
        found = {f"{prefix}type": "yarn", f"{prefix}factor": float(scaling.factor), **original}
        plain = RopeScaling()
        for name in ("beta_fast", "beta_slow"):
            if getattr(scaling, name) != getattr(plain, name):
                found[f"{prefix}yarn_{name}"] = float(getattr(scaling, name))
        return found

    @staticmethod
    def _attention_scale(config: TransformerConfig) -> float:
        return float(config.attention_scale or config.head_dim**-0.5)

    def _check(self, metadata: Mapping[str, Any], weights: Mapping[str, str], dense: Mapping[str, str]) -> None:
        """Refuse a model that would be read as another one."""
        there = _There([*weights, *dense], {**dict.fromkeys(dense), **self._scaling})
        values = {key: _stored(value) for key, value in metadata.items()}
        again = self._architecture.config(cast("Checkpoint", there), Metadata(values, self._where))
        self._is_permuted = again.rope_interleaved
        for field in attrs.fields(type(again)):
            before, after = getattr(self._config, field.name), getattr(again, field.name)
            if field.name in {"rope_interleaved", "norm", "initializer_range", "dropout", "attention_dropout"}:
                continue
            if field.name == "attention_scale":
                before, after = self._attention_scale(self._config), self._attention_scale(again)
            if field.name == "rope_scaling":
                before, after = (_frequencies(config) for config in (self._config, again))
            if not _is_alike(before, after):
                self._fail(field.name, f"{after!r}, as such a file is read", before)


class _There:
    """The names of a file that is yet to be written, as an architecture asks for them."""

    def __init__(self, names: list[str], dense: Mapping[str, Any]) -> None:
        self._names = names
        self.dense = dense
        self.schema = Schema()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _stored(value: Any) -> Any:
    """Return a value as it is read again: floats have 32 bits."""
    return float(torch.tensor(value, dtype=torch.float32)) if isinstance(value, float) else value


def _frequencies(config: TransformerConfig) -> list[float]:
    """Return what decides on the rotary angles, but for the divisors that are tensors."""
    scaling = RopeScaling() if config.rope_scaling.kind == "llama3" else config.rope_scaling
    lengths = (1, config.max_position_embeddings)
    angles = [scaling.frequencies(config.rope_dim, config.rope_theta, length) for length in lengths]
    return [*torch.cat(angles).tolist(), float(scaling.amplitude())]


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return one is not None and other is not None and abs(one - other) <= _CLOSE * max(abs(one), abs(other))
    return bool(one == other)
