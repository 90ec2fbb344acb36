"""The GPU benchmark on a GPU. It imports nothing that a machine with few packages has not."""

from __future__ import annotations

import pytest

from benchmarks.gpu import dense, ours, place, products, stages
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.timing import Budget


@pytest.mark.gpu
def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the yardsticks are graphs of real kernels, faster than any host."""
    monkeypatch.setenv("Q4_BENCH_BACKENDS", "dequant-fallback")
    ours.registry.cache_clear()
    there = place.find_place()
    limits = stages.limits(stages.Work(there, Deadline(60)))
    assert limits["copy_gb_per_s"] > 50
    assert 0.3 < limits["empty_us"] < 50
    table = products.Table((1024, 1024), (1,), frozenset({"nf4"}))
    found = products.measure((table,), there, Budget(2, 1.0), Deadline(60))
    assert found["tables"][0]["calls"][dense.NAME]["why_eager"] is None
