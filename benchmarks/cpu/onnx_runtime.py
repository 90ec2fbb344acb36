"""ONNX Runtime's ``MatMulNBits`` with int8 compute (accuracy level 4) and prepacked weights."""

from __future__ import annotations

import functools
import importlib
import re
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from benchmarks.candidate import PEER, Calls, Candidate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchmarks.problem import Problem

__all__ = ["LIBRARY", "candidates"]

LIBRARY = "onnxruntime"
_FORMATS = ("int4 g32", "int4 g128", "int8 g32")
_TYPE = re.compile(r"int(4|8) g(\d+)( zero)?")
_INT8_COMPUTE = 4
_MANY_ROWS = 64
_OPSET, _IR = 17, 10


def candidates(problem: Problem, types: Iterable[str] = _FORMATS) -> list[Candidate]:
    """Return one candidate for each width and block size, without and with zero points."""
    onnx = importlib.import_module("onnx")
    runtime = importlib.import_module("onnxruntime")
    return [_candidate(problem, name, onnx, runtime) for name in types if _TYPE.fullmatch(name)]


@attrs.frozen(eq=False)
class _Weight:
    """Codes [N, blocks, bytes], scales [N × blocks] and zero points, or None, and what they stand for."""

    codes: np.ndarray[Any, Any]
    scales: np.ndarray[Any, Any]
    zeros: np.ndarray[Any, Any] | None
    reference: torch.Tensor
    bits: int
    block: int

    @classmethod
    def of(cls, problem: Problem, name: str) -> _Weight:
        found = _TYPE.fullmatch(name)
        assert found is not None
        bits, block, has_zero = int(found[1]), int(found[2]), found[3] is not None
        half = 1 << (bits - 1)
        grouped = problem.pattern.view(-1, problem.in_features // block, block)
        if has_zero:
            low = grouped.amin(-1, keepdim=True)
            scale = (grouped.amax(-1, keepdim=True) - low) / (2 * half - 1)
            zero = (-low / scale).round().clamp(0, 2 * half - 1)
        else:
            scale = grouped.abs().amax(-1, keepdim=True) / (half - 1)
            zero = torch.full_like(scale, half)
        codes = (grouped / scale + zero).round().clamp(0, 2 * half - 1)
        reference = ((codes - zero).double() * scale.double()).view(problem.pattern.shape)
        return cls(
            problem.tiled(_bytes(codes, bits)).numpy(),
            problem.tiled(scale[..., 0]).reshape(-1).numpy(),
            problem.tiled(_bytes(zero[..., 0], bits)).reshape(-1).numpy() if has_zero else None,
            reference,
            bits,
            block,
        )


def _bytes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    stored = codes.to(torch.uint8)
    return stored if bits == 8 else stored[..., 0::2] | (stored[..., 1::2] << 4)  # noqa: PLR2004  # or 4


def _model(problem: Problem, weight: _Weight, copies: int, onnx: Any) -> bytes:
    """Return a graph of one product for each copy of the weight, all of the same x."""
    numpy_helper = importlib.import_module("onnx.numpy_helper")
    helper = onnx.helper
    initializers, nodes, outputs = [], [], []
    for copy in range(copies):
        # The runtime keeps one prepacked buffer for equal constants, which then stays in the cache: no two are equal.
        initializers += [
            numpy_helper.from_array(np.roll(weight.codes, copy, axis=0), f"codes{copy}"),
            numpy_helper.from_array(weight.scales, f"scales{copy}"),
        ]
        inputs = ["x", f"codes{copy}", f"scales{copy}"]
        if weight.zeros is not None:
            initializers.append(numpy_helper.from_array(weight.zeros, f"zeros{copy}"))
            inputs.append(f"zeros{copy}")
        nodes.append(
            helper.make_node(
                "MatMulNBits",
                inputs,
                [f"y{copy}"],
                domain="com.microsoft",
                K=problem.in_features,
                N=problem.out_features,
                bits=weight.bits,
                block_size=weight.block,
                accuracy_level=_INT8_COMPUTE,
            )
        )
        outputs.append(helper.make_tensor_value_info(f"y{copy}", onnx.TensorProto.FLOAT, ["M", problem.out_features]))
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["M", problem.in_features])
    graph = helper.make_graph(nodes, "products", [x], outputs, initializers)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
    serialized: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=_IR).SerializeToString()
    return serialized


def _candidate(problem: Problem, name: str, onnx: Any, runtime: Any) -> Candidate:
    weight = _Weight.of(problem, name)
    size = sum(part.nbytes for part in (weight.codes, weight.scales, weight.zeros) if part is not None)
    copies = problem.copies(size)

    @functools.cache
    def session(count: int, threads: int) -> Any:
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Nothing can be fused here, and equal copies of a weight must not become one.
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        model = _model(problem, weight, count, onnx)
        return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def make(x: torch.Tensor, threads: int, resident: bool) -> Calls:  # noqa: FBT001  # the contract of make
        # A run computes the whole graph, and sessions can't share threads: one graph holds every copy. Where a product
        # takes milliseconds, one copy does: each sample finds it evicted.
        count = 1 if resident or x.shape[0] >= _MANY_ROWS else copies
        made = session(count, threads)
        outputs = [np.empty((x.shape[0], problem.out_features), dtype=np.float32) for _ in range(count)]
        return Calls([_bound(made, x.numpy(), outputs, runtime)], lambda: torch.from_numpy(outputs[0]), count)

    return Candidate(
        name=f"onnxruntime {name}",
        library=LIBRARY,
        role=PEER,
        format=name,
        precision="int8",
        weight_bytes=size,
        make=make,
        reference=weight.reference,
    )


def _bound(
    session: Any, x: np.ndarray[Any, Any], outputs: list[np.ndarray[Any, Any]], runtime: Any
) -> Callable[[], object]:
    """Return a call that reads x and writes the outputs in place."""
    binding = session.io_binding()
    given = runtime.OrtValue.ortvalue_from_numpy(x)
    binding.bind_ortvalue_input("x", given)
    for index, output in enumerate(outputs):
        binding.bind_output(f"y{index}", "cpu", 0, np.float32, output.shape, output.ctypes.data)
    return functools.partial(session.run_with_iobinding, binding)
