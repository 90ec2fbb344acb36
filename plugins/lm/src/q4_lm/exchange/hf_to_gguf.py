"""A Hugging Face folder's model as a GGUF file: its names, its order of rows, its metadata, and its vocabulary.

Reference:
    Keys of the GGUF specification. What is written is read again before it is used: a fact that the header can't say is
    an error.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_lm.exchange.gguf_to_hf import GEMMA, PARTS, LazyItems
from q4_lm.exchange.vocabulary_to_gguf import vocabulary_keys
from q4_lm.models.architecture import architectures
from q4_lm.models.gguf_rope import FACTORS
from q4_lm.models.hf_config import config_from_hf
from q4_lm.models.hf_names import from_hf_name
from q4_lm.models.metadata import Metadata
from q4_nn.blocks.rotary import RopeScaling
from q4core import CheckpointError, Schema

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from q4_lm.models.config import TransformerConfig
    from q4core import Checkpoint, PackedWeight

__all__ = ["GgufModel", "to_gguf"]

_ALIKE = ("gemma2", "granite", "llama", "olmo2", "qwen2", "qwen3", "smollm3")
_KINDS = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    **{name: name for name in _ALIKE},
}
"""Hugging Face's kind of model → the architecture of a file."""
_TEXT_PARTS = {"gemma3": "gemma3_text"}
_NOT_SAID = frozenset({"initializer_range", "attention_dropout", "dropout", "rope_interleaved", "norm", "vocab_size"})
"""Fields of a config that a header does not have, or says in another way."""


@attrs.frozen
class GgufModel:
    """What a GGUF file holds, lazily.

    Args:
        weights: Module → packed weight, its rows in the file's order.
        dense: Name → tensor.
        stored: Module → its name in the folder.
        metadata: Key → value.
    """

    weights: Mapping[str, PackedWeight]
    dense: Mapping[str, torch.Tensor]
    stored: Mapping[str, str]
    metadata: Mapping[str, Any]


def to_gguf(checkpoint: Checkpoint, home: Path) -> GgufModel:
    """Return an opened folder's model as a GGUF file.

    Args:
        checkpoint: The opened folder.
        home: The folder, with ``config.json`` and ``tokenizer.json``.

    Raises:
        CheckpointError: GGUF has no architecture that computes the same, or no vocabulary like the folder's.
    """
    own = config_from_hf(home)
    values = json.loads((home / "config.json").read_text(encoding="utf-8"))
    text = values.get("text_config") or values
    kind = _KINDS.get(_TEXT_PARTS.get(str(text.get("model_type")), str(text.get("model_type"))))
    if kind is None:
        rule, where = f"one of {', '.join(_KINDS)}", str(home / "config.json")
        raise CheckpointError("q4 convert", name="model_type", rule=rule, value=text.get("model_type"), where=where)
    architecture = architectures()[kind]
    metadata = {**_keys(own, kind), "general.name": home.name, **vocabulary_keys(home, own.vocab_size)}
    found = attrs.evolve(own, norm="rms")
    names = architecture.names(found)
    theirs = functools.partial(_theirs, names=names, config=own)
    packed = {theirs(name): name for name in checkpoint}
    dense = {
        theirs(name): name for name in checkpoint.dense if not (own.tie_word_embeddings and name == "lm_head.weight")
    }
    if own.tie_word_embeddings:
        packed.pop("output", None)
    made: dict[str, torch.Tensor] = {}
    if own.rope_scaling.kind == "llama3":
        plain = RopeScaling().frequencies(own.rope_dim, own.rope_theta, 1)
        made[FACTORS] = plain / own.rope_scaling.frequencies(own.rope_dim, own.rope_theta, 1)
        dense[FACTORS] = FACTORS
    _check(metadata, own, kind, {*packed, *dense}, made, str(home))
    parts = _Parts(checkpoint, own, kind, made)
    return GgufModel(LazyItems(packed, parts.weight), LazyItems(dense, parts.tensor), packed, metadata)


def _theirs(name: str, *, names: Any, config: TransformerConfig) -> str:
    ours: str = from_hf_name(name if name.endswith((".weight", ".bias")) else f"{name}.weight", config)
    found: str = names.theirs(ours)
    return found if name.endswith((".weight", ".bias")) else found.removesuffix(".weight")


