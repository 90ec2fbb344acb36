"""Checks of a backend's programs: each operation's numbers, the whole's bits, memory, processes and refusals."""

from __future__ import annotations

import importlib
import itertools
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.checks.endurance import threads
from q4_conformance.checks.surroundings import judge_fork
from q4_conformance.contract.case import check, expect, raised, within
from q4_conformance.measurement.allocations import watch
from q4_conformance.measurement.guard_pages import on_last_page
from q4_conformance.outcome import FailureError, NotDeclaredError, NotTestableError
from q4_conformance.subjects.reference import require_device
from q4core import InputError, LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject
    from q4_conformance.subjects.scenes import Scene
    from q4_programs import View

__all__ = ["expect_canaries", "scenes_for"]

_COUNTS = (1, 2, 3, 4)
_RUNS = 6
_TOKENS = (5, 13, 1)
"""Of a run, in this order; the largest is the most."""


def scenes_for(subject: BackendSubject, op: str = "program", name: str = "scenes") -> ModuleType:
    """Return a module of scenes, which needs q4-programs; the rest of the kit works without that package."""
    if op not in subject.backend.capabilities.ops:
        raise NotDeclaredError(f"op {op!r} is not declared")
    require_device(subject.device)
    try:
        return importlib.import_module(f"q4_conformance.subjects.{name}")
    except ModuleNotFoundError as error:
        if error.name != "q4_programs":
            raise
        raise NotTestableError("programs are judged by their contract: pip install q4-programs") from None


@check("program_operations")
@threads(1)
def check_program_operations(case: Case, subject: BackendSubject) -> str:
    """Every operation alone has the numbers of float64, within its roundings, and writes nothing but its output."""
    del case
    scenes = scenes_for(subject)
    count = 0
    for op, inputs, sizes, numbers in _operations(scenes, subject):
        scene = scenes.Scene(subject)
        out, *further = scene.add_alone(op, inputs, sizes, numbers)
        before = [tensor.to("cpu", copy=True) for tensor in scene.tensors]
        with within(f"{op.value} of {[list(tensor.shape) for tensor in inputs]}, numbers {list(numbers)}"):
            scene.bound()()
            if op is scenes.Op.STORE:
                wanted = torch.full(sizes, scenes.CANARY, dtype=torch.float64)
                for own, place in zip(inputs[0].chunk(inputs[1].numel()), inputs[1][0], strict=True):
                    wanted.unflatten(0, (-1, scenes.CAPACITY))[:, place] = own.double()
                _judge(scene.read(out), wanted, None)
            else:
                _judge(scene.read(out), *scenes.exact_operation(op, inputs, numbers))
            if further:
                wanted = inputs[0].sort(stable=True, dim=-1, descending=True).indices[:, : sizes[1]]
                _judge(scene.read(further[0]), wanted.double(), None)
            expect_canaries(scene, before, (out, *further))
        count += 1
    return f"{count} operations"


def _operations(scenes: ModuleType, subject: BackendSubject) -> Iterator[Any]:
    """Yield the operations that a backend is judged by: of one position, or of several, and over spans."""
    has_tokens = "tokens" in subject.backend.capabilities.ops
    yield from scenes.operations((1, 2, 5, 13) if has_tokens else (1,))
    yield from scenes.of_spans() if has_tokens else ()


def _judge(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | None) -> None:
    error = (found.double() - exact).abs()
    wrong = ~(error <= (0 if bound is None else bound + torch.finfo(torch.float32).tiny))
    if bool(wrong.any()):
        place = tuple(int(number) for number in wrong.nonzero()[0])
        count = f"{int(wrong.sum())} of {wrong.numel()} elements are wrong"
        raise FailureError(f"{count}; {list(place)} is {found[place].item():.9g}, exact {exact[place].item():.9g}")


def expect_canaries(scene: Scene, before: Sequence[torch.Tensor], outputs: Sequence[View]) -> None:
    """Expect each buffer to be what it was but for the outputs."""
    for view in outputs:
        old = before[view.buffer]
        old.as_strided((view.rows, view.columns), (view.stride, 1), view.offset).copy_(scene.read(view))
    for buffer, tensor, old in zip(scene.buffers, scene.tensors, before, strict=True):
        same = torch.equal(tensor.cpu().view(torch.uint8), old.view(torch.uint8))  # NaN, too
        expect(same, f"{buffer.name} was written outside the output")


