"""The command line of ``q4 conform``: arguments, options and help; nothing here needs torch."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import Annotated

import typer

__all__ = ["conform"]

PROFILES = ("kernel", "memory", "dialect", "file", "layer", "program", "core")
_MOST_SECONDS = 86_400.0


def conform(  # noqa: PLR0913  # one argument per option
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Installed backend, provider, dialect, reader, layer type; module:function; or q4core."
        ),
    ] = None,
    *,
    profile: Annotated[
        str | None,
        typer.Option("--profile", help=f"{', '.join(PROFILES)}. Defaults to what NAME is.", metavar="PROFILE"),
    ] = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", metavar="FORMAT", help="Only this format; may be repeated.")
    ] = None,
    cases: Annotated[
        list[str] | None,
        typer.Option(
            "--case", metavar="ID", help="Only cases whose ids begin so, such as TC-09/bias; may be repeated."
        ),
    ] = None,
    is_pairwise: Annotated[
        bool,
        typer.Option("--pairwise", help="Only enough cases to have every pair of dtype, precision, scales and so on."),
    ] = False,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="Where to compute: cpu, cuda or cuda:<index>.")
    ] = "cpu",
    report: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="Write JSON and Markdown there.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", metavar="N", min=1, help="Processes at once; 2 where there are two cores.")
    ] = None,
    limit: Annotated[
        float,
        typer.Option(
            "--limit",
            metavar="S",
            min=0.1,
            max=_MOST_SECONDS,
            help="Seconds that one case may take; loading a plugin half as much again, 10 at least.",
        ),
    ] = 60.0,
    verify: Annotated[
        Path | None, typer.Option("--verify", metavar="FILE", help="Check a certificate instead.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="FILE", help="Fail where a case ends otherwise than in this certificate.md."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead.")] = False,
) -> None:
    """Judge a backend by every case of its contract, in processes of its own, and certify what passes.

    Exits with 0 when all that was due passed, 1 when something failed, 2 for bad usage or a damaged certificate.
    --check exits with 1 where a case ended otherwise. A run of all cases makes a certificate; --case, --format and
    --pairwise make a report. For example:

        q4 conform cpu-native --report certificate
    """
    arguments = locals()
    from q4_conformance.command.conform import conform as run  # noqa: PLC0415  # loads torch

    run(**arguments)
