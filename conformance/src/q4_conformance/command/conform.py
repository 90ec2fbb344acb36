"""The command ``q4 conform``: it judges a backend, provider, dialect, reader or layer type, and certifies it."""

from __future__ import annotations

import contextlib
import json
import tempfile
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from q4_conformance.execution.isolated import run_target
from q4_conformance.execution.process import Limits
from q4_conformance.execution.query import Query
from q4_conformance.outcome import BAD
from q4_conformance.report.certificate import make_certificate
from q4_conformance.report.files import write_files
from q4_conformance.report.status import counted, line_of, title_of
from q4_conformance.report.terminal import STYLES, console_of, show_check, show_run
from q4_conformance.report.verify import installed_source, read_certificate, read_page
from q4core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from q4_conformance.outcome import CaseResult

_WHAT = "q4 conform"
_VERIFIED = ("standing", "sentence", "subject", "counts", "content_hash", "statement")
"""Parts of a certificate that ``--verify --json`` prints."""


def conform(  # noqa: PLR0913  # one argument per option
    name: str | None,
    *,
    profile: str | None,
    formats: list[str] | None,
    cases: list[str] | None,
    is_pairwise: bool,
    device: str,
    report: Path | None,
    jobs: int | None,
    limit: float,
    verify: Path | None,
    check: Path | None,
    as_json: bool,
) -> None:
    """Judge a backend by every case of its contract, in processes of its own, and certify what passes."""
    asked = [item for item in (name, verify) if item]
    if len(asked) != 1:
        raise ConfigError(_WHAT, name="arguments", rule="one of NAME and --verify FILE", hint="See q4 conform --help.")
    if not limit > 0:  # NaN, which is in any range of older versions of typer
        raise typer.BadParameter("a number of seconds", param_hint="--limit")
    if verify is not None:
        _verify(verify, as_json=as_json)
    else:
        query = Query(
            name=name or "",
            profile=profile,
            formats=tuple(formats or ()),
            device=device,
            only=tuple(cases or ()),
            is_pairwise=is_pairwise,
            jobs=jobs,
            limits=Limits(case_seconds=limit),
        )
        _judge(query, report, check, as_json=as_json)


def _judge(query: Query, folder: Path | None, page: Path | None, *, as_json: bool) -> None:
    committed = None if page is None else read_page(page)
    if folder is not None:
        _require_folder(folder)
    with _progress(query.name) as (announce, watch):
        run = run_target(query, announce=announce, watch=watch)
    words = query.command() + ([] if folder is None else ["--report", str(folder)])
    document = make_certificate(run, words)
    files = () if folder is None else write_files(folder, document)
    if as_json:
        typer.echo(json.dumps({"certificate": document, "files": [str(path) for path in files]}, indent=2))
    else:
        show_run(document, run, files)
    is_same = committed is None or committed.agrees(document)
    if page is not None and not as_json:
        show_check(page, next((path for path in files if path.suffix == ".md"), None), is_same=is_same)
    if document["standing"] == "failed" or not is_same:
        raise typer.Exit(1)


def _require_folder(folder: Path) -> None:
    """Make a folder and a file in it that goes at once, before minutes are spent on what could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        rule, hint = "a folder that can be made and written", f"The system says: {error.strerror}."
        raise ConfigError(_WHAT, name="--report", rule=rule, value=str(folder), hint=hint) from error


@contextlib.contextmanager
def _progress(label: str) -> Iterator[tuple[Callable[[int], None], Callable[[CaseResult], None]]]:
    """Show on stderr how far a run has come, where that is a terminal."""
    console = console_of(to_stderr=True)
    bad: list[str] = []
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[bad]}", style="red"),
        TextColumn("{task.fields[case]}", markup=False, style="dim"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(label, total=None, bad="", case="starting")

        def watch(result: CaseResult) -> None:
            if result.outcome in BAD:
                bad.append(result.case)
            bar.update(task, advance=1, case=result.case, bad=f"{len(bad)} bad" if bad else "")

        yield lambda total: bar.update(task, total=total), watch


def _verify(path: Path, *, as_json: bool) -> None:
    document = read_certificate(path)
    facts = {"file": str(path), "undamaged": True, "installed": installed_source(document)}
    facts |= {name: document[name] for name in _VERIFIED}
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = console_of()
    console.print(Text("✓ undamaged", style="bold green").append(f": {path}", style="default"))
    seal, meaning = line_of(document)
    console.print(Text.assemble((seal, STYLES[document["standing"]]), meaning))
    console.print(f"{title_of(document)} on {document['subject']['device']}: {counted(document)}")
    console.print(facts["installed"])
    console.print(Text(document["statement"], style="dim"))
