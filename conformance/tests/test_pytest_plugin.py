"""The pytest plugin of the kit: a test for each case, every outcome under its own name."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest

from q4_conformance.report.verify import read_certificate
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.q4_conformance({mark})
def test_conformance(q4_case):
    q4_case.check()
"""
PLUGIN = """
import q4core as q4
import q4_conformance_faults as faults
from q4_conformance_faults import lifecycle, values

@q4.hookimpl
def q4_backends():
    return [{backend}]
"""
RIGHT = 'faults.ToyKernel("mine", formats={"q8_0"})'


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Return what runs pytest, as its user does, over a backend that a plugin module brings."""

    def start(backend: str, *arguments: str, mark: str = '"mine"') -> pytest.RunResult:
        pytester.makepyfile(mine=PLUGIN.format(backend=backend), test_mine=TESTS.format(mark=mark))
        monkeypatch.setenv("Q4_PLUGIN_MODULES", "mine")
        monkeypatch.syspath_prepend(str(pytester.path))
        monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=":")
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=scaled(120))

    return start


def counts(done: pytest.RunResult) -> dict[str, int]:
    """Return what the last line counts."""
    found = re.findall(r"(\d+) ([a-z ]+?)(?=,| in )", done.outlines[-1])
    return {words: int(number) for number, words in found}


@pytest.mark.soak
def test_what_a_function_makes_is_judged_on_all_that_it_declares(run: Callable[..., pytest.RunResult]) -> None:
    """A dialect that is made by a function has a whole run; the cases of formats that it lacks are no tests."""
    mark = '"q4_conformance_faults.toy_dialect:ToyDialect", profile="dialect"'
    done = run(RIGHT, mark=mark)
    assert done.ret == 0
    assert counts(done) == {"passed": 5, "not declared": 1}  # it holds no golden layer


def test_each_case_is_a_test_and_counts_under_its_own_name(
    run: Callable[..., pytest.RunResult], tmp_path: Path
) -> None:
    """What is not declared is no test: the summary counts it, and JUnit does not know it."""
    junit = tmp_path / "junit.xml"
    report = tmp_path / "report"
    done = run(
        RIGHT,
        "-k",
        "TC-09 and values and fp4 or TC-05 or EX-03 and repeat and 48x256",
        f"--junitxml={junit}",
        f"--q4-report={report}",
    )
    assert done.ret == 0
    done.stdout.fnmatch_lines(
        ["*Partial report (no certificate): what ran passed;*", f"written: {report / 'report.json'}"]
    )
    done.stdout.fnmatch_lines(
        ["*conformance of mine on cpu*", "mine: passed; *", "not declared: *'fp4'*", "*no certificate"]
    )
    outcomes = counts(done)
    assert outcomes["passed"] == 7
    assert not {"not declared", "skipped"} & outcomes.keys()
    suite = ET.parse(junit).getroot()[0]  # noqa: S314  # written by pytest a moment ago
    assert (suite.attrib["tests"], suite.attrib["skipped"]) == ("7", "0")


def test_a_fault_fails_its_test_with_the_reason_and_no_traceback(run: Callable[..., pytest.RunResult]) -> None:
    """The message is the case's own."""
    done = run('values.IgnoresBias("mine", formats={"q8_0"})', "-k", "TC-09 and bias")
    assert done.ret == 1
    assert counts(done)["failed"] == 12
    done.stdout.fnmatch_lines(["FAIL *TC-09/bias/q8_0*out_of_bound*", "mine: NOT PASSED*"])
    done.stdout.no_fnmatch_line("*Traceback*")
    done.stdout.no_fnmatch_line("*pytest_q4_conformance.py*")
    done.stdout.fnmatch_lines(["*q4 conform mine --case TC-09/bias/*"])


@pytest.mark.soak
def test_a_run_that_ends_early_writes_what_it_knows(run: Callable[..., pytest.RunResult], tmp_path: Path) -> None:
    """After the first failure the cases that nobody asked for have no result, and the report says so."""
    done = run('values.IgnoresBias("mine", formats={"q8_0"})', "-k", "bias or EX-01", "-x", f"--q4-report={tmp_path}")
    assert done.ret == 1
    assert counts(done)["failed"] == 1
    done.stdout.fnmatch_lines(
        ["pytest ended early: * of * chosen cases have no result", f"written: {tmp_path}/report.json"]
    )
    document = read_certificate(tmp_path / "report.json")
    assert (document["standing"], document["kind"]) == ("failed", "report")
    assert document["missing"]
    assert len(document["missing"]) + len(document["results"]) > document["counts"]["fail"] >= 1
    assert document["not_tested"][-1]["what"] == "cases without a result"
    assert document["run"]["partial"]


INTERRUPTS = """
import pytest

@pytest.mark.q4_conformance("mine")
def test_conformance(q4_case):
    q4_case.check()
    raise KeyboardInterrupt
"""


@pytest.mark.soak
def test_a_run_that_is_interrupted_writes_what_it_knows(
    run: Callable[..., pytest.RunResult], pytester: pytest.Pytester, tmp_path: Path
) -> None:
    """Ctrl-C ends the run at once and leaves a report that is no certificate."""
    pytester.makepyfile(test_interrupts=INTERRUPTS)
    done = run(
        RIGHT, "test_interrupts.py", f"--q4-report={tmp_path}"
    )  # all cases, which take far longer than the first
    assert done.ret == pytest.ExitCode.INTERRUPTED
    done.stdout.fnmatch_lines(["pytest ended early: *", f"written: {tmp_path}/report.json"])
    document = read_certificate(tmp_path / "report.json")
    assert document["standing"] == "failed"
    assert document["counts"]["fail"] == 0
    assert document["missing"]


