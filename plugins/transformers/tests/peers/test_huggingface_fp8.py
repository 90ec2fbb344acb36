"""FP8 layers next to 4-bit ones: decoded with their scales into the model's parameters, and saved as dense ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import transformers

import q4core as q4
from q4_transformers import Q4Config

pytestmark = [pytest.mark.peer, pytest.mark.samples, pytest.mark.usefixtures("quiet_transformers")]


@pytest.mark.parametrize("name", ["modelopt-mixed-nvfp4-fp8", "ct-mixed-nvfp4-fp8"])
def test_fp8_is_decoded_into_the_model(name: str, tmp_path: Path) -> None:
    """Parameters have the decoded numbers; what is saved has them as dense tensors, which its config leaves out."""
    folder = Path(os.environ["Q4_SAMPLES"]) / name / "checkpoint"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=Q4Config())
    ids = torch.arange(8)[None]
    with q4.open(folder) as checkpoint, torch.no_grad():
        decoded = {key: checkpoint.dense[key] for key in checkpoint.schema.decoded}
        assert len(decoded) == 4
        for key, value in decoded.items():
            assert torch.equal(model.get_parameter(key), value.to(model.dtype))
        logits = model(ids).logits
    model.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert {key.removesuffix(".weight") for key in decoded} <= set(entry["ignore"])
    with q4.open(tmp_path) as saved:
        assert (len(saved), dict(saved.schema.decoded)) == (3, {})
        assert all(torch.equal(saved.dense[key], value) for key, value in decoded.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=Q4Config())
    with torch.no_grad():
        assert torch.equal(again(ids).logits, logits)
