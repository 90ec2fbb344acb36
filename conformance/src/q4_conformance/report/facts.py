"""What every page tells of a document in words: who was judged, how much was required, and how to repeat it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from q4_conformance.outcome import Outcome
from q4_conformance.report.tally import undeclared_cases

if TYPE_CHECKING:
    from collections.abc import Mapping

_CORE = "q4core"
_KINDS = {"dialect": "dialect ", "memory": "memory provider "}
"""What stands before a name: dialects are called as the libraries are whose files they read."""


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
    # The core announces no plugin, so that its own version stands among those of the run.
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
    told = [
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
    return [(label, text.strip()) for label, text in told if text and text.strip()]


def path_verdict(path: Mapping[str, Any]) -> str:
    """Return in words whether a path stands for a format."""
    if not path["passed"]:
        return "✗ does not stand"
    return "◐ passed in an interpreter" if path["standing"] == "interpreted" else "✓ passed"


def said_of(override: Mapping[str, Any]) -> str:
    """Return what an override does, and why."""
    does = ["is known to fail"] if override["is_known_failure"] else []
    does += [f"is judged with a bound × {override['bound']:g}"] if override["bound"] > 1.0 else []
    return f"{' and '.join(does)}: {override['reason']}"
