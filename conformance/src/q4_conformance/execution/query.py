"""The query of a run, and its result."""

from __future__ import annotations

import math
import os
import shlex
from typing import TYPE_CHECKING, Any

import attrs

from q4_conformance.execution.process import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_conformance.outcome import Report
    from q4_conformance.subjects.profiles import ConformanceTarget


@attrs.frozen(kw_only=True)
class Query:
    """Who is to be judged, on what, and how.

    Args:
        name: As ``ConformanceTarget.name``.
        profile: As ``ConformanceTarget.profile``. Defaults to the first that fits.
        formats: Formats to judge it on. Defaults to all that it declares.
        device: Where to compute.
        only: Texts with which the ids to run start; none runs all.
        is_pairwise: Whether to run the pairwise choice of the cases instead of all.
        jobs: Processes at once. Defaults to as many as there are cores, and two at most.
        limits: What one process may take.
        budget_seconds: After which the run ends, within a case as well; the report then says that results are missing.
    """

    name: str
    profile: str | None = None
    formats: tuple[str, ...] = ()
    device: str = "cpu"
    only: tuple[str, ...] = ()
    is_pairwise: bool = False
    jobs: int | None = None
    limits: Limits = attrs.field(factory=Limits)
    budget_seconds: float = math.inf

    @property
    def is_partial(self) -> bool:
        """Whether the query itself leaves out cases."""
        return bool(self.only or self.formats or self.budget_seconds < math.inf)

    @property
    def processes(self) -> int:
        """How many processes at once."""
        return max(1, min(2, os.cpu_count() or 1) if self.jobs is None else self.jobs)

    def words(self) -> list[str]:
        """Return the beginning of the command that asks the same subject, in the same way, for cases."""
        words = ["q4", "conform", self.name]
        words += [] if self.profile is None else ["--profile", self.profile]
        words += [] if self.device == "cpu" else ["--device", self.device]
        changed = self.limits.case_seconds != Limits().case_seconds
        return [*words, "--limit", f"{self.limits.case_seconds:g}"] if changed else words

    def command_of(self, case: str) -> str:
        """Return the command that runs one case."""
        return shlex.join([*self.words(), "--case", case])

    def command(self) -> list[str]:
        """Return the words that ask for the same run."""
        words = self.words()
        words += [word for item in self.formats for word in ("--format", item)]
        words += [word for item in self.only for word in ("--case", item)]
        words += ["--pairwise"] if self.is_pairwise else []
        return words if self.jobs is None else [*words, "--jobs", str(self.jobs)]


@attrs.frozen(kw_only=True)
class Run:
    """What a query gave.

    Args:
        query: What was asked.
        target: Who was judged.
        report: The results.
        facts: What the first process reported of the machine and of who was judged.
        manifest: What is declared.
        left_out: How many cases the pairwise choice left out.
        seconds: How long it took.
    """

    query: Query
    target: ConformanceTarget
    report: Report
    facts: Mapping[str, Any]
    manifest: Mapping[str, Any]
    left_out: int = 0
    seconds: float = 0.0
