"""One token of one sequence through a decoder: the general path's arithmetic, without its overhead.

Beside its matrices a small model computes little for a token. What costs is to start it: the general path is 1,750
torch operations for SmolLM2-135M (30 blocks), most of which make a new tensor, and each attribute of a module between
them costs up to 0.5 µs. Here it is 616 operations, which write in place: every buffer is made once, and every part is
bound to its buffers once. Prompts, batches, other dtypes and other kinds of decoders go through
``TransformerDecoder.forward``.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4_nn.blocks.attention import MultiHeadAttention
from q4_nn.blocks.feed_forward import FeedForward
from q4_nn.blocks.joined import JoinedLinear
from q4_nn.blocks.rotary import RotaryEmbedding
from q4_nn.models.transformer import PackedEmbedding, TransformerBlock, TransformerDecoder
from q4core import InputError, Q4Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_nn.blocks.cache import KVCache, Place
    from q4_nn.models.config import TransformerConfig

    Part = Callable[[], object]

__all__ = ["DecodeStep", "make_step"]

_PARTS = (
    *(TransformerDecoder, TransformerBlock, MultiHeadAttention, FeedForward, JoinedLinear, RotaryEmbedding),
    *(PackedEmbedding, Q4Linear, nn.Embedding, nn.Linear, nn.RMSNorm, nn.ModuleList),
)
_LLAMA = {"norm": "rms", "norm_position": "pre", "hidden_act": "silu", "gated": True, "positions": "rotary"}
_LLAMA |= {"rope_interleaved": True, "qk_norm": False, "attention_scale": None, "embedding_scale": 1.0}
_LLAMA |= {"no_rope_layers": (), "sliding_layers": ()}
"""Options of the decoders whose arithmetic this is."""


def make_step(decoder: TransformerDecoder, cache: KVCache) -> DecodeStep | None:
    """Return the step of a decoder over a cache; None where only ``TransformerDecoder.forward`` knows what to do.

    That is so for other decoders than Llama's, for another dtype than float32 (which norms and turns in float32, then
    rounds), other devices, batches, and wherever a module is not one of ours or has a hook, which must be run.
    """
    if type(decoder) is not TransformerDecoder or decoder.dtype is not torch.float32 or decoder.device.type != "cpu":
        return None
    config = decoder.config
    if not cache.is_plain or config.head_dim % 2 or config.rope_scaling.depends_on_length():
        return None
    if any(getattr(config, name) != value for name, value in _LLAMA.items()):
        return None
    for module in decoder.modules():
        if type(module) not in _PARTS or module._forward_hooks or module._forward_pre_hooks:  # noqa: SLF001  # torch has no other way to ask
            return None
    return DecodeStep(decoder, cache)


class DecodeStep:
    """Takes a token number, writes its keys and values into the cache, and returns the next token's logits.

    Args:
        decoder: One that ``make_step`` accepts; changes to its modules are not seen later.
        cache: From ``decoder.make_cache``.
    """

    def __init__(self, decoder: TransformerDecoder, cache: KVCache) -> None:
        self._decoder = decoder
        self._cache = cache
        self._buffers = buffers = _Buffers.of(decoder.config, cache.capacity)
        rotary: Any = decoder.layers[0].self_attn.rotary  # type: ignore[union-attr]  # of all blocks
        self._turn = rotary.table(cache.capacity, decoder.device).unbind(0)
        self._blocks = [_Block(block, buffers) for block in decoder.layers]  # type: ignore[arg-type]  # make_step looked
        self._last = _norm(decoder.norm, buffers), _linear(decoder.lm_head, buffers.normed, buffers.logits)

    @torch.inference_mode()
    def __call__(self, token: int) -> torch.Tensor:
        """Return logits [vocabulary], which the next call overwrites.

        Args:
            token: The token behind those in the cache.

        Raises:
            InputError: The token is not in the vocabulary, or the cache is full.
        """
        vocabulary = self._decoder.config.vocab_size
        if not 0 <= token < vocabulary:
            raise InputError("decoder", name="tokens", rule=f"from 0 to {vocabulary - 1}", value=token)
        cache, buffers = self._cache, self._buffers
        cache.require(1)
        buffers.x.copy_(self._decoder.embed_tokens(torch.tensor([token])))
        turn = self._turn[cache.length]
        places = cache.places()
        scores = buffers.scores_of(cache.length + 1)
        for block in self._blocks:
            block(turn, places[block.layer], scores)
        cache.advance(1)
        for part in self._last:
            part()
        return buffers.logits[0]


@attrs.frozen(eq=False)
class _Buffers:
    """What the blocks write to, one after another: a row for each kind of result, and views of its parts."""

    x: torch.Tensor
    """[1, hidden]: what a block adds to."""
    normed: torch.Tensor
    """[1, hidden]: what a norm gave."""
    added: torch.Tensor
    """[1, hidden]: what attention or SwiGLU gave, to be added to x."""
    zero: torch.Tensor
    """[hidden] of zeros."""
    qkv: torch.Tensor
    """[1, (heads + 2 · kv_heads) · head_dim]: queries, keys and values."""
    query: torch.Tensor
    """View of qkv: [kv_heads, heads / kv_heads, head_dim]."""
    pairs: torch.Tensor
    """View of qkv: complex [heads + kv_heads, dimensions / 2], what the rotary embedding turns."""
    entry: torch.Tensor
    """View of qkv: [2, kv_heads, head_dim], the new key and value."""
    scores: torch.Tensor
    """[heads · capacity]."""
    mixed: torch.Tensor
    """[kv_heads, heads / kv_heads, head_dim]: what attention gives, before its last layer."""
    gate_up: torch.Tensor
    """[1, 2 · feed_forward]."""
    logits: torch.Tensor
    """[1, vocabulary]."""

    @classmethod
    def of(cls, config: TransformerConfig, capacity: int) -> _Buffers:
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        zeros = functools.partial(torch.zeros, dtype=torch.float32)  # whatever torch's default dtype is
        qkv = zeros(1, (heads + 2 * kv_heads) * head_dim)
        by_head = qkv.view(-1, head_dim)
        turned = by_head[: heads + kv_heads, : config.rope_dim]
        return cls(
            x=zeros(1, config.hidden_size),
            normed=zeros(1, config.hidden_size),
            added=zeros(1, config.hidden_size),
            zero=zeros(config.hidden_size),
            qkv=qkv,
            query=by_head[:heads].view(kv_heads, -1, head_dim),
            pairs=torch.view_as_complex(turned.unflatten(-1, (-1, 2))),
            entry=by_head[heads:].view(2, kv_heads, head_dim),
            scores=zeros(heads * capacity),
            mixed=zeros(kv_heads, heads // kv_heads, head_dim),
            gate_up=zeros(1, 2 * config.intermediate_size),
            logits=zeros(1, config.vocab_size),
        )

    def scores_of(self, seen: int) -> torch.Tensor:
        """Return the scores as [kv_heads, heads / kv_heads, seen]: dense, for the matrix product writes no other."""
        kv_heads, group, _ = self.mixed.shape
        return self.scores[: kv_heads * group * seen].view(kv_heads, group, seen)


class _Block:
    """A block bound to its buffers."""

    def __init__(self, block: TransformerBlock, buffers: _Buffers) -> None:
        attention, feed_forward = block.self_attn, block.mlp
        self.layer = attention.layer
        gate, up = buffers.gate_up.chunk(2, -1)
        mixed = buffers.mixed.view(1, -1)
        self._project: tuple[Part, ...] = (
            _norm(block.input_layernorm, buffers),
            *_joined(attention, "qkv_proj", buffers.normed, buffers.qkv),
        )
        self._attend = _attention(buffers, 1 / math.sqrt(attention.head_dim))
        add = functools.partial(buffers.x.add_, buffers.added)
        self._rest: tuple[Part, ...] = (
            _linear(attention.o_proj, mixed, buffers.added),
            add,
            _norm(block.pre_feedforward_layernorm, buffers),
            *_joined(feed_forward, "gate_up_proj", buffers.normed, buffers.gate_up),
            functools.partial(nn.functional.silu, gate, inplace=True),
            functools.partial(gate.mul_, up),
            _linear(feed_forward.down_proj, gate, buffers.added),
            add,
        )

    def __call__(self, turn: torch.Tensor, place: Place, scores: torch.Tensor) -> None:
        for part in self._project:
            part()
        self._attend(turn, place, scores)
        for part in self._rest:
            part()


def _linear(layer: nn.Module, x: torch.Tensor, out: torch.Tensor) -> Part:
    if isinstance(layer, nn.Linear):
        weight, bias = layer.weight, layer.bias
        return lambda: out.copy_(nn.functional.linear(x, weight, bias))
    # forward itself: there are no hooks, and 121 times 1 µs to look for them is a fiftieth of a token.
    return functools.partial(layer.forward, x, out=out)


def _joined(module: Any, name: str, x: torch.Tensor, out: torch.Tensor) -> list[Part]:
    joined = getattr(module, name)
    layers = [getattr(module, part) for part in module.joins[name]] if joined is None else joined.layers
    sizes = [layer.out_features for layer in layers]
    return [_linear(layer, x, part) for layer, part in zip(layers, out.split(sizes, -1), strict=True)]


def _norm(norm: Any, buffers: _Buffers) -> Part:
    """Return a norm from x to normed: 2.4 µs in two calls, where ``rms_norm`` is six calls inside and 7.5 µs."""
    x, zero, out = buffers.x[0], buffers.zero, buffers.normed[0]
    weight, epsilon, size = norm.weight.detach(), norm.eps, x.numel()
    dot, multiply = torch.dot, torch.addcmul

    def run() -> None:
        scale = (float(dot(x, x)) / size + epsilon) ** -0.5
        multiply(zero, x, weight, value=scale, out=out)  # 0 + scale · x · weight

    return run


def _attention(buffers: _Buffers, scale: float) -> Callable[[torch.Tensor, Place, torch.Tensor], None]:
    """Return attention from qkv to mixed, over keys and values that it adds the new ones to.

    Two products and a softmax: ``scaled_dot_product_attention`` takes as long on one thread, and starts a team of
    threads for its three rows on several.
    """
    query, pairs, entry, mixed = buffers.query, buffers.pairs, buffers.entry, buffers.mixed
    product, softmax, mix = torch.baddbmm, torch.softmax, torch.bmm

    def run(turn: torch.Tensor, place: Place, scores: torch.Tensor) -> None:
        pairs.mul_(turn)  # queries and keys
        place.entry.copy_(entry)
        product(scores, query, place.keys, beta=0, alpha=scale, out=scores)
        softmax(scores, -1, out=scores)
        mix(scores, place.values, out=mixed)

    return run
