"""Checks of the surroundings of a call: torch's modes and settings, other layers, earlier contents, and forks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4_conformance.checks.endurance import threads
from q4_conformance.checks.values import draw, draws, judge_call, judged_calls, make_bias
from q4_conformance.contract.case import check, expect, within
from q4_conformance.oracle.weights import WeightRecipe
from q4_conformance.outcome import FailureError, NotDeclaredError, NotTestableError
from q4_conformance.subjects.backend import BackendLayer, BackendSubject
from q4core import BUILTIN_FORMATS, BackendUnavailableError, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.function import Layer, Subject

_COUNTS = (1, 2, 3, 4, 7, 16)
"""Numbers of threads: more than there are rows or columns for each, and some that divide neither."""
_UNUSUAL_THREADS = 5
_FORK_SECONDS = 10.0
_FORK_TEXT = 2048
"""Bytes of what a forked process says, fewer than a pipe takes at once."""


@check("inference")
def _check_inference(case: Case, subject: Subject) -> str:
    return _same_in(case, subject, {"torch.no_grad()": torch.no_grad, "torch.inference_mode()": torch.inference_mode})


@check("modes")
def _check_modes(case: Case, subject: Subject) -> str:
    kind = subject.device.type
    return _same_in(
        case,
        subject,
        {
            "torch.autocast(bfloat16)": lambda: torch.autocast(kind, dtype=torch.bfloat16),
            "default dtype float64": lambda: _default_dtype(torch.float64),
            "default dtype bfloat16": lambda: _default_dtype(torch.bfloat16),
        },
    )


def _same_in(case: Case, subject: Subject, modes: Mapping[str, Callable[[], AbstractContextManager[Any]]]) -> str:
    """Expect a layer with a bias to give the same bits in each mode, whether it or its input was made there or not."""
    weight = case.weight()
    bias = make_bias(case)
    layer = subject.layer(weight, bias, dtype=case.dtype, precision=case.precision)
    made: dict[str, Layer] = {}
    for name, mode in modes.items():
        with mode():
            made[name] = subject.layer(weight, bias, dtype=case.dtype, precision=case.precision)
    for x, plain in judged_calls(layer, draws(case, layer)):
        rows = x.shape[0]
        for name, mode in modes.items():
            with mode():
                results = {
                    "x from outside": layer(x),
                    "x made in it": layer(x.clone()),
                    "a layer made in it": made[name](x),
                }
            for what, y in results.items():
                expect(torch.equal(y, plain), f"M = {rows}: other bits in {name}, {what}")
            expect(torch.equal(made[name](x), plain), f"M = {rows}: other bits outside {name}, a layer made in it")
    return f"{', '.join(modes)}, with a bias"


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@check("thread_counts")
def _check_thread_counts(case: Case, subject: Subject) -> str:
    weight = case.weight()
    earlier = subject.layer(weight, dtype=case.dtype, precision=case.precision)
    for count in _COUNTS:
        with threads(count):
            made = subject.layer(weight, dtype=case.dtype, precision=case.precision)
            for what, layer in (("made with as many", made), ("made earlier", earlier)):
                with within(f"{count} threads, a layer {what}"):
                    judged_calls(layer, draws(case, layer))
    return f"{', '.join(map(str, _COUNTS))} threads"


def _other_recipes(case: Case, subject: Subject) -> Iterator[WeightRecipe]:
    """Yield the case's weight, and others next to it: of other sizes, blocks and, for a backend, formats."""
    base = case.weight_recipe
    kind, block = base.format, base.block_size
    yield base
    yield attrs.evolve(base, n=67, k=2 * base.k)
    yield attrs.evolve(base, n=5, k=block)
    for size in sorted({item for item in kind.block_sizes if item <= base.k} - {block})[:1]:
        yield attrs.evolve(base, n=33, block_size=size)
    if isinstance(subject, BackendSubject):
        for name, other in BUILTIN_FORMATS.items():
            if name != kind.name:
                scale_kind = min(other.scale_kinds, key=lambda item: item.value)
                yield WeightRecipe(format=other, scale_kind=scale_kind, n=16, k=2 * other.block_size)


def _is_wrong(error: Exception) -> bool:
    """Return whether a layer was refused because its numbers were wrong, or failed in another way."""
    cause = error.__cause__
    if not isinstance(cause, BackendUnavailableError):
        return not isinstance(error, NotDeclaredError)
    return any(reason.code is ReasonCode.PROBE_FAILED for item in cause.rejections for reason in item.reasons)