@check("program_packed")
@threads(1)
def check_program_packed(case: Case, subject: BackendSubject) -> str:
    """A packed product has the bits of its layer, for few rows and many; packed rows those of the layer's rows."""
    scenes = scenes_for(subject)
    for rows in case.rows:
        scene = scenes.Scene(subject)
        k = case.weight_recipe.k
        number = scene.layer(case, 67, k)
        x, tokens = scenes.draw(rows, k), torch.arange(rows)[None] * 5 % 67
        dense = scene.add(scenes.Op.LINEAR, [scene.view(x)], scene.out(rows, 67), (0,), layer=number)
        found = scene.add(scenes.Op.EMBEDDING, [scene.view(tokens)], scene.out(rows, k), layer=number)
        before = [tensor.to("cpu", copy=True) for tensor in scene.tensors]
        scene.bound()()
        layer = scene.layers[0]
        with torch.no_grad(), within(f"{rows} rows"):
            _judge(scene.read(dense), layer(x.to(subject.device)).cpu().double(), None)
            _judge(scene.read(found), layer.rows(tokens[0].to(subject.device)).cpu().double(), None)
        expect_canaries(scene, before, (dense, found))
    return f"{len(case.rows)} numbers of rows"


def _tokens_of(scene: Scene, numbers: View, results: Sequence[View], *runs: Callable[[], object]) -> list[torch.Tensor]:
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
    scenes = scenes_for(subject)
    wanted: list[torch.Tensor] = []
    for count, is_whole in ((1, False), *((count, True) for count in _COUNTS)):
        with threads(count), within(f"{count} threads"):
            scene = scenes.Scene(subject)
            numbers, results = scenes.decoder(case, scene)
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


@check("program_tokens")
def check_program_tokens(case: Case, subject: BackendSubject) -> str:
    """Several tokens at once have the bits of one by one: of any number up to the most, with any number of threads."""
    scenes = scenes_for(subject, "tokens")
    most = max(_TOKENS)
    scene = scenes.Scene(subject)
    numbers, results = scenes.decoder(case, scene)
    bound, wanted = scene.bound(), []
    for token in range(most):
        scene.tensors[numbers.buffer][numbers.offset : numbers.offset + 2] = torch.tensor([token * 7 % 50, 20 + token])
        bound()
        wanted.append([scene.read(results[place]) for place in (-4, -3, -2, -1)])
    for threads_now in _COUNTS:
        scene = scenes.Scene(subject)
        numbers, results = scenes.decoder(case, scene, most)
        logits, best, *caches = results[-4:]
        flat = scene.tensors[numbers.buffer]
        flat[numbers.offset : numbers.offset + most] = torch.arange(most) * 7 % 50
        flat[numbers.offset + most : numbers.offset + 2 * most] = 20 + torch.arange(most)
        with threads(threads_now):
            bound = scene.bound()
            bound()  # of all tokens: as any, below
            for index, cache in enumerate(caches, 2):
                same = torch.equal(scene.read(cache), wanted[-1][index])
                expect(same, f"{most} tokens, {threads_now} threads: other keys or values than one by one")
            for count in _TOKENS:
                with within(f"{count} tokens, {threads_now} threads"):
                    written = [(scene.tensors[view.buffer].fill_(scenes.CANARY), view) for view in (logits, best)]
                    scene.tensors[scene.tokens[0]].fill_(count)
                    bound()
                    shown = zip(scene.read(logits), scene.read(best)[0], wanted, strict=True)
                    own = [torch.equal(row, one[0][0]) and int(token) == one[1] for row, token, one in shown]
                    expect(all(own[:count]), "other bits than the tokens one by one")
                    for flat, view in written:
                        flat[view.offset : view.offset + count * (view.stride if view.rows > 1 else 1)] = scenes.CANARY
                        expect(bool((flat == scenes.CANARY).all()), "rows of other tokens were written")
            for count in (0, -1, most + 1, 2**40):
                scene.tensors[scene.tokens[0]].fill_(count)
                held = [tensor.clone() for tensor in scene.tensors]
                raised(InputError, bound, f"{count} tokens of at most {most} were not refused")
                same = all(map(torch.equal, scene.tensors, held))
                expect(same, f"{count} tokens were refused after something was written")
    return f"{_TOKENS} tokens, {_COUNTS} threads"


