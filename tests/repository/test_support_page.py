"""The pages of support and precision say what is so: dialects, formats, backends, and figures that are stored."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import q4core as q4
from benchmarks.cpu import ours
from benchmarks.weights import TYPES, type_of
from q4_gguf.ggml import find_type

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
        if row[0].partition(" ")[0] not in {"GGUF", "ONNX"}
        for name in re.findall(r"`([a-z0-9-]+)`", row[0])
    }
    assert told == {dialect.name: set(dialect.formats) for dialect in q4.dialects() if dialect.formats}


@pytest.mark.parametrize("dialect", [item for item in q4.dialects() if item.formats], ids=lambda item: item.name)
def test_table_names_the_dialects_of_each_format(dialect: q4.Dialect) -> None:
    """The row of each format that a dialect holds has the dialect's name, as ``--dialect`` takes it."""
    section = SUPPORT.partition("## Formats\n")[2].partition("\n## ")[0]
    for name in dialect.formats:
        row = re.search(rf"^\|[^|]*\b{name}\b[^|]*\|([^|]*)\|", section, re.IGNORECASE | re.MULTILINE)
        assert row is not None, name
        assert f"`{dialect.name}`" in row.group(1), name


def test_samples_have_the_sums_of_their_table() -> None:
    """The sentences before the table of samples, and README's, have the sums of its rows."""
    rows = re.findall(r"^\| `[a-z0-9-]+` \| \d+ \| (\d+) \| (\d+) \|$", SUPPORT, re.MULTILINE)
    exact, rounded = (sum(int(row[place]) for row in rows) for place in (0, 1))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{exact} are read bit for bit, {rounded} rounded once" in readme
    assert re.search(rf"\. {exact} of them\s+have the owner's numbers bit for bit", SUPPORT)


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


def _held(name: str) -> float:
    """Return how many bits of a weight cpu-native holds for each number."""
    dense = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    plain = name in {"Q4_0", "Q4_1"}
    weight = q4.quantize(dense, name.lower()) if plain else type_of(name, dense)
    config = q4.SessionConfig(device="cpu", backend="cpu-native", activation_precision="exact")
    return q4.Q4Linear(weight, config=config).diagnostics().prepared_bytes * 8 / dense.numel()


def test_memory_of_each_type_of_gguf_is_what_is_held() -> None:
    """The table has the file's bits by ggml's own sizes of blocks, and what a layer reports."""
    if ours.isa() == "none":
        pytest.skip("cpu-native is not built here")
    rows = _rows("Memory of GGUF's types")
    sizes = {kind.name: kind.block_bytes * 8 / kind.block_size for kind in map(find_type, range(40)) if kind}
    assert {row[0] for row in rows} == {*TYPES["K-quants"], *TYPES["other types of GGUF"], "Q4_0", "Q4_1"}
    for name, stored, held, ratio in rows:
        assert float(stored) == sizes[name]
        assert float(held) == _held(name)
        assert float(ratio) == pytest.approx(float(held) / float(stored), abs=0.006)


def test_figures_of_precision_are_stored() -> None:
    """Each line of the table is a rounding of the result that one command makes."""
    result = json.loads((ROOT / "benchmarks/results/precision.json").read_text(encoding="utf-8"))
    assert f"{result['tokens']} tokens" in PRECISION
    for name, own in result["programs"].items():
        line = f"| {name} | {own['kl_divergence']:.1e} | {own['equal_next_tokens']:.1%} |"
        assert line in PRECISION