@check("neighbours")
def _check_neighbours(case: Case, subject: Subject) -> str:
    """Layers of other sizes, blocks and formats, with and without a bias, change nothing of one another.

    Between two rounds each of them computes NaN, which no scratch may keep.
    """
    made = []
    for index, recipe in enumerate(_other_recipes(case, subject)):
        neighbour = attrs.evolve(case, recipe=recipe)
        weight = neighbour.weight()
        bias = make_bias(neighbour) if index % 2 else None
        try:
            layer = subject.layer(weight, bias, dtype=case.dtype, precision=case.precision)
        except (NotDeclaredError, FailureError) as error:
            if not index or _is_wrong(error):
                raise
            continue  # what is not served has cases of its own
        made.append((neighbour, layer))
    for neighbour, layer in (*made, *reversed(made)):
        with within(f"{neighbour.weight_recipe.label} among {len(made)} layers"):
            judged_calls(layer, draws(neighbour, layer))
        layer(torch.full((max(case.rows), layer.weight.in_features), torch.nan, dtype=case.dtype, device=layer.device))
    return f"{len(made)} layers, forwards and backwards"


@check("changed")
def _check_changed(case: Case, subject: Subject) -> str:
    weight = case.weight()
    bias = make_bias(case)
    layer = subject.layer(weight, bias, dtype=case.dtype, precision=case.precision)
    held = layer.module.bias if isinstance(layer, BackendLayer) else bias
    if held is None:
        raise FailureError("the layer lost its bias")
    for x in draws(case, layer):
        for seed in case.seeds:
            x.copy_(draw(case, layer, x.shape[0], seed))
            with torch.no_grad():
                held.mul_(-1)
            with within("with another x and bias in the same place"):
                judge_call(attrs.evolve(layer, bias=held.detach().to("cpu").clone()), x, layer(x))
    return f"{len(case.seeds)} contents of x and bias"


def _settings() -> dict[str, Any]:
    """Return the process-wide state of torch, numpy and random."""
    subnormal = torch.tensor(2.0**-130)
    return {
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "numpy's random state": repr(np.random.get_state()),  # noqa: NPY002  # the process-wide one
        "random's state": hash(random.getstate()),
        "the number of threads": torch.get_num_threads(),
        "the default dtype": torch.get_default_dtype(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "whether autocast is on": torch.is_autocast_enabled("cpu"),
        "whether algorithms must be deterministic": torch.are_deterministic_algorithms_enabled(),
        "whether subnormal numbers are preserved": bool((subnormal * 0.5).item()),
        "numpy's error handling": str(np.geterr()),
    }


@check("settings")
@threads(_UNUSUAL_THREADS)
def _check_settings(case: Case, subject: Subject) -> str:
    torch.set_flush_denormal(False)  # an earlier layer may have changed what it changes again
    torch.set_grad_enabled(mode=True)
    weight = case.weight()
    bias = make_bias(case)
    _ = torch.rand(1), np.random.random(), random.random()  # noqa: NPY002, S311  # no state that a seed gives
    before = _settings()
    for which in ("the first layer", "a second layer"):
        layer = subject.layer(weight, bias, dtype=case.dtype, precision=case.precision)
        _expect_same(before, f"making {which}")
        for x in draws(case, layer):
            y = layer(x)
            _expect_same(before, f"calling {which}")
            judge_call(layer, x, y)
    return f"{len(before)} settings"


def _expect_same(before: dict[str, Any], what: str) -> None:
    after = _settings()
    changed = [name for name, value in before.items() if after[name] != value]
    expect(not changed, f"{what} changed {', '.join(changed)}")


@check("forked")
def _check_forked(case: Case, subject: Subject) -> str:
    """A process that was forked after a call, as loaders' and servers' workers are, gets the bits of its parent.

    It computes with one thread, as torch's own workers do: torch's pool of threads does not live on in it.
    """
    if subject.device.type != "cpu":
        raise NotTestableError("a forked process can't use its parent's CUDA device")
    layer = subject.layer(case.weight(), dtype=case.dtype, precision=case.precision)
    calls = judged_calls(layer, draws(case, layer))
    judge_fork(lambda: all(torch.equal(layer(x), y) for x, y in calls))
    return f"{len(calls)} calls in a forked process"


def judge_fork(same: Callable[[], bool]) -> None:
    """Expect a forked process, with one thread, to find the same as its parent."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            os.write(writing, b"" if same() else b"other bits")
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is reported
            os.write(writing, f"{type(error).__name__}: {error}".encode(errors="replace")[:_FORK_TEXT])
        finally:
            os._exit(0)
    os.close(writing)
    os.set_blocking(reading, False)  # a process of the child's own may hold the other end open
    said = b""
    try:
        code = code_of(child)
        with contextlib.suppress(BlockingIOError):
            said = os.read(reading, _FORK_TEXT)
    finally:
        os.close(reading)
    expect(code == 0, f"a process that was forked after a call ended with code {code}")
    expect(not said, f"in a process that was forked after a call: {said.decode(errors='replace')}")


def code_of(child: int) -> int:
    """Return how a forked process ended; one that does not is killed, which is a failure."""
    end = time.monotonic() + _FORK_SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise FailureError(f"no answer in {_FORK_SECONDS:.0f} s from a process that was forked after a call")
