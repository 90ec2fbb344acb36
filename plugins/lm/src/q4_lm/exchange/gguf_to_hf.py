"""A GGUF file's model as a Hugging Face folder: its names, its order of rows, its config, and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from q4_lm.exchange.vocabulary_to_hf import tokenizer_files
from q4_lm.models.architecture import find_architecture
from q4_lm.models.gguf_rope import FACTORS, LONG, SHORT, read_factors
from q4_lm.models.hf_config import config_to_hf
from q4_lm.models.hf_names import to_hf_name
from q4_lm.models.metadata import Metadata
from q4_nn.blocks.rotary import RopeScaling
from q4core import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_lm.models.config import TransformerConfig
    from q4core import Checkpoint

__all__ = ["GEMMA", "PARTS", "HfFolder", "LazyItems", "to_hf_folder"]

GEMMA = frozenset({"gemma2", "gemma3"})
"""Kinds whose converter adds to norms the 1 that the model adds."""
PARTS = frozenset({"granite", "llama", "smollm3"})
"""Kinds of whose q and k a converter interleaves the rows of a head."""

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""Hugging Face's kind of model → its class in transformers."""
_KINDS = {"gemma3": "gemma3_text"}
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_ENDS = ("eos", "eot", "eom")
_LLAMA3 = (8.0, 32.0, 4.0, 16.0)
"""Factors of the Llama 3 models, whose other numbers are alike."""
_CONTEXT = 8192
_CLOSE = 1e-5


class LazyItems(Mapping[str, Any]):
    """Items that are made when they are asked for."""

    def __init__(self, sources: Mapping[str, str], make: Callable[[str, str], Any]) -> None:
        self._sources = sources
        self._make = make

    def __getitem__(self, name: str) -> Any:
        """Make one item."""
        return self._make(name, self._sources[name])

    def __contains__(self, name: object) -> bool:
        """Return whether there is one of that name, without making it."""
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._sources)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._sources)


@attrs.frozen
class HfFolder:
    """What a folder holds, lazily.

    Args:
        weights: Module → packed weight, its rows in Hugging Face's order.
        dense: Name → tensor; a packed embedding is dense here, in which rows are looked up.
        stored: Module → its name in the GGUF file.
        config: ``config.json``.
        files: Name → text of the other files.
    """

    weights: Mapping[str, q4.PackedWeight]
    dense: Mapping[str, torch.Tensor]
    stored: Mapping[str, str]
    config: Mapping[str, Any]
    files: Mapping[str, str]


def to_hf_folder(checkpoint: Checkpoint) -> HfFolder:
    """Return an opened GGUF file's model as a folder.

    Raises:
        CheckpointError: The file is malformed, or transformers has no kind of model that computes the same.
    """
    metadata = Metadata(checkpoint.metadata, str(checkpoint.path))
    architecture = find_architecture(metadata)
    own = architecture.config(checkpoint, metadata)
    theirs = _hf_config(checkpoint, metadata, own, architecture.name)
    names = architecture.names(own)
    dense = {to_hf_name(names.ours(name), own): name for name in checkpoint.dense if name not in {FACTORS, LONG, SHORT}}
    modules = {names.ours(name): name for name in checkpoint}
    if _EMBEDDING in modules:
        dense[f"{to_hf_name(_EMBEDDING, own)}.weight"] = modules.pop(_EMBEDDING)
    if own.tie_word_embeddings:
        modules.pop(_HEAD, None)
    packed = {_HEAD if ours == _HEAD else to_hf_name(ours, own): name for ours, name in modules.items()}
    numbers = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {name: theirs[name] for name in numbers if theirs[name] is not None}
    parts = _Parts(checkpoint, own, architecture.name)
    return HfFolder(
        LazyItems(packed, parts.weight),
        LazyItems(dense, parts.tensor),
        packed,
        theirs,
        {**tokenizer_files(metadata), "generation_config.json": json.dumps(generation, indent=2) + "\n"},
    )


