"""Programs by the reference, as far as a CUDA graph of them can be shown without a GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from q4_programs import Buffer, Op, Program, Step, View, reference
from q4_programs.cache_rows import make_rows, narrowed, widened
from q4core import ConfigError


@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("position", [0, 3, 19])
def test_attention_of_a_graph(position: int, window: int) -> None:
    """By a mask over the whole cache, attention is that of the positions that are seen, whatever lies behind."""
    query = torch.randn(6, 8)
    caches = [torch.randn(2 * 20, 8) for _ in range(2)]
    for cache in caches:
        cache.view(2, 20, 8)[:, position + 1 :] = torch.nan
    places, found = torch.tensor([[position]]), [torch.empty(6, 8) for _ in range(2)]
    for out, in_graph in zip(found, (False, True), strict=True):
        reference._attend(query, [*caches, places], out, (2, 0.3, window), in_graph=in_graph)
    assert torch.allclose(found[0], found[1], atol=1e-6)


def test_a_captured_program_keeps_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capturing runs the parts once beforehand, and gives every buffer its values back; a run replays the graph."""
    calls: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda _: calls.append("wait"))
    graph = SimpleNamespace(replay=lambda: calls.append("replay"))
    stand_in: dict[str, Any] = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "CUDAGraph": lambda: graph,
        "graph": lambda _: contextlib.nullcontext(),
    }
    for name, item in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, item)
    state = torch.ones(3)
    run = reference._captured([lambda: state.add_(1), lambda: calls.append("part")], [state])
    assert calls == ["wait", "part", "wait", "part"]
    assert state.tolist() == [1, 1, 1]
    run()
    assert calls[-1] == "replay"


def test_rows_of_int8_are_off_by_half_a_level() -> None:
    """Of any magnitude, against float64: a level is a 127th of the row's largest number."""
    x = torch.randn(40, 24, dtype=torch.float64) * torch.logspace(-36, 36, 40, dtype=torch.float64)[:, None]
    rows = narrowed(x.float(), torch.int8)
    assert (rows.dtype, tuple(rows.shape)) == (torch.int8, (40, 28))
    bound = x.abs().amax(-1, keepdim=True) / 254 * (1 + 1e-5)
    assert bool(((widened(rows, torch.float64) - x).abs() <= bound).all())


def test_rows_of_float16_are_numpys() -> None:
    """Each number is rounded to the nearest, ties to even, as numpy does; what is too large is infinite."""
    x = torch.tensor([[1.0, 1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, -1e-8, 6e-8, torch.nan]])
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(x.numpy().astype("float16"))
    assert torch.equal(narrowed(x, torch.float16).view(torch.int16), expected.view(torch.int16))
    assert torch.equal(widened(expected, torch.float32)[0, :7], expected.float()[0, :7])


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite(odd: float) -> None:
    """Nothing of it is finite in int8; rows beside it, of zeros and of the smallest numbers, are what they were."""
    x = torch.tensor([[1.0, odd, 2.0], [0.0, -0.0, 0.0], [1e-40, -1e-41, 0.0], [3.0, -1.5, 0.0]])
    found = widened(narrowed(x, torch.int8), torch.float32)
    assert found[0].isnan().all()
    assert torch.equal(found[1], torch.zeros(3))
    assert torch.allclose(found[2:], x[2:], rtol=0, atol=3 / 254)
    assert found[2].abs().max() <= 1e-40


def test_only_caches_are_narrow() -> None:
    """A step that has no cache takes no narrow buffer, and rows of int8 have room for their scale."""
    x = View(0, 1, 8)
    with pytest.raises(ConfigError, match=r"buffer 'x' must be of torch.float32, got torch.float16"):
        Program([Buffer("x", 8, torch.float16, True), Buffer("y", 8)], [Step(Op.COPY, [x], [View(1, 1, 8)])])
    buffers = [Buffer("x", 8, is_bound=True), Buffer("place", 1, torch.int64, True), Buffer("c", 8, torch.int8, True)]
    with pytest.raises(ConfigError, match="buffer 'c' must be of 8 columns"):
        Program(buffers, [Step(Op.STORE, [x, View(1, 1, 1)], [View(2, 1, 8)])])
    with pytest.raises(ConfigError, match="dtype must be float32 or int64, or float16 or int8 of a cache"):
        Buffer("c", 8, torch.bfloat16)


def _flags(tensor: torch.Tensor) -> list[str]:
    """Return what the kernel says of the mapping that a tensor lies in."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            first, last = (int(part, 16) for part in name.split("-"))
            is_inside = first <= tensor.data_ptr() < last
        elif is_inside and name == "VmFlags:":
            return rest
    raise AssertionError("no mapping holds the tensor")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_large_caches_ask_for_huge_pages(dtype: torch.dtype) -> None:
    """They do from 4 MiB on; small ones lie wherever torch has room, and both are zeros."""
    large, small = (make_rows((2, count, 64), dtype, "cpu") for count in (2**16, 2**8))
    assert "hg" in _flags(large)
    assert not large.any()
    assert not small.any()
    assert (large.shape, large.dtype, large.is_contiguous()) == ((2, 2**16, 64), dtype, True)


def test_a_cache_that_no_memory_holds_is_torchs_error() -> None:
    """What can't be mapped is left to torch, whose error says how much was asked for."""
    with pytest.raises(RuntimeError, match="allocate"):
        make_rows((2**50,), torch.float32, "cpu")
