"""A document as JUnit XML: what CI systems read. What is not declared or not testable never reads as a pass there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from q4_conformance.outcome import grouped
from q4_conformance.report.tally import format_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_ELEMENTS = {"fail": "failure", "crash": "error", "timeout": "error"}
_FORBIDDEN = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 has no place for, and the carriage return, of which every parser makes an end of line."""


def _legal(text: str) -> str:
    """Return a text with all that XML can't hold spelled out."""
    return _FORBIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def to_junit(document: Mapping[str, Any], seconds: Mapping[str, float]) -> str:
    """Return the XML: a suite for each format, a test case for each case, with the seconds that each case took."""
    who, device = (_legal(document["subject"][key]) for key in ("name", "device"))
    root = ET.Element("testsuites", name=f"q4 conform {who} on {device}")
    for name, results in grouped(document["results"], lambda result: format_of(result["case"])).items():
        outcomes = [result["outcome"] for result in results]
        times = [seconds.get(result["case"], 0.0) for result in results]
        suite = ET.SubElement(
            root,
            "testsuite",
            name=f"{who}.{_legal(name)}",
            tests=str(len(results)),
            failures=str(outcomes.count("fail")),
            errors=str(outcomes.count("crash") + outcomes.count("timeout")),
            skipped=str(outcomes.count("not_declared") + outcomes.count("not_testable")),
            timestamp=document["volatile"]["date"][:19],
            time=f"{sum(times):.3f}",
        )
        for result, time in zip(results, times, strict=True):
            contract, _, rest = result["case"].partition("/")
            classname = f"{who}.{_legal(name)}.{_legal(contract)}"
            case = ET.SubElement(suite, "testcase", classname=classname, name=_legal(rest), time=f"{time:.3f}")
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
