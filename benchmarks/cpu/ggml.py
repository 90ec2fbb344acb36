"""ggml's ``mul_mat``, as llama.cpp runs it: plain, and repacked where there is such a kernel."""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import TYPE_CHECKING

import torch

from benchmarks.candidate import PEER, Calls, Candidate
from benchmarks.cpu.ggml_library import GgmlLibrary

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.problem import Problem

__all__ = ["LIBRARY", "candidates", "library"]

LIBRARY = "ggml"
_NUMBERS = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "MXFP4": 39,
    "NVFP4": 40,
}
_FORMATS = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "IQ4_NL", "MXFP4", "NVFP4")
_F32 = 0


@functools.cache
def library() -> GgmlLibrary:
    """Return ggml, loaded once; torch's OpenMP, which is loaded already, serves it too."""
    return GgmlLibrary()


class _Weights:
    """Copies of one weight in the memory of one buffer type."""

    def __init__(self, problem: Problem, type_: int, packed: bytes, kind: int, copies: int) -> None:
        ggml = library()
        self.context = ggml.context(copies)
        shape = (problem.in_features, problem.out_features)
        self.tensors = [ggml.ggml_new_tensor_2d(self.context, type_, *shape) for _ in range(copies)]
        self.buffer = ggml.allocate_weights(self.context, kind)
        for tensor in self.tensors:
            ggml.ggml_backend_tensor_set(tensor, packed, 0, len(packed))
        weakref.finalize(self, _free, ggml, self.context, self.buffer)


class _Products:
    """One graph of one product for each weight, all of the same x."""

    def __init__(self, weights: _Weights, x: torch.Tensor, threads: int, count: int) -> None:
        ggml = library()
        self.weights, self.rows = weights, x.shape[0]
        self.context = ggml.context(1 + 2 * count)
        given = ggml.ggml_new_tensor_2d(self.context, _F32, x.shape[1], x.shape[0])
        self.outputs, self.graphs = [], []
        for weight in weights.tensors[:count]:
            graph, output = ggml.ggml_new_graph(self.context), ggml.ggml_mul_mat(self.context, weight, given)
            ggml.ggml_build_forward_expand(graph, output)
            self.outputs.append(output)
            self.graphs.append(graph)
        backend = ggml.backend(threads)
        kind = ggml.ggml_backend_get_default_buffer_type(backend)
        self.buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(self.context, kind)
        ggml.ggml_backend_tensor_set(given, x.data_ptr(), 0, x.numel() * 4)
        self.turns = [functools.partial(ggml.ggml_backend_graph_compute, backend, graph) for graph in self.graphs]
        weakref.finalize(self, _free, ggml, self.context, self.buffer)

    def answer(self) -> torch.Tensor:
        """Return y of the first graph."""
        ggml = library()
        size = ggml.ggml_nbytes(self.outputs[0])
        memory = (ctypes.c_char * size).from_address(ggml.ggml_get_data(self.outputs[0]))
        return torch.frombuffer(bytearray(memory), dtype=torch.float32).view(self.rows, -1)


def _free(ggml: GgmlLibrary, context: int, buffer: int) -> None:
    ggml.ggml_backend_buffer_free(buffer)
    ggml.ggml_free(context)


def candidates(problem: Problem, types: Iterable[str] = _FORMATS) -> list[Candidate]:
    """Return each type of ggml's in the plain order, and repacked where llama.cpp would do so."""
    ggml = library()
    plain = ggml.ggml_backend_get_default_buffer_type(ggml.backend(1))
    found = []
    for name in types:
        if (type_ := _NUMBERS.get(name)) is None:
            continue
        pattern = problem.pattern.contiguous()
        packed = ggml.quantize(type_, pattern.shape[0], pattern.shape[1], pattern.data_ptr())
        decoded = ggml.dequantize(type_, packed, pattern.numel())
        reference = torch.frombuffer(decoded, dtype=torch.float32).double().view(pattern.shape)
        whole = packed.raw * problem.repeats
        found.append(_candidate(problem, name, whole, plain, reference))
        repacked = ggml.repacked_type(type_, problem.out_features, problem.in_features)
        if repacked is not None:
            found.append(_candidate(problem, name, whole, repacked, reference))
    return found


def _candidate(problem: Problem, name: str, packed: bytes, kind: int, reference: torch.Tensor) -> Candidate:
    ggml = library()
    weights = _Weights(problem, _NUMBERS[name], packed, kind, problem.copies(len(packed)))
    label = ggml.ggml_backend_buft_name(kind).decode().removeprefix("CPU").strip("_").lower()

    def make(x: torch.Tensor, threads: int, resident: bool) -> Calls:  # noqa: FBT001  # the contract of make
        products = _Products(weights, x.contiguous(), threads, 1 if resident else len(weights.tensors))
        return Calls(products.turns, products.answer)

    return Candidate(
        name=f"ggml {name} {label}".strip(),
        library=LIBRARY,
        role=PEER,
        format=name,
        precision="int8",
        weight_bytes=len(packed),
        make=make,
        reference=reference,
    )
