"""Memory and time of ``q4 inspect`` for large checkpoints, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.footprint import run_child
from tests.support.limits import scaled
from tests.support.sparse import make_sparse

LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is counted by Linux")

INSPECT = """
import contextlib, importlib, json, sys, time
from tests.support.footprint import peak_resident, resident

for name in sys.argv[2:]:
    with contextlib.suppress(Exception):  # a few modules stand in sys.modules under names of their own making
        importlib.import_module(name)
from q4_cli.app import run

known, before, start = set(sys.modules), resident(), time.process_time()
status = run(["inspect", sys.argv[1]])
seconds, grown = time.process_time() - start, peak_resident() - before
found = {"status": status, "seconds": seconds, "grown": grown}
print(json.dumps({**found, "modules": list(sys.modules), "new": sorted(set(sys.modules) - known)}))
"""


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("shards", [1, 12], ids=["one file", "12 shards"])
def test_inspecting_50_gigabytes_is_quick_and_small(shards: int, tmp_path: Path) -> None:
    """``q4 inspect`` of 32 × 7 layers, 57 GB, takes less than 1 s and 60 MB beyond its imports, plugins loaded.

    Measured in a child that first imports every module that another child imported for the same command, plugins
    included: the processor time of the command from there on (all threads; looking for plugins, reading headers,
    printing the table), and the peak of the resident memory, mapped files included, over what was held before.
    """
    hidden, mlp, heads = 16384, 53248, 1024
    shapes = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (hidden, hidden)),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (heads, hidden)),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (mlp, hidden)),
        "mlp.down_proj": (hidden, mlp),
    }
    layers = {f"model.layers.{index}.{name}": shape for index in range(32) for name, shape in shapes.items()}
    norms = {
        f"model.layers.{index}.{name}.weight": (hidden,)
        for index in range(32)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    assert make_sparse(tmp_path, layers, shards, dense=norms) > 50e9
    path = tmp_path / "model-0.safetensors" if shards == 1 else tmp_path
    first = run_child(INSPECT, path)
    assert {"q4_dialects", "q4_gguf", "q4_dequant_fallback"} <= set(first["modules"])
    found = run_child(INSPECT, path, *first["modules"])
    assert found["new"] == []
    assert found["status"] == 0
    assert "224 packed layers" in found["printed"][-2]
    assert found["seconds"] < scaled(1.0)
    assert found["grown"] < 60e6
