"""A Llama-family decoder: embedding, blocks of attention and SwiGLU, head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn

from q4_nn.cache import KVCache
from q4core import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4_nn.attention import Attention
    from q4_nn.joined import JoinedLinear
    from q4_nn.norm import RMSNorm
    from q4_nn.rope import Rotary

__all__ = ["Block", "Decoder", "DecoderShape", "SwiGLU"]


@attrs.frozen(kw_only=True)
class DecoderShape:
    """Sizes of a decoder.

    Args:
        layers: Number of blocks.
        hidden: Features of a token.
        feed_forward: Features inside SwiGLU.
        heads: Query heads.
        kv_heads: Key-value heads.
        head_dim: Features of a head.
        vocabulary: Number of tokens.
        context: Most positions that the model was made for.
    """

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``.

    Args:
        gate_up: Two linear layers hidden → feed_forward.
        down: Linear layer feed_forward → hidden.

    Reference:
        Shazeer, GLU Variants Improve Transformer.
    """

    def __init__(self, *, gate_up: JoinedLinear, down: nn.Module) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden] from [..., hidden]."""
        gate, up = self.gate_up(x)
        y: torch.Tensor = self.down(nn.functional.silu(gate) * up)
        return y


class Block(nn.Module):
    """Attention and SwiGLU, each behind its norm and added to what came in."""

    def __init__(
        self, *, attention_norm: RMSNorm, attention: Attention, feed_forward_norm: RMSNorm, feed_forward: SwiGLU
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward

    def forward(self, x: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Return [B, T, hidden] from [B, T, hidden]."""
        x = x + self.attention(self.attention_norm(x), cache)
        y: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class Decoder(nn.Module):
    """Token numbers to logits.

    Args:
        shape: Sizes.
        embed: Token numbers [n] → rows [n, hidden] in the compute dtype (of a packed weight, of the head, or dense).
        blocks: The blocks in order.
        norm: Norm before the head.
        head: Linear layer hidden → vocabulary.
        rotary: The blocks' rotary embedding, which is prepared for as many positions as a cache has.
        dtype: dtype of activations and cache.
        device: Where it computes.
    """

    def __init__(  # noqa: PLR0913  # its parts
        self,
        shape: DecoderShape,
        *,
        embed: Callable[[torch.Tensor], torch.Tensor],
        blocks: Sequence[Block],
        norm: RMSNorm,
        head: nn.Module,
        rotary: Rotary,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.head = head
        self.rotary = rotary
        self.dtype = dtype
        self.device = device

    def make_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """Return an empty cache for ``capacity`` positions.

        Raises:
            InputError: The capacity is not between 1 and the model's context.
        """
        if not 1 <= capacity <= self.shape.context:
            raise InputError(
                "key-value cache",
                name="capacity",
                rule=f"from 1 to {self.shape.context}, the model's context",
                value=capacity,
            )
        self.rotary.prepare(capacity)
        shape = self.shape
        return KVCache(
            shape.layers,
            shape.kv_heads,
            shape.head_dim,
            capacity,
            batch=batch,
            dtype=self.dtype,
            device=self.device,
        )

    def forward(self, tokens: torch.Tensor, cache: KVCache, *, last_only: bool = False) -> torch.Tensor:
        """Return logits, and leave the tokens' keys and values in the cache.

        Args:
            tokens: int64 [B, T], the tokens behind those in the cache.
            cache: From ``make_cache``.
            last_only: Whether only the last token's logits are wanted.

        Returns:
            [B, T, vocabulary], or [B, 1, vocabulary], in the compute dtype.

        Raises:
            InputError: A token is not in the vocabulary, the tokens do not fit into the cache, or their shape or dtype
                is wrong.
        """
        self._check(tokens, cache)
        x = self.embed(tokens.flatten()).unflatten(0, tokens.shape)
        for block in self.blocks:
            x = block(x, cache)
        cache.advance(tokens.shape[1])
        logits: torch.Tensor = self.head(self.norm(x[:, -1:] if last_only else x))
        return logits

    def _check(self, tokens: torch.Tensor, cache: KVCache) -> None:
        if tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():  # noqa: PLR2004  # [B, T]
            raise InputError(
                "decoder", name="tokens", rule="int64 [B, T], not empty", value=(tokens.dtype, tuple(tokens.shape))
            )
        low, high = (int(value) for value in torch.aminmax(tokens))
        if low < 0 or high >= self.shape.vocabulary:
            raise InputError(
                "decoder",
                name="tokens",
                rule=f"from 0 to {self.shape.vocabulary - 1}",
                value=low if low < 0 else high,
            )
        cache.require(tokens.shape[1])
