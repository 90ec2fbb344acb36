"""The pages of support and precision say what is so: dialects, formats, backends, and figures that are stored."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import q4core as q4

ROOT = Path(__file__).parents[2]
SUPPORT = (ROOT / "docs/support.md").read_text(encoding="utf-8")
PRECISION = (ROOT / "docs/precision.md").read_text(encoding="utf-8")


def _rows(title: str) -> list[list[str]]:
    section = SUPPORT.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_dialect_has_its_formats() -> None:
    """Each dialect that reads something is in the table, with the formats that it has, and no other does."""
    told = {
        name: set(row[1].split(", "))
        for row in _rows("Dialects")
        if row[0] != "GGUF"
        for name in re.findall(r"`([a-z0-9-]+)`", row[0])
    }
    assert told == {dialect.name: set(dialect.formats) for dialect in q4.dialects() if dialect.formats}


def test_every_backend_has_its_formats_and_devices() -> None:
    """Each backend of this repository is in the table with formats and devices as its manifest has them."""
    backends = {backend.name: backend.capabilities for backend in q4.default_registry().backends().values()}
    rows = {row[0].strip("`"): row for row in _rows("Backends")}
    assert rows.keys() == backends.keys()
    for name, manifest in backends.items():
        every = q4.EVERY_FORMAT in manifest.formats or manifest.formats >= q4.BUILTIN_FORMATS.keys()
        assert set(rows[name][1].split(", ")) == ({"every format"} if every else manifest.formats)
        assert set(rows[name][2].lower().split(", ")) == manifest.devices


@pytest.mark.parametrize("name", ["exl3", "aqlm", "vptq"])
def test_what_is_refused_by_name_has_no_reader(name: str) -> None:
    """A dialect that the page calls refused is none that can be read."""
    assert name.upper() in SUPPORT
    assert not any(name == dialect.name.partition("-")[0] for dialect in q4.dialects() if dialect.formats)


def test_figures_of_precision_are_stored() -> None:
    """Each line of the table is a rounding of the result that one command makes."""
    result = json.loads((ROOT / "benchmarks/results/precision.json").read_text(encoding="utf-8"))
    assert f"{result['tokens']} tokens" in PRECISION
    for name, own in result["programs"].items():
        line = f"| {name} | {own['kl_divergence']:.1e} | {own['equal_next_tokens']:.1%} |"
        assert line in PRECISION
