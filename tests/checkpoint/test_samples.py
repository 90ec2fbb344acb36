"""Every checkpoint among the samples: each module has its owner's values, or is refused by name."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import q4core as q4

if TYPE_CHECKING:
    from q4core import Checkpoint

pytestmark = pytest.mark.samples
ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("Q4_SAMPLES", "no samples"))
SAMPLES = sorted(path.parent.name for path in FOLDER.glob("*/meta.json"))
REFUSED = {"autoround-mxint4": "mxint4", "awq-gemv-fast": "awq-gemv-fast"}
"""Samples that are refused → what the message calls them."""
OPTIONS = {"mlx-no-config": {"mlx_bits": 4}}
"""Samples whose files don't say all → what is said of them."""
LAST_BIT = {"gguf-nvfp4-scaled"}
"""Whose owner rounds code times scale before it multiplies by the global scale; its meta.json says so."""


def _path(name: str, meta: dict[str, Any]) -> Path:
    return FOLDER / name / str(meta.get("open", "checkpoint"))


def _values(checkpoint: Checkpoint, module: str, shape: list[int]) -> torch.Tensor:
    """Return the float32 values of a module, of the experts of one, or of a layer that is read as dense."""
    if len(shape) == 3:
        return torch.stack([q4.dequantize(checkpoint[f"{module}.{index}"], torch.float32) for index in range(shape[0])])
    if module in checkpoint:
        return q4.dequantize(checkpoint[module], torch.float32)
    return checkpoint.dense[f"{module}.weight"].to(torch.float32)


def _is_exact(values: torch.Tensor, sha256: str) -> bool:
    """Whether the numbers have the hash; the sign of a zero is no promise of the samples."""
    given = values.numpy().astype("<f4")
    return sha256 in {hashlib.sha256(item.tobytes()).hexdigest() for item in (given, given + np.float32(0))}


@pytest.mark.parametrize("name", SAMPLES)
def test_each_module_has_its_owners_values(name: str) -> None:
    """Each packed module has the hash of its owner's values; one that is read as dense is the owner's, rounded once."""
    meta = json.loads((FOLDER / name / "meta.json").read_text(encoding="utf-8"))
    if name in REFUSED:
        with pytest.raises(q4.SchemaError) as caught:
            q4.open(_path(name, meta))
        assert REFUSED[name] in str(caught.value)
        return
    expected = np.load(FOLDER / name / "expected.npz")
    with q4.open(_path(name, meta), options=OPTIONS.get(name)) as checkpoint:
        for module, facts in meta["modules"].items():
            values = _values(checkpoint, module, facts["shape"])
            if name in LAST_BIT:
                torch.testing.assert_close(values, torch.from_numpy(expected[module]), rtol=2**-23, atol=0)
            elif f"{module}.weight" in checkpoint.dense:
                assert list(values.shape) == facts["shape"]
                if module in expected:  # the hash is of values that were not rounded to bfloat16
                    owners = torch.from_numpy(expected[module])
                    assert torch.equal(values, owners.to(torch.bfloat16).to(torch.float32)), module
            elif not _is_exact(values, facts["sha256"]):  # zeros of both signs have a hash of their own
                assert np.array_equal(values.numpy(), expected[module]), module


def _counts() -> tuple[dict[str, tuple[int, int, int]], int]:
    """Return dialect → samples, modules that are exact and those that are rounded; and how many are refused."""
    samples: collections.defaultdict[str, set[str]] = collections.defaultdict(set)
    exact: collections.Counter[str] = collections.Counter()
    rounded: collections.Counter[str] = collections.Counter()
    refused = 0
    for name in SAMPLES:
        meta = json.loads((FOLDER / name / "meta.json").read_text(encoding="utf-8"))
        if name in REFUSED:
            refused += len(meta["modules"])
            continue
        expected = np.load(FOLDER / name / "expected.npz")
        with q4.open(_path(name, meta), options=OPTIONS.get(name)) as checkpoint:
            layers = [*checkpoint.schema.layers.values(), *checkpoint.schema.decoded.values()]
            for module, facts in meta["modules"].items():
                owners = (layer.dialect for layer in layers if f"{layer.module}.".startswith(f"{module}."))
                dialect = next(owners)
                values = _values(checkpoint, module, facts["shape"])
                is_same = module in expected and np.array_equal(values.numpy(), expected[module])
                (exact if is_same or _is_exact(values, facts["sha256"]) else rounded)[dialect] += 1
                samples[dialect].add(name)
    return {key: (len(names), exact[key], rounded[key]) for key, names in samples.items()}, refused


def test_pages_count_what_is_read() -> None:
    """The table of docs/support.md has each dialect's samples and modules; README has their sums."""
    found, refused = _counts()
    page = (ROOT / "docs/support.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert {name: tuple(map(int, numbers)) for name, *numbers in rows} == found
    exact, rounded = (sum(counts[place] for counts in found.values()) for place in (1, 2))
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    modules = f"Of {exact + rounded + refused} modules in {len(SAMPLES)} checkpoints"
    assert modules in text
    assert f"{exact} are read bit for bit, {rounded} rounded once, and {refused} are refused by name" in text


def test_all_samples_are_there() -> None:
    """The folder has the 74 samples with the 423 modules that its page lists."""
    modules = [json.loads((FOLDER / name / "meta.json").read_text(encoding="utf-8"))["modules"] for name in SAMPLES]
    assert (len(SAMPLES), sum(map(len, modules))) == (74, 423)
