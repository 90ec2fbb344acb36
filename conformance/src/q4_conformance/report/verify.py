"""Reads a certificate, and refuses what is damaged, edited or of another make, saying what is wrong."""

from __future__ import annotations

import importlib.resources
import json
import math
from pathlib import Path
from typing import Any

from q4_conformance.contract.cases import select_cases
from q4_conformance.execution.environment import source_of, versions
from q4_conformance.execution.limited_read import NotRegularError, TooLargeError, read_bounded
from q4_conformance.report.agreement import disagreements
from q4_conformance.report.certificate import (
    SCHEMA,
    SCHEMA_VERSION,
    STATEMENT,
    canonical,
    conclusions,
    content_hash,
    not_tested,
    verdict_hash,
)
from q4_conformance.report.tally import part_of
from q4_conformance.subjects.profiles import ConformanceTarget, cases_for
from q4core import BUILTIN_FORMATS, EVERY_FORMAT, Q4Error

__all__ = ["CertificateError", "check_census", "installed_source", "read_certificate", "schema"]

_MOST_BYTES = 32 << 20
"""A hundred times what a long run writes."""
_DOCUMENTS = ("certificate.json", "report.json")
_PAGES = {".html", ".md", ".xml"}
"""What a run writes beside its document."""
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
    text = importlib.resources.files(__package__).joinpath("certificate.schema.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def read_certificate(path: str | Path) -> dict[str, Any]:
    """Return the document in a file, after every check that needs nothing but the file.

    Raises:
        CertificateError: It can't be read, is no JSON, is of another schema, has another shape, does not agree with its
            own hashes, says something that does not follow from the results in it, or contradicts itself.
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
    try:
        _check_results(document, refuse)
        _check_conclusions(document, refuse)
        for found in disagreements(document):
            raise refuse(*found, "It was edited.")
    except CertificateError:
        raise
    except (AttributeError, IndexError, KeyError, LookupError, RuntimeError, TypeError, ValueError, Q4Error) as error:
        rule = "such that its conclusions can be drawn anew"
        raise refuse("document", rule, f"{type(error).__name__}: {error}", "The file was edited or damaged.") from error
    return document


def _load(path: str | Path, refuse: Any) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands twice")
        return found

    def constant(text: str) -> Any:
        raise ValueError(f"{text} is no JSON")

    def number(text: str) -> float:
        if not math.isfinite(float(text)):
            raise ValueError(f"{text} is too large for a number")
        return float(text)

    try:
        data = read_bounded(path, _MOST_BYTES)
    except NotRegularError as error:
        raise refuse("file", "a regular file", str(error), _of_folder(Path(path))) from error
    except TooLargeError as error:
        raise refuse("size", f"at most {_MOST_BYTES} bytes", str(error), "It is no certificate.") from error
    except (OSError, ValueError) as error:
        raise refuse("file", "one that can be read", getattr(error, "strerror", None) or str(error)) from error
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant, parse_float=number)
    except (ValueError, RecursionError) as error:
        page = Path(path).suffix in _PAGES
        rule, hint = (
            ("the JSON document", _beside(Path(path))) if page else ("whole JSON", "It was cut off or damaged.")
        )
        raise refuse("file", rule, f"a {Path(path).suffix} file" if page else str(error), hint) from error


def _of_folder(path: Path) -> str:
    """Return what to do where a folder, or another thing that is no file, was named."""
    if not path.is_dir():
        return "Save it to a file first."
    there = [str(path / name) for name in _DOCUMENTS if (path / name).is_file()]
    return f"Check {' or '.join(there)}." if there else "Name the JSON file that a run wrote."


def _beside(path: Path) -> str:
    """Return what to check in place of a page."""
    document = path.with_suffix(".json")
    return f"Check {document}." if document.is_file() else "Check the .json file that was written with it."


def _mismatch(value: Any, rule: dict[str, Any], name: str) -> tuple[str, str, object] | None:  # noqa: PLR0911  # one line per word of the schema
    """Return (name, rule, value) of the first thing that the schema does not allow; it knows the words used there."""
    if "const" in rule:
        same = type(value) is type(rule["const"]) and value == rule["const"]  # True equals 1
        return None if same else (name, repr(rule["const"]), value)
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
    if isinstance(value, (int, float)):
        return _mismatch_in_number(value, rule, name)
    return None


def _mismatch_in_number(value: float, rule: dict[str, Any], name: str) -> tuple[str, str, object] | None:
    if value < rule.get("minimum", value):
        return name, f"at least {rule['minimum']}", value
    lowest = rule.get("exclusiveMinimum")
    return None if lowest is None or value > lowest else (name, f"more than {lowest}", value)


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


def _check_results(document: dict[str, Any], refuse: Any) -> None:
    """Let each case have one result, and each override that a result names be declared."""
    names = [item["case"] for item in document["results"]]
    if len(set(names)) != len(names):
        raise refuse("results", "one for each case", f"{len(names)} of {len(set(names))} cases")
    reasons = {item["reason"] for item in (*document["overrides"], *document["known_failures"])}
    for number, item in enumerate(document["results"]):
        strange = [reason for reason in item.get("overrides", ()) if reason not in reasons]
        if strange:
            raise refuse(f"results[{number}].overrides", "declared in overrides or known_failures", strange[0])


def _check_conclusions(document: dict[str, Any], refuse: Any) -> None:
    """Let whoever made hashes anew have written nothing that does not follow from the results."""
    facts = {(row["format"], row["path"]): (row["kind"], row["standing"]) for row in document["paths"]}
    for item in document["manifest"].get("offered", ()):
        if (item["format"], path := f"{item['path']}/{item['precision']}") in facts:
            facts[item["format"], path] = item["kind"], item["standing"]
    try:
        follows = conclusions(document, facts)
    except KeyError as error:
        raise refuse("paths", f"a row for {error}, which a result names", "none") from error
    _compare("statement", STATEMENT, document["statement"], refuse)
    for name in ("counts", "formats", "paths", "matrix", "device", "standing", "kind", "sentence"):
        _compare(name, follows[name], document[name], refuse)


def _compare(name: str, due: Any, told: Any, refuse: Any) -> None:
    """Raise where what is told is not what is due, naming the first thing that differs."""
    if canonical(_sorted(due)) == canonical(_sorted(told)):
        return
    if isinstance(due, dict) and isinstance(told, dict):
        for key in sorted(due.keys() | told.keys()):
            _compare(f"{name}.{key}", due.get(key), told.get(key), refuse)
    if isinstance(due, list) and isinstance(told, list):
        due, told = ([item for item in one if item not in other] for one, other in ((due, told), (told, due)))
        due, told = due[:1] or "no such row", told[:1] or "no such row"
    raise refuse(
        name, f"what follows from the results: {_short(due)}", _short(told), "It was edited, or another kit made it."
    )


def _sorted(value: Any) -> Any:
    return sorted(value, key=canonical) if isinstance(value, list) else value


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def check_census(document: dict[str, Any], where: str) -> str:
    """Return a sentence on whether a document accounts for every case that this kit has for its subject.

    Only the kit of the version that made it has that list; where another one is installed, the sentence says so.

    Args:
        document: As ``read_certificate`` gave it.
        where: Its file.

    Raises:
        CertificateError: Cases are lacking or strange, or what was not tested is not told.
    """

    def refuse(name: str, rule: str, value: object, hint: str | None = None) -> CertificateError:
        return CertificateError("certificate", name=name, rule=rule, value=value, where=where, hint=hint)

    made, here = document["versions"].get("q4-conformance"), versions()["q4-conformance"]
    if made != here:
        return f"made with q4-conformance {made or 'of no known version'}, whose list of cases {here} can't know"
    subject, run = document["subject"], document["run"]
    try:
        every = cases_for(ConformanceTarget(subject["profile"], subject["name"], subject["formats"], subject["device"]))
    except (Q4Error, RuntimeError) as error:
        raise refuse("subject", "one that there can be", str(error), "The file was edited or damaged.") from error
    due = {case.id for case in select_cases(every, run["only"])}
    told = {item["case"] for item in document["results"]} | set(document["missing"])
    for what, cases in (("is not told", due - told), ("is none of this kit's", told - due)):
        if cases:
            rule = f"those of this kit's table, {len(due)}"
            raise refuse("results", rule, f"{len(told)}: {min(cases)} {what}", "The table may be newer: judge it anew.")
    declared = set(document["manifest"].get("capabilities", {}).get("formats", ()))
    wanted = {name for name in BUILTIN_FORMATS if declared & {EVERY_FORMAT, name}}
    lacking = sorted(wanted - set(subject["formats"])) if subject["profile"] == "kernel" else []
    if not run["partial"] and (run["only"] or lacking):
        left = ", ".join([*run["only"], *lacking])
        raise refuse("run.partial", "true where cases or formats were left out", f"false, with {left}")
    _compare("not_tested", not_tested(document, len(every)), document["not_tested"], refuse)
    _compare("parts", {part_of(case.id): case.text for case in every}, document["parts"], refuse)
    return f"all {len(due)} cases of this kit's table are accounted for"


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
