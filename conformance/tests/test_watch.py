"""What a call allocates is seen: torch's tensors one by one, and the peak of memory."""

from __future__ import annotations

import sys

import numpy as np
import torch

from q4_conformance.watch import watch


def test_elements_of_new_tensors_are_counted() -> None:
    """New floating-point tensors count; views, results in place and integers do not."""
    x = torch.ones(1000, 1000)
    assert watch(lambda: None).float_elements == 0
    assert watch(lambda: x * 2).float_elements == 1_000_000
    assert watch(lambda: x.view(-1)[5:].unsqueeze(0)).float_elements == 0
    assert watch(lambda: x.mul_(1.0)).float_elements == 0
    assert watch(lambda: torch.zeros(1000, dtype=torch.int64)).float_elements == 0
    assert watch(lambda: [torch.empty(10, 10).copy_(x[:10, :10]) for _ in range(7)]).float_elements == 700


def test_peak_of_memory_outside_torch_is_seen() -> None:
    """Memory that torch does not allocate shows in the peak, given back at once or not; None where only Linux says."""
    used = watch(lambda: np.ones(8 << 20, np.float32))
    assert used.float_elements == 0
    if sys.platform != "linux":
        assert used.peak_bytes is None
        return
    assert used.peak_bytes is not None
    assert used.peak_bytes > 24 << 20
    small = watch(lambda: np.ones(1 << 10, np.float32)).peak_bytes
    assert small is not None
    assert small < 4 << 20


def test_what_another_thread_allocates_once_is_not_the_call_s() -> None:
    """The least of several peaks counts, because what belongs to the call shows in each."""
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        if len(calls) == 2:
            np.ones(8 << 20, np.float32)

    used = watch(call).peak_bytes
    assert used is None if sys.platform != "linux" else used is not None and used < 4 << 20
    assert len(calls) > 2
