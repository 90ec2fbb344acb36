"""Layers of MiniLM and SmolLM2 in each form that is read: written, read again, and run like float64 on their values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch

import q4core as q4
from benchmarks import embeddings
from q4_lm.commands.generate import find_model

if TYPE_CHECKING:
    from pathlib import Path

    Layers = dict[str, torch.Tensor]

pytestmark = pytest.mark.peer

WRITTEN = {
    "awq": "int4",
    "bitsandbytes": "nf4",
    "comfyui-nvfp4": "nvfp4",
    "compressed-tensors-int4": "int4",
    "compressed-tensors-mxfp4": "mxfp4",
    "deepseek-mxfp4": "mxfp4",
    "gguf Q4_0": "q4_0",
    "gguf Q8_0": "q8_0",
    "gguf IQ4_NL": "iq4_nl",
    "gptq": "int4",
    "gptq-v2": "int4",
    "gptqmodel-bitsandbytes": "fp4",
    "hqq": "int4",
    "mlx": "q4_1",
    "modelopt-mxfp4": "mxfp4",
    "modelopt-nvfp4": "nvfp4",
    "torchao-mxfp4-swizzled": "mxfp4",
    "torchao-nvfp4-swizzled": "nvfp4",
}
"""Dialect, and the type where it has several → the format that its layers are quantised to."""
_GROUP = 32


def _minilm() -> Layers:
    """Return a matrix of each shape of one of MiniLM's blocks."""
    stored = safetensors.torch.load_file(embeddings.folder() / "model.safetensors")
    names = [f"encoder.layer.3.{name}.dense" for name in ("attention.output", "intermediate", "output")]
    return {name: stored[f"{name}.weight"].float() for name in names}


def _smollm2() -> Layers:
    """Return a matrix of each shape of one of SmolLM2's blocks, as its file has them."""
    names = [f"blk.3.{name}" for name in ("attn_q", "attn_v", "ffn_up", "ffn_down")]
    with q4.open(find_model("smollm2")) as checkpoint:
        return {name: q4.dequantize(checkpoint[name], torch.float32) for name in names}


@pytest.fixture(scope="module")
def layers() -> Layers:
    """Matrices of both models."""
    found = {**_minilm(), **_smollm2()}
    assert len({item.shape for item in found.values()}) == 7
    return found


def _check(path: Path, layers: Layers, values: Layers, most: float) -> None:
    """Each layer has these values, is near to what it was, and runs as float64 does on them."""
    session = q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact"))
    generator = torch.Generator().manual_seed(0)
    with q4.open(path) as checkpoint:
        assert {*checkpoint} == {*layers}
        for name, dense in layers.items():
            weight = checkpoint[name]
            value = q4.dequantize(weight, torch.float32)
            assert torch.equal(value, values[name]), name
            assert float((value - dense).norm() / dense.norm()) < most, name
            x = torch.randn(5, dense.shape[1], generator=generator)
            exact = x.double() @ value.double().T
            with torch.no_grad():
                found = session.linear(weight).to(torch.float32)(x)
            assert float((found.double() - exact).norm() / exact.norm()) < 1e-6, name


@pytest.mark.parametrize("target", WRITTEN)
def test_layers_are_written_read_and_run(target: str, layers: Layers, tmp_path: Path) -> None:
    """Quantised by our own rule, with blocks that divide K."""
    dialect, form = target.partition(" ")[0], WRITTEN[target]
    block = {"int4": 64, "q4_1": 64 if dialect == "mlx" else 32}.get(form)
    weights = {name: q4.quantize(dense, form, block_size=block) for name, dense in layers.items()}
    path = tmp_path / ("model.gguf" if dialect == "gguf" else "model.safetensors")
    if dialect != "gguf":
        path = tmp_path
    q4.save_checkpoint(path, weights, dialect=dialect)
    values = {name: q4.dequantize(weight, torch.float32) for name, weight in weights.items()}
    _check(path, layers, values, 0.02 if form == "q8_0" else 0.16)


def test_act_order_is_read_and_run(layers: Layers, tmp_path: Path) -> None:
    """GPTQ's codes in groups of scattered columns, packed here in numpy."""
    random = np.random.default_rng(0)
    tensors: Layers = {}
    values: Layers = {}
    for name, dense in layers.items():
        n, k = dense.shape
        groups = random.permutation(np.arange(k) // _GROUP)
        order = np.argsort(groups, kind="stable")
        blocks = dense.numpy()[:, order].reshape(n, -1, _GROUP)
        low, high = np.minimum(blocks.min(2), 0), np.maximum(blocks.max(2), 0)
        scale = ((high - low) / 15).astype(np.float16)
        zero = np.clip(np.rint(-low / scale.astype(np.float32)), 0, 15).astype(np.int64)
        each = scale.astype(np.float32)[:, groups]
        codes = np.clip(np.rint(dense.numpy() / each) + zero[:, groups], 0, 15).astype(np.int64)
        values[name] = torch.from_numpy((codes - zero[:, groups]).astype(np.float32) * each)
        tensors |= {
            f"{name}.qweight": _words(codes.T),
            f"{name}.qzeros": _words(zero).T.contiguous(),
            f"{name}.scales": torch.from_numpy(scale.T.copy()),
            f"{name}.g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(tensors, path)
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": true,'
        ' "checkpoint_format": "gptq_v2"}}',
        encoding="utf-8",
    )
    _check(path, layers, values, 0.12)


def _words(codes: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return int32 words of eight codes down the rows, the first one lowest."""
    places = codes.reshape(-1, 8, codes.shape[1]) << (4 * np.arange(8)[None, :, None])
    return torch.from_numpy(places.sum(1).astype(np.uint32).view(np.int32).copy())
