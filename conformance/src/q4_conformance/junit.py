"""A document as JUnit XML: what CI systems read. What is not declared or not testable never reads as a pass there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from q4_conformance.tally import format_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["to_junit"]

_ELEMENTS = {"fail": "failure", "crash": "error", "timeout": "error"}


def _legal(text: str) -> str:
    """Return a text without the control characters that XML can't hold."""
    return "".join(letter if letter in "\t\n" or letter >= " " else "?" for letter in text)


def to_junit(document: Mapping[str, Any]) -> str:
    """Return the XML: one suite for each format, one test case for each case."""
    subject = document["subject"]
    root = ET.Element("testsuites", name=f"q4 conform {subject['name']} on {subject['device']}")
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for result in document["results"]:
        groups.setdefault(format_of(result["case"]), []).append(result)
    for name, results in groups.items():
        outcomes = [result["outcome"] for result in results]
        suite = ET.SubElement(
            root,
            "testsuite",
            name=f"{subject['name']}.{name}",
            tests=str(len(results)),
            failures=str(outcomes.count("fail")),
            errors=str(outcomes.count("crash") + outcomes.count("timeout")),
            skipped=str(outcomes.count("not_declared") + outcomes.count("not_testable")),
            timestamp=document["volatile"]["date"][:19],
        )
        for result in results:
            contract, _, rest = result["case"].partition("/")
            case = ET.SubElement(suite, "testcase", classname=f"{subject['name']}.{name}.{contract}", name=rest)
            if result["outcome"] != "pass":
                element = ET.SubElement(case, _ELEMENTS.get(result["outcome"], "skipped"))
                text = _legal(result.get("message", ""))
                element.set("message", f"{result['outcome']}: {text}")
                if element.tag != "skipped":
                    element.set("type", result["outcome"])
            elif result.get("fallback"):
                ET.SubElement(case, "system-out").text = "passed by fallback: the reference computed"
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"
