"""What a document as a whole stands for: its standing, its sentence, and the seal that every form of it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from q4_conformance.outcome import BAD, Outcome
from q4_conformance.subjects.manifest import declared_in, undeclared
from q4core import BUILTIN_FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping

ORDER = ("failed", "partial", "interpreted", "certified")
"""Every standing, the least first."""
_SENTENCES = {
    "certified": "every required case passed on this device",
    "interpreted": "every required case passed in an interpreter on the CPU; this certifies no GPU",
    "partial": "what ran passed; cases were left out or can't be tested here, so this is no certificate",
    "failed": "not all that is required passed",
}


@attrs.frozen
class Seal:
    """Sign and word of a standing, what it is not or who says so, and the standing in whose colours it is shown."""

    sign: str
    word: str
    note: str
    tone: str


SEALS = {
    "certified": Seal("✓", "Certified", "self-certified", "certified"),
    "interpreted": Seal("◐", "Interpreted", "certifies no GPU", "interpreted"),
    "partial": Seal("◔", "Partial report", "no certificate", "partial"),
    "failed": Seal("✗", "Not certified", "report of failures", "failed"),
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


def widened_of(document: Mapping[str, Any]) -> tuple[int, float]:
    """Return how many cases passed by a bound that the author widened, and the widest of these bounds."""
    declared = (*document["overrides"], *document["known_failures"])  # a known failure may widen a bound as well
    wide = [item for item in declared if item["bound"] > 1.0]
    bounds = [
        max(here)
        for result in document["results"]
        if result["outcome"] == Outcome.PASS.value
        and (here := [item["bound"] for item in wide if result["case"].startswith(item["case"])])
    ]
    return len(bounds), max(bounds, default=1.0)


def _by_overrides(document: Mapping[str, Any]) -> str:
    """Return how far a document stands on overrides, or nothing."""
    number, bound = widened_of(document)
    return f"{number} {'case' if number == 1 else 'cases'} by bounds widened up to × {bound:g}" if number else ""


def sentence_of(document: Mapping[str, Any], standing: str) -> str:
    """Return what a document of a standing says in a sentence, with what it owes to overrides."""
    told = "; ".join(filter(None, [_by_overrides(document), _nothing_shown(document)]))
    return f"{_SENTENCES[standing]}; {told}" if told else _SENTENCES[standing]


def _nothing_shown(document: Mapping[str, Any]) -> str:
    """Return why nothing was shown, though no case ended badly, or nothing."""
    counts = document["counts"]
    if any(counts[outcome.value] for outcome in BAD):
        return ""
    if counts["pass"]:
        idle = [] if document["run"]["partial"] else _idle_formats(document)
        return f"no case passed of what is declared: {', '.join(idle)}" if idle else ""
    if counts["cases"]:
        why = "; ".join(undeclared(document["subject"], document["manifest"]))
        return f"no case passed: {why}" if why else "no case passed"
    if document["not_declared"]:
        return f"no case passed: not declared: {', '.join(row['what'] for row in document['not_declared'])}"
    declared = declared_in(document["manifest"])
    if not declared:
        return "nothing that is declared has a case"
    there = ", ".join(BUILTIN_FORMATS)
    return f"no format that is declared ({', '.join(declared)}) has a case; there are cases of {there}"


def seal_of(document: Mapping[str, Any]) -> Seal:
    """Return what a document shows; one that stands on overrides never looks like one that does not."""
    seal = SEALS[document["standing"]]
    told = _by_overrides(document)
    if not told or document["kind"] != "certificate":
        return seal
    return attrs.evolve(seal, word=f"{seal.word} with overrides", note=f"{seal.note}, {told}", tone="interpreted")


def line_of(document: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is printed of a document, in two parts: its seal, and what the seal means."""
    seal = seal_of(document)
    return f"{seal.sign} {seal.word}", f" ({seal.note}): {document['sentence']}"
