"""Blocks, decoders and encoders: trainable as they are, and packable to four bits part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_lm.models.config import TransformerConfig
from q4_nn.blocks.attention import MultiHeadAttention
from q4_nn.blocks.batch_cache import BatchCache
from q4_nn.blocks.cache import KVCache
from q4_nn.blocks.experts import Experts
from q4_nn.blocks.feed_forward import FeedForward
from q4_nn.blocks.norm import OffsetRMSNorm, RMSNorm
from q4_nn.blocks.rotary import RotaryEmbedding
from q4_nn.registry.initialise import initialise_
from q4_programs import Op
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from q4_nn.blocks.cache import CachePlaces
    from q4_nn.blocks.rows import RowPlaces
    from q4_programs import ProgramBuilder, Value

__all__ = ["TransformerBlock", "TransformerDecoder", "TransformerEncoder", "build_transformer", "empty_transformer"]

_NORMS: dict[str, Any] = {"rms": RMSNorm, "offset_rms": OffsetRMSNorm, "layer": nn.LayerNorm}


def _norm(config: TransformerConfig) -> nn.Module:
    options = {"bias": config.norm_bias} if config.norm == "layer" else {}
    made: nn.Module = _NORMS[config.norm](config.hidden_size, eps=config.norm_eps, **options)
    return made


def _embedding(rows: int, config: TransformerConfig) -> nn.Embedding:
    """Return an embedding of values yet to be given: torch's own would draw them, which takes seconds on meta."""
    return nn.Embedding(rows, config.hidden_size, _weight=torch.empty(rows, config.hidden_size))


def _feed_forward(config: TransformerConfig) -> nn.Module:
    sizes = config.hidden_size, config.intermediate_size
    if not config.num_experts:
        act, gated = config.hidden_act, config.gated
        return FeedForward(*sizes, activation=act, gated=gated, bias=config.mlp_bias)
    return Experts(
        *sizes,
        config.num_experts,
        config.num_experts_per_tok,
        normalised=config.norm_topk_prob,
        activation=config.hidden_act,
        bias=config.mlp_bias,
    )


