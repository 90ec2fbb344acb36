"""The layer types of q4-nn: torch's own classes by name, and the four-bit ones."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_nn.blocks.attention import MultiHeadAttention
from q4_nn.blocks.feed_forward import FeedForward
from q4_nn.layer_type import LayerExample, LayerType
from q4_nn.training.layers import STEConv2d, STELinear, STERecurrent
from q4core import default_session, quantize

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_nn.layer_type import Shape
    from q4_programs import ProgramBuilder, Value

__all__ = ["LAYER_TYPES", "Select", "tokens_shape"]

_Size = int | tuple[int, ...]


class Select(nn.Module):
    """One of the results of the layer before, such as a recurrent layer's first; or its last position.

    Args:
        index: Which one.
        last: Whether only the last position of it: [B, K] from [B, T, K].
    """

    def __init__(self, index: int = 0, *, last: bool = False) -> None:
        super().__init__()
        self.index = index
        self.last = last

    def forward(self, x: Any) -> torch.Tensor:
        """Return one result."""
        found: torch.Tensor = x[self.index] if isinstance(x, (tuple, list)) else x
        return found[:, -1] if self.last else found

    def emit_program(self, builder: ProgramBuilder, x: Any) -> Value:
        """Emit no step; return rows of the stored weight."""
        found: Value = x[self.index] if isinstance(x, (tuple, list)) else x
        if not self.last:
            return found
        batch, count = found.shape[:2]
        return builder.rows(found, count - 1, batch, count)


def _linear(
    in_features: int,
    out_features: int,
    *,
    bias: bool = True,
    format: str | None = None,  # noqa: A002  # the contract's name
    trainable: bool = True,
) -> nn.Module:
    if format is None:
        return nn.Linear(in_features, out_features, bias)
    layer = STELinear(in_features, out_features, bias, format=format)
    if trainable:
        return layer
    start = None if layer.bias is None else layer.bias.detach()
    return default_session().linear(quantize(layer.weight.detach(), format), start)


def _conv2d(  # noqa: PLR0913  # those of nn.Conv2d, and one
    in_channels: int,
    out_channels: int,
    kernel_size: _Size,
    *,
    stride: _Size = 1,
    padding: _Size = 0,
    dilation: _Size = 1,
    bias: bool = True,
    format: str | None = None,  # noqa: A002  # the contract's name
) -> nn.Module:
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "bias": bias}
    if format is None:
        return nn.Conv2d(in_channels, out_channels, kernel_size, **options)  # type: ignore[arg-type]  # one or two
    return STEConv2d(in_channels, out_channels, kernel_size, format=format, **options)


def _recurrent(cell: Callable[..., nn.RNNBase]) -> Callable[..., nn.Module]:
    def build(  # noqa: PLR0913  # those of torch's cells, and one
        input_size: int,
        hidden_size: int,
        *,
        num_layers: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        format: str | None = None,  # noqa: A002  # the contract's name
    ) -> nn.Module:
        made = cell(
            input_size=input_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            bias=bias,
            batch_first=True,
            dropout=dropout,
            bidirectional=bidirectional,
        )
        return made if format is None else STERecurrent(made, format)

    return build


def _attention(  # noqa: PLR0913  # one argument per option
    hidden_size: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    causal: bool = True,
    window: int | None = None,
    bias: bool = False,
    dropout: float = 0.0,
) -> nn.Module:
    return MultiHeadAttention(
        hidden_size, num_heads, num_kv_heads, head_dim, causal=causal, window=window, bias=bias, dropout=dropout
    )


def _last(name: str, wanted: int, shape: Shape) -> None:
    if not shape or shape[-1] != wanted:
        raise ValueError(f"of shape [..., {wanted}], as {name} says")


def _linear_shape(shape: Shape, *, in_features: int, out_features: int, **_: Any) -> Shape:
    _last("in_features", in_features, shape)
    return (*shape[:-1], out_features)


def _pair(value: _Size) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _image(shape: Shape, channels: int | None, name: str) -> None:
    if len(shape) != 3 or (channels is not None and shape[0] != channels):  # noqa: PLR2004  # channels, height, width
        raise ValueError(f"of shape [{'any' if channels is None else channels}, height, width], as {name} says")


def _slid(shape: Shape, kernel_size: _Size, stride: _Size | None, padding: _Size = 0, dilation: _Size = 1) -> Shape:
    """Return (height, width) that a window gives which slides over an image."""
    steps = kernel_size if stride is None else stride
    sides = zip(shape[1:], *map(_pair, (kernel_size, steps, padding, dilation)), strict=True)
    found = [
        None if side is None else (side + 2 * pad - wide * (own - 1) - 1) // step + 1
        for side, own, step, pad, wide in sides
    ]
    if any(size is not None and size < 1 for size in found):
        raise ValueError("no smaller than the window that slides over it")
    return tuple(found)


def _conv2d_shape(  # noqa: PLR0913  # those of the layer
    shape: Shape,
    *,
    in_channels: int,
    out_channels: int,
    kernel_size: _Size,
    stride: _Size = 1,
    padding: _Size = 0,
    dilation: _Size = 1,
    **_: Any,
) -> Shape:
    _image(shape, in_channels, "in_channels")
    return (out_channels, *_slid(shape, kernel_size, stride, padding, dilation))


def _pool_shape(
    shape: Shape, *, kernel_size: _Size, stride: _Size | None = None, padding: _Size = 0, **_: Any
) -> Shape:
    _image(shape, None, "a pool")
    return (shape[0], *_slid(shape, kernel_size, stride, padding))


def _recurrent_shape(
    shape: Shape, *, input_size: int, hidden_size: int, bidirectional: bool = False, **_: Any
) -> Shape:
    _last("input_size", input_size, shape)
    return (*shape[:-1], hidden_size * (1 + bidirectional))


def _features_shape(shape: Shape, *, hidden_size: int, **_: Any) -> Shape:
    _last("hidden_size", hidden_size, shape)
    return shape


def tokens_shape(shape: Shape, *, hidden_size: int, **_: Any) -> Shape:
    """Return the shape of tokens' features unchanged, for a layer that takes [positions, hidden_size]."""
    if len(shape) != 2 or shape[-1] != hidden_size:  # noqa: PLR2004  # positions and features
        raise ValueError(f"of shape [positions, {hidden_size}], as hidden_size says")
    return shape


