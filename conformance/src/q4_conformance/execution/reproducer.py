"""The least that still fails: a smaller weight and fewer rows, the worst element, and one command.

A failure on 48 out-features, 256 in-features and nine numbers of rows says little about where to look. The search runs
the same check on smaller sizes, each size at most once, for a few seconds at most, and keeps what still fails in the
same way. It never changes a verdict: the result that it is given stays what it was.
"""

from __future__ import annotations

import functools
import re
import shlex
import time
from typing import TYPE_CHECKING, Any

import attrs

from q4_conformance.contract.cases import backend_cases, device_cases, linear_cases
from q4_conformance.contract.plain_cases import core_cases, dialect_cases, memory_cases
from q4_conformance.oracle.compare import Fault
from q4_conformance.outcome import CaseResult, Outcome
from q4_conformance.subjects.temporary_plugin import is_installed
from q4core import Precision, Q4Error, default_registry, dialects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from q4_conformance.contract.case import Case

__all__ = ["command_of", "smaller_case", "with_command", "with_reproducer"]

_SECONDS = 2.0
_LARGE_ONLY = frozenset({"kind"})
"""Checks of memory, which say nothing of small weights: no smaller one is looked for."""
_CLAIMS = ("precision", "dtypes", "codebook", "has_out", "has_gradients", "has_bias", "roundings")
"""What of a function's claims can be written down; a limit is left out, because the case lies within it."""


_PROFILES = {"dialect": "dialect", "provider": "memory"}
"""What a subject calls whom it stands for → the profile, where a backend may have the same name."""


def smaller_case(name: str, *, rows: tuple[int, ...] | None = None, n: int | None = None, k: int | None = None) -> Case:
    """Return a case of the table with fewer rows and a smaller weight.

    Args:
        name: Its id.
        rows: Values of M; the case's own unless told.
        n: Out-features; the case's own unless told.
        k: In-features; the case's own unless told.

    Raises:
        LookupError: The table has no case of that id.
    """
    case = _table().get(name)
    if case is not None:
        return _resized(case, rows, n, k)
    raise LookupError(f"case {name!r} is not in the table; q4_conformance.linear_cases() and the like list what is")


@functools.cache
def _table() -> dict[str, Case]:
    """Return every case of the built-in formats by its id."""
    tables = (linear_cases, backend_cases, device_cases, core_cases, dialect_cases, memory_cases)
    return {case.id: case for table in tables for case in table()}


def _resized(case: Case, rows: tuple[int, ...] | None, n: int | None, k: int | None) -> Case:
    if case.recipe is None:
        return case
    smaller = attrs.evolve(case, recipe=attrs.evolve(case.recipe, n=n or case.recipe.n, k=k or case.recipe.k))
    return attrs.evolve(smaller, rows=rows, meets_paths=False) if rows else smaller


def command_of(words: Iterable[str], case: str) -> str:
    """Return the command that runs one case, made of the words that ask for its subject."""
    return shlex.join([*words, "--case", case])


def with_command(result: CaseResult, case: Case, subject: Any) -> CaseResult:
    """Return a failed result with what to type; see ``with_reproducer``."""
    return attrs.evolve(result, reproducer="\n".join(_command(case, case, subject)))


def with_reproducer(  # noqa: PLR0913  # the facts of one search
    result: CaseResult,
    case: Case,
    subject: Any,
    run: Callable[[Case, Any], CaseResult],
    *,
    seconds: float = _SECONDS,
    command: str = "",
) -> CaseResult:
    """Return a failed result with what reproduces it; any other as it is.

    Args:
        result: How the case ended.
        case: The case.
        subject: Who was judged.
        run: Runs a case, as ``run_case`` does.
        seconds: How long to look for a smaller shape; 0 looks for none.
        command: What to type, where the subject was found by a command.
    """
    if result.outcome is not Outcome.FAIL:
        return result
    allowed = 0.0 if case.check in _LARGE_ONLY else seconds
    least, message, tries = _least(case, subject, run, result, time.monotonic() + allowed)
    lines = []
    if tries and case.recipe is not None and least.recipe is not None:
        found, was = (
            f"M = {', '.join(map(str, item.rows))}, N = {recipe.n}, K = {recipe.k}"
            for item, recipe in ((least, least.recipe), (case, case.recipe))
        )
        if least is case:
            lines.append(f"smallest that fails: {found}, the case itself; {tries} smaller did not fail so")
        else:
            lines += [f"smallest that fails: {found} (the case: {was})", f"there: {message}"]
    lines += [command] if command else _command(case, least, subject)
    return attrs.evolve(result, reproducer="\n".join(lines))


