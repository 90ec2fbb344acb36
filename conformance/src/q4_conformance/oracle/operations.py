"""Exact results of each operation of a program, in float64, and how much a float32 result may differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4_programs import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ROUNDINGS = 16
"""Roundings of an element in addition to its sum: more than any operation needs."""
_UNIT = 2.0**-24


def exact_operation(  # noqa: C901, PLR0911, PLR0912  # one case per operation
    op: Op, inputs: Sequence[torch.Tensor], numbers: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return an operation's float64 result, and by how much a float32 one may differ; None for not at all."""
    x = inputs[0].double()
    other = inputs[1].double() if len(inputs) > 1 else x
    sums = (x.shape[-1] + _ROUNDINGS) * _UNIT
    if op in {Op.ADD, Op.MULTIPLY}:
        return (inputs[0] + inputs[1] if op is Op.ADD else inputs[0] * inputs[1]).double(), None
    if op in {Op.COPY, Op.RELU}:
        return (x if op is Op.COPY else x.clamp(min=0)), None
    if op is Op.AFFINE:
        return (inputs[0] * numbers[0] + numbers[1]).double(), None
    if op is Op.EMBEDDING:
        return other[inputs[0][0]], None
    if op is Op.ARGMAX:
        return x.argmax(-1)[None].double(), None
    if op is Op.TOP_K:
        return x.sort(stable=True, dim=-1, descending=True).values[:, : int(numbers[0])], None
    if op is Op.LINEAR:
        bias = inputs[2].double() if len(inputs) > 2 else torch.zeros(1)  # noqa: PLR2004  # x, weight, bias
        return x @ other.T + bias, sums * (x.abs() @ other.abs().T + bias.abs())
    if op is Op.RMS_NORM:
        y = x / (x.square().mean(-1, keepdim=True) + numbers[0]).sqrt() * (other + numbers[1])
        return y, sums * (y.abs() + (x * 0 + 1) * _UNIT)
    if op is Op.LAYER_NORM:
        mean = x.mean(-1, keepdim=True)
        spread = ((x - mean).square().mean(-1, keepdim=True) + numbers[0]).sqrt()
        size = (x.abs() + x.abs().mean(-1, keepdim=True)) / spread
        return (x - mean) / spread * other + inputs[2].double(), sums * 2 * (size * other.abs() + inputs[2].abs())
    if op is Op.ROTARY:
        each = x.chunk(inputs[2].numel())
        rows = [
            _turned(own, other[place], pairs=bool(numbers[0])) for own, place in zip(each, inputs[2][0], strict=True)
        ]
        return torch.cat(rows), _ROUNDINGS * _UNIT * 4 * x.abs().max() * (other.abs().max() + 0 * x)
    if op in {Op.ATTEND_SPANS, Op.MEAN_SPANS}:
        spans = inputs[-1].view(-1, 2).tolist()
        if op is Op.MEAN_SPANS:
            rows = [x[first:last] for first, last in spans]
            found = [(row.mean(0), (len(row) + _ROUNDINGS) * _UNIT * row.abs().mean(0)) for row in rows]
        else:
            heads, kv_heads, scale = int(numbers[0]), int(numbers[1]), numbers[2]
            keys, values = (side.double().unflatten(1, (kv_heads, -1)) for side in inputs[1:3])
            found = [
                _seen(own.view(heads, -1), keys[first:last], values[first:last], scale)
                for own, (first, last) in zip(x, spans, strict=True)
            ]
        return torch.stack([y for y, _ in found]), torch.stack([bound for _, bound in found])
    if op is Op.ATTENTION:
        each, places = x.chunk(inputs[3].numel()), inputs[3][0].tolist()
        found = [_attended(own, other, inputs[2].double(), at, numbers) for own, at in zip(each, places, strict=True)]
        return torch.cat([y for y, _ in found]), torch.cat([bound for _, bound in found])
    y = _CURVES[op](x)
    near = x.abs() if op in {Op.GELU, Op.GELU_TANH} else y.abs()
    apart = x.amax(-1, keepdim=True) - x if op is Op.SOFTMAX else x.abs()
    return y, (sums if op is Op.SOFTMAX else 2 * _ROUNDINGS * _UNIT) * (near + y.abs() * apart)


_CURVES: dict[Op, Callable[[torch.Tensor], torch.Tensor]] = {
    Op.GELU: torch.nn.functional.gelu,
    Op.GELU_TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    Op.SILU: torch.nn.functional.silu,
    Op.SIGMOID: torch.sigmoid,
    Op.TANH: torch.tanh,
    Op.SOFTMAX: lambda x: x.softmax(-1),
}


def _turned(x: torch.Tensor, row: torch.Tensor, *, pairs: bool) -> torch.Tensor:
    """Return heads whose first columns are turned, as complex numbers."""
    half = len(row) // 2
    part = x[:, : 2 * half]
    first, second = (part[:, 0::2], part[:, 1::2]) if pairs else (part[:, :half], part[:, half:])
    found = torch.complex(first, second) * torch.complex(row[:half], row[half:])
    y = x.clone()
    if pairs:
        y[:, 0 : 2 * half : 2], y[:, 1 : 2 * half : 2] = found.real, found.imag
    else:
        y[:, :half], y[:, half : 2 * half] = found.real, found.imag
    return y


def _attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, numbers: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention head by head, and its bound: a score's error is a share of its weight."""
    kv_heads, scale, window = int(numbers[0]), numbers[1], int(numbers[2])
    room, group = len(keys) // kv_heads, len(query) // kv_heads
    first = max(0, position + 1 - window) if window else 0
    rows, bounds = [], []
    for head, own in enumerate(query):
        start = head // group * room
        seen = slice(start + first, start + position + 1)
        weights = (keys[seen] @ own * scale).softmax(0)
        rows.append(weights @ values[seen])
        scores = scale * (keys[seen].abs() @ own.abs()).max() * (len(own) + _ROUNDINGS)
        bounds.append((2 * scores + position + _ROUNDINGS) * _UNIT * (weights @ values[seen].abs()))
    return torch.stack(rows), torch.stack(bounds)


def _seen(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of one row's heads to rows of keys [rows, kv_heads, C], and its bound, each flat."""
    group = len(query) // keys.shape[1]
    found = []
    for head, own in enumerate(query):
        place = head // group
        found.append(_attended(own[None], keys[:, place], values[:, place], len(keys) - 1, (1, scale, 0)))
    return torch.cat([y.flatten() for y, _ in found]), torch.cat([bound.flatten() for _, bound in found])
