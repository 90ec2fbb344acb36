"""Checks of a backend's programs: each operation's numbers, the whole's bits, memory, processes and refusals."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.checks.endurance import threads
from q4_conformance.checks.surroundings import judge_fork
from q4_conformance.contract.case import check, expect, raised, within
from q4_conformance.measurement.allocations import watch
from q4_conformance.measurement.guard_pages import on_last_page
from q4_conformance.oracle.operations import exact_operation
from q4_conformance.outcome import FailureError, NotDeclaredError, NotTestableError
from q4_conformance.subjects.reference import REFERENCE, require_device
from q4core import InputError, LifecycleError
from q4core.programs import Buffer, Op, Program, Step, View, bind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject
    from q4core import Q4Linear
    from q4core.programs import BoundProgram

_CANARY = 97.0
_MARGIN = 19
"""Elements before a view, and between its rows: no multiple of a vector."""
_CAPACITY = 40
_HIDDEN, _HEADS, _KV_HEADS, _HEAD, _INNER, _TOKENS = 256, 8, 2, 32, 256, 50
_COUNTS = (1, 2, 3, 4)
_RUNS = 6


@attrs.define
class _Scene:
    """Buffers with margins of canaries round every view, and the steps over them."""

    subject: BackendSubject
    place: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    margin: int = _MARGIN
    buffers: list[Buffer] = attrs.field(factory=list)
    tensors: list[torch.Tensor] = attrs.field(factory=list)
    steps: list[Step] = attrs.field(factory=list)
    layers: list[Q4Linear] = attrs.field(factory=list)

    def view(self, values: torch.Tensor) -> View:
        """Return a view of a new buffer that holds [rows, columns]."""
        rows, columns = values.shape
        stride = columns + self.margin
        dtype = values.dtype
        flat = torch.full((self.margin + rows * stride,), int(_CANARY), dtype=dtype)
        view = View(len(self.buffers), rows, columns, self.margin, stride)
        flat.as_strided((rows, columns), (stride, 1), self.margin).copy_(values)
        self.buffers.append(Buffer(f"buffer {len(self.buffers)}", flat.numel(), dtype, is_bound=True))
        self.tensors.append(self.place(flat).to(self.subject.device))
        return view

    def out(self, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> View:
        """Return a view to be written."""
        return self.view(torch.full((rows, columns), int(_CANARY), dtype=dtype))

    def add(self, op: Op, inputs: Sequence[View], output: View, numbers: Iterable[float] = (), **facts: Any) -> View:
        """Add a step, and return its output."""
        self.steps.append(Step(op, inputs, (output, *facts.pop("further", ())), numbers=numbers, **facts))
        return output

    def layer(self, case: Case, rows: int, columns: int) -> int:
        """Return the number of a packed layer of the case's format."""
        recipe = attrs.evolve(case.weight_recipe, n=rows, k=columns)
        made = self.subject.layer(attrs.evolve(case, recipe=recipe).weight(), dtype=torch.float32)
        self.layers.append(made.module)
        return len(self.layers) - 1

    def bound(self) -> BoundProgram:
        """Bind the steps to the subject."""
        sizes = [(layer.out_features, layer.in_features) for layer in self.layers]
        program = Program(self.buffers, self.steps, sizes)
        made = bind(program, self.tensors, self.layers, registry=self.subject.registry)
        if made.record.backend != self.subject.name:
            raise FailureError(f"declared, then refused: {'; '.join(made.record.reasons)}")
        return made

    def read(self, view: View) -> torch.Tensor:
        """Return what a view holds."""
        tensor = self.tensors[view.buffer]
        shown = tensor.as_strided((view.rows, view.columns), (view.stride, 1), tensor.storage_offset() + view.offset)
        return shown.to("cpu", copy=True)


def _require_programs(subject: BackendSubject) -> None:
    if "program" not in subject.backend.capabilities.ops:
        raise NotDeclaredError("op 'program' is not declared")
    require_device(subject.device)


def _draw(*sizes: int, seed: int = 21) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed + sum(sizes)))


