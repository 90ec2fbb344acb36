"""``q4 conform``: what it prints, what it writes, and with what status it exits."""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import documents
import pytest
import typer
from typer.testing import CliRunner, Result

import q4core as q4
from q4_conformance.command.declared import PROFILES as DECLARED
from q4_conformance.command.declared import conform
from q4_conformance.contract.case import part_order
from q4_conformance.execution.process import Limits
from q4_conformance.outcome import CaseResult, Outcome
from q4_conformance.report.certificate import to_text
from q4_conformance.report.markdown import to_markdown
from q4_conformance.report.verify import CertificateError, read_certificate
from q4_conformance.subjects.profiles import PROFILES, UnknownTargetError
from tests.support.interpreter import run_interpreter
from tests.support.limits import scaled

ONE = "TC-09/bias/nf4-plain-high_first-48x256b64-s0/float32/exact"
STRUCK = "EX-01/rows/nf4-plain-high_first-48x256b64-s0/float32/exact"


@pytest.fixture(autouse=True)
def _hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes find the backends of ``hostile.py``."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def _call(*words: object) -> Result:
    app = typer.Typer()
    app.command()(conform)
    return CliRunner().invoke(app, [*map(str, words)])


def _answer(*words: object, status: int = 0) -> Any:
    result = _call(*words, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def test_the_declaration_knows_what_the_kit_has() -> None:
    """What help shows without loading the kit is what the kit has: the profiles, and the limit of a case."""
    assert DECLARED == PROFILES
    assert inspect.signature(conform).parameters["limit"].default == Limits().case_seconds


def test_help_says_it_all() -> None:
    """-h names every option and the exit statuses."""
    text = " ".join(_call("--help").stdout.split())
    for word in (
        "--profile",
        "--format",
        "--case",
        "--device",
        "--report",
        "--jobs",
        "--verify",
    ):
        assert word in text
    assert "Exits with 0" in text


@pytest.mark.slow
def test_one_case_makes_a_report_and_says_so(tmp_path: Path) -> None:
    """A chosen case runs, its report is written, and nothing calls itself a certificate; its words repeat it."""
    result = _call("dequant-fallback", "--case", ONE, "--report", tmp_path)
    assert result.exit_code == 0, result.output
    assert "no certificate" in result.stdout
    assert {path.name for path in tmp_path.iterdir()} == {f"report.{kind}" for kind in ("json", "md")}
    document = read_certificate(tmp_path / "report.json")
    assert document["standing"] == "partial"
    assert document["run"]["command"] == ["q4", "conform", "dequant-fallback", "--case", ONE, "--report", str(tmp_path)]
    assert document["counts"]["pass"] == document["counts"]["passed_by_fallback"] == 1


@pytest.mark.slow
def test_a_failure_is_shown_and_exits_with_1(tmp_path: Path) -> None:
    """A crash is in the text with its reason, in the JSON document, and in the status."""
    words = ("hostile:leaves", "--format", "nf4", "--case", STRUCK)
    result = _call(*words, "--report", tmp_path)
    assert result.exit_code == 1
    assert STRUCK in result.stdout
    assert "exit code 0" in result.stdout
    document = _answer(*words, status=1)
    assert document["certificate"]["standing"] == "failed"
    assert document["files"] == []


@pytest.mark.slow
@pytest.mark.parametrize("words", [("no-such-one",), ("dequant-fallback", "--format", "nf9")])
def test_bad_usage_is_a_typed_error(words: tuple[str, ...]) -> None:
    """An unknown name or format is an error with what there is."""
    error = _call(*words).exception
    assert isinstance(error, (UnknownTargetError, q4.ConfigError))
    assert "dequant-fallback" in str(error) or "nf4" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:function", "import raised ModuleNotFoundError: No module named 'no_such_module'."),
        ("hostile:nothing", "import raised AttributeError: module 'hostile' has no attribute 'nothing'."),
        ("broken_module:function", "import raised NameError: name 'oops' is not defined (in broken_module.py:1"),
    ],
)
def test_what_can_not_be_imported_is_bad_usage(name: str, words: str, tmp_path: Path) -> None:
    """No case of it is counted: one message has the error and what to do, and the status is that of bad usage."""
    (tmp_path / "broken_module.py").write_text("oops\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *filter(None, sys.path)])
    variables = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin"}
    run = run_interpreter(["-m", "q4_cli", "conform", name], env=variables, timeout=scaled(120))
    assert (run.returncode, run.stdout) == (2, "")
    said = " ".join(run.stderr.split())
    assert f"NAME must be one that can be imported, got {name!r}" in said
    assert words in said
    assert "Correct the name or the module, or install what it imports." in said


@pytest.mark.slow
def test_a_case_that_does_not_exist_is_an_error() -> None:
    """Ids that no case begins with are refused, with the contract cases there are."""
    error = _call("dequant-fallback", "--case", "TC-99").exception
    assert isinstance(error, q4.ConfigError)
    assert "TC-09" in str(error)
    error = _call("dequant-fallback", "--case", "TC-09/bais").exception
    assert isinstance(error, q4.ConfigError)
    meant, _, there = (error.hint or "").partition("? There are ")
    assert meant == "Did you mean TC-09/bias"
    names = there.rstrip(".").split(", ")
    assert names == sorted(names, key=part_order)
    assert len(names) > 10


@pytest.mark.slow
def test_what_is_not_declared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest of formats that the kit does not know, or a request beyond the manifest, is reported as what it is."""
    text = """
import q4core as q4
from q4_conformance_faults import ToyKernel

@q4.hookimpl
def q4_backends():
    return [ToyKernel("unknown", formats={"nf5"}), ToyKernel("few", formats={"nf4"})]
"""
    (tmp_path / "q4_unknown.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("Q4_PLUGIN_MODULES", "q4_unknown")
    said = _answer("unknown", status=1)["certificate"]["sentence"]
    assert "no format that is declared (nf5) has a case; there are cases of nf4, " in said
    error = _call("unknown", "--case", "TC-09/bias").exception
    assert isinstance(error, q4.ConfigError)
    assert error.value == "nf5"
    assert error.name != "--case"
    for words, lacking in (
        (("--format", "nvfp4"), "format 'nvfp4'"),
        (("--device", "cuda"), "device 'cuda'"),
    ):
        said = _answer("few", *words, "--case", "TC-09/bias", status=1)["certificate"]["sentence"]
        assert f"no case passed: not declared: {lacking}" in said


@pytest.mark.parametrize("words", [(), ("a", "--verify", "b")])
def test_one_thing_is_asked_for(words: tuple[str, ...]) -> None:
    """A name and --verify exclude each other, and one must be there."""
    assert isinstance(_call(*words).exception, q4.ConfigError)


@pytest.mark.parametrize("limit", ["inf", "nan", "-1", "0", "1e300"])
def test_a_limit_that_is_none_is_bad_usage(limit: str) -> None:
    """No case may run for ever, and no document can hold such a number."""
    assert _call("dequant-fallback", "--limit", limit).exit_code == 2


def test_verify(tmp_path: Path) -> None:
    """A good certificate is reported as undamaged, and a damaged one is refused."""
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    text = to_text(documents.document())
    good.write_text(text, encoding="utf-8")
    bad.write_text(text.replace("made up", "made better"), encoding="utf-8")
    document = _answer("--verify", good)
    assert document["undamaged"]
    assert document["standing"] == "certified"
    assert "undamaged" in _call("--verify", good).stdout
    assert isinstance(_call("--verify", bad).exception, CertificateError)


def test_a_run_is_checked_against_a_committed_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--check compares how cases end with a page's hash, and says how to see the difference."""
    page = tmp_path / "certificate.md"
    page.write_text(to_markdown(documents.document()), encoding="utf-8")
    monkeypatch.setattr("q4_conformance.command.conform.run_target", lambda *_, **__: documents.run())
    same = _call("made-up", "--check", page)
    assert same.exit_code == 0
    assert f"every case ended as in {page}" in same.stdout
    monkeypatch.setattr("q4_conformance.command.conform.run_target", lambda *_, **__: documents.run(documents.bad()))
    other = _call("made-up", "--check", page, "--report", tmp_path / "fresh")
    assert other.exit_code == 1
    assert f"to see the difference: diff {page} {tmp_path / 'fresh' / 'report.md'}" in other.stdout


def test_a_message_of_several_lines_is_printed_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of a failure is indented, tabs are spaces, and only what a terminal can't show is a question mark."""
    made = documents.run(
        documents.bad(message="refused.\n  - toy:\tprobe\x1b[31m failed\r\n\nhint", reproducer="one\ntwo")
    )
    monkeypatch.setattr("q4_conformance.command.conform.run_target", lambda *_, **__: made)
    shown = _call("made-up").stdout.splitlines()
    head = next(number for number, line in enumerate(shown) if "TC-09/bias/q4_0" in line)
    assert shown[head + 1 : head + 6] == [
        "    refused.",
        "      - toy: probe?[31m failed",
        "    hint",
        "    one",
        "    two",
    ]


def test_a_message_of_many_cases_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cause that fails everything is printed once, with the number of cases and the command of the first."""
    ends = {
        name: CaseResult(
            case=name,
            contract=name[:5],
            outcome=Outcome.FAIL,
            message=f"no such library in <toy at {0x7F0000000000 + number:#x}>" if number else "another",
            reproducer=f"q4 conform made-up --case {name}",
        )
        for number, name in enumerate(documents.run().report.expected)
    }
    monkeypatch.setattr("q4_conformance.command.conform.run_target", lambda *_, **__: documents.run(ends))
    result = _call("made-up")
    _, second, *_ = ends
    assert result.exit_code == 1
    assert result.stdout.count("no such library") == 1
    assert f"✗ failed {second} and {len(ends) - 2:,} other cases, all with this message:" in result.stdout
    assert f"    q4 conform made-up --case {second}\n" in result.stdout
    assert "more; --report" not in result.stdout


@pytest.mark.parametrize("name", ["file", "file/below", "n" * 300, "/proc/x", "/proc"])
def test_a_report_where_no_folder_can_be_is_bad_usage(name: str, tmp_path: Path) -> None:
    """It is refused before anything runs, by an error that names the option and the path."""
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    error = _call("dequant-fallback", "--report", tmp_path / name).exception
    assert isinstance(error, q4.ConfigError)
    assert error.name == "--report"
    assert error.value == str(tmp_path / name)


@pytest.mark.slow
def test_it_runs_without_loading_plugins_here(tmp_path: Path) -> None:
    """``q4 conform`` judges a plugin whose import ends the process."""
    (tmp_path / "q4_deadly.py").write_text(
        "import os, sys\nsys.stderr.write('farewell')\nsys.stderr.flush()\nos._exit(5)\n"
    )
    info = tmp_path / "q4_conformance-1.0.dist-info"  # as installed from this very source, whatever is installed here
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: q4-conformance\nVersion: 1.0\n")
    announced = '[project.entry-points."q4core.commands"]\nconform = "q4_conformance.command.declared:conform"\n'
    assert announced in (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    (info / "entry_points.txt").write_text("[q4core.commands]\nconform = q4_conformance.command.declared:conform\n")
    path = [str(tmp_path), *filter(None, sys.path)]
    variables = {"PYTHONPATH": ":".join(path), "Q4_PLUGIN_MODULES": "q4_deadly", "PATH": "/usr/bin:/bin"}
    words = ["-m", "q4_cli", "conform", "q4_deadly", "--case", "TC-10"]
    run = run_interpreter(words, env=variables, timeout=scaled(120))
    assert run.returncode == 1, run.stderr
    assert "exit code 5; it printed: farewell" in run.stdout
