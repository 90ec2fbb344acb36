"""Checks of a layer under torch's own tools: the registered op's schema and fakes, and a whole graph."""

from __future__ import annotations

import contextlib
import gc
import importlib
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from q4_conformance.checks.values import draw, judge_call, make_bias
from q4_conformance.contract.case import check, expect
from q4_conformance.outcome import FailureError
from q4core import Feature

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendLayer, BackendSubject


class _Calls(TorchDispatchMode):
    """Keeps the calls of q4core's registered ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.namespace == "q4core":
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _compiler() -> Iterator[None]:
    """Have torch's compiler loaded, and look for no garbage among what it is made of, and makes, until the end."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it uses old parts of torch
            for name in ("torch._dynamo", "torch._inductor.compile_fx"):
                with contextlib.suppress(ImportError):  # what needs it will raise
                    importlib.import_module(name)
            yield
    finally:
        if was_enabled:
            gc.enable()


@check("opcheck")
def _check_op(case: Case, subject: BackendSubject) -> str:
    has_gradients = Feature.GRADIENTS in subject.backend.capabilities.features
    layer = subject.layer(case.weight(), make_bias(case), dtype=case.dtype, gradients=has_gradients)
    x = draw(case, layer, max(case.rows))
    with _compiler():
        with _Calls() as calls, torch.no_grad():
            layer(x)
        expect(calls.seen, "the layer called no registered op under a dispatch mode")
        for func, arguments in calls.seen:
            for requires_grad in {False, has_gradients}:
                own = (arguments[0].detach().clone().requires_grad_(requires_grad), *arguments[1:])
                try:
                    torch.library.opcheck(func, own)
                except Exception as error:
                    raise FailureError(f"opcheck of {func} (requires_grad={requires_grad}): {error}") from error
    return ", ".join(str(func) for func, _ in calls.seen)


@check("compile")
def _check_compile(case: Case, subject: BackendSubject) -> str:
    has_gradients = Feature.GRADIENTS in subject.backend.capabilities.features
    layer = subject.layer(case.weight(), make_bias(case), dtype=case.dtype, gradients=has_gradients)
    try:
        with _compiler():
            _compare(case, layer, has_gradients=has_gradients)
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:  # noqa: SLF001  # torch's only name for it
        raise FailureError(f"torch.compile(fullgraph=True): {type(error).__name__}: {error}") from error
    finally:
        torch.compiler.reset()
    return f"whole graph, M = {', '.join(map(str, case.rows))}" + (", with gradients" if has_gradients else "")


def _compare(case: Case, layer: BackendLayer, *, has_gradients: bool) -> None:
    """Call the layer compiled and as it is, and compare bits, counters and gradients."""
    torch.compiler.reset()
    compiled = torch.compile(layer.module, fullgraph=True)
    for rows in case.rows:
        x = draw(case, layer, rows)
        expected = layer(x)
        judge_call(layer, x, expected)
        before = sum(layer.diagnostics().calls)
        y = compiled(x)
        expect(torch.equal(y, expected), f"M = {rows}: the compiled layer gives other bits")
        expect(sum(layer.diagnostics().calls) == before + 1, f"M = {rows}: the compiled call was not counted")
        if has_gradients:
            one, other = (x.detach().clone().requires_grad_() for _ in range(2))
            layer(one).sum().backward()
            compiled(other).sum().backward()
            same = one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
            expect(same, f"M = {rows}: the compiled layer gives another gradient")
