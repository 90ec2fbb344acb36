"""Seconds of ``q4 conform`` for one case by its id, as a whole command: one case of each part, in turns.

``import torch`` is timed with them in each round: it is most of what a command does before its case begins, and shows
how fast the machine was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks import record
from q4_conformance.subjects.profiles import ConformanceTarget, cases_for

if TYPE_CHECKING:
    from collections.abc import Sequence

SUBJECTS = (ConformanceTarget("core", "q4core", (), "cpu"), ConformanceTarget("kernel", "cpu-native", ("nf4",), "cpu"))
LIMIT_SECONDS = 5.0
ROUNDS = 3
TORCH = "import torch"


def _cases(target: ConformanceTarget) -> list[str]:
    """Return one case of each part: at exact precision where it has one, and then that of the shortest id."""
    parts: dict[str, str] = {}
    for case in cases_for(target):
        part = "/".join(case.id.split("/")[:2])
        parts[part] = min(parts.get(part, case.id), case.id, key=_plainness)
    return sorted(parts.values())


def _plainness(name: str) -> tuple[bool, int, str]:
    return not name.endswith("/exact"), len(name), name


def _commands(*, is_quick: bool = False) -> dict[str, list[str]]:
    """Return what is timed, by name."""
    commands = {TORCH: [sys.executable, "-c", TORCH]}
    for target in SUBJECTS:
        chosen = [word for name in target.formats for word in ("--format", name)]
        for case in _cases(target)[: 1 if is_quick else None]:
            words = [sys.executable, "-m", "q4_cli", "conform", target.name, *chosen, "--json", "--case", case]
            commands[f"{target.name} {case}"] = words
    return commands


def _seconds(words: Sequence[str]) -> float:
    """Return how long a command takes, which must end well."""
    started = time.perf_counter()
    done = subprocess.run(  # noqa: S603  # the commands above
        words, capture_output=True, text=True, check=False, timeout=300
    )
    seconds = time.perf_counter() - started
    if words[-1] != TORCH:
        ends = [item["outcome"] for item in json.loads(done.stdout)["certificate"]["results"]]
        if len(ends) != 1 or ends[0] not in {"pass", "not_declared", "not_testable"}:
            raise SystemExit(f"{' '.join(words)} ended with {ends}:\n{done.stderr}")
    return seconds


def main(arguments: Sequence[str]) -> None:
    """Time the commands and write what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks certify", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one case of each subject, for development")
    parser.add_argument("--rounds", type=int, choices=range(1, 100), metavar="N", default=ROUNDS)
    options = parser.parse_args(arguments)
    commands = _commands(is_quick=options.quick)
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, words in commands.items():
            samples[name].append(_seconds(words))
    rows = {name: record.summary(taken) for name, taken in samples.items()}
    slow = sorted(name for name, row in rows.items() if row["median"] > LIMIT_SECONDS)
    folder = record.BUILD if options.quick or options.rounds < ROUNDS else record.RESULTS
    path = record.write("certify", {"limit_seconds": LIMIT_SECONDS, "over_limit": slow, "seconds": rows}, folder=folder)
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["median"])[:12]:
        print(f"{row['median']:5.2f} s ({row['p10']:.2f} to {row['p90']:.2f})  {name}")
    print(f"{len(rows) - 1} cases; {len(slow)} took over {LIMIT_SECONDS:g} s; {TORCH}: {rows[TORCH]['median']:.2f} s")
    print(f"wrote {path}")
