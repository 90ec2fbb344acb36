"""The core's self-probe keeps a consistently wrong backend from serving, loudly, and the next one serves."""

from __future__ import annotations

import pytest
import torch

from q4_conformance.measurement.recording import recorded
from q4_conformance.oracle.compare import judge
from q4_conformance.oracle.exact import exact_linear
from q4_conformance.oracle.grids import draw_on_grid
from q4_conformance.oracle.weights import WeightRecipe
from q4_conformance.subjects.backend import make_registry
from q4_conformance.subjects.reference import REFERENCE
from q4_conformance_faults import FAULTS, Fault
from q4core import (
    ActivationPrecision,
    BackendUnavailableError,
    ComputePath,
    Precision,
    Q4ProbeWarning,
    ReasonCode,
    Session,
    SessionConfig,
)


def _wishes(path: ComputePath) -> SessionConfig:
    return SessionConfig(device="cpu", compute_path=path, activation_precision=ActivationPrecision.EXACT)


@pytest.mark.parametrize("name", ["fault-swapped-nibbles", "fault-scale-off-by-one-block", "fault-half-precision-sums"])
def test_wrong_backend_is_disqualified_and_the_reference_serves(name: str) -> None:
    """AUTO: the wrong backend is warned of and rejected as probe_failed, and the numbers are right."""
    fault: Fault = {item.name: item for item in FAULTS}[name]
    backend = fault.make(f"{name}-probed")
    weight = WeightRecipe(format=fault.format).build()
    registry = make_registry(backend)
    with recorded() as record:
        layer = Session(_wishes(ComputePath.AUTO), registry=registry).linear(weight)
    assert [message for message in record.of(Q4ProbeWarning) if backend.name in message]
    assert any(not fields["passed"] for fields in record.named("q4.probe"))
    diagnostics = layer.diagnostics()
    assert diagnostics.backend == REFERENCE
    codes = {item.backend: {reason.code for reason in item.reasons} for item in diagnostics.rejections}
    assert ReasonCode.PROBE_FAILED in codes[backend.name]
    x = draw_on_grid(Precision.W4A32, 3, weight.in_features, dtype=torch.float32, seed=1)
    assert judge(layer(x), exact_linear(weight, x), out_dtype=torch.float32).passed


def test_wrong_backend_under_kernel_only_is_an_error() -> None:
    """KERNEL_ONLY: a backend that fails its probe is an error with that reason, never replaced."""
    fault = next(fault for fault in FAULTS if fault.name == "fault-swapped-nibbles")
    backend = fault.make(f"{fault.name}-only")
    weight = WeightRecipe(format=fault.format).build()
    with recorded(), pytest.raises(BackendUnavailableError) as caught:
        Session(_wishes(ComputePath.KERNEL_ONLY), registry=make_registry(backend)).linear(weight)
    reasons = [reason for item in caught.value.rejections if item.backend == backend.name for reason in item.reasons]
    assert ReasonCode.PROBE_FAILED in {reason.code for reason in reasons}
