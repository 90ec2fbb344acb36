"""Checkpoints that GPTQModel, AutoAWQ and AutoRound wrote, with the weights that these libraries compute."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import q4core as q4

pytestmark = pytest.mark.samples
ROOT = Path(os.environ.get("Q4_SAMPLES", "."))
READ = {
    **dict.fromkeys(("gptq-v1-asym-g32", "gptq-v1-desc-act-g32", "gptq-v1-sym-g64"), "gptq"),
    **dict.fromkeys(("gptq-v1-autoround-asym-g32", "gptq-v1-autoround-sym-g128"), "gptq"),
    **dict.fromkeys(("autoround-mixed-bits", "autoround-sym-g128"), "gptq"),
    **dict.fromkeys(("gptq-v2-asym-g32", "gptq-v2-sym-channel"), "gptq-v2"),
    **dict.fromkeys(("autoround-asym-g64", "autoround-gptq-asym-g32", "autoround-gptqmodel-asym-g32"), "gptq-v2"),
    **dict.fromkeys(("awq-gemm-autoround-asym-g128", "awq-gemm-shapes", "autoround-awq-asym-g64"), "awq"),
    "awq-gemv": "awq-gemv",
}
"""Sample → the dialect that it is read in."""


def _opened(name: str) -> tuple[Any, q4.Checkpoint]:
    return json.loads((ROOT / name / "meta.json").read_text(encoding="utf-8")), q4.open(ROOT / name / "checkpoint")


@pytest.mark.parametrize("name", READ)
def test_every_module_has_its_owners_values(name: str) -> None:
    """Each module has the sha256 of the float32 values that the owner's code gives, and is written as it was stored."""
    meta, opened = _opened(name)
    stored = load_file(ROOT / name / "checkpoint" / "model.safetensors")
    dialect = next(item for item in q4.dialects() if item.name == READ[name])
    with opened, np.load(ROOT / name / "expected.npz") as expected:
        assert set(opened.schema.layers) == set(meta["modules"])
        assert opened.schema.unsupported == ()
        for module, facts in meta["modules"].items():
            assert opened.schema.layers[module].dialect == READ[name]
            weight = opened[module]
            weight.check_values()
            dense = q4.dequantize(weight, torch.float32)
            if module in expected:
                assert torch.equal(dense, torch.from_numpy(expected[module])), module
            assert list(dense.shape) == facts["shape"]
            # The sign of a zero is no part of it.
            values = {hashlib.sha256(item.numpy().tobytes()).hexdigest() for item in (dense, dense + 0.0)}
            assert facts["sha256"] in values, module
            written = dialect.write(module, weight).tensors
            for key in opened.schema.layers[module].keys.values():
                assert torch.equal(written[key], stored[key]), key


def test_gemv_fast_is_refused_by_name() -> None:
    """AutoAWQ's third layout is not read, and the error says which one it is."""
    with pytest.raises(q4.SchemaError) as caught:
        q4.open(ROOT / "awq-gemv-fast" / "checkpoint")
    assert "awq-gemv-fast" in str(caught.value)
