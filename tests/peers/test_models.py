"""Whole models that q4core wrote load in ``transformers`` and give the logits of the library's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore"),  # loading whole models, the libraries warn of each other
]

MODELS = Path(__file__).parents[2] / "conformance/src/q4_conformance/golden/models"
DIALECTS = {
    "bitsandbytes-nf4": "bitsandbytes",
    "compressed-tensors-nvfp4": "compressed-tensors-nvfp4",
    "torchao-nvfp4": "torchao-nvfp4-swizzled",
}


def _logits(transformers: ModuleType, folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.bfloat16)
    for parameter in model.parameters():
        if type(parameter) is torch.nn.Parameter:
            # It is a view of the file, at an address that depends on the header's length and the shard; a matmul may
            # give other bits at another alignment.
            parameter.data = parameter.data.clone()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.arange(24).reshape(2, 12)).logits
    return logits


@pytest.fixture(scope="module")
def transformers(peer: Callable[[str], ModuleType]) -> ModuleType:
    """Return ``transformers``."""
    return peer("transformers")


@pytest.fixture
def matmuls(
    peer: Callable[[str], ModuleType], portable: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, ...]]:
    """Make bitsandbytes' layers multiply by the portable kernel's weight; return the shapes of those that did.

    On a CPU with avx512_bf16, ``Linear4bit`` of bitsandbytes 0.50.2 repacks its weight before its first forward out of
    training, and that raises where K is no multiple of the block, as in this model's ``down_proj`` (K = 96 in blocks of
    64). On one with AVX-512 alone its public dequantiser gives that layer wrong weights (see ``portable``).
    """
    shapes = []

    def multiply(x: torch.Tensor, packed: torch.Tensor, *, quant_state: Any, bias: torch.Tensor | None) -> torch.Tensor:
        shapes.append(tuple(quant_state.shape))
        return torch.nn.functional.linear(x, portable(packed, quant_state, x.dtype), bias)

    monkeypatch.setattr(peer("bitsandbytes.nn.modules"), "has_avx512bf16", lambda: False)
    monkeypatch.setattr(peer("bitsandbytes"), "matmul_4bit", multiply)
    return shapes


def _rewrite(name: str, folder: Path, **choices: Any) -> dict[str, Any]:
    """Write a golden model again to ``folder`` and return the config.json that it got."""
    checkpoint = q4.open(MODELS / name)
    config = json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]  # the dialect writes its own
    weights, dense = dict(checkpoint.items()), dict(checkpoint.dense.items())
    q4.save_checkpoint(folder, weights, dialect=DIALECTS[name], dense=dense, config=config, **choices)
    written: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return written


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_model_that_we_wrote_gives_the_same_logits(
    name: str,
    transformers: ModuleType,
    matmuls: list[tuple[int, ...]],
    tmp_path: Path,
    same_bits: Callable[..., None],
) -> None:
    """A model read and written again gives the logits of the library's own export, bit for bit."""
    written = _rewrite(name, tmp_path / "again")
    assert written["quantization_config"]["quant_method"] == name.rpartition("-")[0]
    expected = _logits(transformers, MODELS / name)
    assert bool(expected.isfinite().all())
    assert ((64, 96) in matmuls) is name.startswith("bitsandbytes")
    same_bits(_logits(transformers, tmp_path / "again"), expected)


def test_shards_that_we_wrote_give_the_same_logits(
    transformers: ModuleType, matmuls: list[tuple[int, ...]], tmp_path: Path, same_bits: Callable[..., None]
) -> None:
    """A model written in shards loads too."""
    name = "bitsandbytes-nf4"
    _rewrite(name, tmp_path / "again", max_shard_bytes=8192)
    shards = list((tmp_path / "again").glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        with safetensors.safe_open(shard, "pt") as file:
            assert list(file.keys())
    expected = _logits(transformers, MODELS / name)
    assert (64, 96) in matmuls
    same_bits(_logits(transformers, tmp_path / "again"), expected)
