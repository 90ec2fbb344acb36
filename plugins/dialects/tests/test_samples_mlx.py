"""Checkpoints that mlx, hqq, torchao and AutoRound wrote, with the weights that these libraries compute."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import q4core as q4

pytestmark = pytest.mark.samples
ROOT = Path(os.environ.get("Q4_SAMPLES", "."))
NAMES = [
    *("mlx-affine-g32-bf16", "mlx-affine-g64", "mlx-autoround-g64", "mlx-mixed-bits", "mlx-mxfp4", "mlx-no-config"),
    *("mlx-nvfp4", "mlx-shapes", "autoround-mlx-g64"),
    *("hqq-axis0-g64", "hqq-axis1-crossing", "hqq-axis1-g64", "hqq-channel", "hqq-mixed-bits", "hqq-view-as-float"),
    *("torchao-int4-fp8-act", "torchao-int4-plain"),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_module_has_its_owners_values(name: str) -> None:
    """Each module has the sha256 of the float32 values that the owner's code gives; none is left out."""
    meta = json.loads((ROOT / name / "meta.json").read_text(encoding="utf-8"))
    options = {"mlx_bits": 4} if name == "mlx-no-config" else None  # nothing in that folder says it
    with (
        q4.open(ROOT / name / "checkpoint", options=options) as opened,
        np.load(ROOT / name / "expected.npz") as expected,
    ):
        assert set(opened.schema.layers) == set(meta["modules"])
        assert opened.schema.unsupported == ()
        for module, facts in meta["modules"].items():
            weight = opened[module]
            weight.check_values()
            dense = q4.dequantize(weight, torch.float32)
            if module in expected:
                assert torch.equal(dense, torch.from_numpy(expected[module])), module
            assert list(dense.shape) == facts["shape"]
            # The sign of a zero is no part of it.
            values = {hashlib.sha256(item.numpy().tobytes()).hexdigest() for item in (dense, dense + 0.0)}
            assert facts["sha256"] in values, module
