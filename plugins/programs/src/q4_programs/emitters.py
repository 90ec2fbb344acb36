"""Emitters: the operations of torch's own modules and of packed layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_programs.ops import Op
from q4core import Q4Linear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4_programs.operations import Operations, Value

__all__ = ["EMITTERS", "emit_parts", "emit_recurrent", "emit_rms_norm"]


def _linear(module: Any, builder: Operations, x: Value, *, out: Value | None = None) -> Value:
    shape = (*x.shape[:-1], module.out_features)
    if isinstance(module, Q4Linear):
        return builder.step(Op.LINEAR, x, out=out, shape=shape, numbers=(0,), layer=module)
    own = [builder.bound(module.weight, "weight")]
    own += [] if module.bias is None else [builder.bound(module.bias, "bias")]
    return builder.step(Op.LINEAR, x, *own, out=out, shape=shape, numbers=(len(own) - 1,))


def _embedding(module: nn.Embedding, builder: Operations, tokens: Value) -> Value:
    if module.max_norm is not None:
        builder.refuse("max_norm changes the table")
    table = builder.bound(module.weight, "weight")
    return builder.step(Op.EMBEDDING, tokens, table, shape=(*tokens.shape, module.embedding_dim))


def emit_rms_norm(module: nn.RMSNorm, builder: Operations, x: Value, *, shift: float = 0.0) -> Value:
    """Emit ``x / sqrt(mean(x²) + eps) · (weight + shift)``."""
    weight = _norm_weight(module, builder, x, module.weight, 1.0)
    epsilon = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return builder.step(Op.RMS_NORM, x, weight, numbers=(epsilon, shift))


def _layer_norm(module: nn.LayerNorm, builder: Operations, x: Value) -> Value:
    weight = _norm_weight(module, builder, x, module.weight, 1.0)
    bias = _norm_weight(module, builder, x, module.bias, 0.0)
    return builder.step(Op.LAYER_NORM, x, weight, bias, numbers=(module.eps,))


def _norm_weight(module: Any, builder: Operations, x: Value, weight: torch.Tensor | None, start: float) -> Value:
    """Return the weight of a norm of rows, or one that changes nothing."""
    if tuple(module.normalized_shape) != x.shape[-1:]:
        builder.refuse(f"it norms {list(module.normalized_shape)} of {list(x.shape)}, not rows")
    size = x.shape[-1]
    if weight is None:
        return builder.constant(("filled", size, start), lambda: torch.full((size,), start))
    return builder.bound(weight, "weight")


def _unary(op: Op) -> Callable[..., Value]:
    return lambda _module, builder, x: builder.step(op, x)


def _gelu(module: nn.GELU, builder: Operations, x: Value) -> Value:
    return builder.step(Op.GELU if module.approximate == "none" else Op.GELU_TANH, x)


def _softmax(module: nn.Softmax, builder: Operations, x: Value) -> Value:
    if module.dim not in {-1, len(x.shape) - 1}:
        builder.refuse(f"softmax over dim {module.dim}, not over rows")
    return builder.step(Op.SOFTMAX, x)


def _same(_module: nn.Module, _builder: Operations, x: Any) -> Any:
    return x


def _flatten(module: nn.Flatten, builder: Operations, x: Value) -> Value:
    count = len(x.shape)
    first, last = module.start_dim % count, module.end_dim % count
    return builder.reshape(x, (*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))


def _sequential(module: nn.Sequential, builder: Operations, x: Any) -> Any:
    for child in module:
        x = builder.emit(child, x)
    return x


def emit_parts(builder: Operations, x: Value, layers: Sequence[Any], parts: Sequence[Sequence[int]]) -> list[Value]:
    """Emit linear layers that share their x, and return the parts of their results; of one row, side by side."""
    is_row = x.view.rows == 1
    joint = builder.scratch((*x.shape[:-1], sum(map(sum, parts)))) if is_row else None
    found, start = [], 0
    for layer, sizes in zip(layers, parts, strict=True):
        out = None if joint is None else builder.columns(joint, start, sum(sizes))
        if out is None or EMITTERS.get(type(layer)) is not _linear:
            y = builder.emit(layer, x)
            y = y if out is None else builder.step(Op.COPY, y, out=out)
        else:
            y = builder.emit(layer, x, out=out)
        offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        found += [builder.columns(y, offset, size) for offset, size in zip(offsets, sizes, strict=True)]
        start += sum(sizes)
    return found


def _recurrent(module: nn.RNNBase, builder: Operations, x: Value, state: Any = None) -> tuple[Value, Any]:
    if module.proj_size:
        builder.refuse("a projection of its state is not emitted")

    def product(kind: str, cell: int, given: Value) -> Value:
        level, side = divmod(cell, 2 if module.bidirectional else 1)
        end = f"{kind}h_l{level}{'_reverse' if side else ''}"
        weight = getattr(module, f"weight_{end}")
        own = [builder.bound(weight, end)]
        own += [builder.bound(getattr(module, f"bias_{end}"), end)] if module.bias else []
        return builder.step(Op.LINEAR, given, *own, shape=(*given.shape[:-1], len(weight)), numbers=(len(own) - 1,))

    return emit_recurrent(module, builder, x, state, product)


def emit_recurrent(
    module: Any, builder: Operations, x: Value, state: Any, product: Callable[[str, int, Value], Value]
) -> tuple[Value, Any]:
    """Emit an RNN, LSTM or GRU, position by position, and return (y, state).

    Args:
        module: Has torch's ``mode``, ``num_layers``, ``hidden_size`` and ``batch_first``.
        builder: Collects.
        x: [B, T, K] with ``batch_first``, else [T, B, K].
        state: [layers · directions, B, hidden], or a pair of such for an LSTM; None for zeros.
        product: Emits the layer of x (``"i"``) or of the state (``"h"``) of a cell.
    """
    if len(x.shape) != 3:  # noqa: PLR2004  # batch, positions, features
        builder.refuse(f"x has the shape {list(x.shape)}, not three sizes")
    batch, count = x.shape[:2] if module.batch_first else (x.shape[1], x.shape[0])
    hidden, kinds = module.hidden_size, 2 if module.mode == "LSTM" else 1
    sides = 2 if len(_cells(module)) > module.num_layers else 1
    ends = [builder.scratch((len(_cells(module)), batch, hidden)) for _ in range(kinds)]
    if state is None:
        zeros = builder.constant(("zeros", batch, hidden), lambda: torch.zeros(batch, hidden))
        starts = [[zeros] * kinds for _ in _cells(module)]
    else:
        given = state if isinstance(state, (tuple, list)) else (state,)
        sizes = (len(_cells(module)), batch, hidden)
        if [tuple(item.shape) for item in given] != [sizes] * kinds:
            builder.refuse(f"its state is not {kinds} of the shape {list(sizes)}")
        starts = [[builder.rows(item, cell * batch, batch) for item in given] for cell in _cells(module)]

    def at(value: Value, place: int) -> Value:
        first, step = (place, count) if module.batch_first else (place * batch, 1)
        return builder.rows(value, first, batch, step)

    for level in range(module.num_layers):
        y = builder.scratch((*x.shape[:2], hidden * sides))
        for side in range(sides):
            cell = level * sides + side
            taken = product("i", cell, x)
            now = starts[cell]
            for place in reversed(range(count)) if side else range(count):
                out = builder.columns(at(y, place), side * hidden, hidden)
                now = _CELLS[module.mode](builder, at(taken, place), product("h", cell, now[0]), now, out)
            for end, last in zip(ends, now, strict=True):
                builder.step(Op.COPY, last, out=builder.rows(end, cell * batch, batch))
        x = y
    return x, (tuple(ends) if kinds == 2 else ends[0])  # noqa: PLR2004  # an LSTM's


def _cells(module: Any) -> range:
    """Return the numbers of the cells of a recurrent layer."""
    sides = 2 if getattr(module, "bidirectional", False) or getattr(module, "directions", 1) > 1 else 1
    return range(module.num_layers * sides)


def _plain_cell(op: Op) -> Callable[..., list[Value]]:
    def emit(builder: Operations, given: Value, recurrent: Value, _now: list[Value], out: Value) -> list[Value]:
        return [builder.step(op, builder.step(Op.ADD, given, recurrent), out=out)]

    return emit


def _lstm_cell(builder: Operations, given: Value, recurrent: Value, now: list[Value], out: Value) -> list[Value]:
    size = now[0].shape[-1]
    total = builder.step(Op.ADD, given, recurrent)
    both = builder.step(Op.SIGMOID, builder.columns(total, 0, 2 * size))
    into, forget = builder.columns(both, 0, size), builder.columns(both, size, size)
    value = builder.step(Op.TANH, builder.columns(total, 2 * size, size))
    let = builder.step(Op.SIGMOID, builder.columns(total, 3 * size, size))
    memory = builder.step(Op.ADD, builder.step(Op.MULTIPLY, forget, now[1]), builder.step(Op.MULTIPLY, into, value))
    return [builder.step(Op.MULTIPLY, let, builder.step(Op.TANH, memory), out=out), memory]


def _gru_cell(builder: Operations, given: Value, recurrent: Value, now: list[Value], out: Value) -> list[Value]:
    size = now[0].shape[-1]
    total = builder.step(Op.ADD, builder.columns(given, 0, 2 * size), builder.columns(recurrent, 0, 2 * size))
    both = builder.step(Op.SIGMOID, total)
    reset, update = builder.columns(both, 0, size), builder.columns(both, size, size)
    part = builder.step(Op.MULTIPLY, reset, builder.columns(recurrent, 2 * size, size))
    value = builder.step(Op.TANH, builder.step(Op.ADD, builder.columns(given, 2 * size, size), part))
    apart = builder.step(Op.ADD, now[0], builder.step(Op.AFFINE, value, numbers=(-1, 0)))
    return [builder.step(Op.ADD, value, builder.step(Op.MULTIPLY, update, apart), out=out)]


_CELLS: dict[str, Callable[..., list[Value]]] = {
    "RNN_TANH": _plain_cell(Op.TANH),
    "RNN_RELU": _plain_cell(Op.RELU),
    "LSTM": _lstm_cell,
    "GRU": _gru_cell,
}

EMITTERS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.Linear: _linear,
    Q4Linear: _linear,
    nn.Embedding: _embedding,
    nn.RMSNorm: emit_rms_norm,
    nn.LayerNorm: _layer_norm,
    nn.ReLU: _unary(Op.RELU),
    nn.SiLU: _unary(Op.SILU),
    nn.Sigmoid: _unary(Op.SIGMOID),
    nn.Tanh: _unary(Op.TANH),
    nn.GELU: _gelu,
    nn.Softmax: _softmax,
    nn.Dropout: _same,
    nn.Identity: _same,
    nn.Flatten: _flatten,
    nn.Sequential: _sequential,
    nn.RNN: _recurrent,
    nn.LSTM: _recurrent,
    nn.GRU: _recurrent,
}
"""Class → what it emits. Of a subclass nothing is known."""
