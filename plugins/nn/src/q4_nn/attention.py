"""Causal grouped-query attention over a key-value cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from q4_nn.cache import KVCache
    from q4_nn.joined import JoinedLinear
    from q4_nn.rope import Rotary

__all__ = ["Attention", "attend"]


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return softmax(q·kᵀ / sqrt(d))·v, in which token t of the last T sees the positions up to its own.

    Args:
        query: [B, T, heads, head_dim].
        keys: [B, kv_heads, S, head_dim]; the last T positions are the query's own. ``heads`` is a multiple of
            ``kv_heads``; query head h reads key-value head ``h // (heads / kv_heads)``.
        values: The shape of ``keys``.

    Returns:
        [B, T, heads, head_dim].

    Reference:
        Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints.
    """
    batch, count, heads, head_dim = query.shape
    kv_heads, seen = keys.shape[1], keys.shape[2]
    if count == 1:
        # The heads of a group are so many queries to one key-value head; the keys need not be repeated.
        grouped = query.view(batch, kv_heads, heads // kv_heads, head_dim)
        return nn.functional.scaled_dot_product_attention(grouped, keys, values).reshape(query.shape)
    mask = None
    if seen > count:
        mask = torch.ones(count, seen, dtype=torch.bool, device=query.device).tril(seen - count)
    mixed = nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != kv_heads
    )
    return mixed.transpose(1, 2)


class Attention(nn.Module):
    """Projects, turns, attends and projects back.

    Args:
        qkv: Linear layers hidden → heads · head_dim (queries), and twice hidden → kv_heads · head_dim (keys, values).
        output: Linear layer heads · head_dim → hidden.
        rotary: Turns queries and keys.
        head_dim: Features of a head.
        layer: The layer's index in the cache.
    """

    def __init__(self, *, qkv: JoinedLinear, output: nn.Module, rotary: Rotary, head_dim: int, layer: int) -> None:
        super().__init__()
        self.qkv = qkv
        self.output = output
        self.rotary = rotary
        self.head_dim = head_dim
        self.layer = layer

    def forward(self, x: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Return the mixed tokens; writes their keys and values into the cache.

        Args:
            x: [B, T, hidden], the T tokens behind ``cache.length``.
            cache: Keys and values of the tokens before.
        """
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x))
        query, key = self.rotary(query, cache.length), self.rotary(key, cache.length)
        keys, values = cache.write(self.layer, key, value)
        mixed: torch.Tensor = self.output(attend(query, keys, values).flatten(-2))
        return mixed
