"""Every family of transformers that can be made tiny: packed logits are the dequantised model's, saved and loaded too.

A dozen of unlike structure run in CI; ``nox -s soak -- models`` runs all, and stores which were tried and which not.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from families import FAMILIES, UntriedFamilyError, outputs_of, tiny_model

import q4core as q4
from q4_transformers import HfLinear, Q4Config

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers")]

BUILD = Path(__file__).parents[4] / "build"
FEW = (
    "llama", "gemma3_text", "mixtral", "gpt_oss", "granitemoe", "gpt2", "bloom", "mamba", "rwkv", "wavlm", "t5", "vit",
    "clip", "mobilebert", "neomme", "embedding_gemma2_text",
)  # fmt: skip
"""Merged projections, experts in three layouts, transposed layers, weights that are read, changed, tied and empty; and
a config that knows no cache."""
LEAST = 80
FARTHEST = {"nf4": 0.153, "int4": 0.126}
"""The most that quantising moves a weight, of its block's largest one: half of NF4's widest gap, (1 - 0.6962) / 2, and
one of INT4's steps, 1 / 8, by which the largest is cut; with a rounding of float32."""
NEAR = 1e-3
"""Both models sum over K ≤ 4,096 in float32: at most K·2⁻²⁴ of the sum of magnitudes by layer, and so 2.4e-4; a family
has about twenty layers in a row, whose roundings add up as their root."""
CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
"""Dense layers of torch whose bits depend on where their tensors lie: by 4e-7 in mobilenet_v2, of equal weights."""


def _error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the greatest difference of outputs over the greatest one of each; NaN if one is NaN."""
    pairs = zip(found, expected, strict=True)
    tiny = torch.finfo(torch.float32).tiny
    return float(torch.stack([(a - b).abs().max() / b.abs().max().clamp(min=tiny) for a, b in pairs]).max())


def _check_weights(dense: Any, packed: Any, farthest: float) -> None:
    """Check that each tensor of a dense model is there, as it was or as far as quantising moves it."""
    expected, found = dense.state_dict(), packed.state_dict()
    assert found.keys() >= expected.keys(), sorted(expected.keys() - found.keys())[:3]
    for name, value in expected.items():
        moved = found[name]
        if not torch.equal(moved, value):
            assert value.dim() > 1, f"{name} was changed"
            assert float((moved - value).abs().max()) <= farthest * float(value.abs().max()), name


def check(model_type: str, format_: str, folder: Path) -> int:
    """Try one family in one format, and return how many of its layers are packed; 0 if it is refused at load.

    Raises:
        UntriedFamilyError: No tiny model of it can be made.
        Exception: It fails.
    """
    dense, given = tiny_model(model_type)
    dense.save_pretrained(folder / "dense")
    kind, options = type(dense), {"activation_precision": "exact", "cache": "off"}

    def load(name: str, **asked: Any) -> Any:
        config = Q4Config(**options, **asked)
        return kind.from_pretrained(folder / name, quantization_config=config, dtype=torch.float32).eval()

    stored = kind.from_pretrained(folder / "dense", dtype=torch.float32)  # as far as transformers keeps it
    try:
        packed = load("dense", format=format_)
    except q4.Q4Error:
        return 0
    twin = copy.deepcopy(packed).dequantize()
    _check_weights(stored, twin, FARTHEST[format_])
    packed.save_pretrained(folder / "packed")
    again = load("packed")
    found, loaded = outputs_of(packed, given), outputs_of(again, given)
    assert _error(found, outputs_of(twin, given)) <= NEAR
    if any(isinstance(module, CONVOLUTIONS) for module in packed.modules()):
        assert _error(loaded, found) <= NEAR
    else:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, loaded, strict=True))
    return sum(isinstance(module, HfLinear) for module in packed.modules())


@pytest.mark.parametrize("format_", ["nf4", "int4"])
@pytest.mark.parametrize("model_type", FEW)
def test_a_family(model_type: str, format_: str, tmp_path: Path) -> None:
    """A family of its own kind runs packed as it does dequantised, and as it does saved and loaded again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each family has words of its own
        assert check(model_type, format_, tmp_path) > 0


@pytest.mark.soak
@pytest.mark.parametrize("format_", ["nf4", "int4"])
def test_every_family(format_: str, tmp_path: Path) -> None:
    """So does every family of transformers of which a tiny model can be made; what can't is listed with the reason."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    tried, untried, failed = {}, {}, {}
    for number, model_type in enumerate(FAMILIES):
        folder = tmp_path / str(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as above
            try:
                tried[model_type] = check(model_type, format_, folder)
            except UntriedFamilyError as error:
                untried[model_type] = str(error)
            except Exception as error:  # noqa: BLE001  # all of them are wanted
                failed[model_type] = f"{type(error).__name__}: {error}"[:300]
        for file in folder.rglob("*.safetensors"):
            file.unlink()
    BUILD.mkdir(exist_ok=True)
    record = {"transformers": transformers.__version__, "tried": tried, "untried": untried}
    (BUILD / f"families-{format_}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    assert not failed
    assert len(tried) >= LEAST