@attrs.frozen
class _Parts:
    """The weights and tensors of an opened file, as Hugging Face's model has them."""

    checkpoint: Checkpoint
    config: TransformerConfig
    kind: str

    def _rows(self, name: str, count: int) -> torch.Tensor | None:
        """Return the order of rows of q or k, of which a pair's members are half a head apart."""
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        if not self.config.rope_interleaved or part not in heads:
            return None
        return torch.arange(count).view(heads[part], -1, 2).transpose(1, 2).reshape(-1)

    def weight(self, name: str, source: str) -> q4.PackedWeight:
        found = self.checkpoint[source]
        rows = self._rows(name, found.out_features)
        return found if rows is None else found.take_rows(rows)

    def tensor(self, name: str, source: str) -> torch.Tensor:
        if source in self.checkpoint:
            return q4.dequantize(self.checkpoint[source], torch.float32)
        found = self.checkpoint.dense[source]
        rows = self._rows(name, found.shape[0])
        if rows is not None:
            return found[rows]
        # Gemma's converter adds to norms the 1 that transformers adds.
        return found.to(torch.float32) - 1 if self.kind in GEMMA and found.dim() == 1 else found


def _hf_config(checkpoint: Checkpoint, metadata: Metadata, own: TransformerConfig, kind: str) -> dict[str, Any]:
    theirs = "mistral" if kind == "llama" and own.sliding_layers else _KINDS.get(kind, kind)
    if theirs not in _CLASSES:
        metadata.fail("general.architecture", f"one of {', '.join(sorted({*_CLASSES, 'gemma3'}))}", kind)
    if kind in GEMMA:
        own = attrs.evolve(own, norm="offset_rms", attention_scale=own.attention_scale or own.head_dim**-0.5)
    if FACTORS in checkpoint.dense:
        own = attrs.evolve(own, rope_scaling=_llama3(checkpoint, metadata, own))
    if own.rope_dim != own.head_dim and kind != "phi3":
        metadata.fail(
            f"{kind}.rope.dimension_count", f"{own.head_dim}, as transformers turns the whole head", own.rope_dim
        )
    try:
        found = config_to_hf(own, theirs)
    except ConfigError as error:
        what, where = "model metadata", metadata.where
        raise CheckpointError(what, name="header", rule=str(error.rule), value=theirs, where=where) from error
    if kind == "phi3":
        found["original_max_position_embeddings"] = own.rope_scaling.original_context or own.max_position_embeddings
    found |= {"architectures": [_CLASSES[theirs]], "dtype": "bfloat16"}
    ends = [metadata.integer(f"tokenizer.ggml.{end}_token_id", low=0, default=None) for end in _ENDS]
    numbers = {
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id", low=0, default=None),
        "eos_token_id": list(dict.fromkeys(number for number in ends if number is not None)),
        "pad_token_id": metadata.integer("tokenizer.ggml.padding_token_id", low=0, default=None),
    }
    if isinstance(numbers["eos_token_id"], list) and len(numbers["eos_token_id"]) < 2:  # noqa: PLR2004  # several
        numbers["eos_token_id"] = next(iter(numbers["eos_token_id"]), None)
    return found | numbers


def _llama3(checkpoint: Checkpoint, metadata: Metadata, own: TransformerConfig) -> RopeScaling:
    """Return the scaling from which a converter computed the divisors in the file.

    Raises:
        CheckpointError: It is none of the Llama 3 models'.
    """
    factors = read_factors(checkpoint, metadata, FACTORS, own.rope_dim)
    plain = RopeScaling().frequencies(own.rope_dim, own.rope_theta, 1)
    found = None
    for factor in _LLAMA3:
        scaling = RopeScaling(kind="llama3", factor=factor, original_context=_CONTEXT)
        divisors = plain / scaling.frequencies(own.rope_dim, own.rope_theta, 1)
        found = scaling if torch.allclose(divisors.to(torch.float32), factors, rtol=_CLOSE, atol=0) else found
    if found is None:
        rule = f"those of a Llama 3 model, with a factor of {', '.join(f'{factor:g}' for factor in _LLAMA3)}"
        metadata.fail_tensor(FACTORS, rule, f"up to {float(factors.max()):g}")
    return found