@pytest.mark.soak
def test_a_missing_report_has_a_reason(run: Callable[..., pytest.RunResult], tmp_path: Path) -> None:
    """A folder that can't be written fails the run, and says why."""
    (tmp_path / "file").write_text("here", encoding="utf-8")
    done = run(RIGHT, "-k", "EX-03", f"--q4-report={tmp_path / 'file'}")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["no report was written: * File exists*"])


def test_a_crash_fails_one_test_and_the_next_runs(run: Callable[..., pytest.RunResult]) -> None:
    """The process that died was not pytest's."""
    done = run(
        'lifecycle.Crashes("mine", formats={"q8_0"})',
        "-k",
        "float32 and exact and (EX-01 and rows or EX-03 and repeat and 48x256)",
    )
    assert done.ret == 1
    assert (counts(done)["failed"], counts(done)["passed"]) == (1, 1)
    done.stdout.fnmatch_lines(["CRASH *EX-01/rows*"])


@pytest.mark.soak
def test_a_run_without_a_pass_fails(run: Callable[..., pytest.RunResult]) -> None:
    """A target that declares nothing of what it is judged on has shown nothing."""
    done = run(RIGHT, "-k", "TC-09 and bias", mark='"mine", formats=["nf4"]')
    assert done.ret != 0
    done.stdout.fnmatch_lines(["*nothing that mine declares has a case; not declared: *format 'nf4'*"])


@pytest.mark.soak
def test_an_unknown_name_lists_the_names(run: Callable[..., pytest.RunResult]) -> None:
    """Collection ends with the names there are."""
    done = run(RIGHT, mark='"mein"')
    assert done.ret != 0
    done.stdout.fnmatch_lines(["*mein*mine*"])
    done = run(RIGHT, mark='"no_such_module:function"')
    assert done.ret != 0
    done.stdout.fnmatch_lines(["*must be one that can be imported*No module named 'no_such_module'*"])


@pytest.mark.soak
def test_the_mark_is_asked_for(run: Callable[..., pytest.RunResult], pytester: pytest.Pytester) -> None:
    """A test that takes a case and names nobody gets an error that says how to."""
    pytester.makepyfile(test_other="def test_other(q4_case): pass")
    done = run(RIGHT, "test_other.py")
    assert done.ret != 0
    done.stdout.fnmatch_lines(["*needs @pytest.mark.q4_conformance(NAME)*"])


def test_a_run_that_asks_for_no_case_imports_no_kit(pytester: pytest.Pytester) -> None:
    """pytest loads the plugin in every run, so that it must cost nothing."""
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_loaded():
            assert "pytest_q4_conformance" in sys.modules
            assert not {"torch", "q4core", "q4_conformance"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess(timeout=scaled(60)).assert_outcomes(passed=1)  # its entry point loads it, as anywhere


WORKER = """
def pytest_configure(config):
    config.workerinput = {"workerid": "gw0"}
"""
CONTROLLER = """
def pytest_addoption(parser):
    parser.addoption("--dist", default="no")
"""


@pytest.mark.soak
def test_a_worker_judges_nobody(
    run: Callable[..., pytest.RunResult], pytester: pytest.Pytester, tmp_path: Path
) -> None:
    """In a worker of pytest-xdist, which sees a part of the tests, nothing runs and nothing is written."""
    pytester.makeconftest(WORKER)
    done = run(RIGHT, "-k", "TC-09 and bias", "--q4-report", str(tmp_path / "report"))
    assert done.ret == pytest.ExitCode.INTERRUPTED
    done.stdout.fnmatch_lines(["*can't be distributed*run these tests with -n 0*"])
    assert not (tmp_path / "report").exists()


def test_workers_of_xdist_are_refused(run: Callable[..., pytest.RunResult]) -> None:
    """A stranger's ``-n`` gives an error that names the way out, and no verdict."""
    done = run(RIGHT, "-k", "TC-09 and bias", "-n", "1")
    assert done.ret == 1
    assert counts(done) == {"error": 1}
    done.stdout.fnmatch_lines(["*can't be distributed*run these tests with -n 0*"])


@pytest.mark.soak
def test_a_worker_runs_tests_that_ask_for_no_case(pytester: pytest.Pytester) -> None:
    """Whoever distributes other tests is left alone."""
    pytester.makeconftest(WORKER)
    pytester.makepyfile("def test_other(): pass")
    pytester.runpytest_subprocess(timeout=scaled(60)).assert_outcomes(passed=1)


@pytest.mark.soak
@pytest.mark.parametrize(("words", "status"), [(["--dist", "load", "--q4-report", "r"], 4), (["--dist", "load"], 0)])
def test_no_report_is_promised_of_workers(pytester: pytest.Pytester, words: list[str], status: int) -> None:
    """A distributed run that asks for a report, which nobody could write, ends before it begins."""
    pytester.makepyfile(distributing=CONTROLLER)
    pytester.makepyfile("def test_other(): pass")
    done = pytester.runpytest_subprocess("-p", "no:xdist", "-p", "distributing", *words, timeout=scaled(60))
    assert done.ret == status
    if status:
        done.stderr.fnmatch_lines(["*--q4-report can't be distributed*-n 0*"])
