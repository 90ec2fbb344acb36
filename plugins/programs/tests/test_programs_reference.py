"""Programs by the reference, as far as a CUDA graph of them can be shown without a GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from q4_programs import reference


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
