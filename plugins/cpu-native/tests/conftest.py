"""Fixtures of cpu-native's tests."""

from __future__ import annotations

import pytest

from q4_cpu_native import CpuNative
from tests.support.cpu_layers import ISAS


@pytest.fixture(params=ISAS)
def backend(request: pytest.FixtureRequest) -> CpuNative:
    """Return the backend with each instruction set that this machine has."""
    return CpuNative(request.param)