def _keys(config: TransformerConfig, kind: str) -> dict[str, Any]:
    """Return the header's facts of what is computed."""
    keys: dict[str, Any] = {
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
    scaling = config.rope_scaling
    if scaling.kind in {"linear", "yarn"}:
        keys |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    if scaling.kind == "yarn":
        keys["rope.scaling.original_context_length"] = scaling.original_context
        keys |= {f"rope.scaling.yarn_{name}": float(getattr(scaling, name)) for name in ("beta_fast", "beta_slow")}
    if config.sliding_window is not None:
        keys["attention.sliding_window"] = config.sliding_window
    if config.local_rope_theta is not None:
        keys["rope.freq_base_swa"] = float(config.local_rope_theta)
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    keys |= {name: float(cap) for name in caps if (cap := getattr(config, name)) is not None}
    if kind == "granite":
        keys |= {"embedding_scale": config.embedding_scale, "residual_scale": config.residual_scale}
        keys |= {"logit_scale": 1 / config.logit_scale, "attention.scale": config.attention_scale}
    return {"general.architecture": kind, **{f"{kind}.{key}": value for key, value in keys.items()}}


@attrs.frozen
class _Header:
    """What an architecture asks of an opened file, before there is one."""

    names: frozenset[str]
    dense: Mapping[str, Any]
    schema: Schema

    def __iter__(self) -> Any:
        return iter(self.names)


def _check(  # noqa: PLR0913  # the facts of one file
    metadata: Mapping[str, Any],
    config: TransformerConfig,
    kind: str,
    names: set[str],
    made: Mapping[str, torch.Tensor],
    where: str,
) -> None:
    """Read the metadata as a file's, and refuse a model of which it says something else.

    Raises:
        CheckpointError: A fact differs; it is named.
    """
    header: Any = _Header(frozenset(names), made, Schema(layers={}, dense=(), unsupported=()))
    found = architectures()[kind].config(header, Metadata(metadata, where))
    for field in attrs.fields(type(config)):
        wanted, said = getattr(config, field.name), getattr(found, field.name)
        if field.name == "rope_scaling":
            wanted, said = ((item.kind, item.factor) if item.kind != "llama3" else _NONE for item in (wanted, said))
        is_close = isinstance(wanted, float) and isinstance(said, float) and abs(wanted - said) <= _CLOSE * abs(wanted)
        is_scale = field.name == "attention_scale" and {wanted, said} <= {None, config.head_dim**-0.5}
        if field.name not in _NOT_SAID and wanted != said and not is_close and not is_scale:
            rule = f"{said!r}, as a GGUF file of {kind} can't say another"
            raise CheckpointError("q4 convert", name=field.name, rule=rule, value=wanted, where=where)


_NONE = ("default", 1.0)
_CLOSE = 1e-6


@attrs.frozen
class _Parts:
    """The weights and tensors of an opened folder, as the file has them."""

    checkpoint: Checkpoint
    config: TransformerConfig
    kind: str
    made: Mapping[str, torch.Tensor]

    def _rows(self, name: str, count: int) -> torch.Tensor | None:
        """Return the order in which the members of a pair are neighbours, for kinds that store q and k so."""
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if self.kind not in PARTS or part not in heads:
            return None
        return torch.arange(count).view(heads[part], 2, -1).transpose(1, 2).reshape(-1)

    def weight(self, name: str, source: str) -> PackedWeight:
        """Return a packed weight."""
        del name
        found = self.checkpoint[source]
        rows = self._rows(source, found.out_features)
        return found if rows is None else found.take_rows(rows)

    def tensor(self, name: str, source: str) -> torch.Tensor:
        """Return a dense tensor; vectors are float32 in such files."""
        if name in self.made:
            return self.made[name]
        found = self.checkpoint.dense[source]
        rows = self._rows(source, found.shape[0])
        found = found if rows is None else found[rows]
        if found.dim() > 1:
            return found
        found = found.to(torch.float32)
        return found + 1 if self.kind in GEMMA else found
