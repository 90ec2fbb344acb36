"""What a call allocates is seen: torch's tensors that are alive at once, the peak of memory, and what stays."""

from __future__ import annotations

import ctypes
import multiprocessing
import platform
import sys
from concurrent.futures import ProcessPoolExecutor

import attrs
import numpy as np
import pytest
import torch
from bloat import bloated, small_blocks, taken_while_bloated

from q4_conformance import Outcome, backend_cases, run_case
from q4_conformance.measurement.allocations import own_mappings, watch
from q4_conformance.subjects.backend import BackendSubject
from q4_conformance_faults import ToyKernel

CPU = torch.device("cpu")
SOME = 4 << 20


def test_elements_of_new_tensors_are_counted() -> None:
    """New tensors count, of whatever dtype; views and results in place do not."""
    x = torch.ones(1000, 1000)
    assert watch(lambda: None).elements == 0
    assert watch(lambda: x * 2).elements == 1_000_000
    assert watch(lambda: x.view(-1)[5:].unsqueeze(0)).elements == 0
    assert watch(lambda: x.mul_(1.0)).elements == 0
    assert watch(lambda: torch.zeros(1000, dtype=torch.int8)).elements == 1000


def test_peak_of_memory_outside_torch_is_seen() -> None:
    """Memory that torch does not allocate shows in the peak; None where only Linux says."""
    used = watch(lambda: np.ones(8 << 20, np.float32))
    assert used.elements == 0
    if sys.platform != "linux":
        assert used.peak_bytes is None
        return
    assert used.peak_bytes is not None
    assert used.peak_bytes > 24 << 20
    small = watch(lambda: np.ones(1 << 10, np.float32)).peak_bytes
    assert small is not None
    assert small < SOME


def test_what_another_thread_allocates_once_is_not_the_call_s() -> None:
    """The least of several peaks counts, because what belongs to the call shows in each."""
    calls: list[None] = []

    def call() -> None:
        calls.append(None)
        if len(calls) == 1:
            np.ones(8 << 20, np.float32)

    used = watch(call).peak_bytes
    assert used is None if sys.platform != "linux" else used is not None and used < SOME


def test_a_peak_that_is_low_enough_is_looked_for_once() -> None:
    """A peak within what is enough ends the search for the least."""
    calls: list[None] = []
    watch(lambda: calls.append(None), enough_bytes=1 << 30)
    assert len(calls) == 1


def test_freed_pieces_of_a_long_life_are_not_the_call_s() -> None:
    """A call that goes through the heap's freed pieces one after the other holds one of them at a time."""
    with bloated():
        used = watch(small_blocks).peak_bytes
    assert used is None if sys.platform != "linux" else used is not None and used < 1 << 20


def test_a_large_block_in_a_freed_piece_is_the_call_s() -> None:
    """A call whose large block would fit where memory was freed before is seen to hold it."""
    with bloated():
        used = watch(lambda: np.ones(8 << 20, np.uint8)).peak_bytes
    assert used is None if sys.platform != "linux" else used is not None and used > 7 << 20


def test_what_stays_shows_in_a_bloated_heap() -> None:
    """What is held shows whole, what was given back or goes through freed pieces does not.

    A process of its own measures: what the tests before left to be collected would be given back meanwhile.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        before, after, gone = pool.submit(taken_while_bloated).result()
    if sys.platform != "linux":
        assert before is after is gone is None
        return
    assert before is not None
    assert after is not None
    assert gone is not None
    assert abs(after - before - (8 << 20)) < 1 << 20
    assert abs(gone - before) < 1 << 20


def _is_mapped(block: np.ndarray) -> bool:
    """Return whether a block is a mapping of its own: glibc says so in the word before it."""
    return bool(ctypes.c_size_t.from_address(block.ctypes.data - ctypes.sizeof(ctypes.c_size_t)).value & 2)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap is changed")
def test_the_heap_works_as_before_afterwards() -> None:
    """Large blocks are mappings of their own while it lasts, and come from the heap again afterwards."""
    with bloated():
        with own_mappings():
            during = np.ones(4 << 20, np.uint8)
        after = np.ones(4 << 20, np.uint8)
    assert _is_mapped(during)
    assert not _is_mapped(after)


def test_a_bloated_process_passes_for_no_dense_weight() -> None:
    """Memory that a long process freed and reuses is not counted as the kernel's."""
    (case,) = (case for case in backend_cases(["nf4"]) if case.check == "kind")
    small = attrs.evolve(case.weight_recipe, n=1024, k=1024)
    with bloated():
        result = run_case(attrs.evolve(case, recipe=small), BackendSubject(ToyKernel()))
    assert result.outcome is Outcome.PASS, result


def test_what_is_alive_at_once_counts() -> None:
    """Tensors that are gone before the next count once; those that are held add up."""
    x = torch.ones(1000, 1000)
    assert watch(lambda: [torch.empty(10, 10).copy_(x[:10, :10]) for _ in range(7)]).elements == 700
    assert watch(lambda: [float(x[:10, :10].clone().sum()) for _ in range(7)]).elements == 101
