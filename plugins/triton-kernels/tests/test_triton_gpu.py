"""On a device: what neither the interpreter nor the compiled text can show."""

from __future__ import annotations

import attrs
import pytest
import torch
import triton
import triton.language as tl
from triton_programs import RECIPES

from q4_conformance import exact_input_gradient, exact_linear, judge
from q4_triton_kernels import WeightOnlyBackend
from q4_triton_kernels.kernels.decode import look_up, table_text
from q4_triton_kernels.tables import entries_of, values_of
from q4core import (
    Precision,
    PrepareContext,
    Request,
    ScaleKind,
    Session,
    SessionConfig,
    WeightSpec,
    grid_activations,
)

pytestmark = pytest.mark.gpu


class Every(WeightOnlyBackend):
    """A backend of every format that the kernels know."""

    name = "every"
    formats = frozenset({"nf4", "fp4", "q4_0", "q4_1", "int4", "nvfp4", "mxfp4"})
    scale_kinds = frozenset({ScaleKind.E8M0, ScaleKind.E4M3_MUL})


@triton.jit  # type: ignore[untyped-decorator]
def _codes(code_ptr, table_ptr, out_ptr, SIZE: tl.constexpr, TABLE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803  # Triton's
    place = tl.arange(0, SIZE)
    tl.store(out_ptr + place, look_up(tl.load(code_ptr + place), table_ptr, TABLE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_shuffle_finds_each_code(dtype: torch.dtype) -> None:
    """The assembly and its twin find the same entry for all 16 codes, whatever is above a code's four bits."""
    entries = entries_of(values_of(WeightSpec.of(RECIPES["nf4"].build())), dtype)
    table = torch.tensor(entries, dtype=torch.int32, device="cuda")
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    for text in (table_text(entries), ""):
        out = torch.zeros(256, dtype=torch.int32, device="cuda")
        _codes[(1,)](codes, table, out, SIZE=256, TABLE=text)
        assert torch.equal(out, table[(codes & 15).long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_every_path_computes(name: str, dtype: torch.dtype) -> None:
    """Each path is within the float32 bound for rows in each tile's range, and gives the same bits twice."""
    weight = RECIPES[name].build().to("cuda")
    backend = Every()
    request = Request.for_weight(weight, dtype=dtype)
    prepared = backend.prepare(weight, request, PrepareContext("cuda"))
    precision = Precision.W4A32 if dtype is torch.float32 else Precision.W4A16
    bias = torch.linspace(-1, 1, weight.out_features).to(dtype)
    for path in backend.check(request).paths:
        low, high = path.m
        for rows in {low, low + 1, min(high or 300, 17), min(high or 300, 65), high or low + 300}:
            if not path.covers(rows):
                continue
            x = grid_activations(rows, weight.in_features, precision, dtype=dtype, seed=rows) / 16
            outs = [torch.empty((rows, weight.out_features), dtype=dtype, device="cuda") for _ in range(2)]
            for out in outs:
                backend.linear(prepared, x.cuda(), out, bias=bias.cuda(), path=path.name)
            verdict = judge(outs[0].cpu(), exact_linear(weight.to("cpu"), x, bias), out_dtype=dtype)
            assert verdict.passed, (path.name, rows, verdict)
            assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_every_gradient_computes(name: str, dtype: torch.dtype) -> None:
    """The input gradient is within the float32 bound for rows in each tile's range, and gives the same bits twice."""
    weight = RECIPES[name].build().to("cuda")
    backend = Every()
    request = Request.for_weight(weight, dtype=dtype, gradients=True)
    prepared = backend.prepare(weight, request, PrepareContext("cuda"))
    precision = Precision.W4A32 if dtype is torch.float32 else Precision.W4A16
    (path,) = backend.check(attrs.evolve(request, op="input_gradient")).paths
    for rows in (1, 7, 16, 17, 64, 65, 300):
        grad = grid_activations(rows, weight.out_features, precision, dtype=dtype, seed=rows) / 16
        outs = [torch.empty((rows, weight.in_features), dtype=dtype, device="cuda") for _ in range(2)]
        for out in outs:
            backend.input_gradient(prepared, grad.cuda(), out, path=path.name)
        verdict = judge(outs[0].cpu(), exact_input_gradient(weight.to("cpu"), grad), out_dtype=dtype)
        assert verdict.passed, (rows, verdict)
        assert torch.equal(outs[0], outs[1])


def test_a_graph_captures_each_path() -> None:
    """A CUDA graph replays every path on new activations: nothing in a forward waits for the device or compiles."""
    weight = RECIPES["nf4"].build().to("cuda")
    backend = Every()
    request = Request.for_weight(weight, dtype=torch.bfloat16)
    prepared = backend.prepare(weight, request, PrepareContext("cuda"))
    for path in backend.check(request).paths:
        rows = path.m[0]
        x = torch.zeros((rows, weight.in_features), dtype=torch.bfloat16, device="cuda")
        out = torch.empty((rows, weight.out_features), dtype=torch.bfloat16, device="cuda")
        backend.linear(prepared, x, out, bias=None, path=path.name)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            backend.linear(prepared, x, out, bias=None, path=path.name)
        fresh = grid_activations(rows, weight.in_features, Precision.W4A16, dtype=torch.bfloat16) / 16
        x.copy_(fresh)
        graph.replay()
        assert judge(out.cpu(), exact_linear(weight.to("cpu"), fresh), out_dtype=torch.bfloat16).passed


@pytest.mark.parametrize("name", ["nf4", "nvfp4"])
def test_a_graph_captures_an_input_gradient(name: str) -> None:
    """A CUDA graph replays input gradients, in each tile's rows and with cut sums, on new gradients to y."""
    weight = RECIPES[name].build().to("cuda")
    backend = Every()
    request = Request.for_weight(weight, dtype=torch.bfloat16, gradients=True)
    prepared = backend.prepare(weight, request, PrepareContext("cuda"))
    (path,) = backend.check(attrs.evolve(request, op="input_gradient")).paths
    for rows in (1, 17, 300):
        grad = torch.zeros((rows, weight.out_features), dtype=torch.bfloat16, device="cuda")
        out = torch.empty((rows, weight.in_features), dtype=torch.bfloat16, device="cuda")
        backend.input_gradient(prepared, grad, out, path=path.name)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            backend.input_gradient(prepared, grad, out, path=path.name)
        fresh = grid_activations(rows, weight.out_features, Precision.W4A16, dtype=torch.bfloat16) / 16
        grad.copy_(fresh)
        out.fill_(torch.nan)
        graph.replay()
        verdict = judge(out.cpu(), exact_input_gradient(weight.to("cpu"), fresh), out_dtype=torch.bfloat16)
        assert verdict.passed, (rows, verdict)


def test_a_graph_captures_a_training_step() -> None:
    """Forward and backward of a frozen layer, captured as one graph, replay on new numbers."""
    weight = RECIPES["nf4"].build()
    layer = Session(SessionConfig(device="cuda", gradients=True, compute_dtype=torch.bfloat16)).linear(weight)
    assert layer.diagnostics().gradients
    x = torch.zeros((17, weight.in_features), dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad = torch.zeros((17, weight.out_features), dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(layer(x), x, grad)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = torch.autograd.grad(layer(x), x, grad)
    fresh = grid_activations(17, weight.out_features, Precision.W4A16, dtype=torch.bfloat16) / 16
    grad.copy_(fresh)
    graph.replay()
    assert judge(out.cpu(), exact_input_gradient(weight, fresh), out_dtype=torch.bfloat16).passed
