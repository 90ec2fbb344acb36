"""Readers of certificates, which refuse what is damaged, edited or of another make."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs

from q4_conformance.execution.environment import source_of
from q4_conformance.report.certificate import SCHEMA, SCHEMA_VERSION, content_hash, verdict_hash
from q4_conformance.report.tally import SIGNS, format_of, part_of
from q4core import CheckpointError, Q4Error
from q4core.plugin_api import open_regular

_MOST_BYTES = 32 << 20
"""A hundred times what a long run writes."""
_HASH = re.compile(r"^\| Hash of the verdicts \| (sha256:[0-9a-f]{64}) \|$", re.MULTILINE)
_COUNTS = re.compile(r"^\| cases \| passed \|.*\n\|[-|]+\n\| (\d+) \|", re.MULTILINE)
_FORMATS = re.compile(r"^\| case \| what must hold \| (.+) \|$", re.MULTILINE)
_ROW = re.compile(r"^\| (?:TC|EX)-\d\d/\S+ \|.*\|$", re.MULTILINE)


class CertificateError(Q4Error, ValueError, code="certificate"):
    """A file is no certificate, or no longer the one that was written; ``where`` names the file."""


def read_certificate(path: str | Path) -> dict[str, Any]:
    """Return the document in a file.

    Raises:
        CertificateError: It can't be read, is no JSON, is of another schema, or does not agree with its own hashes.
    """
    document = _load(path)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise _refusal(path, "schema", repr(SCHEMA), found, "It is no certificate of this kit.")
    if document.get("schema_version") != SCHEMA_VERSION:
        hint = "Use the version of q4-conformance that wrote it."
        raise _refusal(path, "schema_version", str(SCHEMA_VERSION), document.get("schema_version"), hint)
    for name, due in (("content_hash", content_hash), ("verdict_hash", verdict_hash)):
        try:
            expected = due(document)
        except (KeyError, TypeError, ValueError) as error:
            rule = "such that its hash can be computed"
            raise _refusal(path, "document", rule, str(error), "The file was edited or damaged.") from error
        if document.get(name) != expected:
            hint = "The file was edited after it was written."
            raise _refusal(path, name, expected, document.get(name), hint)
    return document


@attrs.frozen
class Page:
    """What a committed page of Markdown says.

    Args:
        verdict_hash: The hash of the verdicts.
        cases: How many cases ran.
        cells: (part, format) → how its cases ended: a sign and their number, such as ``"✓ 3"`` or ``"✓ 2/3"``.
    """

    verdict_hash: str
    cases: int
    cells: dict[tuple[str, str], str]

    def agrees(self, document: dict[str, Any]) -> bool:
        """Return whether each case of a document ended as it did for the page.

        A pairwise choice has another hash. Its cases must end as all of their cell did, so none of a cell whose cases
        ended in several ways agrees. With the cases that were left out they are as many.
        """
        left_out = document["run"]["left_out"]
        if not left_out:
            return bool(document["verdict_hash"] == self.verdict_hash)
        is_whole: bool = self.cases == document["counts"]["cases"] + left_out
        return is_whole and all(map(self._has, document["results"]))

    def _has(self, result: dict[str, Any]) -> bool:
        sign, _, number = self.cells.get((part_of(result["case"]), format_of(result["case"])), "").partition(" ")
        return bool(SIGNS[result["outcome"]] == sign and "/" not in number)


def read_page(path: str | Path) -> Page:
    """Return what a page of Markdown says; ``CertificateError`` where it has no hash of the verdicts or no counts."""
    text = _text(path)
    found, counts, head = _HASH.search(text), _COUNTS.search(text), _FORMATS.search(text)
    if found is None or counts is None or head is None:
        hint = "Name a certificate.md or report.md that `q4 conform NAME --report DIR` wrote."
        raise _refusal(path, "page", "one with the hash of the verdicts", "none", hint)
    formats = head[1].split(" | ")
    matrix = text[head.end() :].partition("\n\n")[0]
    rows = [row.strip("|").split("|") for row in _ROW.findall(matrix)]
    cells = {(row[0].strip(), name): cell.strip() for row in rows for name, cell in zip(formats, row[2:], strict=False)}
    return Page(found[1], int(counts[1]), cells)


def _refusal(path: str | Path, name: str, rule: str, value: object, hint: str) -> CertificateError:
    return CertificateError("certificate", name=name, rule=rule, value=value, where=str(path), hint=hint)


def _text(path: str | Path) -> str:
    try:
        with open_regular(Path(path)) as file:
            data = file.read(_MOST_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, ValueError, CheckpointError) as error:
        reason = error.value if isinstance(error, CheckpointError) else str(error)
        raise _refusal(path, "file", "one that can be read", reason, "Name the file that a run wrote.") from error
    if len(data) > _MOST_BYTES:
        raise _refusal(path, "size", f"at most {_MOST_BYTES} bytes", "more", "It is no certificate.")
    return text


def _load(path: str | Path) -> Any:
    text = _text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        document = Path(path).with_suffix(".json")
        hint = f"Check {document}." if document.is_file() else "Name the .json file that a run wrote."
        raise _refusal(path, "file", "whole JSON", str(error), hint) from error


def installed_source(document: dict[str, Any]) -> str:
    """Return a sentence that compares the plugin that was judged with the one that is installed here."""
    source = document["source"]
    if not source.get("package"):
        return "the certificate names no package"
    here = source_of(source["package"])
    if not here["files"]:
        return f"{source['package']} is not installed here"
    same = here["sha256"] == source["sha256"]
    verdict = "the same, byte for byte" if same else "NOT the one that was judged"
    return f"{source['package']} as installed here is {verdict}"
