"""Files of distributions: the same bytes from any folder at any time, and a bill of what they are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.support.limits import scaled
from tools import sbom
from tools.progress import CommandError, run_command, step
from tools.projects import ROOT, Project, projects
from tools.wheels import epoch, hashes, placeholders

if TYPE_CHECKING:
    from pathlib import Path

WHEEL = "q4_programs-0.1.0.dev0-py3-none-any.whl"


def built(folder: Path, target: Path, time_of: str) -> dict[str, str]:
    """Build the sdist and the wheel of a pure distribution; return file name → sha256."""
    variables = {**os.environ, "SOURCE_DATE_EPOCH": time_of}
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target)]
    subprocess.run(command, cwd=folder, env=variables, capture_output=True, timeout=scaled(120), check=True)
    return hashes(target)


def test_a_second_build_elsewhere_gives_the_same_bytes(tmp_path: Path) -> None:
    """The folder, its files' times and what runs before do not show in the files; SOURCE_DATE_EPOCH does."""
    source = ROOT / "plugins/programs"
    copy = tmp_path / "copied" / "elsewhere"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copyfile)
    shutil.copyfile(ROOT / ".gitignore", tmp_path / "copied" / ".gitignore")
    first = built(source, tmp_path / "1", "1700000000")
    assert sorted(first) == ["q4_programs-0.1.0.dev0-py3-none-any.whl", "q4_programs-0.1.0.dev0.tar.gz"]
    assert built(copy, tmp_path / "2", "1700000000") == first
    later = built(copy, tmp_path / "3", "1700000002")
    assert {name for name in first if later[name] != first[name]} == set(first)


def test_the_time_is_of_the_last_commit_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another distribution's commit does not move it."""
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    project = Project(ROOT / "plugins/programs")
    command = ["git", "log", "-1", "--format=%at", "--", "plugins/programs"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert epoch(project) == told
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "17")
    assert epoch(project) == "17"


def test_the_bill_has_every_file_and_what_it_needs(tmp_path: Path) -> None:
    """Names, versions, licences, hashes, and the graph of requirements, as the wheels' own metadata has them."""
    built(ROOT / "plugins/programs", tmp_path, "1700000000")
    document = sbom.bill(tmp_path)
    assert document == sbom.bill(tmp_path)
    ours, *others = document["components"]
    assert (ours["name"], ours["version"], ours["licenses"]) == (
        "q4-programs",
        "0.1.0.dev0",
        [{"expression": "Apache-2.0"}],
    )
    assert {item["url"]: item["hashes"][0]["content"] for item in ours["externalReferences"]} == hashes(tmp_path)
    assert [item["name"] for item in others] == ["attrs", "q4core", "torch"]
    assert others[0]["properties"] == [{"name": "q4core:requires", "value": ">=23.2"}]
    (graph,) = (item["dependsOn"] for item in document["dependencies"] if item["ref"] == ours["bom-ref"])
    assert graph == ["pkg:pypi/attrs", "pkg:pypi/q4core", "pkg:pypi/torch"]
    with zipfile.ZipFile(tmp_path / WHEEL) as wheel:
        wheel.extract("q4_programs/py.typed", tmp_path)
    (tmp_path / WHEEL).write_bytes((tmp_path / WHEEL).read_bytes() + b"\0")
    assert sbom.bill(tmp_path)["serialNumber"] != document["serialNumber"]


def test_compiled_distributions_say_what_is_in_them() -> None:
    """Those with a compiler's backend are these two, built for the stable ABI from Python 3.12 on."""
    native = [project for project in projects() if project.native]
    assert [project.name for project in native] == ["q4-actors", "q4-cpu-native"]
    for project in native:
        assert project.toml["tool"]["scikit-build"]["wheel"]["py-api"] == "cp312"
        rules = (project.folder / "CMakeLists.txt").read_text(encoding="utf-8")
        assert "STABLE_ABI" in rules


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("[3/25] Building CXX object CMakeFiles/q4_cpu.dir/native/src/call.cpp.o\n", "3/25 call.cpp.o"),
        ("  [14/14] Linking CXX shared module _native.abi3.so\n", "14/14 _native.abi3.so"),
        ("  *** Configuring CMake...\n", None),
        ("[notice] A new release of pip is available\n", None),
    ],
)
def test_compiler_steps_are_shown(line: str, shown: str | None) -> None:
    """Steps of ninja are shown by the file that they make, and nothing else is."""
    assert step(line) == shown


def test_a_command_shows_its_steps_as_they_end_and_its_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds stand before each step, and the whole time after the last; a failure has what was printed."""
    program = "print('quiet'); print('[1/2] Building CXX object a/b.cpp.o'); print('[2/2] Linking x.so')"
    assert run_command([sys.executable, "-c", program]).startswith("quiet\n")
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"\d+ s", "N s", line.strip()) for line in lines] == [
        "N s  1/2 b.cpp.o",
        "N s  2/2 x.so",
        "compiled in N s",
    ]
    with pytest.raises(CommandError, match="status 3:\nbroken"):
        run_command([sys.executable, "-c", "print('broken'); raise SystemExit(3)"])


def test_a_long_silence_shows_that_the_compiler_is_at_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a step was shown, each silent spell has a line; before that, and of a command without steps, nothing has."""
    monkeypatch.setattr("tools.progress.SILENCE_S", 0.3)
    wait = "import time; time.sleep(0.5); "
    said = f"{wait}print('[1/2] Building CXX object a/b.cpp.o', flush=True); {wait}print('[2/2] Linking x.so')"
    assert run_command([sys.executable, "-c", said]).count("\n") == 2
    shown = [line.split(" s ")[1].strip() for line in capsys.readouterr().out.splitlines()[:-1]]
    assert [*dict.fromkeys(shown)] == ["1/2 b.cpp.o", "compiling …", "2/2 x.so"]  # slow machines have longer spells
    assert run_command([sys.executable, "-c", wait]) == ""
    assert capsys.readouterr().out == ""


def test_addresses_that_lead_nowhere_are_named() -> None:
    """``nox -s build`` says so, as long as the project has no address of its own."""
    assert placeholders() == ["https://q4core.example"]


def test_the_bill_is_json() -> None:
    """Licences of what is compiled in have names of the list of SPDX."""
    assert json.loads(json.dumps(sbom.COMPILED)) == {"nanobind": "BSD-3-Clause", "robin-map": "MIT"}
