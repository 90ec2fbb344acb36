"""The pytest side of the kit: a test with the argument ``q4_case`` runs once for each case of the contract.

    @pytest.mark.q4_conformance("my-backend")
    def test_conformance(q4_case):
        q4_case.check()

Cases run in processes of their own, so that a crash or a hang is one failed test. Cases of what the manifest does not
declare are no tests: the summary counts them. What can't be tested here is counted under its own name and never as
passed. ``--q4-report DIR`` writes the report, and a certificate where every case of the target ran. Several workers of
pytest-xdist would each judge the whole target and see a part of it, so that they are refused.

pytest imports this module in every run, so it imports the kit only where a test asks for it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from q4_conformance import CaseResult, ConformanceTarget, Run

MARK = "q4_conformance"
FIXTURE = "q4_case"
_RUNS = pytest.StashKey["dict[ConformanceTarget, _Run]"]()
_WRITTEN = pytest.StashKey["dict[ConformanceTarget, list[str]]"]()
_UNJUDGED = {"not_declared": ("not declared", "-"), "not_testable": ("not testable", "?")}
"""Outcome → what pytest calls it, in words and as one sign."""
_DISTRIBUTED = (
    "{what} can't be distributed: each worker would judge the whole target, and none would know all results. Its cases "
    "run in processes of their own anyway: run these tests with -n 0."
)


class CaseFailed(Exception):  # noqa: N818  # not an error of the program: a verdict
    """A case ended as FAIL, CRASH or TIMEOUT."""


class _Unjudged(Exception):  # noqa: N818  # as above
    """A case ended as NOT_DECLARED or NOT_TESTABLE: arguments outcome and message."""


class CaseOfTarget:
    """One case of one target; the value of the fixture ``q4_case``."""

    def __init__(self, run: _Run, case: str) -> None:
        self.id = case
        self._run = run

    def check(self) -> None:
        """Wait for the case's result.

        Raises:
            CaseFailed: What must hold does not; the message has the reason.
        """
        result = self._run.result(self.id)
        if result.outcome.value in _UNJUDGED:
            raise _Unjudged(result.outcome.value, result.message)
        if result.outcome.value != "pass":
            raise CaseFailed(str(result))


class _Run:
    """The chosen cases of one target, run in processes of their own from the first that is asked for."""

    def __init__(self, target: ConformanceTarget, claims: dict[str, Any]) -> None:
        from q4_conformance.execution.isolated import due_cases  # noqa: PLC0415  # see the module's docstring
        from q4_conformance.execution.query import Query  # noqa: PLC0415  # as above

        self.target = target
        self.claims = claims
        due, self.undeclared = due_cases(Query(name=target.name, **claims))
        self.every = [case.id for case in due]
        self.chosen: list[str] = []
        self._awaited: dict[str, Future[CaseResult]] = {case: Future() for case in self.every}
        self._whole: Future[Run] = Future()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    @property
    def results(self) -> list[CaseResult]:
        """The results so far."""
        return [item.result() for item in self._awaited.values() if item.done() and item.exception() is None]

    def result(self, case: str) -> CaseResult:
        """Return the result of a case, as soon as there is one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"conformance of {self.target.name}", daemon=True)
            self._thread.start()
        return self._awaited[case].result()

    def finish(self) -> Run | None:
        """Return the whole run, or None where nothing was asked for; cases that no test came to ask for end here."""
        if not all(self._awaited[case].done() for case in self.chosen):
            self._stopped.set()
        return None if self._thread is None else self._whole.result()

    def _work(self) -> None:
        from q4_conformance import Query, run_target  # noqa: PLC0415  # see the module's docstring

        def watch(result: CaseResult) -> None:
            self._awaited[result.case].set_result(result)

        only = () if set(self.chosen) == set(self.every) else tuple(self.chosen)
        lost: BaseException = LookupError(f"the run of {self.target.name} has ended")
        try:
            query = Query(name=self.target.name, only=only, **self.claims)
            self._whole.set_result(run_target(query, watch=watch, is_over=self._stopped.is_set))
        except BaseException as error:  # noqa: BLE001  # raised in the test that waits
            lost = error
            self._whole.set_exception(error)
        for item in self._awaited.values():
            if not item.done():
                item.set_exception(lost)