@check("program_pages")
def check_program_pages(case: Case, subject: BackendSubject) -> str:
    """Every buffer ends where readable memory ends: a read or a write past an end kills the process."""
    scenes = scenes_for(subject)
    if subject.device.type != "cpu":
        raise NotTestableError("only the CPU's memory can be made unreadable page by page")
    for op, inputs, sizes, numbers in _operations(scenes, subject):
        scene = scenes.Scene(subject, on_last_page, 0)
        scene.add_alone(op, inputs, sizes, numbers)
        scene.bound()()
    scene = scenes.Scene(subject, on_last_page, 0)
    numbers_at, results = scenes.decoder(case, scene)
    _tokens_of(scene, numbers_at, results, scene.bound())
    return "every operation, and a block of a decoder"


@check("program_refused")
def check_program_refused(case: Case, subject: BackendSubject) -> str:
    """Tokens and positions out of range, and a buffer that was resized, are typed errors; nothing is written."""
    scenes = scenes_for(subject)
    scene = scenes.Scene(subject)
    numbers, _ = scenes.decoder(case, scene)
    bound = scene.bound()
    held = scene.tensors[numbers.buffer]
    wrong: tuple[tuple[int, int], ...] = (
        (-1, 0),
        (scenes.TOKENS, 0),
        (2**40, 0),
        (0, -1),
        (0, scenes.CAPACITY),
        (0, -(2**40)),
    )
    for pair in wrong:
        held[numbers.offset : numbers.offset + 2] = torch.tensor(pair)
        before = [tensor.clone() for tensor in scene.tensors]
        raised(InputError, bound, f"token {pair[0]} at position {pair[1]} was not refused")
        same = all(map(torch.equal, scene.tensors, before))
        expect(same, f"token {pair[0]} at position {pair[1]} was refused after something was written")
    if "tokens" in subject.backend.capabilities.ops:
        wrong += _refused_spans(scenes, subject)
    held[numbers.offset : numbers.offset + 2] = torch.tensor([1, 1])
    bound()
    held.resize_(held.numel() - 1)
    raised(LifecycleError, bound, "a buffer that was resized was not refused")
    return f"{len(wrong)} numbers, a buffer"


def _refused_spans(scenes: ModuleType, subject: BackendSubject) -> tuple[tuple[int, int], ...]:
    """Expect spans that are empty, or not inside, to be refused before anything is written; return them."""
    wrong = ((0, 0), (3, 2), (-1, 2), (0, 41), (40, 41), (0, 2**40), (-(2**40), 1))
    for op, inputs, sizes, numbers in itertools.islice(scenes.of_spans(), 2):
        scene = scenes.Scene(subject)
        scene.add_alone(op, inputs, sizes, numbers)
        bound, place = scene.bound(), scene.steps[0].inputs[-1]
        own = scene.tensors[place.buffer]
        for pair in wrong:
            own[place.offset + 20 : place.offset + 22] = torch.tensor(pair)
            before = [tensor.clone() for tensor in scene.tensors]
            raised(InputError, bound, f"{op.value} of the span {pair} was not refused")
            same = all(map(torch.equal, scene.tensors, before))
            expect(same, f"{op.value} of the span {pair} was refused after something was written")
    return wrong


@check("program_quiet")
def check_program_quiet(case: Case, subject: BackendSubject) -> str:
    """A run makes no tensor."""
    scenes = scenes_for(subject)
    for tokens in (1, max(_TOKENS)) if "tokens" in subject.backend.capabilities.ops else (1,):
        scene = scenes.Scene(subject)
        scenes.decoder(case, scene, tokens)
        bound = scene.bound()
        bound()
        elements = watch(bound, subject.device).elements
        expect(elements == 0, f"a run made tensors of {elements} elements")
    return f"{len(scene.steps)} steps"


@check("program_forked")
def check_program_forked(case: Case, subject: BackendSubject) -> str:
    """A process that was forked after a run gets the bits of its parent."""
    scenes = scenes_for(subject)
    if subject.device.type != "cpu":
        raise NotTestableError("a forked process can't use its parent's CUDA device")
    scene = scenes.Scene(subject)
    numbers, results = scenes.decoder(case, scene)
    bound = scene.bound()
    _tokens_of(scene, numbers, results, bound)  # fills the cache
    wanted = _tokens_of(scene, numbers, results, bound)
    judge_fork(lambda: all(map(torch.equal, _tokens_of(scene, numbers, results, bound), wanted)))
    return f"{_RUNS} tokens in a forked process"
