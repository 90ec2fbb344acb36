"""Layer types by name, models from descriptions, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import q4_nn
import q4core as q4
from q4_nn import LayerType, STELinear, build, describe, layer_types, make

OPTIONS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "linear": ({"in_features": 32, "out_features": 5, "bias": False}, (7, 32)),
    "embedding": ({"num_embeddings": 9, "embedding_dim": 4}, (6,)),
    "conv2d": ({"in_channels": 3, "out_channels": 4, "kernel_size": (3, 2), "stride": 2, "padding": 1}, (3, 9, 8)),
    "rnn": ({"input_size": 8, "hidden_size": 6}, (5, 8)),
    "lstm": ({"input_size": 8, "hidden_size": 6, "num_layers": 2, "bidirectional": True}, (5, 8)),
    "gru": ({"input_size": 8, "hidden_size": 6}, (5, 8)),
    "attention": ({"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2}, (5, 16)),
    "feed_forward": ({"hidden_size": 16, "intermediate_size": 20, "gated": False}, (5, 16)),
    "block": ({"hidden_size": 16, "num_heads": 4, "intermediate_size": 20}, (5, 16)),
    "rms_norm": ({"normalized_shape": 16}, (5, 16)),
    "layer_norm": ({"normalized_shape": 16}, (5, 16)),
    "batch_norm1d": ({"num_features": 3}, (3, 4)),
    "batch_norm2d": ({"num_features": 3}, (3, 4, 4)),
    "max_pool2d": ({"kernel_size": 2}, (3, 9, 8)),
    "avg_pool2d": ({"kernel_size": 3, "stride": 1}, (3, 9, 8)),
    "adaptive_avg_pool2d": ({"output_size": 2}, (3, 9, 8)),
    "softmax": ({"dim": -1}, (5, 16)),
    "dropout": ({"p": 0.25}, (5, 16)),
    "select": ({"last": True}, (5, 16)),
}
CNN = {
    "input": [1, 8, 8],
    "layers": [
        {"type": "conv2d", "in_channels": 1, "out_channels": 8, "kernel_size": 3, "padding": 1, "format": "nf4"},
        {"type": "relu"},
        {"type": "max_pool2d", "kernel_size": 2},
        {"type": "flatten"},
        {"type": "linear", "in_features": 128, "out_features": 10, "format": "q4_0"},
    ],
}
TEXT = {
    "input": [-1],
    "layers": [
        {"type": "embedding", "num_embeddings": 30, "embedding_dim": 16},
        {"type": "lstm", "input_size": 16, "hidden_size": 32, "format": "q4_0"},
        {"type": "select", "index": 0},
        {"type": "block", "hidden_size": 32, "num_heads": 2, "intermediate_size": 48},
        {"type": "linear", "in_features": 32, "out_features": 30},
    ],
}


@pytest.mark.parametrize("name", sorted(layer_types()))
def test_every_type(name: str) -> None:
    """Each type is made from plain options, returns them, and gives the shape that it says."""
    example = layer_types()[name].examples[0]
    options, shape = OPTIONS.get(name, (dict(example.options), example.shape))
    description = {"input": [*shape], "layers": [{"type": name, **options}]}
    model = build(description)
    assert describe(model) == json.loads(json.dumps(description))
    assert describe(build(describe(model))) == describe(model)
    assert layer_types()[name].summary


@pytest.mark.parametrize("description", [CNN, TEXT])
def test_models_from_descriptions(description: dict[str, Any]) -> None:
    """A model of several kinds of layers is built, trains, is packed, and gives its description back."""
    model = build(description)
    assert describe(model) == description
    x = torch.randint(0, 30, (4, 7)) if description is TEXT else torch.randn(4, 1, 8, 8)
    model(x).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    with torch.no_grad(), q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        expected = model(x)
        q4_nn.pack_(model, session)
        assert torch.allclose(model(x), expected, rtol=0, atol=1e-4)


def test_linear_of_three_kinds() -> None:
    """A linear layer is float, trains in four bits, or is packed."""
    assert type(make("linear", in_features=32, out_features=4)) is nn.Linear
    trained = make("linear", in_features=32, out_features=4, format="q4_0")
    assert isinstance(trained, STELinear)
    packed = make("linear", in_features=32, out_features=4, format="q4_0", trainable=False)
    assert isinstance(packed, q4.Q4Linear)
    assert packed(torch.randn(2, 32)).shape == (2, 4)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown type": ({"type": "liner", "in_features": 2}, "Did you mean 'linear'"),
    "unknown option": ({"type": "linear", "in_feature": 2, "out_features": 2}, "Did you mean 'in_features'"),
    "missing option": ({"type": "linear", "in_features": 2}, "out_features must be given"),
    "another type": ({"type": "linear", "in_features": 2.5, "out_features": 2}, "in_features must be of type int"),
    "a truth value": ({"type": "linear", "in_features": True, "out_features": 2}, "in_features must be of type int"),
    "refused by the layer": ({"type": "dropout", "p": 2.0}, "ValueError: dropout probability"),
    "refused by ours": (
        {"type": "feed_forward", "hidden_size": 2, "intermediate_size": 2, "activation": "gelo"},
        "gelu",
    ),
    "unknown format": ({"type": "linear", "in_features": 2, "out_features": 2, "format": "nf5"}, "nf5"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name: str) -> None:
    """An unknown type or option, a missing one, one of another type, or one that the layer refuses is a typed error."""
    item, message = BAD[name]
    options = dict(item)
    with pytest.raises((q4.ConfigError, q4.FormatError), match=message):
        make(options.pop("type"), **options)


CHAINS: dict[str, tuple[list[dict[str, Any]], list[int], str]] = {
    "widths": (
        [
            {"type": "linear", "in_features": 4, "out_features": 8},
            {"type": "linear", "in_features": 9, "out_features": 2},
        ],
        [4],
        r"layer 1 \('linear'\).*\[\.\.\., 9\], as in_features says, got .\[8\] from layer 0",
    ),
    "input": ([{"type": "linear", "in_features": 4, "out_features": 8}], [5], r"\[5\] from the input"),
    "image": ([{"type": "conv2d", "in_channels": 3, "out_channels": 8, "kernel_size": 3}], [1, 8, 8], r"\[3, height"),
    "window": ([{"type": "max_pool2d", "kernel_size": 9}], [1, 8, 8], "no smaller than the window"),
    "tuple": (
        [{"type": "lstm", "input_size": 4, "hidden_size": 4}, {"type": "linear", "in_features": 4, "out_features": 4}],
        [3, 4],
        r"layer 1 \('linear'\): layer must be one that takes",
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_sizes_that_do_not_chain(name: str) -> None:
    """The layer, what it takes, and what it would get are named."""
    layers, given, message = CHAINS[name]
    with pytest.raises(q4.ConfigError, match=message):
        build({"input": given, "layers": layers})


@pytest.mark.parametrize("description", [{}, {"layers": []}, {"layers": [3]}, {"layers": [{"type": "relu"}], "x": 1}])
def test_bad_descriptions(description: Any) -> None:
    """What is no description is refused."""
    with pytest.raises(q4.ConfigError, match="must be"):
        build(description)


def test_a_model_that_was_made_otherwise() -> None:
    """A layer that no type made has no description, and is named."""
    with pytest.raises(q4.ConfigError, match=r"layer 0 must be made by q4_nn\.make, got 'ReLU'"):
        describe(nn.Sequential(nn.ReLU()))


class Scale(nn.Module):
    """A third party's layer, in as many lines as it takes."""

    def __init__(self, features: int, start: float = 1.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((features,), start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x scaled."""
        return x * self.factor


class Strangers:
    """A plugin with an honest layer type, one that lies about its shape, and one that makes no module."""

    @q4.hookimpl
    def q4_layers(self) -> list[LayerType]:
        """Return the layer types."""
        return [
            LayerType("scale", Scale),
            LayerType("liar", Scale, lambda shape, **_: (*shape, 2)),
            LayerType("nothing", lambda: 3),  # type: ignore[arg-type, return-value]  # on purpose
        ]


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a third party's plugin to the registry."""
    registry = q4.Registry([("nn", q4_nn), ("strangers", Strangers())])
    monkeypatch.setattr("q4_nn.layer_type.default_registry", lambda: registry)


@pytest.mark.usefixtures("strangers")
def test_layer_of_a_third_party() -> None:
    """A third party's layer works in a description; one of a wrong shape is named; one that is no module is refused."""
    model = build({"input": [4], "layers": [{"type": "scale", "features": 4, "start": 2.0}]})
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 2.0))
    with pytest.raises(q4.ConfigError, match=r"layer 0 \('liar'\): result must be of shape \[4, 2\], got \[4\]"):
        build({"input": [4], "layers": [{"type": "liar", "features": 4}]})
    with pytest.raises(q4.ConfigError, match=r"returns an nn\.Module, got 'int'"):
        make("nothing")
