"""The GPU plugins' own choices on a pretended CUDA device: what serves by default (TC-16), and what the table asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest

from q4_conformance import Case, Outcome, run_case
from q4_conformance.contract.cases import cases_of
from q4_conformance.subjects.backend import BackendSubject
from q4_nf4_cuda import Nf4Cuda
from q4_nvfp4_native import Nvfp4Native
from q4_triton_kernels import ARCHITECTURES, Facts, WeightOnlyBackend
from q4_triton_kernels.plan import Plan
from q4core import BUILTIN_FORMATS, dequantize
from tests.support.pretended import DEVICE, pretended_cuda

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from q4core import Prepared

PLUGINS: dict[str, type[WeightOnlyBackend]] = {"nf4-cuda": Nf4Cuda, "nvfp4-native": Nvfp4Native}
SERVED = {name: tuple(sorted(plugin.formats & BUILTIN_FORMATS.keys())) for name, plugin in PLUGINS.items()}
PICKED = [
    (name, case) for name, formats in SERVED.items() for case in cases_of(formats, DEVICE) if case.contract == "TC-16"
]


def _facts(arch: int) -> Facts:
    return Facts(
        torch_cuda="13.0",
        is_cuda_available=True,
        driver=13000,
        triton="3.7.1",
        capability=lambda _: divmod(arch, 10),
        processors=lambda _: 100,
    )


def _computes(
    self: WeightOnlyBackend,
    prepared: Prepared,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    path: str,
) -> None:
    """Compute what the kernels would, from their own layout: there is no device to launch them on."""
    del path
    y = x.double() @ dequantize(self.export(prepared)).double().T
    out.copy_(y if bias is None else y + bias.double())


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend a device, and let what would be compiled and launched there be computed by the CPU."""
    monkeypatch.setattr(Plan, "load", lambda *_: None)
    for plugin in PLUGINS.values():
        monkeypatch.setattr(plugin, "linear", _computes)
    with pretended_cuda():
        yield


@pytest.mark.parametrize(
    ("name", "case", "arch"),
    [(name, case, (80, 90, 121)[place % 3]) for place, (name, case) in enumerate(PICKED)],
    ids=[f"{name}, {case.id}" for name, case in PICKED],
)
def test_a_kernel_serves_unasked(name: str, case: Case, arch: int) -> None:
    """TC-16: of each format and dtype, the plugin's kernel is chosen before the reference, proven and recorded."""
    result = run_case(case, BackendSubject(PLUGINS[name](_facts(arch)), device=DEVICE))
    assert result.outcome is Outcome.PASS, result
    assert not result.is_fallback
    assert name in result.message
    assert f"sm_{arch}" in result.message


@pytest.mark.parametrize("name", PLUGINS)
def test_a_device_off_the_list_is_reported(name: str) -> None:
    """The same cases are not testable on an architecture that the plugin does not serve; they never pass there."""
    assert 75 not in ARCHITECTURES
    case = next(case for plugin, case in PICKED if plugin == name)
    result = run_case(case, BackendSubject(PLUGINS[name](_facts(75)), device=DEVICE))
    assert result.outcome is Outcome.NOT_TESTABLE, result
    assert "sm_75" in result.message


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_the_cpu_is_refused_at_once(name: str, device: str) -> None:
    """TC-17: named by override under KERNEL_ONLY, a backend for CUDA alone refuses the CPU; no GPU is asked for."""
    cases = [case for case in cases_of(SERVED[name], device) if case.contract == "TC-17"]
    assert {case.weight_recipe.format.name for case in cases} == {*SERVED[name]}
    subject = BackendSubject(PLUGINS[name](_facts(90)), device=device)
    for case in cases:
        result = run_case(case, subject)
        assert result.outcome is Outcome.PASS, result


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.parametrize("contract", ["TC-14", "TC-15", "TC-16", "TC-17", "TC-19"])
def test_the_table_asks_both_plugins(name: str, contract: str, device: str) -> None:
    """On the CPU too, where kernels are interpreted, each of these contracts has a case for every format of either."""
    cases = [case for case in cases_of(SERVED[name], device) if case.contract == contract]
    assert {case.weight_recipe.format.name for case in cases} == {*SERVED[name]}
    assert len({attrs.astuple(case, recurse=False) for case in cases}) == len(cases)
