"""From an opened model file to a decoder: one builder function for each ``general.architecture``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

import q4core as q4
from q4_nn.attention import Attention
from q4_nn.decoder import Block, Decoder, DecoderShape, SwiGLU
from q4_nn.norm import RMSNorm
from q4_nn.rope import Rotary
from q4_nn.weights import Weights
from q4core.plugin_api import closest_name, resolve_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_nn.metadata import Metadata
    from q4core import Checkpoint, Session

__all__ = ["architectures", "build_decoder", "builder", "find_architecture"]

_BUILDERS: dict[str, Callable[[Weights, Metadata], Decoder]] = {}


def builder(
    architecture: str,
) -> Callable[[Callable[[Weights, Metadata], Decoder]], Callable[[Weights, Metadata], Decoder]]:
    """Register the decorated function as the builder of an architecture.

    Args:
        architecture: Value of ``general.architecture``.
    """

    def register(function: Callable[[Weights, Metadata], Decoder]) -> Callable[[Weights, Metadata], Decoder]:
        _BUILDERS[architecture] = function
        return function

    return register


def architectures() -> tuple[str, ...]:
    """Return the architectures that have a builder."""
    return tuple(sorted(_BUILDERS))


def find_architecture(metadata: Metadata) -> str:
    """Return a model file's architecture, which has a builder.

    Raises:
        CheckpointError: The file names none, or one without a builder.
    """
    if "general.architecture" not in metadata:
        metadata.fail(
            "general.architecture", "present", hint="Only a file that describes its model, such as a GGUF, can answer."
        )
    architecture: str = metadata.text("general.architecture")
    if architecture not in _BUILDERS:
        close = closest_name(architecture, _BUILDERS)
        hint = f"Did you mean {close!r}?" if close else "Register a builder for it with q4_nn.builder."
        metadata.fail("general.architecture", f"one of {', '.join(architectures())}", architecture, hint)
    return architecture


def build_decoder(checkpoint: Checkpoint, session: Session, metadata: Metadata) -> Decoder:
    """Build the decoder that an opened file holds.

    Args:
        checkpoint: The opened file.
        session: Makes the linear layers.
        metadata: The file's metadata.

    Raises:
        CheckpointError: The architecture is not known, a metadata value or a tensor is missing or contradicts the
            others, or there is a tensor that the builder does not know.
        ConfigError: The session's device is not available.
    """
    architecture = find_architecture(metadata)
    weights = Weights(
        checkpoint,
        session,
        where=metadata.where,
        dtype=session.config.compute_dtype or torch.float32,
        device=resolve_device(q4.resolve_config(session.config), torch.device("cpu")),  # where a file's weights are
    )
    decoder = _BUILDERS[architecture](weights, metadata)
    weights.finish()
    return decoder.eval()


@attrs.frozen
class _Llama:
    """Hyper-parameters of a Llama-family decoder beside its sizes."""

    epsilon: float
    rotary_dimensions: int
    rotary_base: float
    rotary_scale: float


def _read_llama(metadata: Metadata) -> tuple[DecoderShape, _Llama]:
    def key(name: str) -> str:
        return f"llama.{name}"

    hidden = metadata.integer(key("embedding_length"))
    heads = metadata.integer(key("attention.head_count"))
    kv_heads = metadata.integer(key("attention.head_count_kv"), default=heads)
    if heads % kv_heads:
        metadata.fail(key("attention.head_count_kv"), f"a divisor of the {heads} heads", kv_heads)
    head_dim = metadata.integer(key("attention.key_length"), default=None)
    if head_dim is None:
        if hidden % heads:
            metadata.fail(key("attention.head_count"), f"a divisor of the {hidden} features", heads)
        head_dim = hidden // heads
    value_dim = metadata.integer(key("attention.value_length"), default=head_dim)
    if value_dim != head_dim:
        metadata.fail(key("attention.value_length"), f"{head_dim}, as many as a key has", value_dim)
    turned = metadata.integer(key("rope.dimension_count"), default=head_dim)
    if turned % 2 or turned > head_dim:
        metadata.fail(key("rope.dimension_count"), f"even and at most {head_dim}", turned)
    experts = metadata.integer(key("expert_count"), low=0, default=0)
    if experts:
        metadata.fail(key("expert_count"), "0 (no mixture of experts is served)", experts)
    context = metadata.integer(key("context_length"))
    # Inside its window a sliding-window model is an ordinary one; beyond it nothing is promised.
    context = min(context, metadata.integer(key("attention.sliding_window"), low=1, default=context))
    tokens = len(metadata.items("tokenizer.ggml.tokens", str)) if "tokenizer.ggml.tokens" in metadata else None
    vocabulary = metadata.integer(key("vocab_size"), default=tokens)
    if vocabulary is None:
        metadata.fail(key("vocab_size"), "present")
    shape = DecoderShape(
        layers=metadata.integer(key("block_count"), high=10_000),
        hidden=hidden,
        feed_forward=metadata.integer(key("feed_forward_length")),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        context=context,
    )
    return shape, _Llama(
        epsilon=metadata.number(key("attention.layer_norm_rms_epsilon"), above=0),
        rotary_dimensions=turned,
        rotary_base=metadata.number(key("rope.freq_base"), above=0, default=10000.0),
        rotary_scale=_rope_scale(metadata, key),
    )


def _rope_scale(metadata: Metadata, key: Callable[[str], str]) -> float:
    kind = metadata.text(key("rope.scaling.type"), default=None)
    if kind is None:
        legacy: float = metadata.number(key("rope.scale_linear"), above=0, default=1.0)
        return legacy
    if kind == "none":
        return 1.0
    if kind != "linear":
        metadata.fail(key("rope.scaling.type"), "'none' or 'linear'", kind)
    factor: float = metadata.number(key("rope.scaling.factor"), above=0)
    return factor


@builder("llama")
def build_llama(weights: Weights, metadata: Metadata) -> Decoder:
    """Build a Llama-family decoder.

    Reference:
        Tensor names and metadata keys of the GGUF specification.
    """
    shape, llama = _read_llama(metadata)
    factors = None
    if weights.has("rope_freqs.weight"):
        factors = weights.vector("rope_freqs.weight", llama.rotary_dimensions // 2, dtype=torch.float32).cpu()
    rotary = Rotary(llama.rotary_dimensions, llama.rotary_base, scale=llama.rotary_scale, factors=factors)
    rotary = rotary.to(weights.device)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weights.vector(f"{name}.weight", shape.hidden), llama.epsilon)

    def block(index: int) -> Block:
        at = f"blk.{index}"
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return Block(
            attention_norm=norm(f"{at}.attn_norm"),
            attention=Attention(
                qkv=weights.joined(
                    {f"{at}.attn_q": wide, f"{at}.attn_k": narrow, f"{at}.attn_v": narrow}, shape.hidden
                ),
                output=weights.linear(f"{at}.attn_output", shape.hidden, wide),
                rotary=rotary,
                head_dim=shape.head_dim,
                layer=index,
            ),
            feed_forward_norm=norm(f"{at}.ffn_norm"),
            feed_forward=SwiGLU(
                gate_up=weights.joined(
                    {f"{at}.ffn_gate": shape.feed_forward, f"{at}.ffn_up": shape.feed_forward}, shape.hidden
                ),
                down=weights.linear(f"{at}.ffn_down", shape.hidden, shape.feed_forward),
            ),
        )

    embedding = weights.linear("token_embd", shape.vocabulary, shape.hidden)
    tied = not weights.has("output.weight")
    return Decoder(
        shape,
        embed=weights.lookup(embedding),
        blocks=[block(index) for index in range(shape.layers)],
        norm=norm("output_norm"),
        head=embedding if tied else weights.linear("output", shape.vocabulary, shape.hidden),
        rotary=rotary,
        dtype=weights.dtype,
        device=weights.device,
    )
