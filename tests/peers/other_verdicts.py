"""Judges other libraries by the kit's cases; ``nox -s others`` runs it to write counts and page.

Each library runs in a process of its own, so that one that ends its process gets a CRASH, and the rest goes on.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from other_libraries import SUBJECTS, Subject
from other_page import PAGE, page_of, summary_of

import q4core as q4
from q4_conformance import Case, CaseResult, Outcome, check_linear, linear_cases

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["VERDICTS", "cases_of", "facts", "judge", "kernels"]

VERDICTS = Path(__file__).with_name("verdicts.json")
_MARK = "\x1everdict "
_USUAL_ROWS = 48
_SECONDS = 600.0
_DISTRIBUTIONS = ("bitsandbytes", "torch", "torchao")


def cases_of(subject: Subject, format_: str) -> tuple[Case, ...]:
    """Return the kit's cases of a format, with N as the library takes it in place of the usual N."""

    def fitted(case: Case) -> Case:
        recipe = case.weight_recipe
        if recipe.n != _USUAL_ROWS:
            return case
        return attrs.evolve(case, recipe=attrs.evolve(recipe, n=subject.rows))

    return tuple(fitted(case) for case in linear_cases([format_]))


def judge(subject: Subject, format_: str) -> list[CaseResult]:
    """Return one result for each case."""
    left = list(cases_of(subject, format_))
    results: list[CaseResult] = []
    while left:
        came = list(_in_one_process(subject, format_, [case.id for case in left]))
        results += came
        left = left[len(came) :]
        if left:
            case = left.pop(0)
            message = "the process ended"
            crash = CaseResult(case=case.id, contract=case.contract, outcome=Outcome.CRASH, message=message)
            results.append(crash)
    return results


def _in_one_process(subject: Subject, format_: str, ids: list[str]) -> Iterator[CaseResult]:
    """Yield the results of cases until all are done or the process ends."""
    request = json.dumps({"subject": subject.name, "format": format_, "ids": ids})
    done = subprocess.run(
        [sys.executable, __file__, "--serve"],
        input=request,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    found = [line.removeprefix(_MARK) for line in done.stdout.split("\n") if line.startswith(_MARK)]
    if "ready" not in found:
        raise RuntimeError(f"{subject.name} can't be judged: {done.stderr[-2000:]}")
    yield from (CaseResult.from_dict(json.loads(line)) for line in found if line != "ready")


def _tell(text: str) -> None:
    sys.stdout.write(f"\n{_MARK}{text}\n")
    sys.stdout.flush()


def _serve() -> None:
    """Judge as a parent asks on stdin."""
    request = json.loads(sys.stdin.read())
    subject = next(item for item in SUBJECTS if item.name == request["subject"])
    wanted = set(request["ids"])
    cases = [case for case in cases_of(subject, request["format"]) if case.id in wanted]
    subject.load()
    _tell("ready")
    with torch.compiler.set_stance("force_eager"):  # helpers that would be compiled again for each shape: the same bits
        check_linear(
            subject.function,
            request["format"],
            cases=cases,
            watch=lambda result: _tell(json.dumps(result.to_dict())),
            name=subject.name,
            **subject.claims,
        )


def kernels() -> dict[str, bool]:
    """Return the facts of this CPU by which bitsandbytes picks its kernels."""
    features = q4.machine_facts().cpu_features
    return {name: name in features for name in ("avx512f", "avx512_bf16")}


def facts() -> dict[str, Any]:
    """Return what the verdicts depend on."""
    machine = q4.machine_facts()
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).date().isoformat(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": {name: importlib.metadata.version(name) for name in _DISTRIBUTIONS},
        "processor": machine.processor,
        "system": f"{machine.system.split()[0]} {machine.machine}",
        "threads": machine.torch_threads,
        "kernels": kernels(),
    }


def _regenerate() -> None:
    found = {
        subject.name: {name: summary_of(subject.name, judge(subject, name)) for name in subject.formats}
        for subject in SUBJECTS
    }
    verdicts = {"facts": facts(), "verdicts": found}
    VERDICTS.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page_of(verdicts), encoding="utf-8")


if __name__ == "__main__":
    if "--serve" in sys.argv:
        _serve()
    else:
        _regenerate()
