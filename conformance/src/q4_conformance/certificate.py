"""The certificate: what a run showed, with all that one needs to believe it or to repeat it.

A document is a *certificate* where every case of the target was due and every declared one passed; of anything less it
is a *report*. ``verdict_hash`` covers who was judged and how each case ended, so that two runs can be compared;
``content_hash`` covers everything, so that an edited file shows.
"""

from __future__ import annotations

import hashlib
import json
import os
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from q4_conformance.outcome import Outcome
from q4_conformance.profiles import cases_for
from q4_conformance.tally import BAD, count, format_of, format_order, matrix_of, part_of, path_label, paths_of
from q4core import BUILTIN_FORMATS, EVERY_FORMAT, Standing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from q4_conformance.outcome import CaseResult
    from q4_conformance.query import Run

__all__ = ["SCHEMA", "SCHEMA_VERSION", "canonical", "content_hash", "make_certificate", "to_text", "verdict_hash"]

SCHEMA = "q4-conformance/certificate"
SCHEMA_VERSION = 1
STATEMENT = "Self-certified: whoever ran the kit made this document; its hash shows damage and edits, not authorship."
_LONGEST = 2000
_INTERPRETED = f"|{Standing.INTERPRETED.value}"
_PREFIX = "sha256:"
_TOLD = ("Q4_", "TRITON_", "OMP_", "MKL_", "CUDA_VISIBLE_DEVICES")
"""Beginnings of the environment variables that may change a result."""


def canonical(value: object) -> bytes:
    """Return the one spelling of a JSON value that is hashed: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _hash(value: object) -> str:
    return _PREFIX + hashlib.sha256(canonical(value)).hexdigest()


def content_hash(document: Mapping[str, Any]) -> str:
    """Return the hash over all of a document but the hash itself."""
    return _hash({key: item for key, item in document.items() if key != "content_hash"})


def verdict_hash(document: Mapping[str, Any]) -> str:
    """Return the hash over who was judged and how each case ended."""
    ends = sorted([item["case"], item["outcome"], item.get("fallback", False)] for item in document["results"])
    return _hash({"subject": document["subject"], "results": ends})


def standing_of(document: Mapping[str, Any]) -> str:
    """Return ``certified``, ``interpreted``, ``partial`` or ``failed``, from the document's own facts."""
    counts = document["counts"]
    bad = any(counts[outcome.value] for outcome in BAD)
    if bad or not counts["pass"] or document["missing"]:
        return "failed"
    if document["run"]["partial"] or counts[Outcome.NOT_TESTABLE.value]:
        return "partial"
    return "interpreted" if document["device"]["interpreted"] else "certified"


_SENTENCES = {
    "certified": "every required case passed on this device",
    "interpreted": "every required case passed in an interpreter on the CPU; this certifies no GPU",
    "partial": "what ran passed; cases were left out or can't be tested here, so this is no certificate",
    "failed": "not certified",
}


def _result(result: CaseResult) -> dict[str, Any]:
    told: dict[str, Any] = {"case": result.case, "outcome": result.outcome.value}
    if result.paths:
        told["paths"] = [path_label(path) for path in result.paths]
    if result.is_fallback:
        told["fallback"] = True
    if result.overrides:
        told["overrides"] = list(result.overrides)
    if result.outcome is not Outcome.PASS:
        told["message"] = result.message[:_LONGEST]
    if result.reproducer:
        told["reproducer"] = result.reproducer[:_LONGEST]
    return told


def _formats(results: Sequence[CaseResult]) -> list[dict[str, Any]]:
    groups: dict[str, list[CaseResult]] = {}
    for result in results:
        groups.setdefault(format_of(result.case), []).append(result)
    rows = []
    for name in sorted(groups, key=format_order):
        counts = count(groups[name])
        passed = counts["pass"] > 0 and not any(counts[outcome.value] for outcome in BAD)
        rows.append({"format": name, "passed": passed} | counts)
    return rows