def _least(
    case: Case, subject: Any, run: Callable[[Case, Any], CaseResult], result: CaseResult, end: float
) -> tuple[Case, str, int]:
    """Return the smallest case found that fails in the same way, its message, and how many were tried."""
    least, message, kind, tries = case, result.message, _kind(result.message), 0
    for axis in ("rows", "k", "n", "rows", "k"):
        for smaller in _smaller(least, axis, message):
            if time.monotonic() >= end:
                return least, message, tries
            tries += 1
            try:
                tried = run(smaller, _anew(subject))
            except (Q4Error, ArithmeticError, LookupError):
                continue  # no weight, or no draw, of this size
            if tried.outcome is Outcome.FAIL and _kind(tried.message) == kind:
                least, message = smaller, tried.message
                break
    return least, message, tries


def _anew(subject: Any) -> Any:
    """Return a subject that remembers nothing of the sizes it was asked for before, where it can tell how."""
    return subject.anew() if hasattr(subject, "anew") else subject


def _kind(message: str) -> str:
    """Return in what way a case failed: the judge's fault, else the message without its numbers."""
    for fault in Fault:
        if f"{fault.value}:" in message:
            return fault.value
    return re.sub(r"\d+|\(in .*", "", message)


def _smaller(case: Case, axis: str, message: str) -> Iterator[Case]:
    """Yield a case with one axis smaller, the smallest first; the message tells at which M it failed."""
    recipe = case.recipe
    if recipe is None:
        return
    if axis == "rows":
        told = {int(rows) for rows in re.findall(r"\bM = (\d+)", message)}
        alone = [(rows,) for rows in sorted({1, *told, *case.rows}, key=lambda rows: (rows == 0, rows))]  # 0 is last
        yield from (_resized(case, rows, None, None) for rows in alone if rows != case.rows)
        return
    if axis == "n":
        yield from (_resized(case, None, size, None) for size in _sizes(1, recipe.n))
        return
    unit = 1 if recipe.is_flat else min(recipe.block_size, recipe.k)
    yield from (_resized(case, None, None, size) for size in _sizes(unit, recipe.k))


def _sizes(unit: int, size: int) -> Iterator[int]:
    """Yield multiples of a unit below a size: twice as large each time, then half of it and three quarters."""
    found = set()
    step = unit
    while step < size:
        found.add(step)
        step *= 2
    found |= {size * part // 4 // unit * unit for part in (2, 3)}
    yield from sorted(item for item in found if 0 < item < size)


def _command(case: Case, least: Case, subject: Any) -> list[str]:
    """Return the lines to type."""
    if case.id not in _table():
        return ["the case is not of the table: q4_conformance.run_case(case, subject) runs it again"]
    if getattr(subject, "function", None) is not None:
        return _snippet(case, least, subject)
    if not _is_installed(subject):
        sizes = _sizes_of(least) if least is not case else ""
        return [f'q4_conformance.run_case(q4_conformance.smaller_case("{case.id}"{sizes}), subject)']
    words = ["q4", "conform", getattr(subject, "name", "q4core")]
    words += [word for name, profile in _PROFILES.items() if hasattr(subject, name) for word in ("--profile", profile)]
    device = getattr(subject, "device", None)
    if device is not None and device.type != "cpu":
        words += ["--device", str(device)]
    return [command_of(words, case.id)]


def _is_installed(subject: Any) -> bool:
    """Say whether a command finds who is judged; the core is always there."""
    if hasattr(subject, "dialect"):
        return any(item is subject.dialect for item in dialects())
    if hasattr(subject, "provider"):
        return any(item is subject.provider for item in default_registry().memory_providers())
    return subject is None or (hasattr(subject, "backend") and is_installed(subject.backend))


def _sizes_of(case: Case) -> str:
    """Return the sizes of a case as arguments of ``smaller_case``."""
    if case.recipe is None:
        return ""
    rows = "" if case.meets_paths else f", rows={case.rows}"
    return f"{rows}, n={case.recipe.n}, k={case.recipe.k}"


def _snippet(case: Case, least: Case, subject: Any) -> list[str]:
    """Return a Python program that judges the function by the smallest case, and ends as that does."""
    function = subject.function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    is_found = module is not None and name.isidentifier()
    head = f"from {module} import {name} as function" if is_found else "function = ...  # yours"
    claims = _claims(subject)
    chosen = f'cases=[smaller_case("{case.id}"{_sizes_of(least)})]'
    call = f'check_linear(function, "{case.weight_recipe.format.name}", {chosen}{claims})'
    return [
        "import torch; from q4core import Precision; from q4_conformance import check_linear, smaller_case",
        head,
        f"print(report := {call}); raise SystemExit(not report.passed)",
    ]


def _claims(subject: Any) -> str:
    """Return the claims that differ from what a function claims unless told, as arguments."""
    fields = attrs.fields_dict(type(subject))
    words = []
    for name in _CLAIMS:
        value, usual = getattr(subject, name), fields[name].default
        if isinstance(usual, attrs.Factory):  # type: ignore[arg-type]  # attrs' own way to say so
            usual = {}
        if value != usual:
            text = str(value) if isinstance(value, Precision) else repr(value)
            words.append(f", {name}={text}")
    return "".join(words)
