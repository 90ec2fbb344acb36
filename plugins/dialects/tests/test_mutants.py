"""Damaged layers: each mutant is an error that names its key, is refused, or has the value of an undamaged reading."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from cases import BUILDERS, FP8, Layer

import q4core as q4
from q4core.plugin_api import find_dialect

if TYPE_CHECKING:
    from collections.abc import Iterator

ALL = {**BUILDERS, "fp8": FP8}
SEEDS = 8
DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float8_e4m3fn)
Tensors = dict[str, torch.Tensor]


def _mutants(layer: Layer, seed: int) -> Iterator[tuple[str, Tensors, dict[str, Any]]]:
    random = np.random.default_rng(seed)
    tensors, config = layer.tensors, layer.config
    for key, item in tensors.items():
        if key.endswith("bias"):
            continue
        left = {name: other for name, other in tensors.items() if name != key}
        yield f"{key} dropped", left, config
        yield f"{key} renamed", {**left, f"{key}_old": item}, config
        for dtype in DTYPES:
            if dtype != item.dtype:
                yield f"{key} as {dtype}", {**left, key: torch.zeros(item.shape, dtype=dtype)}, config
        for what, other in (("longer", (*item.shape, 1)), ("wider", (*item.shape[:-1], 2 * sum(item.shape[-1:]) + 1))):
            yield f"{key} {what}", {**left, key: torch.zeros(other, dtype=item.dtype)}, config
        yield f"{key} empty", {**left, key: item.reshape(-1)[:0]}, config
        if item.dim():
            yield f"{key} shorter", {**left, key: item[: len(item) // 2]}, config
            yield f"{key} flat", {**left, key: item.reshape(-1)}, config
        if item.is_floating_point() and item.dtype.itemsize > 1 and item.numel():
            broken = item.clone()
            broken.reshape(-1)[int(random.integers(item.numel()))] = float("nan")
            yield f"{key} with NaN", {**left, key: broken}, config
    yield "a scale of tomorrow", {**tensors, "proj.weight_scale_of_tomorrow": torch.ones(3)}, config
    for method in (
        "gptq",
        "awq",
        "quark",
        "modelopt",
        "compressed-tensors",
        "auto-round",
        "gemma",
        "bitsandbytes",
        7,
        None,
    ):
        yield f"config of {method}", tensors, {"quantization_config": {"quant_method": method}}
    empty: dict[str, Any] = {"weights": [], "format": {}}
    odds: list[Any] = [{}, [], "int4", None, {"config_groups": 3}, {"config_groups": {"g": empty}}]
    for odd in odds:
        yield f"config {odd}", tensors, {"quantization_config": odd}


def _judge(what: str, layer: Layer, tensors: Tensors, config: dict[str, Any]) -> None:
    try:
        schema = q4.detect(tensors, config=config)
    except q4.Q4Error:
        return
    if schema is None or "proj" not in schema.layers:
        packed = {key for key in tensors if key.split(".")[1] in {"weight_packed", "embedding_quantized"}}
        is_dense = schema is not None and packed & set(schema.dense) and len(tensors) > 1
        assert not is_dense or "dropped" in what or "as torch.float" in what or "empty" in what, what
        return
    if q4.validate(schema, tensors, config=config):
        return
    found = schema.layers["proj"]
    try:
        weight = find_dialect(found.dialect, q4.dialects()).read(found, tensors.__getitem__)
        weight.check_values()
        value = q4.dequantize(weight, torch.float32)
    except q4.Q4Error:
        return
    changed = {key for key in {*tensors, *layer.tensors} if tensors.get(key) is not layer.tensors.get(key)}
    if not changed and found.dialect in {layer.dialect, *_TWINS.get(layer.dialect, ())}:
        assert np.array_equal(value.numpy(), layer.value), what


_TWINS = {"modelopt-mxfp4": ("quark-mxfp4",), "quark-mxfp4": ("modelopt-mxfp4",)}


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("dialect", ALL)
def test_mutants_raise_typed_errors_or_are_read_right(dialect: str, seed: int) -> None:
    """No mutant crashes, hangs, or changes what an undamaged layer means."""
    layer = ALL[dialect](seed)
    for what, tensors, config in _mutants(layer, zlib.crc32(f"{dialect} {seed}".encode())):
        _judge(f"{dialect} {seed}: {what}", layer, tensors, config)


@pytest.mark.parametrize(
    ("groups", "value"),
    [
        (torch.arange(64, dtype=torch.int32) // 16 + 1, "4"),
        (torch.full((64,), -2, dtype=torch.int32), "-2"),
        (torch.zeros(64, dtype=torch.int32), "64"),
        (torch.full((64,), 2**31 - 1, dtype=torch.int32), "2147483647"),
    ],
    ids=["beyond", "negative", "one group", "huge"],
)
def test_order_out_of_range_is_named(groups: torch.Tensor, value: str) -> None:
    """An index of groups that are not there, or of groups of several sizes, is an error under its key."""
    tensors = {
        "proj.weight_packed": torch.zeros(8, 8, dtype=torch.int32),
        "proj.weight_scale": torch.ones(8, 4),
        "proj.weight_shape": torch.tensor([8, 64]),
        "proj.weight_g_idx": groups,
    }
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(tensors)
    ((code, key, found),) = [(item.code, item.key, str(item.value)) for item in caught.value.problems]
    assert (code, key.partition("[")[0], found.partition(" ")[0]) == ("value", "proj.weight_g_idx", value)
