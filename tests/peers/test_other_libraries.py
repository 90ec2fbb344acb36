"""What other libraries pass is what the page says, and what they fail is shown again without the kit."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from other_libraries import SUBJECTS, Subject
from other_page import summary_of
from other_verdicts import VERDICTS, cases_of, facts, judge, kernels

from benchmarks.int4pack import int4pack_operands
from q4_conformance import check_linear
from q4_conformance_faults import ToyKernel, function_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = pytest.mark.peer

STORED: dict[str, Any] = json.loads(VERDICTS.read_text(encoding="utf-8"))
HAS_BF16_KERNEL = kernels()["avx512_bf16"]
OFTEN = {("bitsandbytes `matmul_4bit`", "nf4"), ("torchao `Int4OpaqueTensor`, weight only", "int4")}
"""What every run judges: a codebook and integers. Below, it sees each library's failures without the kit."""
EVERY = [
    pytest.param(
        subject, name, id=f"{subject.name}-{name}", marks=[] if (subject.name, name) in OFTEN else [pytest.mark.soak]
    )
    for subject in SUBJECTS
    for name in subject.formats
]


def test_versions_are_those_of_the_page() -> None:
    """The libraries that are compared here are those that the page names."""
    assert facts()["versions"] == STORED["facts"]["versions"]


@pytest.mark.parametrize(("subject", "name"), EVERY)
def test_verdicts_are_those_of_the_page(subject: Subject, name: str) -> None:
    """As many cases as the page says end each way, for each reason; for another CPU's kernels each has an outcome."""
    results = judge(subject, name)
    assert [result.case for result in results] == [case.id for case in cases_of(subject, name)]
    if subject.is_by_cpu and kernels() != STORED["facts"]["kernels"]:
        assert {result.outcome.value for result in results} <= {"pass", "fail", "crash", "not_declared"}
    else:
        assert summary_of(subject.name, results) == STORED["verdicts"][subject.name][name]


@pytest.mark.parametrize(("subject", "name"), EVERY)
def test_what_a_library_is_not_asked_is_no_accident(subject: Subject, name: str) -> None:
    """A right function under a library's claims passes all that is declared: no claim makes a case fail."""
    claims = {**subject.claims, "has_gradients": False}
    assert check_linear(function_of(ToyKernel()), name, cases=cases_of(subject, name), **claims).passed


# -- the failures, without the kit


def _dense(n: int = 64, k: int = 256) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(1))


def _linear4bit(peer: Callable[[str], ModuleType], dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """Return a layer as bitsandbytes' users make one, and its weight in float64."""
    library, dense = peer("bitsandbytes"), _dense()
    layer = library.nn.Linear4bit(256, 64, bias=False, compute_dtype=dtype, compress_statistics=False, quant_type="nf4")
    layer.weight = library.nn.Params4bit(dense, requires_grad=False, compress_statistics=False, quant_type="nf4")
    packed, state = library.functional.quantize_4bit(dense, blocksize=64, quant_type="nf4")
    return layer.to("cpu").eval(), library.functional.dequantize_4bit(packed, state).double()


def _error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_linear4bit_computes_in_bfloat16(dtype: torch.dtype, peer: Callable[[str], ModuleType]) -> None:
    """With AVX512-BF16 its error is bfloat16's in every compute_dtype; in training mode, and elsewhere, it is not."""
    layer, dense = _linear4bit(peer, dtype)
    x = _dense(4).to(dtype)
    exact = x.double() @ dense.T
    with torch.no_grad():
        training = _error(layer.train()(x), exact)
        inference = _error(layer.eval()(x), exact)
    assert training < 1e-3
    assert (inference > 1e-3) is HAS_BF16_KERNEL


def test_linear4bit_reads_a_transposed_input_wrongly(peer: Callable[[str], ModuleType]) -> None:
    """With AVX512-BF16 an x whose elements do not lie side by side gives other numbers than its contiguous copy."""
    layer, dense = _linear4bit(peer, torch.bfloat16)
    x = _dense(4).to(torch.bfloat16)
    exact = x.double() @ dense.T
    with torch.no_grad():
        assert _error(layer(x), exact) < 0.01
        assert (_error(layer(x.T.contiguous().T), exact) > 0.5) is HAS_BF16_KERNEL


def test_linear4bit_ends_the_process_for_no_rows() -> None:
    """With AVX512-BF16 an empty x ends the process by a signal; elsewhere the result is empty."""
    text = (
        "import bitsandbytes as b, torch\n"
        "layer = b.nn.Linear4bit(256, 64, bias=False, compute_dtype=torch.bfloat16, quant_type='nf4').eval()\n"
        "layer.weight = b.nn.Params4bit(torch.ones(64, 256), requires_grad=False, quant_type='nf4').to('cpu')\n"
        "with torch.no_grad():\n"
        "    assert layer(torch.ones(2, 256).bfloat16()).shape == (2, 64)\n"
        "    print('before', flush=True)\n"
        "    assert layer(torch.ones(0, 256).bfloat16()).shape == (0, 64)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert "before" in done.stdout, done.stderr
    assert (done.returncode < 0) is HAS_BF16_KERNEL


def test_int4_tensor_rounds_before_the_bias(peer: Callable[[str], ModuleType]) -> None:
    """In bfloat16 the result with a bias is the rounded product, plus the bias, rounded again."""
    kind = peer("torchao.prototype.quantization.int4.int4_opaque_tensor").Int4OpaqueTensor
    weight = kind.from_hp(_dense(48, 128).bfloat16(), [1, 32])
    x, bias = _dense(200, 128).bfloat16(), _dense(1, 48)[0].bfloat16()
    y = torch.nn.functional.linear(x, weight, bias)
    wide = kind(weight.qdata, weight.scale_and_zero.float(), [1, 32], torch.Size((48, 128)))
    product = torch.nn.functional.linear(x.float(), wide)
    assert torch.equal(y, (product.bfloat16().float() + bias.float()).bfloat16())
    assert not torch.equal(y, (product + bias.float()).bfloat16())


def test_int4_operands_say_what_torch_computes() -> None:
    """The operands that the adapters and the benchmark share stand for (code - 8) * scale + added."""
    codes = torch.randint(0, 16, (32, 64), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    scale, added = _dense(32, 2).abs(), _dense(2, 32).T
    packed, numbers = int4pack_operands(codes, scale, added, torch.float32)
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(64), packed, 32, numbers)
    exact = (codes.double() - 8) * scale.double().repeat_interleave(32, 1) + added.double().repeat_interleave(32, 1)
    assert torch.allclose(y.T.double(), exact, rtol=1e-6, atol=1e-6)
