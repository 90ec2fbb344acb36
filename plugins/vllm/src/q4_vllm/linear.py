"""``Q4LinearMethod`` and ``Q4EmbeddingMethod``: vLLM's layers over layers of a q4core session, cut for a rank."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

import q4core as q4
from q4_vllm.cuts import Cut, prepare
from q4_vllm.ops import add_layer, linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4_vllm.config import Q4Config

__all__ = ["Q4EmbeddingMethod", "Q4LinearMethod", "cuts_of"]


class Q4LinearMethod(LinearMethodBase):  # type: ignore[misc]  # vLLM has no types here
    """Reads, cuts, joins and prepares the stored parts of one layer, without a dense copy.

    Args:
        config: The model's.
        parts: The checkpoint's layers that this one is made of, in order.
        prefix: vLLM's name of it.
    """

    def __init__(self, config: Q4Config, parts: Sequence[str], prefix: str) -> None:
        self.config, self.parts, self.prefix = config, tuple(parts), prefix

    def create_weights(  # noqa: PLR0913  # vLLM's signature
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Store the sizes, and allocate nothing: the weight is not vLLM's."""
        del input_size, output_size
        layer.q4_sizes = input_size_per_partition, list(output_partition_sizes), params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare this rank's part."""
        columns, sizes, dtype = layer.q4_sizes
        shapes = [self.config.shape(name) for name in self.parts]
        cuts = cuts_of(layer, self.parts, shapes, columns, sizes, self.prefix)
        found = prepare(cuts, sum(sizes), self.config.checkpoint, self.config.layers(dtype), self.prefix)
        layer.__dict__["q4"] = found  # which holds it: the op's table does not
        layer.q4_name = add_layer(self.prefix, found)
        self.config.finish(self.parts)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ wᵀ + bias`` of this rank's rows or in-features."""
        y = linear(x, layer.q4_name, sum(layer.q4_sizes[1]))
        return y if bias is None else y + bias

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Return the layer as it is: a head that is stored packed has its own weight."""
        del embed_tokens
        return layer


class Q4EmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]  # vLLM has no types here
    """An embedding that is stored packed: dequantised into vLLM's own, which looks up rows.

    Args:
        config: The model's.
        stored: The checkpoint's layer.
    """

    def __init__(self, config: Q4Config, stored: str) -> None:
        super().__init__()
        self.config, self.stored = config, stored

    def process_weights_after_loading(self, layer: Any) -> None:
        """Fill this rank's rows."""
        shard, weight = layer.shard_indices, self.config.checkpoint[self.stored]
        rows = range(shard.org_vocab_start_index, shard.org_vocab_end_index)
        with torch.no_grad():
            layer.weight.zero_()
            if rows:
                cover = weight.cover(rows=rows)
                layer.weight[: len(rows)] = q4.dequantize(cover.weight, layer.weight.dtype)[cover.cut]
        super().process_weights_after_loading(layer)
        self.config.finish([self.stored])


def cuts_of(  # noqa: PLR0913  # facts of a layer
    layer: Any, parts: Sequence[str], shapes: Sequence[tuple[int, int]], columns: int, sizes: Sequence[int], prefix: str
) -> list[Cut]:
    """Return what a rank needs of each stored part.

    Args:
        layer: vLLM's.
        parts: Names of the stored layers.
        shapes: (N, K) of each.
        columns: In-features of this rank.
        sizes: Out-features of this rank, for each layer that is fused.
        prefix: vLLM's name.

    Raises:
        SchemaError: The stored parts are not those that the layer is made of, or have other sizes.
    """
    if len(parts) != len(sizes) and len(parts) != 1:
        raise q4.SchemaError(f"layer {prefix!r}", name="parts", rule=f"{len(sizes)}", value=list(parts))
    is_vocabulary = isinstance(layer, VocabParallelEmbedding)
    rank = layer.tp_rank if isinstance(layer, RowParallelLinear) else 0
    inputs = range(rank * columns, (rank + 1) * columns)
    if any(k != layer.input_size for _, k in shapes):
        value = sorted({k for _, k in shapes})
        raise q4.SchemaError(f"layer {prefix!r}", name="in_features", rule=str(layer.input_size), value=value)
    if is_vocabulary:
        shard = layer.shard_indices
        rows = range(shard.org_vocab_start_index, min(shard.org_vocab_end_index, shapes[0][0]))
        return [Cut(parts[0], rows, inputs)] if rows else []
    whole = _whole_sizes(layer, sizes)
    if sum(whole) != sum(n for n, _ in shapes):
        value = [n for n, _ in shapes]
        raise q4.SchemaError(f"layer {prefix!r}", name="out_features", rule=str(list(whole)), value=value)
    starts = [0] * len(sizes)  # of a matrix that is stored fused, as Phi-3's, these are places in it
    if len(parts) == 1:
        parts = [parts[0]] * len(sizes)
        starts = [start for start, _ in pairwise(_sums(whole))]
    cuts = []
    for index, (name, size, start) in enumerate(zip(parts, sizes, starts, strict=True)):
        first = start + _rank(layer, index, size, whole[index]) * size
        cuts.append(Cut(name, range(first, first + size), inputs))
    return cuts


def _sums(sizes: Sequence[int]) -> list[int]:
    found = [0]
    for size in sizes:
        found.append(found[-1] + size)
    return found


def _whole_sizes(layer: Any, sizes: Sequence[int]) -> Sequence[int]:
    """Return the out-features of each fused layer, as the checkpoint has them."""
    if isinstance(layer, QKVParallelLinear):  # whose own sizes count a head again for each rank that has it
        keys = layer.total_num_kv_heads
        return [layer.total_num_heads * layer.head_size, keys * layer.head_size, keys * layer.v_head_size]
    if isinstance(layer, RowParallelLinear):
        return sizes
    own: Sequence[int] = getattr(layer, "output_sizes", None) or [layer.output_size]
    return own


def _rank(layer: Any, index: int, size: int, whole: int) -> int:
    """Return which part of a fused layer's rows this rank has."""
    if size == whole:
        return 0
    rank: int = layer.tp_rank
    return rank // layer.num_kv_head_replicas if isinstance(layer, QKVParallelLinear) and index else rank
