"""The reference of programs, in plain torch: each operation writes to its views; on CUDA one graph captures them.

The graph is built and tested without a GPU only as far as that goes: no CUDA device has run it yet.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from q4_programs.cache_rows import narrowed, widened
from q4_programs.ops import WITH_CLOCK, WITH_SPANS, Op
from q4_programs.spiking import spiking_part
from q4core import InputError, PrepareError, Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4_programs.contract import BoundLayer, Runner
    from q4_programs.program import Program, Step

    Part = Callable[[], object]
    _Limit = tuple[torch.Tensor, int, str, bool]

__all__ = ["REFERENCE", "Reference"]

_aten: Any = torch.ops.aten
_UNARY: dict[Op, Callable[..., object]] = {
    Op.RELU: _aten.relu.out,
    Op.GELU: _aten.gelu.out,
    Op.GELU_TANH: functools.partial(_aten.gelu.out, approximate="tanh"),
    Op.SILU: _aten.silu.out,
    Op.SIGMOID: torch.sigmoid,
    Op.TANH: torch.tanh,
    Op.SOFTMAX: functools.partial(torch.softmax, dim=-1),
}
_BINARY: dict[Op, Callable[..., object]] = {Op.ADD: torch.add, Op.MULTIPLY: torch.mul}


class Reference:
    """The backend that runs every program, with which others are compared; packed layers run themselves."""

    name = "reference"

    def bind_program(self, program: Program, buffers: Sequence[torch.Tensor], layers: Sequence[BoundLayer]) -> Runner:
        """Return what runs a program over buffers.

        Raises:
            PrepareError: The buffers are neither on the CPU nor on a CUDA device.
        """
        if buffers[0].device.type not in {"cpu", "cuda"}:
            raise PrepareError([Reason(ReasonCode.DEVICE, f"the reference does not run on {buffers[0].device.type}")])
        if buffers[0].is_cuda and any(step.op in WITH_SPANS for step in program.steps):
            raise PrepareError([Reason(ReasonCode.DEVICE, "the reference runs spans on the CPU alone")])
        if program.tokens is not None:
            return _OfTokens(self, program, buffers, layers)
        parts: list[Part] = []
        limits: list[_Limit] = []
        written: set[int] = set()
        for index, step in enumerate(program.steps):
            what = f"program step {index}, {step.op.value} {step.label}".rstrip()
            inputs, outputs = (
                [view.of(buffers[view.buffer]) for view in views] for views in (step.inputs, step.outputs)
            )
            module = None if step.layer is None else layers[step.layer].module
            limits += [
                (tensor, program.limit(step), what, step.op in WITH_SPANS)
                for (view, name), tensor in zip(step.patterns(), inputs, strict=False)  # outputs follow
                if name[0] == "i" and view.buffer not in written
            ]
            written.update(view.buffer for view in step.outputs)
            parts.append(spiking_part(step, inputs, outputs, module) or _part(step, inputs, outputs, module))
        is_fixed = program.clock is None and not any(step.op in WITH_CLOCK for step in program.steps)
        if buffers[0].is_cuda and is_fixed:  # a graph can't read a clock on the CPU
            # A packed layer's rows are checked on the CPU, which no graph can do; there is one such step, the first.
            first = 1 if program.steps[0].op is Op.EMBEDDING and program.steps[0].layer is not None else 0
            parts = [*parts[:first], _captured(parts[first:], [buffers[index] for index in sorted(written)])]
        clock = None if program.clock is None else buffers[program.clock]
        places = [(buffers[i], program.buffers[i].given == "round", i in written) for i in program.given]
        run = functools.partial(_run, limits, parts, clock=clock)
        return functools.partial(_run_given, run, places)


class _OfTokens:
    """What runs a program of several tokens, each step token by token: of many rows torch may sum in another order.

    Bound anew for another number of tokens than in the last run.
    """

    def __init__(
        self, reference: Reference, program: Program, buffers: Sequence[torch.Tensor], layers: Sequence[BoundLayer]
    ) -> None:
        self._bind = functools.partial(reference.bind_program, buffers=buffers, layers=layers)
        self._program, (number, self._most) = program, program.tokens or (0, 0)
        self._count = buffers[number]
        self._runner: tuple[int, Runner] | None = None

    def __call__(self, rounds: int = 1, given: Sequence[torch.Tensor] = ()) -> None:  # noqa: ARG002  # has none
        """Run the steps for the tokens that there are."""
        count = int(self._count)
        if not 1 <= count <= self._most:
            raise InputError("program", name="tokens", rule=f"from 1 to {self._most}", value=count)
        if self._runner is None or self._runner[0] != count:
            self._runner = count, self._bind(self._program.by_token(count))
        self._runner[1](rounds)


REFERENCE = Reference()


def _run(
    limits: Sequence[_Limit],
    parts: Sequence[Part],
    rounds: int = 1,
    *,
    clock: torch.Tensor | None = None,
) -> None:
    with torch.inference_mode():
        for given, limit, what, has_spans in limits:
            name = "spans" if has_spans else "token, position or clock"
            for value in (int(given.min()), int(given.max())):
                if not 0 <= value < limit:
                    raise InputError(what, name=name, rule=f"from 0 to {limit - 1}", value=value)
            if has_spans and not bool((given[:, ::2] < given[:, 1::2]).all()):
                raise InputError(what, name=name, rule="of a row at least", value=given.tolist())
        for _ in range(rounds):
            for part in parts:
                part()
            if clock is not None:
                clock += 1


def _run_given(
    run: Callable[..., object],
    places: Sequence[tuple[torch.Tensor, bool, bool]],
    rounds: int = 1,
    given: Sequence[torch.Tensor] = (),
) -> None:
    """Run by rounds; of each place what is given comes to it before and, if it is written, goes back after."""
    if not given:
        run(rounds)
        return
    for number in range(rounds):
        for (place, is_rounds, _), tensor in zip(places, given, strict=True):
            place.copy_((tensor[number] if is_rounds else tensor).reshape(-1))
        run()
        for (place, is_rounds, is_written), tensor in zip(places, given, strict=True):
            if is_written:
                (tensor[number] if is_rounds else tensor).view(-1).copy_(place)


def _captured(parts: Sequence[Part], written: Sequence[torch.Tensor]) -> Part:
    """Return the parts as one CUDA graph; what they write keeps its values."""
    with torch.inference_mode():
        saved = [buffer.clone() for buffer in written]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _run((), parts)  # libraries make their workspaces now
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _run((), parts)
        for buffer, values in zip(written, saved, strict=True):
            buffer.copy_(values)
    return graph.replay


def _part(  # noqa: C901, PLR0911, PLR0912  # one case per operation
    step: Step, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], module: Any
) -> Part:
    """Return what runs one step."""
    x, out, op, numbers = inputs[0], outputs[0], step.op, step.numbers
    if op in _UNARY:
        return functools.partial(_UNARY[op], x, out=out)
    if op in _BINARY:
        return functools.partial(_BINARY[op], x, inputs[1], out=out)
    if op is Op.LINEAR:
        if module is not None:
            return functools.partial(module.forward, x, out=out)
        bias = inputs[2][0] if len(inputs) > 2 else None  # noqa: PLR2004  # x, weight, bias
        return lambda: out.copy_(nn.functional.linear(x, inputs[1], bias))
    if op is Op.EMBEDDING:
        if module is not None:
            return lambda: out.copy_(module.rows(x[0], torch.float32))
        return lambda: out.copy_(inputs[1].index_select(0, x[0]))
    if op is Op.AFFINE:
        return lambda: torch.mul(x, numbers[0], out=out).add_(numbers[1])
    if op is Op.RMS_NORM:
        return lambda: out.copy_(nn.functional.rms_norm(x, x.shape[1:], inputs[1][0] + numbers[1], numbers[0]))
    if op is Op.LAYER_NORM:
        return lambda: out.copy_(nn.functional.layer_norm(x, x.shape[1:], inputs[1][0], inputs[2][0], numbers[0]))
    if op is Op.ROTARY:
        return functools.partial(_turn, x, inputs[1], inputs[2][0], out, interleaved=numbers[0] == 1)
    if op is Op.STORE:
        return functools.partial(_store, x, inputs[1][0], out)
    if op is Op.ATTENTION:
        each = x.unflatten(0, (inputs[3].shape[1], -1))  # [T, heads, C]
        mixed = out.unflatten(0, each.shape[:2])
        places = inputs[3].split(1, 1)
        attend = functools.partial(_attend, numbers=numbers, in_graph=x.is_cuda)
        tokens = [(query, (*inputs[1:3], place), to) for query, place, to in zip(each, places, mixed, strict=True)]

        def attend_all() -> None:
            for token in tokens:
                attend(*token)

        return attend_all
    if op in WITH_SPANS:
        return functools.partial(_of_spans, step, inputs, out)
    if op is Op.ARGMAX:
        return lambda: out.copy_(x.argmax(-1)[None])
    if op is Op.TOP_K:
        return functools.partial(_top, x, out, outputs[1])
    return functools.partial(out.copy_, x)


def _store(x: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Write the heads of each token to its position in a cache, token by token."""
    each = narrowed(x, out.dtype).unflatten(0, (len(positions), -1))
    cache = out.unflatten(0, (each.shape[1], -1))
    for heads, position in zip(each, positions[:, None], strict=True):
        cache.index_copy_(1, position, heads[:, None])