def _norm_shape(shape: Shape, *, normalized_shape: _Size, **_: Any) -> Shape:
    _last("normalized_shape", normalized_shape if isinstance(normalized_shape, int) else normalized_shape[-1], shape)
    return shape


def _batch_norm_shape(shape: Shape, *, num_features: int, **_: Any) -> Shape:
    if not shape or shape[0] != num_features:
        raise ValueError(f"of shape [{num_features}, ...], as num_features says")
    return shape


def _flatten_shape(shape: Shape) -> Shape:
    size = 1
    for side in shape:
        if side is None:
            raise ValueError("of known sizes")
        size *= side
    return (size,)


def _select_shape(shape: Shape, *, last: bool = False, **_: Any) -> Shape:
    return shape[1:] if last else shape


def _embedding_shape(shape: Shape, *, embedding_dim: int, **_: Any) -> Shape:
    return (*shape, embedding_dim)


def _adaptive_shape(shape: Shape, *, output_size: _Size) -> Shape:
    _image(shape, None, "a pool")
    return (shape[0], *_pair(output_size))


def _examples(shape: tuple[int, ...] = (3, 4), /, **options: Any) -> tuple[LayerExample, ...]:
    return (LayerExample(shape, options),)


def _in_both(shape: tuple[int, ...], /, **options: Any) -> tuple[LayerExample, ...]:
    """Return the examples of a type that computes in floats, or in four bits."""
    return (*_examples(shape, **options), LayerExample(shape, {**options, "format": "nf4"}, straight_through=True))