def _operations() -> Iterator[tuple[Op, list[torch.Tensor], tuple[int, int], tuple[float, ...]]]:
    """Yield each operation with inputs, the sizes of its output, and numbers: sizes that divide no vector, too."""
    at = torch.tensor([[_CAPACITY - 3]])
    for rows, columns in ((1, 1), (1, 17), (3, 64), (5, 131)):
        x, row = _draw(rows, columns), _draw(1, columns)
        for op in (Op.RELU, Op.GELU, Op.GELU_TANH, Op.SILU, Op.SIGMOID, Op.TANH, Op.SOFTMAX, Op.COPY):
            yield op, [4 * x], (rows, columns), ()
        for op, other in itertools.product((Op.ADD, Op.MULTIPLY), (row, 2 * x)):
            yield op, [x, other], (rows, columns), ()
        yield Op.AFFINE, [x], (rows, columns), (0.3, -1.7)
        yield from ((Op.RMS_NORM, [x, row], (rows, columns), (1e-6, shift)) for shift in (0, 1))
        yield Op.LAYER_NORM, [x, row, 2 * row], (rows, columns), (1e-5,)
        yield Op.LINEAR, [x, _draw(7, columns)], (rows, 7), (0,)
        yield Op.LINEAR, [x, _draw(66, columns), _draw(1, 66)], (rows, 66), (1,)
        yield Op.ARGMAX, [x.round()], (1, rows), ()
        yield Op.TOP_K, [x.round()], (rows, min(columns, 5)), (min(columns, 5),)
        yield Op.EMBEDDING, [torch.arange(rows)[None] * 2, _draw(11, columns)], (rows, columns), ()
        yield Op.STORE, [x, at], (rows * _CAPACITY, columns), ()
    for heads, kv_heads, size, window in ((1, 1, 8, 0), (6, 2, 24, 0), (8, 8, 64, 5), (9, 3, 64, 0)):
        cache = [_draw(kv_heads * _CAPACITY, size, seed=seed) for seed in (1, 2)]
        yield Op.ATTENTION, [_draw(heads, size), *cache, at], (heads, size), (kv_heads, size**-0.5, window)
        for turned, pairs in itertools.product((size, size // 2), (0, 1)):
            table = _draw(_CAPACITY, turned)
            yield Op.ROTARY, [_draw(heads, size), table, at], (heads, size), (pairs,)


@check("program_operations")
@threads(1)
def check_program_operations(case: Case, subject: BackendSubject) -> str:
    """Every operation alone has the numbers of float64, within its roundings, and writes nothing beside its output."""
    del case
    _require_programs(subject)
    count = 0
    for op, inputs, sizes, numbers in _operations():
        scene = _Scene(subject)
        views = [scene.view(tensor) for tensor in inputs]
        out = scene.out(*sizes, torch.int64 if op is Op.ARGMAX else torch.float32)
        further = (scene.out(*sizes, torch.int64),) if op is Op.TOP_K else ()
        scene.add(op, views, out, numbers, further=further)
        before = [tensor.to("cpu", copy=True) for tensor in scene.tensors]
        with within(f"{op.value} of {[list(tensor.shape) for tensor in inputs]}, numbers {list(numbers)}"):
            scene.bound()()
            if op is Op.STORE:
                wanted = torch.full(sizes, _CANARY, dtype=torch.float64)
                wanted.unflatten(0, (-1, _CAPACITY))[:, int(inputs[1])] = inputs[0].double()
                _judge(scene.read(out), wanted, None)
            else:
                _judge(scene.read(out), *exact_operation(op, inputs, numbers))
            if further:
                wanted = inputs[0].sort(stable=True, dim=-1, descending=True).indices[:, : sizes[1]]
                _judge(scene.read(further[0]), wanted.double(), None)
            _expect_canaries(scene, before, (out, *further))
        count += 1
    return f"{count} operations"


def _judge(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | None) -> None:
    error = (found.double() - exact).abs()
    wrong = ~(error <= (0 if bound is None else bound + torch.finfo(torch.float32).tiny))
    if bool(wrong.any()):
        place = tuple(int(number) for number in wrong.nonzero()[0])
        told = f"{int(wrong.sum())} of {wrong.numel()} elements are wrong"
        raise FailureError(f"{told}; {list(place)} is {found[place].item():.9g}, exact {exact[place].item():.9g}")


def _expect_canaries(scene: _Scene, before: Sequence[torch.Tensor], outputs: Sequence[View]) -> None:
    """Expect each buffer to be what it was but for the outputs."""
    for view in outputs:
        old = before[view.buffer]
        old.as_strided((view.rows, view.columns), (view.stride, 1), view.offset).copy_(scene.read(view))
    for buffer, tensor, old in zip(scene.buffers, scene.tensors, before, strict=True):
        expect(torch.equal(tensor.cpu(), old), f"{buffer.name} was written outside the output")


@check("program_packed")
@threads(1)
def check_program_packed(case: Case, subject: BackendSubject) -> str:
    """A packed product has the bits of its layer, for few rows and many; packed rows those of the layer's rows."""
    _require_programs(subject)
    for rows in case.rows:
        scene = _Scene(subject)
        k = case.weight_recipe.k
        number = scene.layer(case, 67, k)
        x, tokens = _draw(rows, k), torch.arange(rows)[None] * 5 % 67
        dense = scene.add(Op.LINEAR, [scene.view(x)], scene.out(rows, 67), (0,), layer=number)
        found = scene.add(Op.EMBEDDING, [scene.view(tokens)], scene.out(rows, k), layer=number)
        before = [tensor.to("cpu", copy=True) for tensor in scene.tensors]
        scene.bound()()
        layer = scene.layers[0]
        with torch.no_grad(), within(f"{rows} rows"):
            _judge(scene.read(dense), layer(x.to(subject.device)).cpu().double(), None)
            _judge(scene.read(found), layer.rows(tokens[0].to(subject.device)).cpu().double(), None)
        _expect_canaries(scene, before, (dense, found))
    return f"{len(case.rows)} numbers of rows"


def _decoder(case: Case, scene: _Scene) -> tuple[View, list[View]]:
    """Add a block of a decoder with its embedding and head, and return where token and position stand, and results."""
    numbers = scene.view(torch.tensor([[3, _CAPACITY // 2]]))
    token, position = (attrs.evolve(numbers, columns=1, offset=numbers.offset + at) for at in (0, 1))
    embedding, qkv, out_layer, gates, down = (
        scene.layer(case, rows, columns)
        for rows, columns in (
            (_TOKENS, _HIDDEN),
            ((_HEADS + 2 * _KV_HEADS) * _HEAD, _HIDDEN),
            (_HIDDEN, _HEADS * _HEAD),
            (2 * _INNER, _HIDDEN),
            (_HIDDEN, _INNER),
        )
    )
    norm, table = scene.view(1 + 0.1 * _draw(1, _HIDDEN)), scene.view(_draw(_CAPACITY, _HEAD).cos())
    caches = [scene.view(_draw(_KV_HEADS * _CAPACITY, _HEAD, seed=seed)) for seed in (1, 2)]
    results: list[View] = []

    def add(op: Op, inputs: Sequence[View], columns: int, numbers: Iterable[float] = (), **facts: Any) -> View:
        results.append(scene.add(op, inputs, scene.out(1, columns), numbers, **facts))
        return results[-1]

    def part(view: View, first: int, rows: int, columns: int) -> View:
        return View(view.buffer, rows, columns, view.offset + first)

    x = add(Op.EMBEDDING, [token], _HIDDEN, layer=embedding)
    both = add(
        Op.LINEAR, [add(Op.RMS_NORM, [x, norm], _HIDDEN, (1e-6, 0))], (_HEADS + 2 * _KV_HEADS) * _HEAD, (0,), layer=qkv
    )
    turned = part(both, 0, _HEADS + _KV_HEADS, _HEAD)
    scene.add(Op.ROTARY, [turned, table, position], turned, (1,))
    for index, cache in enumerate(caches):
        scene.add(Op.STORE, [part(both, (_HEADS + index * _KV_HEADS) * _HEAD, _KV_HEADS, _HEAD), position], cache)
    mixed = scene.out(1, _HEADS * _HEAD)
    query = part(both, 0, _HEADS, _HEAD)
    scene.add(Op.ATTENTION, [query, *caches, position], part(mixed, 0, _HEADS, _HEAD), (_KV_HEADS, _HEAD**-0.5, 0))
    x = add(Op.ADD, [x, add(Op.LINEAR, [mixed], _HIDDEN, (0,), layer=out_layer)], _HIDDEN)
    inner = add(Op.LINEAR, [add(Op.RMS_NORM, [x, norm], _HIDDEN, (1e-6, 1))], 2 * _INNER, (0,), layer=gates)
    gate = part(inner, 0, 1, _INNER)
    scene.add(Op.SILU, [gate], gate)
    scene.add(Op.MULTIPLY, [gate, part(inner, _INNER, 1, _INNER)], gate)
    x = add(Op.ADD, [x, add(Op.LINEAR, [gate], _HIDDEN, (0,), layer=down)], _HIDDEN)
    logits = add(Op.LINEAR, [add(Op.RMS_NORM, [x, norm], _HIDDEN, (1e-6, 0))], _TOKENS, (0,), layer=embedding)
    best = scene.out(1, 1, torch.int64)
    results.append(scene.add(Op.ARGMAX, [logits], best))
    return numbers, [*results, *caches]


def _tokens_of(
    scene: _Scene, numbers: View, results: Sequence[View], *runs: Callable[[], object]
) -> list[torch.Tensor]:
    """Return what some tokens leave in the results."""
    found = []
    for token in range(_RUNS):
        scene.tensors[numbers.buffer][numbers.offset : numbers.offset + 2] = torch.tensor([token * 7, 20 + token])
        for run in runs:
            run()
        found += [scene.read(view) for view in results]
    return found


@check("program_whole")
def check_program_whole(case: Case, subject: BackendSubject) -> str:
    """A block of a decoder has the bits of its steps one by one, with any number of threads."""
    _require_programs(subject)
    wanted: list[torch.Tensor] = []
    for count, is_whole in ((1, False), *((count, True) for count in _COUNTS)):
        with threads(count), within(f"{count} threads"):
            scene = _Scene(subject)
            numbers, results = _decoder(case, scene)
            runs: list[Callable[[], object]] = [scene.bound()] if is_whole else []
            if not is_whole:
                steps = scene.steps
                for step in steps:
                    scene.steps = [step]
                    runs.append(scene.bound())
            found = _tokens_of(scene, numbers, results, *runs)
            wanted = wanted or found
            same = all(map(torch.equal, found, wanted))
            expect(same, "other bits than the steps one by one on one thread")
    return f"{_RUNS} tokens, {_COUNTS} threads"


@check("program_pages")
def check_program_pages(case: Case, subject: BackendSubject) -> str:
    """Every buffer ends where readable memory ends: a read or a write past an end kills the process."""
    _require_programs(subject)
    if subject.device.type != "cpu":
        raise NotTestableError("only the CPU's memory can be made unreadable page by page")
    for op, inputs, sizes, numbers in _operations():
        scene = _Scene(subject, on_last_page, 0)
        further = (scene.out(*sizes, torch.int64),) if op is Op.TOP_K else ()
        out = scene.out(*sizes, torch.int64 if op is Op.ARGMAX else torch.float32)
        scene.add(op, [scene.view(tensor) for tensor in inputs], out, numbers, further=further)
        scene.bound()()
    scene = _Scene(subject, on_last_page, 0)
    numbers_at, results = _decoder(case, scene)
    _tokens_of(scene, numbers_at, results, scene.bound())
    return "every operation, and a block of a decoder"


@check("program_refused")
def check_program_refused(case: Case, subject: BackendSubject) -> str:
    """Tokens and positions out of range, and a buffer that was resized, are typed errors; nothing is written."""
    _require_programs(subject)
    scene = _Scene(subject)
    numbers, _ = _decoder(case, scene)
    bound = scene.bound()
    kept = scene.tensors[numbers.buffer]
    wrong = ((-1, 0), (_TOKENS, 0), (2**40, 0), (0, -1), (0, _CAPACITY), (0, -(2**40)))
    for pair in wrong:
        kept[numbers.offset : numbers.offset + 2] = torch.tensor(pair)
        before = [tensor.clone() for tensor in scene.tensors]
        raised(InputError, bound, f"token {pair[0]} at position {pair[1]} was not refused")
        same = all(map(torch.equal, scene.tensors, before))
        expect(same, f"token {pair[0]} at position {pair[1]} was refused after something was written")
    kept[numbers.offset : numbers.offset + 2] = torch.tensor([1, 1])
    bound()
    kept.resize_(kept.numel() - 1)
    raised(LifecycleError, bound, "a buffer that was resized was not refused")
    return f"{len(wrong)} numbers, a buffer"


@check("program_quiet")
def check_program_quiet(case: Case, subject: BackendSubject) -> str:
    """A run makes no tensor."""
    _require_programs(subject)
    if subject.name == REFERENCE:
        raise NotDeclaredError("the reference computes with tensors of its own")
    scene = _Scene(subject)
    _decoder(case, scene)
    bound = scene.bound()
    bound()
    elements = watch(bound, subject.device).elements
    expect(elements == 0, f"a run made tensors of {elements} elements")
    return f"{len(scene.steps)} steps"


@check("program_forked")
def check_program_forked(case: Case, subject: BackendSubject) -> str:
    """A process that was forked after a run gets the bits of its parent."""
    _require_programs(subject)
    if subject.device.type != "cpu":
        raise NotTestableError("a forked process can't use its parent's CUDA device")
    scene = _Scene(subject)
    numbers, results = _decoder(case, scene)
    bound = scene.bound()
    _tokens_of(scene, numbers, results, bound)  # fills the cache
    wanted = _tokens_of(scene, numbers, results, bound)
    judge_fork(lambda: all(map(torch.equal, _tokens_of(scene, numbers, results, bound), wanted)))
    return f"{_RUNS} tokens in a forked process"
