"""The standing of a document, in words: its seal, who was judged, how to repeat it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import attrs

from q4_conformance.outcome import BAD, Outcome
from q4_conformance.report.tally import undeclared_cases
from q4_conformance.subjects.manifest import declared_in
from q4core import BUILTIN_FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping

_SENTENCES = {
    "certified": "every required case passed on this device",
    "interpreted": "every required case passed in an interpreter on the CPU; this certifies no GPU",
    "partial": "what ran passed; cases were left out or can't be tested here, so this is no certificate",
    "failed": "not all that is required passed",
}


@attrs.frozen
class Seal:
    """Sign and word of a standing, and what it is not or who says so."""

    sign: str
    word: str
    note: str


SEALS = {
    "certified": Seal("✓", "Certified", "self-certified"),
    "interpreted": Seal("◐", "Interpreted", "certifies no GPU"),
    "partial": Seal("◔", "Partial report", "no certificate"),
    "failed": Seal("✗", "Not certified", "report of failures"),
}


def standing_of(document: Mapping[str, Any]) -> str:
    """Return ``certified``, ``interpreted``, ``partial`` or ``failed``, from the document's own facts."""
    counts = document["counts"]
    bad = any(counts[outcome.value] for outcome in BAD)
    if bad or not counts["pass"] or document["missing"]:
        return "failed"
    if not document["run"]["partial"] and _idle_formats(document):
        return "failed"
    if document["run"]["partial"] or counts[Outcome.NOT_TESTABLE.value]:
        return "partial"
    return "interpreted" if document["device"]["interpreted"] else "certified"


def _idle_formats(document: Mapping[str, Any]) -> list[str]:
    """Return the formats that the subject is for and no case passed or was left to other hardware: a mere claim."""
    live = (Outcome.PASS.value, Outcome.NOT_TESTABLE.value)
    seen = {row["format"]: any(row[name] for name in live) for row in document["formats"]}
    return [name for name in document["subject"]["formats"] if not seen.get(name, False)]


def kind_of(standing: str) -> str:
    """Return ``certificate``, or ``report`` for what is less."""
    return "certificate" if standing in {"certified", "interpreted"} else "report"


def sentence_of(document: Mapping[str, Any], standing: str) -> str:
    """Return what a document of a standing says in a sentence."""
    reason = _nothing_shown(document)
    return f"{_SENTENCES[standing]}; {reason}" if reason else _SENTENCES[standing]


def _nothing_shown(document: Mapping[str, Any]) -> str:
    """Return why nothing was shown, though no case ended badly, or nothing."""
    counts = document["counts"]
    if any(counts[outcome.value] for outcome in BAD):
        return ""
    if counts["pass"]:
        idle = [] if document["run"]["partial"] else _idle_formats(document)
        return f"no case passed of what is declared: {', '.join(idle)}" if idle else ""
    if counts["cases"]:
        return "no case passed"
    if document["not_declared"]:
        return f"no case passed: not declared: {', '.join(row['what'] for row in document['not_declared'])}"
    declared = declared_in(document["manifest"])
    if not declared:
        return "nothing that is declared has a case"
    there = ", ".join(BUILTIN_FORMATS)
    return f"no format that is declared ({', '.join(declared)}) has a case; there are cases of {there}"


