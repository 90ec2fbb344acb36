"""A GGUF file's model as a Hugging Face folder: its names, its order of rows, its config, and its tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from q4_lm.exchange.header_to_hf import header_to_hf, order_of_rows
from q4_lm.exchange.vocabulary_to_hf import tokenizer_files
from q4_lm.models.architecture import find_architecture
from q4_lm.models.gguf_rope import FACTORS, LONG, SHORT
from q4_lm.models.hf_names import to_hf_name
from q4_lm.models.metadata import Metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from q4_lm.models.config import TransformerConfig
    from q4core import Checkpoint

__all__ = ["HfFolder", "LazyItems", "to_hf_folder"]

_CHUNK_ELEMENTS = 1 << 24
_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_EXPERTS: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen3_moe": ((r"\.mlp\.router\.", ".mlp.gate."),),
    "mixtral": (
        (r"\.mlp\.router\.", ".block_sparse_moe.gate."),
        (r"\.mlp\.(experts\.\d+)\.gate_proj", r".block_sparse_moe.\1.w1"),
        (r"\.mlp\.(experts\.\d+)\.down_proj", r".block_sparse_moe.\1.w2"),
        (r"\.mlp\.(experts\.\d+)\.up_proj", r".block_sparse_moe.\1.w3"),
    ),
}
"""Kind of model → what its checkpoints call a router and experts; others have experts in one tensor, or biases."""


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


def to_hf_folder(checkpoint: Checkpoint, *, for_engine: bool = False) -> HfFolder:
    """Return an opened GGUF file's model as a folder.

    Args:
        checkpoint: The opened file.
        for_engine: Whether an engine takes it, which has each expert as layers of its own, and a head that shares the
            packed matrix of the embedding as a packed layer. Folders of transformers' libraries have neither.

    Raises:
        CheckpointError: The file is malformed, or transformers has no kind of model that computes the same.
    """
    metadata = Metadata(checkpoint.metadata, str(checkpoint.path))
    own, theirs = header_to_hf(checkpoint, metadata)
    architecture = find_architecture(metadata)
    kind = theirs["model_type"]
    if not own.causal or (own.num_experts and not (for_engine and kind in _EXPERTS)):
        metadata.fail("general.architecture", "a decoder's without experts, for a folder", architecture.name)
    names = architecture.names(own)

    def their_name(ours: str) -> str:
        name = to_hf_name(ours, own)
        for pattern, replacement in _EXPERTS[kind] if own.num_experts else ():
            name = re.sub(pattern, replacement, name)
        return name

    dense = {their_name(names.ours(name)): name for name in checkpoint.dense if name not in {FACTORS, LONG, SHORT}}
    modules = {names.ours(name): name for name in checkpoint}
    shared = modules.pop(_EMBEDDING, None)
    if shared is not None:
        dense[f"{to_hf_name(_EMBEDDING, own)}.weight"] = shared
    if own.tie_word_embeddings:
        modules.pop(_HEAD, None)
        if for_engine and shared is not None:
            modules[_HEAD] = shared
            theirs["tie_word_embeddings"] = False
    packed = {_HEAD if ours == _HEAD else their_name(ours): name for ours, name in modules.items()}
    numbers = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {name: theirs[name] for name in numbers if theirs[name] is not None}
    parts = _Parts(checkpoint, own, torch.float32)
    parts = attrs.evolve(parts, dtype=_exact_dtype(parts, dense))
    theirs["dtype"] = str(parts.dtype).removeprefix("torch.")
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
    dtype: torch.dtype

    def weight(self, name: str, source: str) -> q4.PackedWeight:
        found = self.checkpoint[source]
        rows = order_of_rows(self.config, name, found.out_features)
        return attrs.evolve(found if rows is None else found.take_rows(rows), dtype=self.dtype)

    def tensor(self, name: str, source: str) -> torch.Tensor:
        if source in self.checkpoint:
            weight = self.checkpoint[source]
            dense = torch.empty(weight.shape, dtype=self.dtype)
            for rows, values in _some_rows(weight):
                dense[rows] = values.to(self.dtype)
            return dense
        found = self.checkpoint.dense[source]
        order = order_of_rows(self.config, name.rpartition(".")[0], found.shape[0])
        found = found if order is None else found[order]
        if self.config.norm == "offset_rms" and found.dim() == 1:  # to which the converter added transformers' 1
            found = found.to(torch.float32) - 1
        return found.to(self.dtype)


def _some_rows(weight: q4.PackedWeight) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield a weight's values in float32, some rows at a time: an embedding may be most of a model."""
    rows, columns = weight.shape
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        some = slice(start, min(start + step, rows))
        yield some, q4.dequantize(weight, torch.float32, rows=some)


def _exact_dtype(parts: _Parts, dense: Mapping[str, str]) -> torch.dtype:
    """Return the smallest dtype that holds every dense tensor exactly: owners want all of them in the model's."""
    known = [torch.bfloat16, torch.float16]
    for name, source in sorted(dense.items(), key=lambda item: item[1] in parts.checkpoint):  # the smaller ones first
        if not known:
            break
        is_packed = source in parts.checkpoint
        for _, values in _some_rows(parts.checkpoint[source]) if is_packed else [(None, parts.tensor(name, source))]:
            known = [dtype for dtype in known if torch.equal(values.to(dtype).to(torch.float32), values)]
            if not known:
                break
    return known[0] if known else torch.float32
