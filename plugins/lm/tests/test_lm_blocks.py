"""Blocks: gradients in float64, caches and windows against one pass, and what is refused."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_lm import TransformerBlock, TransformerConfig, TransformerDecoder, TransformerEncoder
from q4_nn import FeedForward, KVCache, MultiHeadAttention, OffsetRMSNorm, RopeScaling, RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
CONFIGS = {
    "llama": TransformerConfig(**SIZES, num_key_value_heads=2),
    "interleaved": TransformerConfig(**SIZES, rope_interleaved=True, rope_dim=2),
    "qwen3": TransformerConfig(**SIZES, qk_norm=True, head_dim=6, attention_bias=True),
    "gemma": TransformerConfig(
        **SIZES,
        norm="offset_rms",
        norm_position="both",
        hidden_act="gelu_tanh",
        qk_norm=True,
        sliding_window=3,
        sliding_layers=[0],
        local_rope_theta=100.0,
        embedding_scale=4.0,
    ),
    "bert": TransformerConfig(
        **SIZES, causal=False, gated=False, hidden_act="gelu", norm="layer", norm_position="post", positions="learned"
    ),
}


def of(name: str, **more: Any) -> TransformerConfig:
    """Return a config with some options changed."""
    return TransformerConfig.from_dict({**CONFIGS[name].to_dict(), **more})


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    **{f"block-{name}": functools.partial(TransformerBlock, config) for name, config in CONFIGS.items()},
    "attention-full": lambda: MultiHeadAttention(16, 2, causal=False),
    "attention-window": lambda: MultiHeadAttention(16, 4, 1, window=2),
    "feed-forward-relu": lambda: FeedForward(16, 8, activation="relu", gated=False, bias=True),
    "offset-norm": lambda: OffsetRMSNorm(16),
}


@pytest.mark.parametrize("name", MODULES)
def test_gradients(name: str) -> None:
    """Gradients of x and of every parameter are those of finite differences in float64."""
    torch.manual_seed(3)
    module = MODULES[name]().double()
    names = [key for key, _ in module.named_parameters()]
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, *values: torch.Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *module.parameters()), fast_mode=True)


def test_gradients_of_cross_attention() -> None:
    """Attention over another sequence has the gradients of finite differences, for both sequences."""
    module = MultiHeadAttention(8, 2, causal=False).double()
    x, memory = (torch.randn(2, count, 8, dtype=torch.float64, requires_grad=True) for count in (3, 4))
    allowed = torch.tensor([[True] * 4, [True, True, False, False]])
    assert torch.autograd.gradcheck(lambda x, memory: module(x, memory, allowed=allowed), (x, memory), fast_mode=True)


@pytest.mark.parametrize("interleaved", [True, False])
def test_gradients_of_rotation(interleaved: bool) -> None:
    """Turning has the gradients of finite differences."""
    rotary = RotaryEmbedding(4, 50.0, interleaved=interleaved)
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotary(x, 3), (x,), fast_mode=True)


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.causal])
@pytest.mark.parametrize("cuts", [[12], [1] * 12, [5, 1, 1, 5], [2, 9, 1]])
def test_cache_gives_what_one_pass_gives(name: str, cuts: list[int]) -> None:
    """In pieces of any size, with and without a sliding window, logits are those of one pass without a cache."""
    torch.manual_seed(1)
    decoder = TransformerDecoder(of(name, vocab_size=11)).double().eval()
    tokens = torch.randint(0, 11, (2, 12))
    with torch.no_grad():
        whole, cache = decoder(tokens), decoder.make_cache(12, 2)
        parts = torch.cat([decoder(piece, cache) for piece in tokens.split(cuts, 1)], 1)
    assert torch.allclose(parts, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_padding_on_the_left_changes_nothing(name: str) -> None:
    """Prompts of different lengths, filled up on the left, give the logits that each gives alone."""
    torch.manual_seed(2)
    decoder = TransformerDecoder(of(name, vocab_size=11)).double().eval()
    tokens = torch.randint(0, 11, (2, 9))
    padding = torch.tensor([0, 4])
    with torch.no_grad():
        cache = decoder.make_cache(9, 2, padding=padding)
        both = torch.cat([decoder(piece, cache) for piece in tokens.split([6, 1, 2], 1)], 1)
        for row, start in enumerate(padding.tolist()):
            alone = decoder(tokens[row : row + 1, start:])
            assert torch.allclose(both[row, start:], alone[0], rtol=1e-9, atol=1e-12)


def test_padding_of_an_encoder_changes_nothing() -> None:
    """Tokens that are not allowed change no other token's features."""
    torch.manual_seed(2)
    encoder = TransformerEncoder(of("bert", vocab_size=11, type_vocab_size=2)).double().eval()
    tokens = torch.randint(0, 11, (1, 9))
    allowed = torch.arange(9)[None] < 6
    with torch.no_grad():
        assert torch.allclose(encoder(tokens, allowed=allowed)[:, :6], encoder(tokens[:, :6]), rtol=1e-9, atol=1e-12)


