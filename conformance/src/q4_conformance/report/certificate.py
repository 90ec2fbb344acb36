"""The certificate: the results of a run, with all that is needed to check or to repeat it.

A document is a *certificate* where every case of the target was due and every declared one passed; of anything less it
is a *report*. ``verdict_hash`` covers how each case ended, so that two runs can be compared;
``content_hash`` covers everything, so that an edited file shows.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import attrs

from q4_conformance.contract.case import part_order
from q4_conformance.outcome import Outcome
from q4_conformance.report.status import kind_of, sentence_of, standing_of
from q4_conformance.report.tally import count, format_of, formats_of, part_of, path_label, paths_of, undeclared_cases
from q4_conformance.subjects.profiles import cases_for
from q4core import BUILTIN_FORMATS, EVERY_FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from q4_conformance.execution.query import Run
    from q4_conformance.outcome import CaseResult

SCHEMA = "q4-conformance/certificate"
SCHEMA_VERSION = 1
STATEMENT = "Self-certified: whoever ran the kit made this document; its hash shows damage and edits, not authorship."
_LONGEST = 2000
_NOT_DECLARED = "not declared"
_VARIABLES = ("Q4_", "TRITON_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES")
"""Beginnings of the environment variables that may change a result."""


def _hash(value: object) -> str:
    """Return the hash of the one spelling of a JSON value: sorted keys, no spaces, ASCII."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def content_hash(document: Mapping[str, Any]) -> str:
    """Return the hash over all of a document but the hash itself."""
    return _hash({key: item for key, item in document.items() if key != "content_hash"})


def verdict_hash(document: Mapping[str, Any]) -> str:
    """Return the hash over (case, outcome) of every result: equal hashes are equal verdicts."""
    return _hash(sorted([item["case"], item["outcome"]] for item in document["results"]))


def _spelled(value: Any) -> Any:
    """Return a value with what is no UTF-8 in its texts spelled out, because no file can hold it."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_spelled(key): _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, list) else value


def _result(result: CaseResult) -> dict[str, Any]:
    row: dict[str, Any] = {"case": result.case, "outcome": result.outcome.value}
    if result.paths:
        row["paths"] = [path_label(path) for path in result.paths]
    if result.is_fallback:
        row["fallback"] = True
    if result.outcome is not Outcome.PASS:
        row["message"] = result.message[:_LONGEST]
    if result.reproducer:
        row["reproducer"] = result.reproducer[:_LONGEST]
    return row


def not_tested(document: Mapping[str, Any], due: int) -> list[dict[str, Any]]:
    """Return what a reader might take for tested, each with the reason; ``due`` cases are in the whole table."""
    rows: list[dict[str, Any]] = []
    subject, manifest, results = document["subject"], document["manifest"], document["results"]
    if subject["profile"] == "dialect" and manifest.get("formats"):
        left_out = _formats_left(subject["formats"], set(manifest["formats"]))
        rows += [row for row in left_out if row["why"] != _NOT_DECLARED]  # no gap: most dialects hold one format
    if subject["profile"] == "kernel":
        capabilities = manifest.get("capabilities", {})
        declared = set(capabilities.get("formats", ()))
        rows += _formats_left(subject["formats"], declared, is_known="formats" in capabilities)
        here = subject["device"].partition(":")[0]
        for name in sorted(set(capabilities.get("devices", ())) - {here}):
            rows.append(_row(f"device {name}", f"declared; --device {name} judges it, on a machine that has it"))
    ran = {(format_of(result["case"]), path) for result in results for path in result.get("paths", ())}
    for item in manifest.get("offered", ()):
        label = f"{item['path']}/{item['precision']}"
        if item["format"] in subject["formats"] and (item["format"], label) not in ran:
            rows.append(_row(f"path {label} of {item['format']}", "offered; no case that ran came to it"))
    rows += _unmet(results)
    if document["run"]["only"]:
        text = f"cases whose ids do not begin with {', '.join(document['run']['only'])}"
        left = due - len(results) - len(document["missing"]) - undeclared_cases(document)
        rows.append(_row(text, "not asked for", left - document["run"]["left_out"]))
    if document["run"]["left_out"]:
        rows.append(_row("further pairs of values", "left out by the pairwise choice", document["run"]["left_out"]))
    rows += [_row(row["what"], _NOT_DECLARED, row["cases"]) for row in document["not_declared"]]
    rows += _silent(results)
    if document["missing"]:
        rows.append(_row("cases without a result", "the run ended before them", len(document["missing"])))
    return rows


def _unmet(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the paths that no case of some part came to, though cases of it ran on another path of that precision."""
    met: dict[tuple[str, str], set[str]] = {}
    for result in results:
        for path in result.get("paths", ()):
            met.setdefault((format_of(result["case"]), path), set()).add(part_of(result["case"]))
    rows = []
    for (kind, path), parts in sorted(met.items()):
        precision = path.rpartition("/")[2]
        alike = (both for (of, other), both in met.items() if of == kind and other.rpartition("/")[2] == precision)
        left = sorted(set().union(*alike) - parts, key=part_order)
        if left:
            rows.append(_row(f"path {path} of {kind}", f"no case of {', '.join(left)} came to it"))
    return rows