class TransformerBlock(nn.Module):
    """Attention and a feed-forward part, each with its norms, each added to its input.

    Parts: ``self_attn``, ``mlp``, and the norms that ``norm_position`` asks for: ``input_layernorm`` and
    ``pre_feedforward_layernorm`` (before), ``post_attention_layernorm`` and ``post_feedforward_layernorm`` (after).
    ``mlp`` is a ``FeedForward``, or ``Experts`` where the config has any.

    Args:
        config: Sizes and options.
        layer: The block's index.
        rotary: Turns queries and keys; defaults to what the config says.
    """

    def __init__(self, config: TransformerConfig, layer: int = 0, *, rotary: RotaryEmbedding | None = None) -> None:
        super().__init__()
        if rotary is None:
            rotary = make_rotary(config, layer)
        has_pre, has_post = config.norm_position in {"pre", "both"}, config.norm_position != "pre"
        is_normed = config.embedding_norm and layer == 0
        self.input_layernorm = _norm(config) if has_pre and not is_normed else None
        self.self_attn = MultiHeadAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            causal=config.causal,
            window=config.windows[layer],
            bias=config.attention_bias,
            out_bias=config.attention_out_bias,
            qk_norm=config.norm_eps if config.qk_norm else None,
            norm=_NORMS[config.norm],
            norm_heads=config.qk_norm_heads,
            rotary=rotary,
            scale=config.attention_scale,
            dropout=config.attention_dropout,
            layer=layer,
            cap=config.attn_logit_softcapping,
            sinks=config.attention_sinks,
        )
        self.post_attention_layernorm = _norm(config) if has_post else None
        self.pre_feedforward_layernorm = _norm(config) if has_pre else None
        self.mlp = _feed_forward(config)
        self.post_feedforward_layernorm = _norm(config) if has_post else None
        self.norm_position = config.norm_position
        self.residual_scale = config.residual_scale
        self.dropout = config.dropout

    def forward(
        self, x: torch.Tensor, *, cache: KVCache | None = None, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [B, T, hidden] from [B, T, hidden]; ``cache`` and ``allowed`` as ``MultiHeadAttention`` takes them."""
        y = x if self.input_layernorm is None else self.input_layernorm(x)
        x = self._add(x, self.self_attn(y, cache=cache, allowed=allowed), self.post_attention_layernorm)
        y = x if self.pre_feedforward_layernorm is None else self.pre_feedforward_layernorm(x)
        return self._add(x, self.mlp(y), self.post_feedforward_layernorm)

    def emit_program(self, builder: ProgramBuilder, x: Value, *, cache: CachePlaces | RowPlaces | None = None) -> Value:
        """Emit tokens of one sequence, after those of a cache, or of whole sequences."""
        y = x if self.input_layernorm is None else builder.emit(self.input_layernorm, x)
        x = self._emit_add(builder, x, builder.emit(self.self_attn, y, cache=cache), self.post_attention_layernorm)
        y = x if self.pre_feedforward_layernorm is None else builder.emit(self.pre_feedforward_layernorm, x)
        return self._emit_add(builder, x, builder.emit(self.mlp, y), self.post_feedforward_layernorm)

    def _emit_add(self, builder: ProgramBuilder, x: Value, y: Value, norm: nn.Module | None) -> Value:
        if self.residual_scale != 1.0:
            y = builder.step(Op.AFFINE, y, numbers=(self.residual_scale, 0))
        if norm is None:
            return builder.step(Op.ADD, x, y)
        if self.norm_position != "post":
            return builder.step(Op.ADD, x, builder.emit(norm, y))
        summed: Value = builder.emit(norm, builder.step(Op.ADD, x, y))
        return summed

    def _add(self, x: torch.Tensor, y: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        if self.dropout:
            y = nn.functional.dropout(y, self.dropout, self.training)
        if self.residual_scale != 1.0:
            y = y * self.residual_scale
        if norm is None:
            return x + y
        summed: torch.Tensor = norm(x + y) if self.norm_position == "post" else x + norm(y)
        return summed


def make_rotary(config: TransformerConfig, layer: int) -> RotaryEmbedding | None:
    """Return what turns the queries and keys of a block, or None where nothing does."""
    if config.positions != "rotary" or layer in config.no_rope_layers:
        return None
    if layer in config.sliding_layers and config.local_rope_theta is not None:
        return RotaryEmbedding(config.rope_dim, config.local_rope_theta, interleaved=config.rope_interleaved)
    return RotaryEmbedding(
        config.rope_dim, config.rope_theta, scaling=config.rope_scaling, interleaved=config.rope_interleaved
    )


class _Transformer(nn.Module):
    """The common base of decoders and encoders: embeddings and blocks."""

    _what = "transformer"

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ConfigError(self._what, name="vocab_size", rule="a positive whole number", value=config.vocab_size)
        self.config = config
        self.embed_tokens: nn.Module = _embedding(config.vocab_size, config)
        positions = config.max_position_embeddings + config.position_offset
        self.embed_positions = _embedding(positions, config) if config.positions == "learned" else None
        kinds: dict[Any, RotaryEmbedding | None] = {}  # one table for all blocks that turn alike
        blocks = []
        for layer in range(config.num_hidden_layers):
            rotary = make_rotary(config, layer)
            key = None if rotary is None else (rotary.base, rotary.scaling)
            blocks.append(TransformerBlock(config, layer, rotary=kinds.setdefault(key, rotary)))
        self.layers = nn.ModuleList(blocks)

    def _initialise(self) -> None:
        """Draw random weights, where there is memory for them."""
        if self.embed_tokens.weight.device.type != "meta":
            initialise_(self, std=self.config.initializer_range)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of activations."""
        found = self.embed_tokens.weight if isinstance(self.embed_tokens, nn.Embedding) else self.embed_tokens
        dtype: torch.dtype = found.dtype  # type: ignore[assignment]  # a weight's, or a PackedEmbedding's
        return dtype

    @property
    def device(self) -> torch.device:
        """The device that it computes on: that of its norms."""
        return next(parameter.device for name, parameter in self.named_parameters() if "norm" in name)

    def _check(self, tokens: torch.Tensor) -> None:
        if tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():  # noqa: PLR2004  # [B, T]
            value = (tokens.dtype, tuple(tokens.shape))
            raise InputError(self._what, name="tokens", rule="int64 [B, T], not empty", value=value)
        low, high = (int(value) for value in torch.aminmax(tokens))
        if low < 0 or high >= self.config.vocab_size:
            rule = f"from 0 to {self.config.vocab_size - 1}"
            raise InputError(self._what, name="tokens", rule=rule, value=low if low < 0 else high)

    def _embed(self, tokens: torch.Tensor, start: int | torch.Tensor = 0) -> torch.Tensor:
        x: torch.Tensor = self.embed_tokens(tokens)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)  # rounded as the model was trained
        if self.embed_positions is None:
            return x
        place = torch.arange(tokens.shape[1], device=tokens.device)
        place = place + (start[:, None] if isinstance(start, torch.Tensor) else start)
        limit = self.config.max_position_embeddings
        if int(place.max()) >= limit:
            raise InputError(self._what, name="tokens", rule=f"at most {limit} positions", value=int(place.max()) + 1)
        y: torch.Tensor = x + self.embed_positions(place.clamp(min=0) + self.config.position_offset)
        return y


