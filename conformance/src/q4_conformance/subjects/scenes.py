"""Scenes of programs: buffers, steps and layers that a backend binds and runs, by the contract of q4-programs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.oracle.operations import exact_operation
from q4_conformance.outcome import FailureError
from q4_programs import Buffer, Op, Program, SparseWeight, Step, View, bind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject
    from q4_programs import BoundProgram
    from q4core import Q4Linear

__all__ = [
    "CANARY",
    "CAPACITY",
    "TOKENS",
    "Op",
    "Scene",
    "decoder",
    "draw",
    "exact_operation",
    "of_spans",
    "operations",
]

CANARY = 97.0
_MARGIN = 19
"""Elements before a view, and between its rows: no multiple of a vector."""
CAPACITY = 40
_HIDDEN, _HEADS, _KV_HEADS, _HEAD, _INNER, TOKENS = 256, 8, 2, 32, 256, 50


@attrs.define
class Scene:
    """Buffers with margins of canaries round every view, and the steps over them."""

    subject: BackendSubject
    place: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    margin: int = _MARGIN
    buffers: list[Buffer] = attrs.field(factory=list)
    tensors: list[torch.Tensor] = attrs.field(factory=list)
    steps: list[Step] = attrs.field(factory=list)
    layers: list[Q4Linear | SparseWeight] = attrs.field(factory=list)
    clock: int | None = None
    tokens: tuple[int, int] | None = None

    def view(self, values: torch.Tensor) -> View:
        """Return a view of a new buffer that holds [rows, columns]."""
        rows, columns = values.shape
        stride = columns + self.margin
        dtype = values.dtype
        flat = torch.full((self.margin + rows * stride,), int(CANARY), dtype=dtype)
        view = View(len(self.buffers), rows, columns, self.margin, stride)
        flat.as_strided((rows, columns), (stride, 1), self.margin).copy_(values)
        self.buffers.append(Buffer(f"buffer {len(self.buffers)}", flat.numel(), dtype, is_bound=True))
        self.tensors.append(self.place(flat).to(self.subject.device))
        return view

    def given(self, values: torch.Tensor, rows: int, *, per: str) -> View:
        """Return a view [rows, columns] of memory that each run gives: for itself, or for each round."""
        rounds = len(values) // rows
        size, gap = rows * values.shape[1], self.margin if rounds > 1 else 0
        flat = torch.full((rounds, size + gap), int(CANARY), dtype=values.dtype)
        flat[:, :size] = values.view(rounds, size)
        view = View(len(self.buffers), rows, values.shape[1])
        self.buffers.append(Buffer(f"buffer {len(self.buffers)}", size, values.dtype, given=per))
        self.tensors.append(self.place(flat).to(self.subject.device)[:, :size])
        return view

    def streams(self, first: int, count: int) -> list[torch.Tensor]:
        """Return what a run of some rounds is given."""
        pairs = zip(self.buffers, self.tensors, strict=True)
        found = [(item.given, tensor) for item, tensor in pairs if item.given]
        return [tensor[first : first + count] if per == "round" else tensor for per, tensor in found]

    def out(self, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> View:
        """Return a view to be written."""
        return self.view(torch.full((rows, columns), int(CANARY), dtype=dtype))

    def add(self, op: Op, inputs: Sequence[View], output: View, numbers: Iterable[float] = (), **facts: Any) -> View:
        """Add a step, and return its output."""
        self.steps.append(Step(op, inputs, (output, *facts.pop("further", ())), numbers=numbers, **facts))
        return output

    def add_alone(
        self, op: Op, inputs: Iterable[torch.Tensor], sizes: tuple[int, int], numbers: Iterable[float]
    ) -> tuple[View, ...]:
        """Add a step over buffers of its own, and return its outputs."""
        views = [self.view(tensor) for tensor in inputs]
        out = self.out(*sizes, torch.int64 if op is Op.ARGMAX else torch.float32)
        further = (self.out(*sizes, torch.int64),) if op is Op.TOP_K else ()
        self.add(op, views, out, numbers, further=further)
        return (out, *further)

    def layer(self, case: Case, rows: int, columns: int) -> int:
        """Return the number of a packed layer of the case's format."""
        recipe = attrs.evolve(case.weight_recipe, n=rows, k=columns)
        made = self.subject.layer(attrs.evolve(case, recipe=recipe).weight(), dtype=torch.float32)
        self.layers.append(made.module)
        return len(self.layers) - 1

    def synapses(self, weight: SparseWeight) -> int:
        """Return the number of sparse synapses, placed as buffers are."""
        tensors = (self.place(tensor).to(self.subject.device) for tensor in weight.tensors())
        self.layers.append(SparseWeight(weight.sources, weight.targets, *tensors))
        return len(self.layers) - 1

    def round(self, number: int, *, counts: bool = False) -> View:
        """Return a view of a new clock; of the program's own where it counts."""
        self.buffers.append(Buffer(f"buffer {len(self.buffers)}", 1, torch.int64, is_bound=True))
        self.tensors.append(self.place(torch.tensor([number])).to(self.subject.device))
        if counts:
            self.clock = len(self.buffers) - 1
        return View(len(self.buffers) - 1, 1, 1)

    def bound(self) -> BoundProgram:
        """Bind the steps to the subject."""
        sizes = [
            (layer.targets, layer.sources)
            if isinstance(layer, SparseWeight)
            else (layer.out_features, layer.in_features)
            for layer in self.layers
        ]
        program = Program(self.buffers, self.steps, sizes, self.clock, self.tokens)
        pairs = zip(self.buffers, self.tensors, strict=True)
        tensors = [tensor for item, tensor in pairs if item.is_bound]
        made = bind(program, tensors, self.layers, registry=self.subject.registry)
        if made.record.backend != self.subject.name:
            raise FailureError(f"declared, then refused: {'; '.join(made.record.reasons)}")
        return made

    def read(self, view: View) -> torch.Tensor:
        """Return what a view holds."""
        tensor = self.tensors[view.buffer]
        if self.buffers[view.buffer].given:
            return tensor.reshape(-1, view.columns).to("cpu", copy=True)
        shown = tensor.as_strided((view.rows, view.columns), (view.stride, 1), tensor.storage_offset() + view.offset)
        return shown.to("cpu", copy=True)


