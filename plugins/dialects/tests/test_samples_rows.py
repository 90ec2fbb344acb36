"""Checkpoints that compressed-tensors, ModelOpt and AutoRound wrote: their values bit for bit, or a refusal by name."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import q4core as q4

pytestmark = pytest.mark.samples
READ = [
    *("ct-int4-actorder-weight", "ct-int4-asym-g128", "ct-int4-autoround-asym-g64", "ct-int4-channel"),
    *("ct-int4-g_idx-asym-g64", "ct-int4-g_idx-sym", "ct-int4-sym-g128", "ct-mixed-int4-int8", "ct-mixed-nvfp4-fp8"),
    *("ct-mxfp4", "ct-mxfp4-autoround", "ct-nvfp4a16", "autoround-ct-w4a16-g128", "autoround-mxfp4"),
    *("modelopt-int4-awq", "modelopt-mixed-nvfp4-fp8", "modelopt-mxfp4", "modelopt-nvfp4-mlp-only"),
]


def _folder(name: str) -> tuple[Path, dict[str, Any]]:
    folder = Path(os.environ["Q4_SAMPLES"]) / name
    return folder / "checkpoint", json.loads((folder / "meta.json").read_text())


def _hashes(value: torch.Tensor) -> set[str]:
    """Return the hash of float32 numbers, and that of the same with every zero positive: its sign is no promise."""
    array = value.to(torch.float32).numpy()
    return {hashlib.sha256(item.astype("<f4").tobytes()).hexdigest() for item in (array, array + np.float32(0))}


@pytest.mark.parametrize("name", READ)
def test_sample_has_its_owners_values(name: str) -> None:
    """Each module's float32 values have the owner's hash; FP8 is the owner's float32, rounded once to bfloat16."""
    folder, meta = _folder(name)
    stored = {
        key: item for path in folder.glob("*.safetensors") for key, item in safetensors.torch.load_file(path).items()
    }
    with q4.open(folder) as checkpoint:
        assert checkpoint.schema.unsupported == ()
        for module, facts in meta["modules"].items():
            if module in checkpoint:
                assert facts["sha256"] in _hashes(q4.dequantize(checkpoint[module], torch.float32)), module
                continue
            key = f"{module}.weight"
            exact = stored[key].to(torch.float32) * stored[f"{module}.weight_scale"].to(torch.float32)
            assert facts["sha256"] in _hashes(exact), module
            assert key in checkpoint.schema.decoded
            assert torch.equal(checkpoint.dense[key], exact.to(torch.bfloat16))
        assert len(checkpoint) + len(checkpoint.schema.decoded) == len(meta["modules"])


def test_mxint4_is_refused_by_name() -> None:
    """AutoRound's MXINT4 has the keys of MXFP4, and is never read as that."""
    folder, _ = _folder("autoround-mxint4")
    with pytest.raises(q4.SchemaError, match="mxint4"):
        q4.open(folder)