def _formats_left(judged: Sequence[str], declared: set[str], *, is_known: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the formats that a subject was not judged on, whether or not it declares them."""
    everything = EVERY_FORMAT in declared or not is_known
    for name in BUILTIN_FORMATS:
        if name not in judged:
            is_asked = everything or name in declared
            yield _row(f"format {name}", "not asked for" if is_asked else _NOT_DECLARED)
    for name in sorted(declared - BUILTIN_FORMATS.keys() - {EVERY_FORMAT}):
        yield _row(f"format {name}", "declared; this kit has no cases for it")
    if EVERY_FORMAT in declared:
        yield _row("formats of plugins", "declared; this kit has no cases for them")


def _silent(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    groups = collections.Counter(
        (part_of(result["case"]), result["outcome"], result.get("message", ""))
        for result in results
        if result["outcome"] in {Outcome.NOT_DECLARED.value, Outcome.NOT_TESTABLE.value}
    )
    return [
        _row(part, f"{outcome.replace('_', ' ')}: {why}", number)
        for (part, outcome, why), number in sorted(groups.items())
    ]


def _row(what: str, why: str, cases: int = 0) -> dict[str, Any]:
    return {"what": what, "why": why, "cases": cases}


def _path_facts(results: Iterable[CaseResult]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return kind and standing of every (format, path) that ran; ``interpreted`` where it was so once."""
    kinds: dict[tuple[str, str], set[str]] = {}
    standings: dict[tuple[str, str], set[str]] = {}
    for result in results:
        for path in result.paths:
            key = (format_of(result.case), _spelled(path_label(path)))
            _, kind, _, standing = path.rsplit("|", 3)
            kinds.setdefault(key, set()).add(kind)
            standings.setdefault(key, set()).add(standing)
    return {key: (", ".join(sorted(kinds[key])), min(standings[key])) for key in kinds}


def make_certificate(run: Run, command: Sequence[str]) -> dict[str, Any]:
    """Return the document of a run, ready for JSON.

    Args:
        run: What ``run_target`` gave.
        command: The words by which the run can be repeated.
    """
    cases = cases_for(run.target)
    results, missing = _spelled([_result(result) for result in run.report.results]), list(run.report.missing)
    document: dict[str, Any] = _spelled(
        {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "statement": STATEMENT,
            "subject": {**attrs.asdict(run.target), "formats": list(run.target.formats)},
            "versions": dict(run.facts.get("versions", {})),
            "source": dict(run.manifest.get("source", {})),
            "device": {"device": run.target.device, **run.facts.get("device", {})},
            "run": {
                "command": list(command),
                "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)},
                "partial": run.query.is_partial or run.left_out > 0,
                "left_out": run.left_out,
                "only": list(run.query.only),
                "processes": run.query.processes,
                "case_seconds": run.query.limits.case_seconds,
                "memory_bytes": run.query.limits.memory_bytes,
            },
            "manifest": {key: item for key, item in run.manifest.items() if key != "source"},
            "counts": count(results),
            "missing": missing,
            "not_declared": [{"what": what, "cases": number} for what, number in run.report.not_declared.items()],
            "formats": formats_of(results, missing),
            "paths": paths_of(results, missing, _path_facts(run.report.results)),
            "parts": {part_of(case.id): case.text for case in cases},
            "broken_plugins": dict(run.facts.get("broken_plugins", {})),
            "results": results,
            "volatile": {
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "seconds": round(run.seconds, 1),
                "case_seconds": round(sum(result.seconds for result in run.report.results), 1),
            },
        }
    )
    document["not_tested"] = not_tested(document, len(cases))
    paths = (*document["paths"], *document["manifest"].get("offered", ()))
    document["device"]["interpreted"] = any(path.get("standing") == "interpreted" for path in paths)
    standing = standing_of(document)
    document |= {"standing": standing, "kind": kind_of(standing), "sentence": sentence_of(document, standing)}
    document["verdict_hash"] = verdict_hash(document)
    document["content_hash"] = content_hash(document)
    return document


def to_text(document: Mapping[str, Any]) -> str:
    """Return a document as JSON."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
