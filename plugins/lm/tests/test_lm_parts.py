"""Parts of decoders of few families: experts, capped scores and logits, sinks, norms after a part, factors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import q4core as q4
from q4_lm import Generation, TransformerConfig, build_transformer, load_model, save_model
from q4_nn.blocks.attention import attend, visible
from q4_nn.blocks.experts import Experts
from q4_nn.blocks.feed_forward import FeedForward

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize("normalised", [True, False])
def test_experts(normalised: bool) -> None:  # a case
    """Each token is the sum of its chosen experts, by the softmax of the router."""
    torch.manual_seed(0)
    part = Experts(8, 12, 5, 2, normalised=normalised).double().requires_grad_(requires_grad=False)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    for row, found in zip(x.view(-1, 8), part(x).view(-1, 8), strict=True):
        shares = (part.router.weight @ row).softmax(-1)
        chosen = sorted(range(5), key=lambda number: -float(shares[number]))[:2]
        total = sum(shares[number] for number in chosen) if normalised else 1
        expected = sum(part.experts[number](row) * shares[number] / total for number in chosen)
        assert torch.allclose(found, torch.as_tensor(expected))


def test_more_experts_than_there_are() -> None:
    """More chosen experts than there are is refused, by the part and by the config."""
    with pytest.raises(q4.ConfigError, match="from 1 to 2"):
        Experts(8, 12, 2, 3)
    with pytest.raises(q4.ConfigError, match="from 1 to 2"):
        TransformerConfig(hidden_size=8, intermediate_size=8, num_experts=2, num_experts_per_tok=3)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_capped_scores_and_sinks(count: int, window: int | None) -> None:
    """Scores are bounded and share their softmax with the sinks, for each head and query by itself."""
    torch.manual_seed(0)
    query = torch.randn(2, count, 4, 6, dtype=torch.float64)
    keys, values = torch.randn(2, 2, 2, 9, 6, dtype=torch.float64)
    sinks = torch.randn(4, dtype=torch.float64)
    mask = visible(count, 9, window=window)
    found = attend(query, keys, values, mask=mask, scale=0.7, cap=1.5, sinks=sinks)
    for batch, place, head in torch.cartesian_prod(torch.arange(2), torch.arange(count), torch.arange(4)).tolist():
        last = 9 - count + place
        seen = range(max(0, last - (window or 9) + 1), last + 1)
        scores = [float(query[batch, place, head] @ keys[batch, head // 2, key]) * 0.7 for key in seen]
        bounded = torch.tensor([*scores, 0], dtype=torch.float64).div(1.5).tanh() * 1.5
        bounded[-1] = sinks[head]
        weights = bounded.softmax(-1)[:-1]
        expected = weights @ values[batch, head // 2, list(seen)]
        assert torch.allclose(found[batch, place, head], expected)


class LargestStorage(TorchDispatchMode):
    """Records the largest memory that any step's result needs."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a step of torch, and look at what it returns."""
        found = func(*args, **(kwargs or {}))
        tensors = [item for item in tree_leaves(found) if isinstance(item, torch.Tensor)]
        self.nbytes = max([self.nbytes, *(item.untyped_storage().nbytes() for item in tensors)])
        return found


@pytest.mark.parametrize("count", [1, 3])
def test_capped_scores_copy_no_keys(count: int) -> None:
    """The heads of a group read the keys and values of a cache where they lie, which are not copied for each."""
    query, keys = torch.randn(1, count, 8, 64), torch.randn(1, 2, 500, 64)
    with LargestStorage() as steps:  # type: ignore[no-untyped-call]  # torch's
        attend(query, keys, keys, cap=2.0, sinks=torch.zeros(8))
    assert steps.nbytes <= keys.nbytes


def test_without_cap_and_sinks() -> None:
    """A cap far above all scores, and sinks far below, change nothing."""
    torch.manual_seed(0)
    query, keys = torch.randn(1, 5, 4, 8), torch.randn(1, 2, 5, 8)
    plain = attend(query, keys, keys)
    assert torch.allclose(attend(query, keys, keys, cap=1e4), plain, atol=1e-5)
    assert torch.allclose(attend(query, keys, keys, sinks=torch.full((4,), -1e4)), plain, atol=1e-5)


def test_clamped_swiglu() -> None:
    """GPT-OSS's gate bounds both of its inputs, the gate above alone, and is refused without a gate."""
    part = FeedForward(2, 2, activation="clamped_swiglu")
    for layer in (part.gate_proj, part.up_proj, part.down_proj):
        torch.nn.init.eye_(layer.weight)  # type: ignore[union-attr, arg-type]  # linear layers
    x = torch.tensor([[9.0, -20.0]])
    gate = torch.tensor([[7.0, -20.0]])
    assert torch.allclose(part(x), gate * (1.702 * gate).sigmoid() * (torch.tensor([[7.0, -7.0]]) + 1))
    with pytest.raises(q4.ConfigError, match="activation"):
        FeedForward(2, 2, activation="clamped_swiglu", gated=False)


PARTS: dict[str, dict[str, Any]] = {
    "after": {"norm_position": "after", "qk_norm": True, "qk_norm_heads": False},
    "factors": {"embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 0.2, "attention_scale": 0.1},
    "capped logits": {"final_logit_softcapping": 2.0},
    "capped scores": {"attn_logit_softcapping": 1.0, "norm_position": "both"},
    "sinks": {"attention_sinks": True, "sliding_window": 4, "sliding_layers": (0, 2)},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("name", PARTS)
def test_token_by_token(name: str) -> None:
    """A generation, by a program where there is one, gives the tokens of whole sequences."""
    torch.manual_seed(0)
    decoder: Any = build_transformer(TransformerConfig(**SIZES, **PARTS[name])).eval()
    with torch.no_grad():
        for key, parameter in decoder.named_parameters():
            if "norm" in key or "sinks" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
    prompt = [3, 1, 4, 1, 5]
    found = list(Generation(decoder, prompt, max_tokens=12))
    with torch.no_grad():
        logits = decoder(torch.tensor([[*prompt, *found]]))[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == found


@pytest.mark.parametrize("name", PARTS)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """A folder of our own restores every bit."""
    torch.manual_seed(0)
    decoder: Any = build_transformer(TransformerConfig(**SIZES, **PARTS[name])).eval()
    with q4.Session() as session, torch.no_grad():
        found = load_model(save_model(decoder, tmp_path / "model").parent, session)
        tokens = torch.arange(20)[None]
        assert torch.equal(found(tokens), decoder(tokens))


def test_config_of_parts() -> None:
    """Options are checked, and a config goes to plain values and back."""
    for options in PARTS.values():
        config = TransformerConfig(**SIZES, **options)
        assert TransformerConfig.from_dict(config.to_dict()) == config
    # What is a default of other sizes alone is kept.
    heads: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    for own in ({"num_key_value_heads": 1}, {"head_dim": 64}, {"head_dim": 32, "rope_dim": 16}, {"head_dim": 16}):
        config = TransformerConfig(**(heads | own))
        assert TransformerConfig.from_dict(config.to_dict()) == config
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        none: dict[str, Any] = {name: 0.0}
        with pytest.raises(q4.ConfigError, match=name):
            TransformerConfig(**SIZES, **none)