class TransformerDecoder(_Transformer):
    """Token numbers to logits.

    Parts: ``embed_tokens``, ``layers``, ``norm`` and ``lm_head``, which shares the embedding's weight where the config
    ties them.

    Args:
        config: Sizes and options; ``causal``.
    """

    _what = "decoder"

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        if not config.causal:
            raise ConfigError("decoder", name="causal", rule="True; an encoder is TransformerEncoder", value=False)
        self.cache_dtype: torch.dtype | None = None
        """What keys and values are held in: a floating dtype, or int8; None for that of activations."""
        self.norm = None if config.norm_position == "post" else _norm(config)
        self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()
        self._initialise()

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.config.tie_word_embeddings

    def tie(self) -> None:
        """Tie the head to the embedding, where the config says so and both have weights of their own."""
        if self.is_tied and isinstance(self.embed_tokens, nn.Embedding):
            self.lm_head.weight = self.embed_tokens.weight

    def divide_frequencies(self, factors: torch.Tensor) -> None:
        """Divide the rotary frequencies of every block that turns by float32 [rope_dim / 2]."""
        for module in self.modules():
            if isinstance(module, RotaryEmbedding):
                module.factors = factors

    def make_cache(self, capacity: int, batch: int = 1, *, padding: torch.Tensor | None = None) -> KVCache:
        """Return an empty cache.

        Args:
            capacity: Positions.
            batch: Sequences.
            padding: As ``KVCache`` takes it.

        Raises:
            InputError: The capacity is not between 1 and the model's context.
        """
        self._check_capacity(capacity)
        return KVCache(
            self.config.num_hidden_layers,
            self.config.num_key_value_heads,
            self.config.head_dim,
            capacity,
            batch=batch,
            windows=self.config.windows,
            padding=padding,
            dtype=self.dtype if self.cache_dtype is None else self.cache_dtype,
            device=self.device,
        )

    def make_batch_cache(self, capacity: int, batch: int) -> BatchCache:
        """Return an empty cache of sequences that grow by themselves, for programs alone.

        Args:
            capacity: Positions of a sequence.
            batch: Sequences.

        Raises:
            InputError: The capacity is not between 1 and the model's context.
        """
        self._check_capacity(capacity)
        config = self.config
        return BatchCache(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, capacity, batch)

    def _check_capacity(self, capacity: int) -> None:
        limit = self.config.max_position_embeddings
        if not 1 <= capacity <= limit:
            rule = f"from 1 to {limit}, the model's context"
            raise InputError("key-value cache", name="capacity", rule=rule, value=capacity)

    def emit_program(
        self, builder: ProgramBuilder, tokens: Value, *, cache: CachePlaces | RowPlaces | None = None, part: str = "all"
    ) -> Value:
        """Emit the logits [T, vocabulary] of tokens [T] of one sequence, after those of a cache, or of whole sequences.

        Args:
            builder: Collects.
            tokens: Their numbers; for the head what the body gave.
            cache: Where their keys and values go.
            part: ``"body"`` for what the last block gives, [T, hidden], ``"head"`` for the logits of that.
        """
        if part == "head":
            return self._emit_head(builder, tokens)
        if cache is None:
            builder.refuse("a decoder is emitted for tokens of one sequence, over a cache")
        x: Value = builder.emit(self.embed_tokens, tokens)
        if self.config.embedding_scale != 1.0:
            x = builder.step(Op.AFFINE, x, numbers=(self.config.embedding_scale, 0))
        if self.embed_positions is not None:
            x = builder.step(Op.ADD, x, builder.emit(self.embed_positions, cache.position))
        for block in self.layers:
            x = builder.emit(block, x, cache=cache)
        return x if part == "body" else self._emit_head(builder, x)

    def _emit_head(self, builder: ProgramBuilder, x: Value) -> Value:
        logits: Value = builder.emit(self.lm_head, x if self.norm is None else builder.emit(self.norm, x))
        scale, cap = self.config.logit_scale, self.config.final_logit_softcapping
        if scale != 1.0:
            logits = builder.step(Op.AFFINE, logits, numbers=(scale, 0))
        if cap is not None:
            bounded = builder.step(Op.TANH, builder.step(Op.AFFINE, logits, numbers=(1 / cap, 0)))
            logits = builder.step(Op.AFFINE, bounded, numbers=(cap, 0))
        return logits

    def forward(
        self,
        tokens: torch.Tensor,
        cache: KVCache | None = None,
        *,
        allowed: torch.Tensor | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Return logits [B, T, vocabulary], or [B, 1, vocabulary] of the last tokens alone.

        Args:
            tokens: int64 [B, T], the tokens after those in the cache.
            cache: From ``make_cache``; takes the tokens' keys and values. None in training.
            allowed: bool [B, T]: which tokens are not padding; without a cache.
            last_only: Whether only the last token's logits are wanted.

        Raises:
            InputError: A token is not in the vocabulary, the tokens do not fit into the cache or the context, or their
                shape or dtype is wrong.
        """
        self._check(tokens)
        if cache is None:
            limit = self.config.max_position_embeddings
            if tokens.shape[1] > limit:
                raise InputError(self._what, name="tokens", rule=f"at most {limit} a row", value=tokens.shape[1])
        else:
            cache.require(tokens.shape[1])
        x = self._embed(tokens, 0 if cache is None else cache.start)
        for block in self.layers:
            x = block(x, cache=cache, allowed=allowed)
        if cache is not None:
            cache.advance(tokens.shape[1])
        x = x[:, -1:] if last_only else x
        logits: torch.Tensor = self.lm_head(x if self.norm is None else self.norm(x))
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if self.config.final_logit_softcapping is not None:
            logits = (logits / self.config.final_logit_softcapping).tanh() * self.config.final_logit_softcapping
        return logits

    def features(self, tokens: torch.Tensor, *, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """Return what the head takes, [B, T, hidden], as an encoder does.

        Args:
            tokens: int64 [B, T].
            allowed: bool [B, T]: which tokens are not padding.

        Raises:
            InputError: As ``forward``.
        """
        self._check(tokens)
        x = self._embed(tokens)
        for block in self.layers:
            x = block(x, allowed=allowed)
        y: torch.Tensor = x if self.norm is None else self.norm(x)
        return y


class TransformerEncoder(_Transformer):
    """Token numbers to features [B, T, hidden].

    Parts: ``embed_tokens``, ``embed_positions`` (learned), ``embed_types`` (segments), ``layers``; ``embed_norm`` where
    the config has one, and ``norm`` where norms are before the sums.

    Args:
        config: Sizes and options; not ``causal``.
    """

    _what = "encoder"

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        if config.causal:
            raise ConfigError("encoder", name="causal", rule="False; a decoder is TransformerDecoder", value=True)
        kinds = config.type_vocab_size
        self.embed_types = _embedding(kinds, config) if kinds else None
        self.embed_norm = _norm(config) if config.embedding_norm else None
        self.norm = None if config.norm_position == "post" else _norm(config)
        self._initialise()

    def forward(
        self, tokens: torch.Tensor, *, allowed: torch.Tensor | None = None, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return features [B, T, hidden].

        Args:
            tokens: int64 [B, T].
            allowed: bool [B, T]: which tokens are not padding.
            types: int64 [B, T]: each token's segment. Defaults to 0.

        Raises:
            InputError: A token is not in the vocabulary, there are too many, or their shape or dtype is wrong.
        """
        self._check(tokens)
        x = self._embed(tokens)
        if self.embed_types is not None:
            x = x + self.embed_types(torch.zeros_like(tokens) if types is None else types)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if self.config.dropout:
            x = nn.functional.dropout(x, self.config.dropout, self.training)
        for block in self.layers:
            x = block(x, allowed=allowed)
        y: torch.Tensor = x if self.norm is None else self.norm(x)
        return y

    def emit_program(
        self, builder: ProgramBuilder, tokens: Value, *, cache: RowPlaces | None = None, types: Value | None = None
    ) -> Value:
        """Emit the features [T, hidden] of tokens [T] of whole sequences, and of their segments [T]."""
        if cache is None:
            builder.refuse("an encoder is emitted for whole sequences")
        x: Value = builder.emit(self.embed_tokens, tokens)
        if self.config.embedding_scale != 1.0:
            x = builder.step(Op.AFFINE, x, numbers=(self.config.embedding_scale, 0))
        if self.embed_positions is not None:
            table, first = builder.bound(self.embed_positions.weight, "positions"), self.config.position_offset
            table = builder.rows(table, first, table.shape[0] - first)
            x = builder.step(Op.ADD, x, builder.step(Op.EMBEDDING, cache.position, table, shape=x.shape))
        if self.embed_types is not None:
            x = builder.step(Op.ADD, x, builder.emit(self.embed_types, types))
        x = x if self.embed_norm is None else builder.emit(self.embed_norm, x)
        for block in self.layers:
            x = builder.emit(block, x, cache=cache)
        return x if self.norm is None else builder.emit(self.norm, x)


Transformer = TransformerDecoder | TransformerEncoder


def empty_transformer(config: TransformerConfig) -> Transformer:
    """Return the model of a config, on the meta device, to be filled."""
    with torch.device("meta"):
        return TransformerDecoder(config) if config.causal else TransformerEncoder(config)


def build_transformer(config: TransformerConfig | None = None, **options: Any) -> Transformer:
    """Build a decoder, or an encoder where ``causal`` is False, with random weights.

    Args:
        config: Sizes and options.
        **options: Fields of ``TransformerConfig``, instead of ``config``.

    Raises:
        ConfigError: An option is unknown or not legal, or both are given.
    """
    if config is not None and options:
        raise ConfigError("build_transformer", name="config", rule="given, or options", value="both")
    config = TransformerConfig.from_dict(options) if config is None else config
    return TransformerDecoder(config) if config.causal else TransformerEncoder(config)