def line_of(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is printed of a document, in two parts: its seal, and what the seal means."""
    seal = SEALS[document["standing"]]
    return f"{seal.sign} {seal.word}", f" ({seal.note}): {document['sentence']}"


_CORE = "q4core"
_KINDS = {"dialect": "dialect ", "memory": "memory provider ", "layer": "layer type ", "file": "reader "}
"""What comes before a name: dialects are called as the libraries are whose files they read."""


def subject_of(document: Mapping[str, Any]) -> str:
    """Return who was judged: what it is, and its name."""
    subject = document["subject"]
    return f"{_KINDS.get(subject['profile'], '')}{subject['name']}"


def maker_of(document: Mapping[str, Any]) -> str:
    """Return the distribution and version of who was judged, else its package; nothing where neither is known."""
    source = document["source"]
    name = source.get("distribution") or source.get("package")
    if not name:
        return ""
    # The core announces no plugin, so that its own version is among those of the run.
    version = source.get("version") or (document["versions"].get(_CORE) if name == _CORE else None)
    return f"{name} {version}" if version else f"{name}, of no version"


def title_of(document: Mapping[str, Any]) -> str:
    """Return who was judged, and of which distribution and version it is."""
    subject, maker = subject_of(document), maker_of(document)
    if maker.partition(" ")[0] == subject:
        return maker
    return f"{subject} of {maker}" if maker else subject


def not_meant(document: Mapping[str, Any]) -> str:
    """Return what a certificate of a dialect is not about; nothing for other subjects."""
    if document["subject"]["profile"] != "dialect":
        return ""
    maker = document["source"].get("distribution") or document["source"].get("package") or "this package"
    return f"Judged is how {maker} reads and writes this layout, and no other software of that name."


def required_of(document: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many cases passed, and how many were required: all but those of what is not declared."""
    counts = document["counts"]
    due = counts["cases"] + len(document["missing"]) - counts[Outcome.NOT_DECLARED.value]
    return counts[Outcome.PASS.value], due


def counted(document: Mapping[str, Any]) -> str:
    """Return how many of the required cases passed, and what the others are about."""
    passed, required = required_of(document)
    text = f"{passed:,} of {required:,} required {'case' if required == 1 else 'cases'} passed"
    text += " of those asked for" if document["run"]["partial"] else ""
    text = text if required else "no case was required"
    rest = document["counts"][Outcome.NOT_DECLARED.value] + undeclared_cases(document)
    if not rest:
        return text
    what = "1 other tests" if rest == 1 else f"{rest:,} others test"
    return f"{text}; {what} what {document['subject']['name']} does not claim, so that nothing is required there"


def _assignments(document: Mapping[str, Any]) -> str:
    set_there = document["run"].get("environment", {})
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(set_there.items()))


def command_line(document: Mapping[str, Any]) -> str:
    """Return the line that repeats a run, with the variables that were set and may matter."""
    return f"{_assignments(document)} {shlex.join(document['run']['command'])}".strip()


def facts_of(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a reader wants to know of plugin, machine and run, as (label, text)."""
    device, source, versions = document["device"], document["source"], document["versions"]
    name = device.get("gpu") or device.get("processor", "unknown")
    facts = [
        ("Device", f"{device['device']}: {name}" + (" (interpreter)" if device["interpreted"] else "")),
        ("Compute capability", device.get("compute_capability")),
        ("Driver", device.get("driver")),
        ("CPU features", " ".join(device.get("cpu_features", ()))),
        ("System", f"{device.get('system', '')} {device.get('machine', '')}, {device.get('cores', '?')} cores"),
        ("Plugin", maker_of(document) or "unknown"),
        ("Built with", ", ".join(f"{item} {version}" for item, version in source.get("with", {}).items())),
        ("Source hash", f"sha256:{source.get('sha256', '')} over {source.get('files', 0)} files"),
        ("Versions", ", ".join(f"{item} {version}" for item, version in versions.items() if version)),
        ("Command", command_line(document)),
        ("Variables that were set", "" if _assignments(document) else "none that may change a result"),
        ("Made", f"{document['volatile']['date']}, in {document['volatile']['seconds']:.0f} s"),
        ("Hash of the verdicts", document["verdict_hash"]),
        ("Hash of the content", document["content_hash"]),
    ]
    return [(label, text.strip()) for label, text in facts if text and text.strip()]


def path_verdict(path: Mapping[str, Any]) -> str:
    """Return in words whether a path stands for a format."""
    if not path["passed"]:
        return "✗ does not stand"
    return "◐ passed in an interpreter" if path["standing"] == "interpreted" else "✓ passed"