def _not_tested(run: Run) -> list[dict[str, Any]]:
    """Return what a reader might take for tested: formats, paths and cases, each with the reason."""
    rows: list[dict[str, Any]] = []
    if run.target.profile == "kernel":
        declared = set(run.manifest.get("capabilities", {}).get("formats", ()))
        everything = EVERY_FORMAT in declared or not declared
        for name in BUILTIN_FORMATS:
            if name not in run.target.formats:
                asked = everything or name in declared
                rows.append({"what": f"format {name}", "why": "not asked for" if asked else "not declared", "cases": 0})
    ran = {(format_of(result.case), path_label(path)) for result in run.report.results for path in result.paths}
    for item in run.manifest.get("offered", ()):
        label = f"{item['path']}/{item['precision']}"
        if item["format"] in run.target.formats and (item["format"], label) not in ran:
            text = f"path {label} of {item['format']}"
            rows.append({"what": text, "why": "offered; no case that ran came to it", "cases": 0})
    if run.query.only:
        text = f"cases whose ids do not begin with {', '.join(run.query.only)}"
        rows.append(
            {"what": text, "why": "not asked for", "cases": len(cases_for(run.target)) - len(run.report.expected)}
        )
    rows += _silent(run.report.results)
    if run.report.missing:
        rows.append({"what": "cases without a result", "why": "the time was spent", "cases": len(run.report.missing)})
    return rows


def _silent(results: Iterable[CaseResult]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str, str], int] = {}
    for result in results:
        if result.outcome in {Outcome.NOT_DECLARED, Outcome.NOT_TESTABLE}:
            key = (part_of(result.case), result.outcome.value, result.message[:_LONGEST])
            groups[key] = groups.get(key, 0) + 1
    return [
        {"what": part, "why": f"{outcome.replace('_', ' ')}: {why}", "cases": number}
        for (part, outcome, why), number in sorted(groups.items())
    ]


def _is_interpreted(run: Run) -> bool:
    """Return whether any path that ran, or that is offered, is an interpreter's by its own account."""
    ran = any(path.endswith(_INTERPRETED) for result in run.report.results for path in result.paths)
    return ran or any(f"|{item['standing']}" == _INTERPRETED for item in run.manifest.get("offered", ()))


def make_certificate(run: Run, command: Sequence[str], *, now: datetime | None = None) -> dict[str, Any]:
    """Return the document of a run, ready for JSON.

    Args:
        run: What ``run_target`` gave.
        command: The words by which the run can be repeated.
        now: When it was made; now unless told.
    """
    results = run.report.results
    overrides = list(run.manifest.get("overrides", ()))
    device = {"device": run.target.device, **run.facts.get("device", {}), "interpreted": _is_interpreted(run)}
    standing_facts: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "statement": STATEMENT,
        "subject": {
            "name": run.target.name,
            "profile": run.target.profile,
            "formats": list(run.target.formats),
            "device": run.target.device,
        },
        "versions": dict(run.facts.get("versions", {})),
        "source": dict(run.manifest.get("source", {})),
        "device": device,
        "run": {
            "command": list(command),
            "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_TOLD)},
            "partial": run.query.is_partial,
            "only": list(run.query.only),
            "processes": run.query.processes,
            "case_seconds": run.query.limits.case_seconds,
            "memory_bytes": run.query.limits.memory_bytes,
        },
        "manifest": {key: item for key, item in run.manifest.items() if key not in {"source", "overrides"}},
        "counts": count(results),
        "missing": list(run.report.missing),
        "formats": _formats(results),
        "paths": paths_of(results),
        "matrix": matrix_of(results),
        "parts": {part_of(case.id): case.text for case in cases_for(run.target)},
        "overrides": [item for item in overrides if not item["is_known_failure"]],
        "known_failures": [item for item in overrides if item["is_known_failure"]],
        "not_tested": _not_tested(run),
        "broken_plugins": dict(run.facts.get("broken_plugins", {})),
        "results": [_result(result) for result in results],
        "volatile": {
            "date": (now or datetime.now(timezone.utc)).isoformat(timespec="seconds"),
            "seconds": round(run.seconds, 1),
            "case_seconds": round(sum(result.seconds for result in results), 1),
        },
    }
    standing = standing_of(standing_facts)
    kind = "certificate" if standing in {"certified", "interpreted"} else "report"
    document = {**standing_facts, "kind": kind, "standing": standing, "sentence": _SENTENCES[standing]}
    document["verdict_hash"] = verdict_hash(document)
    document["content_hash"] = content_hash(document)
    return document


def to_text(document: Mapping[str, Any]) -> str:
    """Return a document as JSON, one line for each result, so that two files can be compared line by line."""
    lines = []
    for key, item in document.items():
        if isinstance(item, list) and item and isinstance(item[0], dict):
            inner = ",\n".join("  " + json.dumps(one, ensure_ascii=False) for one in item)
            lines.append(f" {json.dumps(key)}: [\n{inner}\n ]")
        else:
            text = json.dumps(item, indent=1, ensure_ascii=False).replace("\n", "\n ")
            lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
