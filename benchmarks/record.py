"""Records of results: commit, machine, versions, raw samples, and their statistics."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

RESULTS = Path(__file__).parent / "results"
BUILD = Path(__file__).parents[1] / "build" / "benchmarks"
"""Where runs that are no results go: quick ones, partial ones, and those of uncommitted source."""
_DIRTY = "-dirty"
_NO_SOURCE = (":!benchmarks/results", ":!docs", ":!*.md")
"""What a run writes, and pages: they change no number."""


def _git(*words: str) -> str:
    folder = Path(__file__).parents[1]
    done = subprocess.run(  # noqa: S603  # words of this module's own
        ["git", *words],  # noqa: S607  # git is found on the path, as everywhere
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    return done.stdout.strip()


def _commit() -> str:
    """Return which commit this is, ``-dirty`` where source differs from it.

    ``Q4_BENCH_COMMIT`` names it where there is no repository.
    """
    named = os.environ.get("Q4_BENCH_COMMIT")
    if named:
        return named
    name = _git("describe", "--always")
    if not name:
        return "unknown"
    return name + _DIRTY if _git("status", "--porcelain", "--", ".", *_NO_SOURCE) else name


def _version() -> str:
    try:
        return importlib.metadata.version("q4core")
    except importlib.metadata.PackageNotFoundError:
        return "a source tree"


def environment() -> dict[str, Any]:
    """Return the facts that a number depends on."""
    facts = attrs.asdict(q4.machine_facts())
    facts["cpu_features"] = list(facts["cpu_features"])
    facts["system"] = facts["system"].split()[0]  # the kernel's release says which host it was, not how fast
    return {
        "date": dt.datetime.now(tz=dt.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "q4core": _version(),
        "load_average": os.getloadavg()[0],
        "machine": facts,
    }


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Return median, 10th and 90th percentile, and the samples, of which there may be one."""
    cuts = statistics.quantiles(samples if len(samples) > 1 else [*samples] * 2, n=10, method="inclusive")
    rounded = [round(sample, 3) for sample in samples]
    return {"median": statistics.median(samples), "p10": cuts[0], "p90": cuts[-1], "samples": rounded}


def interleaved_us(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 60,
    repeats: int = 300,
    settle: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Time calls in turns, so that a noisy machine is noisy for all of them alike.

    Args:
        calls: What to time, by name.
        rounds: Samples of each.
        repeats: Calls per sample.
        settle: Called before each sample, such as to wait for a device that calls only start.

    Returns:
        Microseconds per call, ``rounds`` samples for each name.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(repeats):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            settle()
            started = time.perf_counter()
            for _ in range(repeats):
                call()
            samples[name].append((time.perf_counter() - started) / repeats * 1e6)
    return samples


def of_isa(name: str) -> str:
    """Return the name of a result: with the instruction set that ``Q4_CPU_ISA`` asks for, if it does."""
    isa = os.environ.get("Q4_CPU_ISA")
    return f"{name}-{isa}" if isa else name


def write(name: str, result: Mapping[str, Any], *, folder: Path = RESULTS) -> Path:
    """Write one result as JSON, a list of numbers to a line, and return where it is.

    Numbers of uncommitted source can't be measured again, so they are no result: they go to ``BUILD``.
    """
    facts = {"environment": environment(), **result}
    commit = facts["environment"]["commit"]
    if folder == RESULTS and commit.endswith(_DIRTY):
        print(f"{name}: not stored, because source differs from commit {commit}; commit it first", file=sys.stderr)
        folder = BUILD
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = json.dumps(facts, indent=1)
    text = re.sub(r"\[[-+.eE\d,\s]+\]", lambda found: " ".join(found[0].split()), text)
    path.write_text(text + "\n", encoding="utf-8")
    return path