_CELL = _in_both((3, 4), input_size=4, hidden_size=3)
LAYER_TYPES = (
    LayerType(
        "linear",
        _linear,
        _linear_shape,
        "matrix and bias; format= for 4 bits, trainable=False for packed",
        _in_both((4,), in_features=4, out_features=3),
    ),
    LayerType(
        "embedding",
        nn.Embedding,
        _embedding_shape,
        "a row for each token number",
        (LayerExample((3,), {"num_embeddings": 5, "embedding_dim": 4}, integers=5),),
    ),
    LayerType(
        "conv2d",
        _conv2d,
        _conv2d_shape,
        "convolution of images; format= for 4 bits",
        _in_both((2, 4, 5), in_channels=2, out_channels=3, kernel_size=2, stride=2, padding=1),
    ),
    LayerType("rnn", _recurrent(nn.RNN), _recurrent_shape, "torch's RNN; format= for 4 bits", _CELL),
    LayerType("lstm", _recurrent(nn.LSTM), _recurrent_shape, "torch's LSTM; format= for 4 bits", _CELL),
    LayerType("gru", _recurrent(nn.GRU), _recurrent_shape, "torch's GRU; format= for 4 bits", _CELL),
    LayerType(
        "attention",
        _attention,
        tokens_shape,
        "multi-head attention, grouped, causal or not",
        _examples((3, 8), hidden_size=8, num_heads=2, num_kv_heads=1),
    ),
    LayerType(
        "feed_forward",
        FeedForward,
        _features_shape,
        "SwiGLU, or one hidden layer",
        _examples(hidden_size=4, intermediate_size=5),
    ),
    LayerType("relu", nn.ReLU, summary="torch's ReLU", examples=_examples()),
    LayerType("gelu", nn.GELU, summary="torch's GELU", examples=_examples()),
    LayerType("silu", nn.SiLU, summary="torch's SiLU", examples=_examples()),
    LayerType("sigmoid", nn.Sigmoid, summary="torch's Sigmoid", examples=_examples()),
    LayerType("tanh", nn.Tanh, summary="torch's Tanh", examples=_examples()),
    LayerType("softmax", functools.partial(nn.Softmax, dim=-1), summary="torch's Softmax", examples=_examples()),
    LayerType("dropout", nn.Dropout, summary="torch's Dropout", examples=_examples()),
    LayerType("rms_norm", nn.RMSNorm, _norm_shape, "torch's RMSNorm", _examples(normalized_shape=4)),
    LayerType("layer_norm", nn.LayerNorm, _norm_shape, "torch's LayerNorm", _examples(normalized_shape=4)),
    LayerType("batch_norm1d", nn.BatchNorm1d, _batch_norm_shape, "torch's BatchNorm1d", _examples(num_features=3)),
    LayerType(
        "batch_norm2d", nn.BatchNorm2d, _batch_norm_shape, "torch's BatchNorm2d", _examples((3, 2, 4), num_features=3)
    ),
    LayerType("max_pool2d", nn.MaxPool2d, _pool_shape, "torch's MaxPool2d", _examples((2, 4, 5), kernel_size=2)),
    LayerType("avg_pool2d", nn.AvgPool2d, _pool_shape, "torch's AvgPool2d", _examples((2, 4, 5), kernel_size=2)),
    LayerType(
        "adaptive_avg_pool2d",
        nn.AdaptiveAvgPool2d,
        _adaptive_shape,
        "torch's AdaptiveAvgPool2d",
        _examples((2, 4, 5), output_size=2),
    ),
    LayerType("flatten", nn.Flatten, _flatten_shape, "one row for each sample", _examples()),
    LayerType("select", Select, _select_shape, "one of several results, or the last position", _examples(last=True)),
)
