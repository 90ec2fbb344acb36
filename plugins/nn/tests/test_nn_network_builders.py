"""Builders of usual networks: shapes, training, four bits, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import q4core as q4
from q4_lm import TransformerConfig, TransformerDecoder, TransformerEncoder, build_transformer
from q4_nn import build, build_cnn, build_mlp, build_rnn, describe, initialise_, pack_

if TYPE_CHECKING:
    from collections.abc import Callable

TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 500}
MODELS: dict[str, Callable[[str | None], nn.Sequential]] = {
    "mlp": lambda kind: build_mlp([12, 32, 32, 5], dropout=0.1, format=kind),
    "cnn": lambda kind: build_cnn((1, 8, 8), [8, 16], 5, format=kind),
    "rnn": lambda kind: build_rnn(20, 32, cell="gru", num_layers=2, outputs=5, last=True, dropout=0.1, format=kind),
}


def batch_of(name: str) -> torch.Tensor:
    """Return 32 samples for a model."""
    shapes: dict[str, tuple[int, ...]] = {"mlp": (32, 12), "cnn": (32, 1, 8, 8)}
    return torch.randint(0, 20, (32, 7)) if name == "rnn" else torch.randn(shapes[name])


@pytest.mark.parametrize("kind", [None, "q4_0"])
@pytest.mark.parametrize("name", MODELS)
def test_networks(name: str, kind: str | None) -> None:
    """Each network has a description, learns its samples, and in four bits is packed with the same results."""
    torch.manual_seed(0)
    model = MODELS[name](kind)
    assert describe(build(describe(model))) == describe(model)
    x, y = batch_of(name), torch.randint(0, 5, (32,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    if kind is not None:
        model.eval()
        config = q4.SessionConfig(device="cpu", compute_path="dequant_matmul_only")
        with torch.no_grad(), q4.Session(config) as session:
            expected = model(x)
            pack_(model, session)
            assert torch.allclose(model(x), expected, rtol=0, atol=1e-4)


def test_transformers() -> None:
    """A transformer is a decoder, or an encoder where it is not causal; its weights have the config's spread."""
    decoder = build_transformer(**TINY, initializer_range=0.05)
    assert isinstance(decoder, TransformerDecoder)
    assert isinstance(build_transformer(**TINY, causal=False), TransformerEncoder)
    assert isinstance(build_transformer(decoder.config), TransformerDecoder)
    spread = [float(value.detach().std()) for value in decoder.parameters() if value.dim() > 1]
    assert all(0.045 < value < 0.055 for value in spread)


def test_rules_of_initialisation() -> None:
    """Each rule gives the spread that its paper says, and biases of zero."""
    expected = {"normal": 0.02, "kaiming": (2 / 400) ** 0.5, "xavier": (2 / 600) ** 0.5}
    for rule, spread in expected.items():
        layer = nn.Linear(400, 200)
        initialise_(layer, rule)
        assert float(layer.weight.detach().std()) == pytest.approx(spread, rel=0.02)
        assert not layer.bias.detach().any()
    with pytest.raises(q4.ConfigError, match="Did you mean 'kaiming'"):
        initialise_(nn.Linear(2, 2), "kaimin")


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "mlp": (lambda: build_mlp([3]), "at least 2 positive whole numbers"),
    "activation": (lambda: build_mlp([3, 2, 2], activation="rely"), "Did you mean 'relu'"),
    "cnn": (lambda: build_cnn((1, 8, 8), [4] * 4, 2), "at least 16 high and wide, for 4 pools"),
    "kernel": (lambda: build_cnn((1, 8, 8), [4], 2, kernel_size=2), "a positive odd number"),
    "cell": (lambda: build_rnn(9, 8, cell="gnu"), "rnn, lstm or gru"),
    "both": (
        lambda: build_transformer(TransformerConfig(hidden_size=2, intermediate_size=2), causal=True),
        "or options",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str) -> None:
    """Sizes and names that make no network are refused."""
    call, message = BAD[name]
    with pytest.raises(q4.ConfigError, match=message):
        call()