def test_window_of_a_cache_is_small() -> None:
    """A layer that sees 4 tokens keeps 8, whatever the context; a long prompt through it keeps the last ones."""
    cache = KVCache(2, 1, 2, 1000, windows=[4, None])
    assert cache.nbytes == 2 * 2 * 4 * (8 + 1000)
    rows = torch.arange(30.0)[None, :, None, None].expand(1, 30, 1, 2)
    seen, _ = cache.write(0, rows, rows)
    cache.write(1, rows, rows)
    cache.advance(30)
    assert seen.shape[2] == 30
    keys, _ = cache.write(0, 30 + rows[:, :1], rows[:, :1])
    assert keys[0, 0, :, 0].tolist() == [27.0, 28.0, 29.0, 30.0]


def test_a_tied_head_is_the_embedding() -> None:
    """Tied, head and embedding are one parameter that trains once."""
    decoder = TransformerDecoder(of("llama", vocab_size=11, tie_word_embeddings=True))
    assert decoder.lm_head.weight is decoder.embed_tokens.weight
    assert sum(parameter.shape == (11, 16) for parameter in decoder.parameters()) == 1


def test_config_round_trip() -> None:
    """A config from its plain values is the same config."""
    for config in CONFIGS.values():
        assert TransformerConfig.from_dict(config.to_dict()) == config
    scaled = of("llama", rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_context=64))
    assert TransformerConfig.from_dict(scaled.to_dict()) == scaled


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "hidden_size": ({"hidden_size": 0}, "a positive whole number"),
    "num_key_value_heads": ({"num_key_value_heads": 3}, "a divisor of the 4 heads"),
    "hidden_act": ({"hidden_act": "gelo"}, "one of silu, gelu"),
    "norm_position": ({"norm_position": "before"}, "one of pre, post, both"),
    "rope_dim": ({"rope_dim": 3}, "even and at most 4"),
    "sliding_window": ({"sliding_layers": [0]}, "the tokens that a sliding block sees"),
    "sliding_layers": ({"sliding_layers": [2], "sliding_window": 4}, "indices from 0 to 1"),
    "dropout": ({"dropout": 1.0}, "from 0 to below 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_config(name: str) -> None:
    """An option that is not legal, or contradicts another one, is refused by name and rule."""
    changes, rule = BAD[name]
    with pytest.raises(q4.ConfigError, match=rule) as caught:
        of("llama", **changes)
    assert caught.value.name == name


def test_unknown_option_of_a_config() -> None:
    """An option that there is not is refused with the nearest one."""
    with pytest.raises(q4.ConfigError, match="Did you mean 'num_hidden_layers'") as caught:
        of("llama", num_hiden_layers=3)
    assert caught.value.value == "num_hiden_layers"


def test_bad_input() -> None:
    """Wrong widths, a cache for what is not causal, and an encoder in a decoder's place are refused."""
    with pytest.raises(q4.InputError, match=r"x must be \[B, T, 16\]"):
        MultiHeadAttention(16, 2)(torch.randn(2, 3, 8))
    with pytest.raises(q4.InputError, match="cache must be None"):
        MultiHeadAttention(16, 2, causal=False)(torch.randn(1, 3, 16), cache=KVCache(1, 2, 8, 4))
    with pytest.raises(q4.ConfigError, match="an encoder is TransformerEncoder"):
        TransformerDecoder(of("bert", vocab_size=3))
    with pytest.raises(q4.ConfigError, match="a decoder is TransformerDecoder"):
        TransformerEncoder(of("llama", vocab_size=3))
    with pytest.raises(q4.ConfigError, match="vocab_size must be a positive"):
        TransformerDecoder(CONFIGS["llama"])
    decoder = TransformerDecoder(of("llama", vocab_size=3, max_position_embeddings=4))
    with pytest.raises(q4.InputError, match="at most 4 a row"):
        decoder(torch.zeros(1, 5, dtype=torch.int64))
