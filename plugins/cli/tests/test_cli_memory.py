"""Memory and time of ``q4 inspect`` for large checkpoints, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.footprint import run_child
from tests.support.limits import scaled
from tests.support.sparse import make_sparse, make_sparse_gguf, make_sparse_model

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


WHOLE = """
import json, sys, time
from q4_cli.app import run
from tests.support.footprint import PeakAnonymous

with PeakAnonymous() as peak:
    status = run(["inspect", sys.argv[1]])
print(json.dumps({"status": status, "seconds": time.process_time(), "peak": peak.bytes}))
"""
EXPERTS, MODEL_LAYERS, PARTS = 64, 18, 20


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize("kind", ["gptq", "awq", "modelopt-nvfp4", "compressed-tensors-int4", "mlx", "gguf"])
def test_inspecting_100_gigabytes_of_experts_is_quick_and_small(kind: str, tmp_path: Path) -> None:
    """``q4 inspect`` of 3,528 layers, 100 GB in 20 shards, takes less than 5 s and 300 MB, Python and torch included.

    The time is the processor's, of all threads. Pages of torch's libraries are not counted: 75 to 135 MB of them are
    resident, as the system's file cache has them in small or in large pages; 80 MB of the 300 are left to them.
    """
    sizes = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (4096, 4096)),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (1024, 4096)),
        **{f"mlp.experts.{number}.{name}_proj": (14336, 4096) for number in range(EXPERTS) for name in ("gate", "up")},
        **{f"mlp.experts.{number}.down_proj": (4096, 14336) for number in range(EXPERTS)},
    }
    layers = {f"model.layers.{index}.{name}": size for index in range(MODEL_LAYERS) for name, size in sizes.items()}
    if kind == "gguf":
        nbytes, path = make_sparse_gguf(tmp_path, layers, PARTS), tmp_path / "model-00007-of-00020.gguf"
    else:
        nbytes, path = make_sparse_model(tmp_path, kind, layers, PARTS), tmp_path
    assert nbytes > 100e9
    found = run_child(WHOLE, path)
    assert found["status"] == 0
    assert f"{len(layers):,} packed layers" in found["printed"][-2]
    assert found["seconds"] < scaled(5.0)
    assert found["peak"] < 300e6 - 80e6
