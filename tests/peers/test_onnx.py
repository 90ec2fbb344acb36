"""ONNX Runtime and the package ``onnx``: what they write is read, and the values are those that they compute with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import q4core as q4
from tests.support.onnx_models import MICROSOFT, Packed, packed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.peer
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def onnx(peer: Callable[[str], ModuleType]) -> ModuleType:
    """Return the package ``onnx``."""
    return peer("onnx")


@pytest.fixture(scope="module")
def runtime(peer: Callable[[str], ModuleType]) -> ModuleType:
    """Return the package ``onnxruntime``."""
    return peer("onnxruntime")


def _save(onnx: ModuleType, path: Path, matrix: Packed, operator: str = "MatMulNBits", **external: Any) -> Path:
    """Write a model of one operator, made by ``onnx.helper``."""
    helper = onnx.helper
    stem, is_product = "layers.0.proj.MatMul.weight", operator == "MatMulNBits"
    kind = helper.np_dtype_to_tensor_dtype(matrix.parts["_scales"].dtype)
    names, numbers, given, sizes = matrix.names(stem), {**matrix.numbers}, kind, [None, matrix.numbers["K"]]
    if not is_product:
        names, given, sizes = (names[1], "x", *names[2:]), onnx.TensorProto.INT64, [None]
        numbers = {"bits": numbers["bits"], "block_size": numbers["block_size"], "quantize_axis": 1}
    graph = helper.make_graph(
        [helper.make_node(operator, names, ["y"], "/layers/proj", domain=MICROSOFT, **numbers)],
        "main",
        [helper.make_tensor_value_info("x", given, sizes)],
        [helper.make_tensor_value_info("y", kind, [None, None])],
        [onnx.numpy_helper.from_array(array, stem + part) for part, array in matrix.parts.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path, **external)
    return path


def _run(runtime: ModuleType, path: Path, x: Array) -> Array:
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    return np.asarray(y)


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("zero", ["none", "bytes"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("seed", range(6))
def test_values_are_those_that_onnx_runtime_multiplies(
    onnx: ModuleType, runtime: ModuleType, tmp_path: Path, seed: int, bits: int, zero: str, kind: str
) -> None:
    """The product with the identity shows each value: 1 × w and sums of zeros are exact."""
    matrix = packed(seed, bits=bits, zero=zero, kind=kind, modest=True)
    path = _save(onnx, tmp_path / "model.onnx", matrix)
    weight = q4.open(path)["layers.0.proj"]
    found = q4.dequantize(weight, torch.float32).numpy().astype(kind)
    theirs = _run(runtime, path, np.eye(matrix.numbers["K"], dtype=kind)).T
    assert np.array_equal(found, theirs)


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("seed", range(6))
def test_values_of_float_zero_points_are_within_its_roundings(
    onnx: ModuleType, runtime: ModuleType, tmp_path: Path, seed: int, kind: str
) -> None:
    """ONNX Runtime computes q × s − z × s there, of 4 bits alone: three roundings of at most (q + z) × s, and one."""
    matrix = packed(seed, zero="floats", kind=kind, modest=True)
    path = _save(onnx, tmp_path / "model.onnx", matrix)
    weight = q4.open(path)["layers.0.proj"]
    found = q4.dequantize(weight, torch.float32).numpy()
    theirs = _run(runtime, path, np.eye(matrix.numbers["K"], dtype=kind)).T.astype(np.float32)
    scale = np.repeat(np.abs(matrix.parts["_scales"].astype(np.float32)), matrix.numbers["block_size"], axis=1)
    terms = 32 * scale[:, : matrix.numbers["K"]]
    assert (np.abs(found - theirs) <= 3 * np.finfo(np.float32).eps * terms + np.finfo(kind).eps * np.abs(found)).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_product_is_within_the_bound_of_float32(
    onnx: ModuleType, runtime: ModuleType, tmp_path: Path, seed: int, bits: int
) -> None:
    """Both products differ from float64's by at most K + 2 roundings of the sum of absolute terms."""
    matrix = packed(seed, bits=bits, modest=True)
    path = _save(onnx, tmp_path / "model.onnx", matrix)
    x = np.random.default_rng(seed).standard_normal((5, matrix.numbers["K"])).astype(np.float32)
    weight = q4.open(path)["layers.0.proj"]
    exact = x.astype(np.float64) @ matrix.value.astype(np.float64).T
    terms = np.abs(x).astype(np.float64) @ np.abs(matrix.value).astype(np.float64).T
    bound = (matrix.numbers["K"] + 2) * np.finfo(np.float32).eps * terms
    ours = q4.linear(torch.from_numpy(x), weight).numpy()
    assert (np.abs(_run(runtime, path, x) - exact) <= bound).all()
    assert (np.abs(ours - exact) <= bound).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_embedding_is_what_onnx_runtime_gathers(
    onnx: ModuleType, runtime: ModuleType, tmp_path: Path, seed: int, bits: int
) -> None:
    """Rows of GatherBlockQuantized are the rows of the weight."""
    matrix = packed(seed, bits=bits, modest=True)
    rows, width = matrix.numbers["N"], matrix.parts["_Q4"].shape[1] * matrix.numbers["block_size"]
    matrix.parts["_Q4"] = matrix.parts["_Q4"].reshape(rows, -1)
    path = _save(onnx, tmp_path / "model.onnx", matrix, "GatherBlockQuantized")
    weight = q4.open(path)["layers.0.proj"]
    assert weight.shape == (rows, width)
    assert np.array_equal(q4.dequantize(weight, torch.float32).numpy(), _run(runtime, path, np.arange(rows)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_matrix_that_onnx_runtime_quantised_is_read(
    onnx: ModuleType, runtime: ModuleType, tmp_path: Path, *, bits: int, symmetric: bool
) -> None:
    """Its own quantiser packs a matrix; external data, as its tools store large models, is read from the other file."""
    columns, rows, block = 160, 24, 32
    dense = np.random.default_rng(0).standard_normal((columns, rows)).astype(np.float32)
    blocks = columns // block
    codes = np.zeros((rows, blocks, block * bits // 8), np.uint8)
    scales = np.zeros(rows * blocks, np.float32)
    points = np.zeros(rows * -(-blocks * bits // 8), np.uint8)
    quantise = getattr(runtime.capi._pybind_state, f"quantize_matmul_{bits}bits")
    quantise(codes, dense, scales, points, block, rows, columns, symmetric)
    parts = {"_Q4": codes, "_scales": scales} | ({} if symmetric else {"_zero_points": points})
    numbers = {"K": columns, "N": rows, "bits": bits, "block_size": block}
    external = {"save_as_external_data": True, "location": "model.onnx_data", "size_threshold": 0}
    matrix = Packed(parts=parts, kinds={}, numbers=numbers, value=dense)
    path = _save(onnx, tmp_path / "model.onnx", matrix, **external)
    assert path.stat().st_size < (tmp_path / "model.onnx_data").stat().st_size
    weight = q4.open(path)["layers.0.proj"]
    values = q4.dequantize(weight, torch.float32).numpy()
    assert np.array_equal(values, _run(runtime, path, np.eye(columns, dtype=np.float32)).T)
    step = np.repeat(np.abs(scales).reshape(rows, blocks), block, axis=1)
    assert (np.abs(values - dense.T) <= step).all()


def test_every_dtype_of_the_package_is_the_same_dense_tensor(onnx: ModuleType, tmp_path: Path) -> None:
    """Raw or as single numbers, ``numpy_helper`` and the reader see the same elements."""
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    kinds = ("f4", "f8", "f2", "i4", "i8", "u2", "u4", "u8", "?")
    arrays = [(np.arange(6) % 4).astype(kind).reshape(2, 3) for kind in kinds]
    tensors = [numpy_helper.from_array(array, f"raw{array.dtype}") for array in arrays]
    tensors += [
        helper.make_tensor(f"typed{item.name[3:]}", item.data_type, item.dims, numpy_helper.to_array(item).flatten())
        for item in tensors
    ]
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph([], "main", [], [], tensors)), path)
    opened = q4.open(path)
    assert len(opened.dense) == len(tensors)
    for item in tensors:
        assert np.array_equal(opened.dense[item.name].numpy(), numpy_helper.to_array(item))