def _run_of(metafunc: pytest.Metafunc) -> _Run:
    from q4_conformance import find_target  # noqa: PLC0415  # see the module's docstring

    mark = metafunc.definition.get_closest_marker(MARK)
    name = metafunc.function.__name__
    if hasattr(metafunc.config, "workerinput"):  # as pytest-xdist marks its workers
        raise pytest.UsageError(_DISTRIBUTED.format(what=f"{name}: the argument {FIXTURE}"))
    if mark is None or len(mark.args) != 1:
        raise pytest.UsageError(
            f"{name}: the argument {FIXTURE} needs @pytest.mark.{MARK}(NAME), with the name of an installed backend"
        )
    claims: dict[str, Any] = {key: tuple(value) if key == "formats" else value for key, value in mark.kwargs.items()}
    known = metafunc.config.stash[_RUNS]
    try:
        target = find_target(mark.args[0], **claims)
        run = known.get(target) or known.setdefault(target, _Run(target, claims))
    except (LookupError, ValueError, TypeError) as error:
        raise pytest.UsageError(f"{name}: {error}") from error
    if not run.every:
        lacking = ", ".join(sorted({*run.undeclared.values()}))
        raise pytest.UsageError(f"{name}: nothing that {target.name} declares has a case; not declared: {lacking}")
    return run


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--q4-report``."""
    group = parser.getgroup("q4core conformance")
    group.addoption("--q4-report", metavar="DIR", type=Path, help="write the kit's report, and certificate, there")


def pytest_configure(config: pytest.Config) -> None:
    """Announce the mark."""
    config.addinivalue_line("markers", f"{MARK}(name, *, profile, formats, device): whose cases {FIXTURE} runs")
    config.stash[_RUNS] = {}
    config.stash[_WRITTEN] = {}
    options = config.option
    if getattr(options, "dist", "no") != "no" and options.q4_report is not None:
        raise pytest.UsageError(_DISTRIBUTED.format(what="--q4-report"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test with ``q4_case`` every case that concerns its target."""
    if FIXTURE not in metafunc.fixturenames:
        return
    run = _run_of(metafunc)
    metafunc.parametrize(FIXTURE, [(run, case) for case in run.every], ids=run.every, indirect=True)


@pytest.fixture
def q4_case(request: pytest.FixtureRequest) -> CaseOfTarget:
    """One case of the target that the test's mark names."""
    return CaseOfTarget(*request.param)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note which cases were chosen, in the order of the tests."""
    for item in session.items:
        run, case = _param(item)
        if run is not None:
            run.chosen.append(case)


def _param(item: pytest.Item) -> tuple[_Run | None, str]:
    spec = getattr(item, "callspec", None)
    run, case = spec.params.get(FIXTURE, (None, "")) if spec is not None else (None, "")
    return run, case


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say a verdict in its own words instead of a traceback."""
    report = yield
    if call.excinfo is None:
        return report
    if isinstance(call.excinfo.value, CaseFailed):
        report.longrepr = str(call.excinfo.value)
    elif isinstance(call.excinfo.value, _Unjudged):
        report.outcome = "skipped"  # of pytest's three the only one that says neither right nor wrong
        path, line, _ = item.location
        outcome, message = call.excinfo.value.args
        report.longrepr = (path, (line or 0) + 1, f"{outcome}: {message}")
        report.user_properties.append((FIXTURE, outcome))
    return report


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    """Count what was not judged under its own name."""
    outcome = dict(getattr(report, "user_properties", ())).get(FIXTURE)
    if outcome not in _UNJUDGED:
        return None
    words, sign = _UNJUDGED[outcome]
    return words, sign, words.upper()


def _reports(runs: Iterable[_Run]) -> Generator[tuple[_Run, Any]]:
    from q4_conformance import Report  # noqa: PLC0415  # see the module's docstring

    for run in runs:
        if run.chosen:
            undeclared = run.undeclared
            yield run, Report(subject=run.target.name, expected=run.chosen, results=run.results, undeclared=undeclared)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the reports, and fail a run in which a target passed no case, because it showed nothing."""
    config = session.config
    if config.option.collectonly:
        return
    runs = list(_reports(config.stash[_RUNS].values()))
    is_good = all(report.passed for _, report in runs)
    folder: Path | None = config.getoption("--q4-report")
    if folder is not None:
        words = ["pytest", *map(str, config.invocation_params.args)]
        for run, _ in runs:
            lines, is_written = _write(run, folder / run.target.name if len(runs) > 1 else folder, words)
            config.stash[_WRITTEN][run.target] = lines
            is_good = is_good and is_written
    if exitstatus == pytest.ExitCode.OK and not is_good:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say for each target how its cases ended, whether they are all there are, and which files have them."""
    config = terminalreporter.config
    if config.option.collectonly:
        return
    for run, report in _reports(config.stash[_RUNS].values()):
        terminalreporter.section(f"conformance of {run.target.name} on {run.target.device}")
        terminalreporter.line(str(report).splitlines()[-1])
        for reason, count in report.not_declared.items():
            terminalreporter.line(f"not declared: {reason}, {count:,} cases")
        if len(run.chosen) < len(run.every):
            terminalreporter.line(f"{len(run.chosen)} of {len(run.every)} cases were chosen: no certificate")
        for line in config.stash[_WRITTEN].get(run.target, ()):
            terminalreporter.line(line)


def _write(run: _Run, folder: Path, command: list[str]) -> tuple[list[str], bool]:
    """Write what a run showed, and return what to say of it and whether it is written."""
    from q4_conformance import make_certificate, write_files  # noqa: PLC0415  # see the module's docstring
    from q4_conformance.report.status import line_of  # noqa: PLC0415  # as above

    try:
        done = run.finish()
        if done is None:
            return ["no report was written: no test asked for the result of a case"], False
        document = make_certificate(done, command)
        files = write_files(folder, document)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is reported, and takes no other summary away
        return [f"no report was written: {type(error).__name__}: {error}"], False
    lacking = len(document["missing"])
    lines = [f"pytest ended early: {lacking} of {len(run.chosen)} chosen cases have no result"] if lacking else []
    return [*lines, "".join(line_of(document)), *(f"written: {path}" for path in files)], True
