"""``TransformerConfig``: sizes and options of a transformer, in Hugging Face's field names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from q4_nn.blocks.feed_forward import ACTIVATIONS, GATED_ACTIVATIONS
from q4_nn.blocks.rotary import RopeScaling
from q4core import ConfigError
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TransformerConfig"]

_WHAT = "transformer config"
_CHOICES = {
    "hidden_act": (*ACTIVATIONS, *GATED_ACTIVATIONS),
    "norm": ("rms", "offset_rms", "layer"),
    "norm_position": ("pre", "post", "both", "after"),
    "positions": ("rotary", "learned", "none"),
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def _as_tuple(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(values)


@attrs.frozen(kw_only=True)
class TransformerConfig:
    """Sizes and options of a decoder or an encoder.

    Args:
        hidden_size: Features of a token.
        intermediate_size: Features inside a feed-forward part.
        num_hidden_layers: Blocks.
        num_attention_heads: Query heads.
        vocab_size: Tokens; a block alone needs none.
        num_key_value_heads: Key-value heads, a divisor of ``num_attention_heads``. Defaults to as many.
        head_dim: Features of a head. Defaults to ``hidden_size / num_attention_heads``.
        max_position_embeddings: Most positions that the model is made for.
        position_offset: Row of the first position in a learned table, of which there are so many more (RoBERTa).
        causal: Whether a token sees none after it.
        hidden_act: ``silu``, ``gelu``, ``gelu_tanh``, ``relu`` or ``clamped_swiglu`` (gated).
        gated: Whether the feed-forward parts have a gate.
        norm: ``rms``, ``offset_rms`` (weight stored minus one) or ``layer``.
        norm_eps: Epsilon of every norm.
        norm_bias: Whether ``layer`` norms have one.
        embedding_norm: Whether an encoder norms its embeddings, in the place of the first block's first norm where
            norms are before. Defaults to encoders with norms after sums.
        norm_position: Norms before each part (``pre``), after its sum (``post``), before and after it (``both``), or
            after it and before the sum (``after``).
        positions: ``rotary``, ``learned`` or ``none``.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: How they are changed.
        rope_dim: Features of a head that are turned. Defaults to all.
        rope_interleaved: Whether the members of a pair are neighbours, as in Llama-family GGUF files.
        no_rope_layers: Indices of the blocks that turn nothing.
        sliding_window: How many tokens a sliding block sees, its own among them; on either side in an encoder.
        sliding_layers: Indices of the sliding blocks.
        local_rope_theta: Base of the sliding blocks, unscaled; None for that of the others.
        attention_bias: Whether queries, keys and values have one.
        attention_out_bias: Whether attention's last projection has one.
        mlp_bias: Whether the layers of feed-forward parts have one.
        qk_norm: Whether queries and keys are normed.
        qk_norm_heads: Whether head by head; else all heads' features at once.
        attention_scale: Of the scores. Defaults to 1 / sqrt(head_dim).
        attn_logit_softcapping: Bound of the scores, which become ``cap · tanh(score / cap)``.
        attention_sinks: Whether each head has a learnt score of no key.
        attention_dropout: Share of the attention weights that training drops.
        dropout: Share of what each part gives that training drops.
        embedding_scale: What embeddings are multiplied by.
        residual_scale: What the result of each part is multiplied by before it is added.
        logit_scale: What logits are multiplied by.
        final_logit_softcapping: Bound of the logits, as of the scores.
        num_experts: Experts of each feed-forward part; 0 for a part without.
        num_experts_per_tok: How many of them compute a token.
        norm_topk_prob: Whether their weights add up to one.
        type_vocab_size: Kinds of segments (BERT); 0 for none.
        tie_word_embeddings: Whether the head is the embedding.
        initializer_range: Standard deviation of random weights.

    Raises:
        ConfigError: A value is not legal, or contradicts another one.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    vocab_size: int = 0
    num_key_value_heads: int = attrs.Factory(lambda self: self.num_attention_heads, takes_self=True)
    head_dim: int = attrs.Factory(lambda self: self.hidden_size // max(self.num_attention_heads, 1), takes_self=True)
    max_position_embeddings: int = 2048
    position_offset: int = 0
    causal: bool = True
    hidden_act: str = "silu"
    gated: bool = True
    norm: str = "rms"
    norm_eps: float = 1e-6
    norm_position: str = "pre"
    norm_bias: bool = True
    embedding_norm: bool = attrs.Factory(lambda self: self.norm_position == "post" and not self.causal, takes_self=True)
    positions: str = "rotary"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = attrs.Factory(RopeScaling)
    rope_dim: int = attrs.Factory(lambda self: self.head_dim, takes_self=True)
    rope_interleaved: bool = False
    no_rope_layers: tuple[int, ...] = attrs.field(default=(), converter=_as_tuple)
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = attrs.field(default=(), converter=_as_tuple)
    local_rope_theta: float | None = None
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_heads: bool = True
    attention_scale: float | None = None
    attn_logit_softcapping: float | None = None
    attention_sinks: bool = False
    attention_dropout: float = 0.0
    dropout: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    type_vocab_size: int = 0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __attrs_post_init__(self) -> None:
        """Check the values against one another."""
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                close = closest_name(str(value), choices)
                hint = f"Did you mean {close!r}?" if close else None
                raise ConfigError(_WHAT, name=name, rule=f"one of {', '.join(choices)}", value=value, hint=hint)
        for name in (*_SIZES, "num_key_value_heads", "head_dim"):
            self._require(name, _is_count(getattr(self, name)), "a positive whole number")
        heads = self.num_attention_heads
        self._require("num_key_value_heads", heads % self.num_key_value_heads == 0, f"a divisor of the {heads} heads")
        if self.positions == "rotary":
            even = self.rope_dim % 2 == 0 and 0 < self.rope_dim <= self.head_dim
            self._require("rope_dim", even, f"even and at most {self.head_dim}")
            for name in ("short_factor", "long_factor") if self.rope_scaling.kind == "longrope" else ():
                factors = getattr(self.rope_scaling, name)
                if len(factors) != self.rope_dim // 2:
                    rule = f"{self.rope_dim // 2} numbers long, half of rope_dim"
                    raise ConfigError(_WHAT, name=f"rope_scaling.{name}", rule=rule, value=len(factors))
        if self.sliding_layers:
            self._require("sliding_window", _is_count(self.sliding_window), "the tokens that a sliding block sees")
        for name in ("no_rope_layers", "sliding_layers"):
            layers = self.num_hidden_layers
            inside = all(0 <= layer < layers for layer in getattr(self, name))
            self._require(name, inside, f"indices from 0 to {layers - 1}")
        self._check_experts_and_caps()
        for name in ("attention_dropout", "dropout"):
            self._require(name, 0 <= getattr(self, name) < 1, "from 0 to below 1")

    def _check_experts_and_caps(self) -> None:
        if self.num_experts:
            fits = _is_count(self.num_experts_per_tok) and self.num_experts_per_tok <= self.num_experts
            self._require("num_experts_per_tok", fits, f"from 1 to {self.num_experts}, the experts")
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            cap = getattr(self, name)
            self._require(name, cap is None or cap > 0, "a positive number, or None")

    def _require(self, name: str, is_legal: bool, rule: str) -> None:  # noqa: FBT001  # a condition
        if not is_legal:
            raise ConfigError(_WHAT, name=name, rule=rule, value=getattr(self, name))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each block how many tokens one sees, its own among them; None for all."""
        sliding = frozenset(self.sliding_layers)
        return tuple(self.sliding_window if layer in sliding else None for layer in range(self.num_hidden_layers))

    def to_dict(self) -> dict[str, Any]:
        """Return what differs from the defaults, as plain values: ``TransformerConfig.from_dict`` reads it."""
        fields = attrs.asdict(self, recurse=False)
        plain = {"hidden_size", "intermediate_size"}
        heads = max(self.num_attention_heads, 1)
        # Other defaults follow from these.
        given = {**{name: fields[name] for name in plain}, "num_attention_heads": heads, "head_dim": self.head_dim}
        default = TransformerConfig(**given)
        found = {name: value for name, value in fields.items() if name in plain or value != getattr(default, name)}
        found |= {} if heads == 1 else {"num_attention_heads": heads}
        found |= {} if self.head_dim == self.hidden_size // heads else {"head_dim": self.head_dim}
        if "rope_scaling" in found:
            scaling = attrs.asdict(self.rope_scaling)
            plain_scaling = attrs.asdict(RopeScaling())
            found["rope_scaling"] = {name: item for name, item in scaling.items() if item != plain_scaling[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TransformerConfig:
        """Return the config of what ``to_dict`` returned.

        Raises:
            ConfigError: A name is not known, one is missing, or a value is not legal.
        """
        names = [field.name for field in attrs.fields(cls)]
        for name in values:
            if name not in names:
                close = closest_name(name, names)
                hint = f"Did you mean {close!r}?" if close else None
                raise ConfigError(_WHAT, name="option", rule="one that a transformer has", value=name, hint=hint)
        given = dict(values)
        if isinstance(given.get("rope_scaling"), dict):
            given["rope_scaling"] = RopeScaling(**given["rope_scaling"])
        try:
            return cls(**given)
        except TypeError as error:
            raise ConfigError(_WHAT, name="options", rule="whole", value=str(error)) from error


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
