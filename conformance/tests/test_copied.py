"""The first process of a command that asks for a few cases is a copy of the command's, and as good as a new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STRUCK = "EX-01/rows/nf4-plain-high_first-48x256b64-s0/float32/exact"
BIAS = "TC-09/bias/nf4-plain-high_first-48x256b64-s0/float32/exact"
JUDGE = """
import json, os, sys
from q4_conformance.execution import copied
from q4_conformance.execution.isolated import run_target
from q4_conformance.execution.process import Limits
from q4_conformance.execution.query import Query

begun = []
real = copied.Copied.__init__
def begin(self, *given, **named):
    begun.append(given[0])
    real(self, *given, **named)
copied.Copied.__init__ = begin
name, *only = sys.argv[1:]
limits = Limits(case_seconds=8.0, memory_bytes=2 << 30)
query = Query(name=name, formats=() if name == "q4core" else ("nf4",), only=tuple(only), limits=limits)
run = run_target(query, is_command=os.environ.get("NEW") is None)
results = {item.case: (item.outcome.value, item.message) for item in run.report.results}
print(json.dumps({"copies": len(begun), "results": results}))
"""
FACTS = """
import json, os, signal, sys, warnings
import torch
from q4_conformance_faults import talking

def make():
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGPIPE")
    facts = {
        "argv": sys.argv,
        "path": list(dict.fromkeys(sys.path)),
        "main": sorted(vars(sys.modules["__main__"]).keys() & {"__file__", "FACTS", "JUDGE", "begun"}),
        "signals": {name: repr(signal.getsignal(getattr(signal, name))) for name in names},
        "filters": [repr(item) for item in warnings.filters],
        "descriptors": sorted(name for name in os.listdir("/proc/self/fd") if int(name) <= 2 or int(name) > 8),
        "leads": os.getsid(0) == os.getpid(),
        "empty": os.read(0, 1) == b"",
        "streams": [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "threads": torch.get_num_threads(),
        "environment": sorted(set(os.environ) - {"NEW", "LC_CTYPE"}),
    }
    with open("facts.json", "w") as file:
        json.dump(facts, file)
    return talking()
"""


def _judge(
    name: str,
    *only: str,
    before: str = "",
    folder: Path | None = None,
    streams: str = "",
    trap: str = "",
    **variables: str,
) -> dict[str, Any]:
    """Judge in a process that has done nothing else, and return what came of it.

    Args:
        name: Who.
        only: Which cases.
        before: What the process does before.
        folder: Where it works; its program lies in another folder then.
        streams: What a shell redirects for it.
        trap: What the shell does with signals before.
        variables: Of its environment.
    """
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    start = ["-c", before + JUDGE]
    if folder is not None:
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin/judge.py").write_text(before + JUDGE, encoding="utf-8")
        start = [str(folder / "bin/judge.py")]
    words = [sys.executable, *start, name, *only]
    done = subprocess.run(
        ["/bin/sh", "-c", f'{trap}exec "$0" "$@" {streams}', *words],
        env={**os.environ, "PYTHONPATH": path, **variables},
        cwd=folder,
        capture_output=True,
        timeout=60,
        check=False,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("hostile:wrong", "fail", ""),
        ("hostile:crashes", "crash", "SIGSEGV"),
        ("hostile:leaves", "crash", "exit code 0"),
        ("hostile:forks", "crash", "SIGABRT"),
        ("hostile:eats", "crash", "the limit is 2.0 GiB"),
        ("hostile:shouts", "pass", ""),
        ("hostile:breeds", "pass", ""),
        ("hostile:hides", "pass", ""),
        ("hostile:lingers", "pass", ""),
        ("q4_conformance_faults:hanging", "timeout", "no answer for 8 s"),
    ],
)
def test_a_copy_ends_as_a_new_process_would(name: str, outcome: str, words: str) -> None:
    """Whatever a subject does to a copy is a result with the same reason, the next case passes, and nothing stays."""
    told = _judge(name, STRUCK, BIAS)
    assert told["copies"] == 1
    ended, message = told["results"][STRUCK]
    assert (ended, words in message) == (outcome, True), message
    assert told["results"][BIAS][0] == "pass"
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"q4-hostile-child" in _words_of(path)]
    assert left == []


def _words_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["TC-13/processes", "EX-01"])
def test_a_copy_may_start_processes(case: str) -> None:
    """What a case starts from a copy looks neither for the command's program nor for its pipes."""
    told = _judge("q4core" if case.startswith("TC-13") else "dequant-fallback", case)
    assert told["copies"] == 1
    assert {ended for ended, _ in told["results"].values()} <= {"pass", "not_declared"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
        "import q4core; q4core.default_registry().records()\n",
    ],
)
def test_no_copy_is_made_of_a_process_that_is_used(before: str) -> None:
    """Beside another thread, and once plugins are loaded, the first process is a new one, and the result the same."""
    told = _judge("dequant-fallback", BIAS, before=before)
    assert told == {"copies": 0, "results": {BIAS: ["pass", told["results"][BIAS][1]]}}


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "trap '' INT HUP; "])
def test_a_copy_is_like_a_new_process(before: str, tmp_path: Path) -> None:
    """A module of the working directory is found, and finds all that a process has as a new one has it."""
    (tmp_path / "mine.py").write_text(FACTS, encoding="utf-8")
    facts = {}
    for kind, variables in (("copy", {}), ("new", {"NEW": "1"})):
        told = _judge("mine:make", BIAS, folder=tmp_path, streams="8</dev/null 9</dev/null", trap=before, **variables)
        assert (told["copies"], told["results"][BIAS][0]) == (int(kind == "copy"), "pass"), told
        facts[kind] = json.loads((tmp_path / "facts.json").read_text(encoding="utf-8"))
    assert facts["copy"] == facts["new"]


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["<&-", "2>&-", "<&- 2>&-"])
def test_a_command_may_be_given_closed_streams(streams: str) -> None:
    """What is closed for the command is a pipe for the copy, as for a new process."""
    told = _judge("dequant-fallback", BIAS, streams=streams)
    assert (told["copies"], told["results"][BIAS][0]) == (1, "pass"), told


@pytest.mark.slow
def test_processes_share_under_a_folder_of_a_long_name(tmp_path: Path) -> None:
    """Where a socket's name has no room, the processes of the case are started in another way."""
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    told = _judge("q4core", "TC-13/processes", TMPDIR=str(folder))
    assert [ended for ended, _ in told["results"].values()] == ["pass"], told
