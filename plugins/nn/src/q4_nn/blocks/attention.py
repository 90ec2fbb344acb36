"""Multi-head attention: grouped queries, causal or not, over x or another sequence, with or without a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from q4_nn.blocks.joined import emit_project, project
from q4_nn.blocks.rows import RowPlaces
from q4_programs import Op
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4_nn.blocks.cache import CachePlaces, KVCache
    from q4_nn.blocks.rotary import RotaryEmbedding
    from q4_programs import ProgramBuilder, Value

__all__ = ["MultiHeadAttention", "attend", "visible"]


def visible(  # noqa: PLR0913  # one argument per rule
    count: int,
    seen: int,
    *,
    causal: bool = True,
    window: int | None = None,
    allowed: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> torch.Tensor | None:
    """Return which keys each query sees: bool, broadcastable to [B, 1, T, S]; None for all.

    Args:
        count: T queries.
        seen: S keys.
        causal: Whether query t of T sees key s only where ``s <= S - T + t``.
        window: And only the last ``window`` of these; where not causal, keys less than ``window`` away on either side.
        allowed: bool [B, S]: keys that hold a token; a query always sees itself, so that no row is empty.
        device: Where.
    """
    mask = None
    past = torch.ones(count, seen, dtype=torch.bool, device=device).tril(seen - count)
    if causal and (count > 1 or (window is not None and window < seen)):
        mask = past if window is None else past.triu(seen - count - window + 1)
    elif window is not None and window < seen:
        mask = torch.ones_like(past).tril(seen - count + window - 1).triu(seen - count - window + 1)
    if allowed is not None:
        held = allowed[:, None, None, :] | past.triu(seen - count)
        mask = held if mask is None else held & mask
    return mask


def attend(  # noqa: PLR0913  # what a call of torch's takes
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(q·kᵀ · scale)·v; causal: token t of the last T sees the keys up to its own.

    Args:
        query: [B, T, heads, head_dim].
        keys: [B, kv_heads, S, head_dim]. ``heads`` is a multiple of ``kv_heads``; query head h reads key-value head
            ``h // (heads / kv_heads)``.
        values: The shape of ``keys``.
        causal: Whether the last T keys are the query's own and later ones are hidden; ignored where a mask is given.
        mask: From ``visible``, or None.
        scale: Of the scores. Defaults to 1 / sqrt(head_dim).
        dropout: Share of the weights that is dropped.
        cap: Bound of the scores, which become ``cap · tanh(score / cap)``; None for none.
        sinks: [heads]: a further score of each head, whose weight falls on no value; None for none.

    Returns:
        [B, T, heads, head_dim].

    Reference:
        Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints.
    """
    batch, count, heads, head_dim = query.shape
    kv_heads, seen = keys.shape[1], keys.shape[2]
    if cap is not None or sinks is not None:
        mask = visible(count, seen, causal=causal, device=query.device) if mask is None else mask
        return _attend_in_steps(query, keys, values, mask, scale=scale, dropout=dropout, cap=cap, sinks=sinks)
    product = nn.functional.scaled_dot_product_attention
    if count == 1:
        # The heads of a group are so many queries to one key-value head; the keys need not be repeated.
        grouped = query.view(batch, kv_heads, heads // kv_heads, head_dim)
        mixed = product(grouped, keys, values, attn_mask=mask, scale=scale, dropout_p=dropout)
        return mixed.reshape(query.shape)
    if mask is None and causal and seen > count:
        mask = visible(count, seen, device=query.device)
    mixed = product(
        query.transpose(1, 2),
        keys,
        values,
        attn_mask=mask,
        is_causal=causal and mask is None,
        enable_gqa=heads != kv_heads,
        scale=scale,
        dropout_p=dropout,
    )
    return mixed.transpose(1, 2)


def _attend_in_steps(  # noqa: PLR0913  # as above
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float | None,
    dropout: float,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return what ``attend`` does, with scores that torch's own product can't change."""
    kv_heads, count = keys.shape[1], query.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # The heads of a group are so many queries to one key-value head, [B, kv_heads, heads of one · T, head_dim]; a
    # product over [B, kv_heads, heads of one] would copy keys and values for each of them.
    grouped = query.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (grouped @ keys.transpose(-1, -2) * scale).unflatten(2, (-1, count))
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None] if mask.dim() > 2 else ~mask, float("-inf"))  # noqa: PLR2004  # [T, S]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if sinks is not None:
        extra = sinks.to(scores.dtype).view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, extra), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = nn.functional.dropout(weights.to(values.dtype), dropout)
    mixed: torch.Tensor = (weights.flatten(2, 3) @ values).unflatten(2, (-1, count))
    return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)


class MultiHeadAttention(nn.Module):
    """Projects, turns, attends and projects back.

    Parts: ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, ``q_norm``, ``k_norm`` where ``qk_norm`` is given, and
    ``sinks`` where asked for.
    Packing may replace the first three by one ``qkv_proj``.

    Args:
        hidden_size: Features of a token.
        num_heads: Query heads.
        num_kv_heads: Key-value heads, a divisor of ``num_heads``. Defaults to as many.
        head_dim: Features of a head; defaults to ``hidden_size / num_heads``.
        causal: Whether a token sees none after it.
        window: How many tokens it sees, its own among them; where not causal, on either side. None for all.
        bias: Whether queries, keys and values have one.
        out_bias: Whether the last projection has one; defaults to ``bias``.
        qk_norm: Epsilon of the RMS norm of each head's queries and keys; None for no norm.
        norm: Makes that norm, from its features and epsilon.
        norm_heads: Whether that norm is of each head, of head_dim; else of all heads' features at once.
        rotary: Turns queries and keys, or None.
        scale: Of the scores. Defaults to 1 / sqrt(head_dim).
        dropout: Share of the attention weights that training drops.
        layer: The layer's index in a cache.
        cap: Bound of the scores, as ``attend`` takes it.
        sinks: Whether each head has a learnt score of no key.

    Raises:
        ConfigError: The sizes don't fit one another.
    """

    joins = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}  # noqa: RUF012  # read, never written
    """Layers that share their x, by the name of the one that may take their place."""

    def __init__(  # noqa: PLR0913  # one argument per option
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        causal: bool = True,
        window: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm: float | None = None,
        norm: type[nn.Module] = nn.RMSNorm,
        norm_heads: bool = True,
        rotary: RotaryEmbedding | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        layer: int = 0,
        cap: float | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            rule = f"a divisor of the {num_heads} heads"
            raise ConfigError("attention", name="num_kv_heads", rule=rule, value=num_kv_heads)
        if head_dim is None and hidden_size % num_heads:
            rule = f"a divisor of the {hidden_size} features"
            raise ConfigError("attention", name="num_heads", rule=rule, value=num_heads)
        self.head_dim = head_dim = hidden_size // num_heads if head_dim is None else head_dim
        if rotary is not None and rotary.dim > head_dim:
            raise ConfigError("attention", name="rotary.dim", rule=f"at most {head_dim}", value=rotary.dim)
        narrow = num_kv_heads * head_dim
        self.q_proj: nn.Module | None = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj: nn.Module | None = nn.Linear(hidden_size, narrow, bias=bias)
        self.v_proj: nn.Module | None = nn.Linear(hidden_size, narrow, bias=bias)
        self.qkv_proj: nn.Module | None = None
        out_bias = bias if out_bias is None else out_bias
        self.o_proj: nn.Module = nn.Linear(num_heads * head_dim, hidden_size, bias=out_bias)
        wide = num_heads * head_dim
        self.q_norm = None if qk_norm is None else norm(head_dim if norm_heads else wide, eps=qk_norm)
        self.k_norm = None if qk_norm is None else norm(head_dim if norm_heads else narrow, eps=qk_norm)
        self.norm_heads = norm_heads
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.rotary = rotary
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.causal = causal
        self.window = window
        self.scale = scale
        self.dropout = dropout
        self.layer = layer
        self.cap = cap

    def extra_repr(self) -> str:
        """Return the options that torch prints before the parts."""
        text = f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, causal={self.causal}"
        return text if self.window is None else f"{text}, window={self.window}"

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor | None = None,
        *,
        cache: KVCache | None = None,
        allowed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the mixed tokens [B, T, hidden_size].

        Args:
            x: [B, T, hidden_size]; after ``cache.length`` tokens where a cache is given.
            memory: [B, S, hidden_size]: another sequence to attend to, all of it; None for x itself.
            cache: Keys and values of the tokens before, to which x's are added.
            allowed: bool [B, S]: which tokens of x, or of the memory, are not padding.

        Raises:
            InputError: A cache is given with a memory, or to attention that is not causal; x has another size.
        """
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:  # noqa: PLR2004  # [B, T, hidden]
            raise InputError("attention", name="x", rule=f"[B, T, {self.hidden_size}]", value=list(x.shape))
        if cache is not None and (memory is not None or not self.causal):
            raise InputError("attention", name="cache", rule="None, for attention is not causal over x alone")
        causal = self.causal and memory is None
        query, key, value = project(self, "qkv_proj", x, x if memory is None else memory)
        if self.q_norm is not None and self.k_norm is not None and not self.norm_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in (query, key, value))
        if self.q_norm is not None and self.k_norm is not None and self.norm_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        start = 0 if cache is None else cache.start
        if self.rotary is not None:
            query, key = self.rotary(query, start), self.rotary(key, start)
        if cache is None:
            keys, values = key.transpose(1, 2), value.transpose(1, 2)
        else:
            keys, values = cache.write(self.layer, key, value)
            allowed = self._held(cache, keys.shape[2], x)
        window = self.window if self.window is not None and self.window < keys.shape[2] else None
        mask = None
        if allowed is not None or window is not None:
            mask = visible(x.shape[1], keys.shape[2], causal=causal, window=window, allowed=allowed, device=x.device)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(
            query,
            keys,
            values,
            causal=causal,
            mask=mask,
            scale=self.scale,
            dropout=dropout,
            cap=self.cap,
            sinks=self.sinks,
        )
        y: torch.Tensor = self.o_proj(mixed.flatten(-2))
        return y

    def emit_program(self, builder: ProgramBuilder, x: Value, *, cache: CachePlaces | RowPlaces | None = None) -> Value:
        """Emit the tokens that the builder has steps for: of one sequence after a cache's, or of whole sequences."""
        if cache is None or not (self.causal or isinstance(cache, RowPlaces)):
            builder.refuse("attention is emitted for tokens of one sequence over a cache, or for whole sequences")
        if self.cap is not None or self.sinks is not None:
            builder.refuse("attention with capped scores or sinks is no operation of a program")
        query, key, value = emit_project(self, "qkv_proj", builder, x)
        rows = [part.shape[-1] // self.head_dim * builder.most_tokens for part in (query, key, value)]
        shapes = [(count, self.head_dim) for count in rows]
        if self.q_norm is not None and self.k_norm is not None and not self.norm_heads:
            query, key = builder.emit(self.q_norm, query), builder.emit(self.k_norm, key)
        if isinstance(cache, RowPlaces):
            return self._emit_rows(builder, (query, key, value), cache)
        query, key, value = map(builder.reshape, map(builder.dense, (query, key, value)), shapes)
        if self.q_norm is not None and self.k_norm is not None and self.norm_heads:
            query, key = builder.emit(self.q_norm, query), builder.emit(self.k_norm, key)
        # Of one token, whose queries and keys are rows side by side.
        both = builder.joined_rows(query, key) if builder.most_tokens == 1 else None
        if self.rotary is not None and both is not None:
            both = builder.emit(self.rotary, both, cache=cache)
            query, key = builder.rows(both, 0, shapes[0][0]), builder.rows(both, *(count for count, _ in shapes[:2]))
        elif self.rotary is not None:
            query, key = (builder.emit(self.rotary, part, cache=cache) for part in (query, key))
        keys, values, place = cache.of(self.layer)
        builder.step(Op.STORE, key, place, out=keys)
        builder.step(Op.STORE, value, place, out=values)
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        numbers = (self.num_kv_heads, scale, self.window or 0)
        mixed = builder.step(Op.ATTENTION, query, keys, values, place, numbers=numbers)
        y: Value = builder.emit(self.o_proj, builder.reshape(mixed, (*x.shape[:-1], self.num_heads * self.head_dim)))
        return y

    def _emit_rows(self, builder: ProgramBuilder, parts: Sequence[Value], places: RowPlaces) -> Value:
        """Emit rows [rows, heads · head_dim], each of which sees a span of rows: of its run, or of a cache."""
        query, key, value = parts
        has_norms = self.q_norm is not None and self.norm_heads
        if has_norms or self.rotary is not None:
            found = []
            for part, norm in ((query, self.q_norm), (key, self.k_norm)):
                shape = part.shape
                heads = builder.reshape(builder.dense(part), (shape[0] * (shape[-1] // self.head_dim), self.head_dim))
                heads = builder.emit(norm, heads) if has_norms and norm is not None else heads
                heads = heads if self.rotary is None else builder.emit(self.rotary, heads, cache=places)
                found.append(builder.reshape(heads, shape))
            query, key = found
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        spans = places.spans(causal=self.causal, window=self.window)
        numbers = (self.num_heads, self.num_kv_heads, scale)
        seen = places.seen(self.layer, key, value)
        y: Value = builder.emit(
            self.o_proj, builder.step(Op.ATTEND_SPANS, query, *seen, spans, numbers=numbers, shape=query.shape)
        )
        return y

    @staticmethod
    def _held(cache: KVCache, seen: int, x: torch.Tensor) -> torch.Tensor | None:
        """Return which of the last ``seen`` positions hold a token: bool [B, S]; None for all."""
        if cache.padding is None:
            return None
        end = cache.length + x.shape[1]
        return torch.arange(end - seen, end, device=x.device) >= cache.padding.to(x.device)[:, None]
