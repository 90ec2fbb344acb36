"""200 generated layers of each dialect: found by keys and config, read bit for bit, written as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from cases import BUILDERS, FP8, Layer

import q4core as q4
from q4core.plugin_api import find_dialect

if TYPE_CHECKING:
    from pathlib import Path

EACH, STEPS = 20, 10


def _is_same(found: torch.Tensor, value: Any) -> bool:
    return bool(np.array_equal(found.to(torch.float32).numpy(), value, equal_nan=True))


def _check(layer: Layer) -> None:
    schema = q4.detect_or_fail(layer.tensors, config=layer.config)
    found = schema.layers["proj"]
    assert (found.dialect, list(schema.layers)) == (layer.dialect, ["proj"])
    assert set(schema.dense) <= {"proj.bias"}
    bare = {key: item.to("meta") for key, item in layer.tensors.items()}
    header = q4.detect(bare, config=layer.config)
    assert header is not None
    assert header.layers["proj"].dialect == layer.dialect
    assert q4.validate(header, bare, config=layer.config) == ()
    dialect = find_dialect(layer.dialect, q4.dialects())
    weight = dialect.read(found, layer.tensors.__getitem__)
    assert found.shape in {weight.shape, None}
    assert _is_same(q4.dequantize(weight, torch.float32), layer.value)
    if not layer.is_written:
        with pytest.raises(q4.DialectError):
            dialect.write("proj", weight)
        return
    written = dialect.write("proj", weight).tensors
    wanted = {key: item for key, item in layer.tensors.items() if key != "proj.bias"}
    assert written.keys() == wanted.keys()
    for key, item in wanted.items():
        assert (written[key].dtype, written[key].shape) == (item.dtype, item.shape), key
        assert torch.equal(written[key].reshape(-1).clone().view(torch.uint8), item.reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("dialect", BUILDERS)
def test_layer_is_read_and_written_bit_for_bit(dialect: str, step: int) -> None:
    """Values are the formula's, from the keys that the config names; the same bytes are written again."""
    for seed in range(step * EACH, (step + 1) * EACH):
        _check(BUILDERS[dialect](seed))


@pytest.mark.parametrize("step", range(STEPS))
def test_fp8_is_a_dense_tensor_rounded_once(step: int) -> None:
    """FP8 with any of its scales is a dense tensor in bfloat16: the float32 product, rounded once."""
    for seed in range(step * EACH, (step + 1) * EACH):
        layer = FP8(seed)
        schema = q4.detect(layer.tensors)
        assert schema is not None
        assert (dict(schema.layers), list(schema.decoded)) == ({}, ["proj.weight"])
        assert q4.validate(schema, layer.tensors) == ()
        assert set(schema.dense) <= {"proj.weight", "proj.bias"}
        found = schema.decoded["proj.weight"]
        decoder = next(item for item in q4.dialects() if item.name == found.dialect)
        dense = decoder.read_dense(found, layer.tensors.__getitem__)
        assert torch.equal(dense, torch.from_numpy(layer.value).to(torch.bfloat16))


def test_mixed_file_counts_what_it_decodes(tmp_path: Path) -> None:
    """Next to 4-bit layers, FP8 is dense, with its stored bytes in the schema; nothing is decoded by opening."""
    import safetensors.torch  # noqa: PLC0415  # a file that no writer of q4core makes

    four, eight = BUILDERS["modelopt-mxfp4"](3), FP8(3)
    tensors = {key.replace("proj", "mlp"): item for key, item in four.tensors.items()}
    tensors |= {key.replace("proj", "attention"): item for key, item in eight.tensors.items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with q4.open(tmp_path / "model.safetensors") as checkpoint:
        assert list(checkpoint) == ["mlp"]
        info = checkpoint.dense.infos["attention.weight"]
        assert (info.dtype, info.shape) == (torch.bfloat16, eight.value.shape)
        parts = [item for key, item in eight.tensors.items() if not key.endswith("bias")]
        assert checkpoint.schema.decoded["attention.weight"].nbytes == sum(item.nbytes for item in parts)
        value = torch.from_numpy(eight.value).to(torch.bfloat16)
        assert torch.equal(checkpoint.dense["attention.weight"], value)