def draw(*sizes: int, seed: int = 21) -> torch.Tensor:
    """Return random numbers, the same for the same sizes and seed."""
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed + sum(sizes)))


def operations(
    tokens: Sequence[int] = (1,),
) -> Iterator[tuple[Op, list[torch.Tensor], tuple[int, int], tuple[float, ...]]]:
    """Yield each operation with inputs, the sizes of its output, and numbers: sizes that divide no vector, too.

    Args:
        tokens: The numbers of positions of operations that have some.
    """
    at = torch.tensor([[CAPACITY - 3]])
    for rows, columns in ((1, 1), (1, 17), (3, 64), (5, 131)):
        x, row = draw(rows, columns), draw(1, columns)
        for op in (Op.RELU, Op.GELU, Op.GELU_TANH, Op.SILU, Op.SIGMOID, Op.TANH, Op.SOFTMAX, Op.COPY):
            yield op, [4 * x], (rows, columns), ()
        for op, other in itertools.product((Op.ADD, Op.MULTIPLY), (row, 2 * x)):
            yield op, [x, other], (rows, columns), ()
        yield Op.AFFINE, [x], (rows, columns), (0.3, -1.7)
        yield from ((Op.RMS_NORM, [x, row], (rows, columns), (1e-6, shift)) for shift in (0, 1))
        yield Op.LAYER_NORM, [x, row, 2 * row], (rows, columns), (1e-5,)
        yield Op.LINEAR, [x, draw(7, columns)], (rows, 7), (0,)
        yield Op.LINEAR, [x, draw(66, columns), draw(1, 66)], (rows, 66), (1,)
        yield Op.ARGMAX, [x.round()], (1, rows), ()
        yield Op.TOP_K, [x.round()], (rows, min(columns, 5)), (min(columns, 5),)
        yield Op.EMBEDDING, [torch.arange(rows)[None] * 2, draw(11, columns)], (rows, columns), ()
        yield Op.STORE, [x, at], (rows * CAPACITY, columns), ()
    sizes = ((1, 1, 8, 0), (6, 2, 24, 0), (8, 8, 64, 5), (9, 3, 64, 0), (4, 1, 40, 0))
    for (heads, kv_heads, size, window), count in itertools.product(sizes, tokens):
        places = (CAPACITY - 3 - 5 * torch.arange(count) % (CAPACITY - 3))[None]
        cache = [draw(kv_heads * CAPACITY, size, seed=seed) for seed in (1, 2)]
        query, shape = draw(count * heads, size), (count * heads, size)
        yield Op.ATTENTION, [query, *cache, places], shape, (kv_heads, size**-0.5, window)
        if count > 1:
            yield Op.STORE, [query, places], (heads * CAPACITY, size), ()
        for turned, pairs in itertools.product((size, size // 2), (0, 1)):
            yield Op.ROTARY, [query, draw(CAPACITY, turned), places], shape, (pairs,)


def of_spans() -> Iterator[tuple[Op, list[torch.Tensor], tuple[int, int], tuple[float, ...]]]:
    """Yield the operations over spans, as ``operations`` does: each row's own sequence, itself alone, and windows."""
    alone = torch.arange(40)[:, None] + torch.tensor([0, 1])
    windows = torch.stack((torch.arange(40) - 4, torch.arange(40) + 7), 1).clamp(0, 40)
    whole = torch.tensor([[0, 1]] + [[1, 3]] * 2 + [[3, 20]] * 17 + [[20, 40]] * 20)
    mixed = torch.cat((alone[:7], windows[7:25], whole[25:30]))
    for (heads, kv_heads, size), spans in itertools.product(
        ((1, 1, 8), (6, 2, 24), (4, 4, 32), (14, 1, 17), (2, 2, 65)), (alone, windows, whole, mixed)
    ):
        query, sides = draw(len(spans), heads * size), [draw(40, kv_heads * size, seed=seed) for seed in (1, 2)]
        shape = (len(spans), heads * size)
        yield Op.ATTEND_SPANS, [query, *sides, spans.reshape(1, -1)], shape, (heads, kv_heads, size**-0.5)
        yield Op.MEAN_SPANS, [sides[0], spans.reshape(1, -1)], (len(spans), kv_heads * size), ()


def decoder(case: Case, scene: Scene, tokens: int = 1) -> tuple[View, list[View]]:
    """Add a block of a decoder with its embedding and head, and return where token and position stand, and results.

    Args:
        case: Of the layers' format.
        scene: To add to.
        tokens: Of how many tokens the steps are: first come their numbers, then their positions. The last results are
            the logits, the tokens of the largest, keys and values.
    """
    numbers = scene.view(torch.tensor([[3, CAPACITY // 2]]).repeat_interleave(tokens, 1))
    token, position = (View(numbers.buffer, 1, tokens, numbers.offset + at * tokens, numbers.stride) for at in (0, 1))
    if tokens > 1:
        scene.tokens = scene.view(torch.tensor([[tokens]])).buffer, tokens
        scene.buffers[-1] = attrs.evolve(scene.buffers[-1], size=1)
        scene.tensors[-1] = scene.place(torch.tensor([tokens])).to(scene.subject.device)
    embedding, qkv, out_layer, gates, down = (
        scene.layer(case, rows, columns)
        for rows, columns in (
            (TOKENS, _HIDDEN),
            ((_HEADS + 2 * _KV_HEADS) * _HEAD, _HIDDEN),
            (_HIDDEN, _HEADS * _HEAD),
            (2 * _INNER, _HIDDEN),
            (_HIDDEN, _INNER),
        )
    )
    norm, table = scene.view(1 + 0.1 * draw(1, _HIDDEN)), scene.view(draw(CAPACITY, _HEAD).cos())
    caches = [scene.view(draw(_KV_HEADS * CAPACITY, _HEAD, seed=seed)) for seed in (1, 2)]
    results: list[View] = []

    def add(op: Op, inputs: Sequence[View], columns: int, numbers: Iterable[float] = (), **facts: Any) -> View:
        results.append(scene.add(op, inputs, scene.out(tokens, columns), numbers, **facts))
        return results[-1]

    def part(view: View, first: int, columns: int) -> View:
        return View(view.buffer, tokens, columns, view.offset + first, view.stride)

    def as_heads(view: View, count: int) -> View:
        return View(view.buffer, tokens * count, _HEAD, view.offset)

    def heads(view: View, first: int, count: int) -> View:
        own = part(view, first * _HEAD, count * _HEAD)
        if tokens > 1:  # whose rows are apart
            flat = scene.out(1, tokens * count * _HEAD)
            own = scene.add(Op.COPY, [own], View(flat.buffer, tokens, count * _HEAD, flat.offset))
        return as_heads(own, count)

    x = add(Op.EMBEDDING, [token], _HIDDEN, layer=embedding)
    both = add(
        Op.LINEAR, [add(Op.RMS_NORM, [x, norm], _HIDDEN, (1e-6, 0))], (_HEADS + 2 * _KV_HEADS) * _HEAD, (0,), layer=qkv
    )
    query, key, value = (
        heads(both, first, count)
        for first, count in ((0, _HEADS), (_HEADS, _KV_HEADS), (_HEADS + _KV_HEADS, _KV_HEADS))
    )
    joint = attrs.evolve(query, rows=_HEADS + _KV_HEADS)  # of one token
    for turned in (query, key) if tokens > 1 else (joint,):
        scene.add(Op.ROTARY, [turned, table, position], turned, (1,))
    for new, cache in zip((key, value), caches, strict=True):
        scene.add(Op.STORE, [new, position], cache)
    flat = scene.out(1, tokens * _HEADS * _HEAD)
    mixed = View(flat.buffer, tokens, _HEADS * _HEAD, flat.offset)
    scene.add(Op.ATTENTION, [query, *caches, position], as_heads(mixed, _HEADS), (_KV_HEADS, _HEAD**-0.5, 0))
    x = add(Op.ADD, [x, add(Op.LINEAR, [mixed], _HIDDEN, (0,), layer=out_layer)], _HIDDEN)
    inner = add(Op.LINEAR, [add(Op.RMS_NORM, [x, norm], _HIDDEN, (1e-6, 1))], 2 * _INNER, (0,), layer=gates)
    gate = part(inner, 0, _INNER)
    scene.add(Op.SILU, [gate], gate)
    scene.add(Op.MULTIPLY, [gate, part(inner, _INNER, _INNER)], gate)
    x = add(Op.ADD, [x, add(Op.LINEAR, [gate], _HIDDEN, (0,), layer=down)], _HIDDEN)
    logits = add(Op.LINEAR, [add(Op.RMS_NORM, [x, norm], _HIDDEN, (1e-6, 0))], TOKENS, (0,), layer=embedding)
    results.append(scene.add(Op.ARGMAX, [logits], scene.out(1, tokens, torch.int64)))
    return numbers, [*results, *caches]
