"""Builders of usual networks from their sizes, float or training in four bits."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from q4_nn.registry.description import build
from q4_nn.registry.initialise import initialise_
from q4core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

__all__ = ["build_cnn", "build_mlp", "build_rnn"]


def _require(what: str, name: str, values: Sequence[int], least: int) -> None:
    if len(values) < least or not all(isinstance(value, int) and value > 0 for value in values):
        raise ConfigError(what, name=name, rule=f"at least {least} positive whole numbers", value=list(values))


def _kind(format: str | None) -> dict[str, str]:  # noqa: A002  # the contract's name
    return {} if format is None else {"format": format}


def build_mlp(
    sizes: Sequence[int],
    *,
    activation: str = "relu",
    dropout: float = 0.0,
    format: str | None = None,  # noqa: A002  # the contract's name
    rule: str = "kaiming",
) -> nn.Sequential:
    """Build a multi-layer perceptron: linear layers with an activation between.

    Args:
        sizes: Features from the input's to the output's, at least two.
        activation: Name of a layer type.
        dropout: Share that training drops after each activation.
        format: What its linear layers train in; None for float.
        rule: As ``initialise_`` takes it.

    Returns:
        A model that ``describe`` accepts: [..., sizes[0]] → [..., sizes[-1]].

    Raises:
        ConfigError: A size, name or share is not legal.
    """
    _require("build_mlp", "sizes", sizes, 2)
    layers: list[dict[str, Any]] = []
    for features, following in itertools.pairwise(sizes):
        layers.append({"type": "linear", "in_features": features, "out_features": following, **_kind(format)})
        layers.append({"type": activation})
        if dropout:
            layers.append({"type": "dropout", "p": dropout})
    while layers[-1]["type"] != "linear":  # the output has no activation
        layers.pop()
    return initialise_(build({"input": [sizes[0]], "layers": layers}), rule)


def build_cnn(  # noqa: PLR0913  # one argument per option
    image: Sequence[int],
    channels: Sequence[int],
    classes: int,
    *,
    kernel_size: int = 3,
    pool: int = 2,
    batch_norm: bool = True,
    activation: str = "relu",
    format: str | None = None,  # noqa: A002  # the contract's name
    rule: str = "kaiming",
) -> nn.Sequential:
    """Build a classifier of images: convolutions, each with norm, activation and pool, then one linear layer.

    Args:
        image: (channels, height, width).
        channels: Of each convolution's result.
        classes: How many there are.
        kernel_size: Odd; images keep their size.
        pool: Side of the windows of the max-pool; 1 for no pool.
        batch_norm: Whether a batch norm follows each convolution.
        activation: Name of a layer type.
        format: What its convolutions and its linear layer train in; None for float.
        rule: As ``initialise_`` takes it.

    Returns:
        A model that ``describe`` accepts: [B, *image] → [B, classes].

    Raises:
        ConfigError: A size or name is not legal, or the image is too small for so many pools.
    """
    _require("build_cnn", "image", image, 3)
    _require("build_cnn", "channels", channels, 1)
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ConfigError("build_cnn", name="kernel_size", rule="a positive odd number", value=kernel_size)
    layers: list[dict[str, Any]] = []
    height, width = image[1:]
    for taken, given in itertools.pairwise((image[0], *channels)):
        sizes = {"in_channels": taken, "out_channels": given, "kernel_size": kernel_size, "padding": kernel_size // 2}
        layers.append({"type": "conv2d", **sizes, **_kind(format)})
        layers += [{"type": "batch_norm2d", "num_features": given}] if batch_norm else []
        layers.append({"type": activation})
        if pool > 1:
            layers.append({"type": "max_pool2d", "kernel_size": pool})
            height, width = height // pool, width // pool
    if not height * width:
        rule = f"at least {pool ** len(channels)} high and wide, for {len(channels)} pools"
        raise ConfigError("build_cnn", name="image", rule=rule, value=list(image))
    features = channels[-1] * height * width
    layers += [
        {"type": "flatten"},
        {"type": "linear", "in_features": features, "out_features": classes, **_kind(format)},
    ]
    return initialise_(build({"input": [*image], "layers": layers}), rule)


def build_rnn(  # noqa: PLR0913  # one argument per option
    vocabulary: int,
    hidden_size: int,
    *,
    cell: str = "lstm",
    num_layers: int = 1,
    embedding: int | None = None,
    outputs: int | None = None,
    last: bool = False,
    dropout: float = 0.0,
    format: str | None = None,  # noqa: A002  # the contract's name
    rule: str = "xavier",
) -> nn.Sequential:
    """Build a network over token numbers: embedding, recurrent layers, one linear layer.

    Args:
        vocabulary: How many tokens there are.
        hidden_size: Features of the state.
        cell: ``rnn``, ``lstm`` or ``gru``.
        num_layers: Recurrent layers.
        embedding: Features of a token. Defaults to the state's.
        outputs: Features of the result; defaults to one for each token of the vocabulary.
        last: Whether only the last position gives a result.
        dropout: Share that training drops between recurrent layers.
        format: What its matrices but the embedding train in; None for float.
        rule: As ``initialise_`` takes it.

    Returns:
        A model that ``describe`` accepts: int64 [B, T] → [B, T, outputs], or [B, outputs].

    Raises:
        ConfigError: A size or name is not legal.
    """
    features = hidden_size if embedding is None else embedding
    _require("build_rnn", "sizes", (vocabulary, hidden_size, features, num_layers), 4)
    if cell not in {"rnn", "lstm", "gru"}:
        raise ConfigError("build_rnn", name="cell", rule="rnn, lstm or gru", value=cell)
    sizes = {"input_size": features, "hidden_size": hidden_size, "num_layers": num_layers, "dropout": dropout}
    wide = vocabulary if outputs is None else outputs
    layers = [
        {"type": "embedding", "num_embeddings": vocabulary, "embedding_dim": features},
        {"type": cell, **sizes, **_kind(format)},
        {"type": "select", "index": 0, "last": last},
        {"type": "linear", "in_features": hidden_size, "out_features": wide, **_kind(format)},
    ]
    return initialise_(build({"input": [-1], "layers": layers}), rule, std=1.0)
