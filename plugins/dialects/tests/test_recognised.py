"""Known dialects that nothing here reads are named, and none of their tensors is taken for dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import q4core as q4

if TYPE_CHECKING:
    from pathlib import Path


def _of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).to(dtype)


INT32, U8, F16, F8 = torch.int32, torch.uint8, torch.float16, torch.float8_e4m3fn
LAYERS: dict[str, dict[str, torch.Tensor]] = {
    "marlin": {"proj.qweight": _of(INT32, 4, 128), "proj.scales": _of(F16, 1, 64)},
    "awq-gemv-fast": {
        "proj.qweight": _of(torch.int16, 16, 64),
        "proj.qzeros": _of(F16, 8, 64),
        "proj.scales": _of(F16, 8, 64),
    },
    "openai-mxfp4": {"proj.blocks": _of(U8, 2, 16, 2, 16), "proj.scales": _of(U8, 2, 16, 2)},
    "bitsandbytes-int8": {"proj.weight": _of(torch.int8, 16, 64), "proj.SCB": _of(torch.float32, 16)},
    "tensorrt-llm-nvfp4": {
        "proj.weight": _of(U8, 16, 32),
        "proj.weights_block_scaling_factor": _of(F8, 16, 4),
        "proj.alpha": _of(torch.float32, 1),
    },
}


@pytest.mark.parametrize("dialect", LAYERS)
def test_known_dialect_is_named(dialect: str) -> None:
    """Each is listed under its name with all of its tensors, and leaves other tensors alone."""
    schema = q4.detect({**LAYERS[dialect], "proj.bias": torch.ones(16), "norm.weight": torch.ones(4)})
    assert schema is not None
    assert [(problem.code, problem.key, problem.value) for problem in schema.unsupported] == [
        ("unsupported", "proj", dialect)
    ]
    assert dict(schema.layers) == {}
    assert set(schema.dense) == {"proj.bias", "norm.weight"}


@pytest.mark.parametrize(
    "tensors",
    [
        {"norm.scale": torch.ones(4), "norm.weight": torch.ones(4)},
        {"embed.weight": torch.ones(4, 4), "pos.scales": torch.ones(2)},
        {"table": _of(U8, 4, 4), "head.weight": _of(U8, 4, 4)},
        {"conv.weight": _of(F8, 4, 4)},
    ],
    ids=lambda tensors: next(iter(tensors)),
)
def test_plain_tensors_are_left_alone(tensors: dict[str, torch.Tensor]) -> None:
    """Scales of norms, byte tables and lone 8-bit tensors are no one's 4-bit layer."""
    assert q4.detect(tensors) is None


@pytest.mark.parametrize("name", ["marlin", "recognised-only"])
def test_only_readable_dialects_can_be_asked_for(name: str) -> None:
    """What is merely recognised is no choice, and is in no list of choices."""
    with pytest.raises(q4.DialectError) as caught:
        q4.detect(LAYERS["marlin"], dialect=name)
    assert "recognised-only" not in str(caught.value.rule)
    assert "bitsandbytes" in str(caught.value.rule)


def test_checkpoint_says_why_when_such_a_layer_is_asked_for(tmp_path: Path) -> None:
    """Other layers are read; this one is refused with its dialect's name, and is not ``in`` the checkpoint."""
    path = tmp_path / "x.safetensors"
    weight = q4.quantize(torch.randn(16, 64), "nf4")
    q4.save_checkpoint(path, {"other": weight}, dialect="bitsandbytes")
    dense = {**q4.open(path).dense, **LAYERS["marlin"]}
    with pytest.raises(q4.CheckpointError, match="marlin"):
        q4.save_checkpoint(path, {"other": weight}, dialect="bitsandbytes", dense=dense)
    import safetensors.torch  # noqa: PLC0415  # files that q4core itself refuses to write

    safetensors.torch.save_file({**safetensors.torch.load_file(path), **LAYERS["marlin"]}, path)
    checkpoint = q4.open(path)
    assert list(checkpoint) == ["other"]
    assert "proj" not in checkpoint
    with pytest.raises(q4.CheckpointError) as caught:
        checkpoint["proj"]
    assert (caught.value.name, caught.value.value, caught.value.where) == ("proj", "marlin", str(path))