def _turn(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, *, interleaved: bool
) -> None:
    """Rotate the first columns of x by the angles of the positions."""
    angles = table.index_select(0, positions).repeat_interleave(len(x) // len(positions), 0)
    cos, sin = angles.chunk(2, -1)
    width = table.shape[1]
    turned = x[:, :width]
    first, second = (turned[:, ::2], turned[:, 1::2]) if interleaved else turned.chunk(2, -1)
    one, two = first * cos - second * sin, second * cos + first * sin
    mixed = torch.stack((one, two), -1).flatten(-2) if interleaved else torch.cat((one, two), -1)
    out[:, width:].copy_(x[:, width:])
    out[:, :width].copy_(mixed)


def _attend(
    query: torch.Tensor,
    seen_by: Sequence[torch.Tensor],
    out: torch.Tensor,
    numbers: tuple[float, ...],
    *,
    in_graph: bool,
) -> None:
    """Mix the values of the positions that a query sees; in a graph, where no size may depend on them, by a mask."""
    heads, scale, window = int(numbers[0]), numbers[1], int(numbers[2])
    position = seen_by[2]
    keys, values = (cache.unflatten(0, (heads, -1)) for cache in seen_by[:2])
    grouped = query.unflatten(0, (heads, -1))
    if in_graph:
        places = torch.arange(keys.shape[1], device=query.device)
        hidden = (places > position[0]) | ((places <= position[0] - window) if window else places < 0)
        keys, values = (widened(rows, query.dtype) for rows in (keys, values))
        scores = (grouped @ keys.mT * scale).masked_fill(hidden, -torch.inf)
        mixed = scores.softmax(-1) @ values.masked_fill(hidden[:, None], 0)
    else:
        end = int(position[0, 0]) + 1
        seen = slice(max(0, end - window) if window else 0, end)
        keys, values = (widened(rows[:, seen], query.dtype) for rows in (keys, values))
        mixed = (grouped @ keys.mT * scale).softmax(-1) @ values
    out.copy_(mixed.flatten(0, 1))


def _of_spans(step: Step, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write for each row what it makes of the rows in its span: the values that it attends to, or their mean."""
    for row, (first, last) in enumerate(inputs[-1][0].view(-1, 2).tolist()):
        if step.op is Op.MEAN_SPANS:
            out[row].copy_(inputs[0][first:last].mean(0))
            continue
        heads, kv_heads = (int(number) for number in step.numbers[:2])
        keys, values = (side[first:last].unflatten(1, (kv_heads, -1)).transpose(0, 1) for side in inputs[1:3])
        query = inputs[0][row].view(kv_heads, heads // kv_heads, -1)
        out[row].copy_(((query @ keys.mT * step.numbers[2]).softmax(-1) @ values).flatten())


def _top(x: torch.Tensor, out: torch.Tensor, columns: torch.Tensor) -> None:
    """Write the largest numbers of each row and their columns; of equals the first."""
    found = x.sort(stable=True, dim=-1, descending=True)
    out.copy_(found.values[:, : out.shape[1]])
    columns.copy_(found.indices[:, : out.shape[1]])
