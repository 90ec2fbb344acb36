"""Reads a certificate, and refuses what is damaged, edited or of another make, saying what is wrong."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

from q4_conformance.certificate import SCHEMA, SCHEMA_VERSION, content_hash, standing_of, verdict_hash
from q4_conformance.environment import source_of
from q4_conformance.outcome import Outcome
from q4core import Q4Error

__all__ = ["CertificateError", "installed_source", "read_certificate", "schema"]

_MOST_BYTES = 64 << 20
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


class CertificateError(Q4Error, ValueError):
    """A file is no certificate, or no longer the one that was written; ``where`` names the file."""

    code = "certificate"


def schema() -> dict[str, Any]:
    """Return the published JSON Schema of certificates."""
    text = importlib.resources.files("q4_conformance").joinpath("certificate.schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def read_certificate(path: str | Path) -> dict[str, Any]:
    """Return the document in a file, after every check that needs nothing but the file.

    Raises:
        CertificateError: It can't be read, is no JSON, is of another schema, has another shape, or does not agree with
            its own hashes and counts.
    """
    where = str(path)

    def refuse(name: str, rule: str, value: object, hint: str | None = None) -> CertificateError:
        return CertificateError("certificate", name=name, rule=rule, value=value, where=where, hint=hint)

    document = _load(path, refuse)
    if not isinstance(document, dict):
        raise refuse("document", "a JSON object", type(document).__name__)
    if document.get("schema") != SCHEMA:
        raise refuse("schema", repr(SCHEMA), document.get("schema"), "It is no certificate of this kit.")
    if document.get("schema_version") != SCHEMA_VERSION:
        hint = "Use the version of q4-conformance that wrote it."
        raise refuse("schema_version", str(SCHEMA_VERSION), document.get("schema_version"), hint)
    problem = _mismatch(document, schema(), "document")
    if problem is not None:
        raise refuse(*problem, "The file was edited or damaged.")
    _check(document, refuse, "content_hash", content_hash(document))
    _check(document, refuse, "verdict_hash", verdict_hash(document))
    _check_counts(document, refuse)
    _check(document, refuse, "standing", standing_of(document))
    return document


def _load(path: str | Path, refuse: Any) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice")
        return found

    def constant(text: str) -> Any:
        raise ValueError(f"{text} is no JSON")

    try:
        if Path(path).stat().st_size > _MOST_BYTES:
            raise refuse("size", f"at most {_MOST_BYTES} bytes", Path(path).stat().st_size)
        text = Path(path).read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except OSError as error:
        raise refuse("file", "one that can be read", error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CertificateError):
            raise
        raise refuse("file", "whole JSON", str(error), "It was cut off or damaged.") from error


def _mismatch(value: Any, rule: dict[str, Any], name: str) -> tuple[str, str, object] | None:  # noqa: PLR0911  # one line per word of the schema
    """Return (name, rule, value) of the first thing that the schema does not allow; it knows the words used there."""
    if "const" in rule:
        return None if value == rule["const"] else (name, repr(rule["const"]), value)
    if "enum" in rule:
        return None if value in rule["enum"] else (name, f"one of {', '.join(map(str, rule['enum']))}", value)
    kinds = rule.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    allowed = tuple(kind for word in kinds for kind in _TYPES[word])
    if kinds and (not isinstance(value, allowed) or (isinstance(value, bool) and "boolean" not in kinds)):
        return name, f"of type {' or '.join(kinds)}", type(value).__name__
    if isinstance(value, dict):
        return _mismatch_in_object(value, rule, name)
    if isinstance(value, list) and "items" in rule:
        for number, item in enumerate(value):
            problem = _mismatch(item, rule["items"], f"{name}[{number}]")
            if problem is not None:
                return problem
    if isinstance(value, (int, float)) and value < rule.get("minimum", value):
        return name, f"at least {rule['minimum']}", value
    return None


def _mismatch_in_object(value: dict[str, Any], rule: dict[str, Any], name: str) -> tuple[str, str, object] | None:
    known = rule.get("properties", {})
    for key in rule.get("required", ()):
        if key not in value:
            return f"{name}.{key}", "there", "nothing"
    rest = rule.get("additionalProperties", True)
    for key, item in value.items():
        if key in known:
            problem = _mismatch(item, known[key], f"{name}.{key}")
        elif isinstance(rest, dict):
            problem = _mismatch(item, rest, f"{name}.{key}")
        else:
            problem = None if rest else (f"{name}.{key}", "absent", "a value")
        if problem is not None:
            return problem
    return None


def _check(document: dict[str, Any], refuse: Any, name: str, expected: str) -> None:
    if document[name] != expected:
        raise refuse(name, expected, document[name], "The file was edited after it was written.")


def _check_counts(document: dict[str, Any], refuse: Any) -> None:
    """Let whoever made hashes anew at least have made results that add up."""
    results = document["results"]
    counts = document["counts"]
    for outcome in Outcome:
        number = sum(item["outcome"] == outcome.value for item in results)
        if counts[outcome.value] != number:
            raise refuse(f"counts.{outcome.value}", str(number), counts[outcome.value], "The results do not add up.")
    names = [item["case"] for item in results]
    if len(set(names)) != len(names) or counts["cases"] != len(names):
        raise refuse("results", "one for each case", f"{len(names)} of {counts['cases']}", "The results do not add up.")


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
