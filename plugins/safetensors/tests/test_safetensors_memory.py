"""How much memory and time large checkpoints take, in processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import q4core as q4
from q4_safetensors.files import find_files
from tests.support.footprint import run_child
from tests.support.limits import scaled
from tests.support.sparse import make_sparse, make_sparse_model

LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is counted by Linux")

LOAD = """
import json, sys
import torch, q4core as q4
from tests.support.footprint import PeakAnonymous, anonymous

def in_memory(tensors):
    "Bytes of tensors that lie in no mapping of a checkpoint file."
    with open("/proc/self/maps") as lines:
        files = [line.split()[0].split("-") for line in lines if ".safetensors" in line]
    ranges = [(int(start, 16), int(end, 16)) for start, end in files]
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if not any(start <= tensor.data_ptr() < end for start, end in ranges)
    )

how = sys.argv[2]
torch.set_num_threads(1)
q4.dialects()
before = anonymous()
with PeakAnonymous() as peak, q4.open(sys.argv[1]) as checkpoint:
    if how.startswith("read"):
        kept = [checkpoint[module] if how == "read" else checkpoint[module].contiguous() for module in checkpoint]
        prepared = [tensor for weight in kept for _, tensor in weight.tensors()]
    else:
        session = q4.Session(q4.SessionConfig(device="cpu", compute_path=q4.ComputePath.DEQUANT_MATMUL_ONLY))
        kept = [
            session.linear(checkpoint[module] if how == "layers" else checkpoint[module].contiguous())
            for module in checkpoint
        ]
        assert all(record.backend == "dequant-fallback" for record in session.report().layers)
        prepared = [buffer for layer in kept for buffer in layer.buffers()]
print(json.dumps({"peak": peak.bytes - before, "prepared": in_memory(prepared), "layers": len(kept)}))
"""

OPEN = """
import json, sys, time
import torch, q4core as q4
from tests.support.footprint import peak_resident, resident

q4.dialects()
before, start = resident(), time.process_time()
with q4.open(sys.argv[1]) as checkpoint:
    nbytes = sum(layer.nbytes for layer in checkpoint.schema.layers.values())
seconds, grown = time.process_time() - start, peak_resident() - before
print(json.dumps({"seconds": seconds, "grown": grown, "layers": len(checkpoint), "nbytes": nbytes}))
"""


@LINUX
def test_opening_50_gigabytes_is_quick_and_small(tmp_path: Path) -> None:
    """Opening 600 layers of 50 GB in 12 shards takes less than 1 s of processor time and 60 MB beyond the import.

    Measured in a child: the peak of its resident memory, mapped files included, over what it held before.
    """
    shapes = {"q_proj": (8192, 8192), "o_proj": (8192, 8192), "gate_proj": (28672, 8192), "down_proj": (8192, 28672)}
    layers = {f"model.layers.{index}.{name}": shape for index in range(150) for name, shape in shapes.items()}
    assert make_sparse(tmp_path, layers, 12) > 50e9
    found = run_child(OPEN, tmp_path)
    assert found["layers"] == len(layers)
    assert found["nbytes"] > 50e9
    assert found["seconds"] < scaled(1.0)
    assert found["grown"] < 60e6


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize(
    "how",
    ["layers", *(pytest.param(how, marks=pytest.mark.soak) for how in ("read", "read and copied", "layers of copies"))],
)
def test_loading_2_gigabytes_holds_no_second_copy(how: str, tmp_path: Path) -> None:
    """Peak anonymous memory of loading 2 GB layer by layer: what was prepared in memory + 2 × the largest tensor.

    Measured in a child that has imported q4core and its plugins, from there on, without any slack: weights held as
    read, copies of them, layers of the reference backend over weights as read (which stay views of the file), and
    layers over copies.
    """
    square, up, down = (4096, 4096), (14336, 4096), (4096, 14336)
    shapes = {"q_proj": square, "o_proj": square, "gate_proj": up, "up_proj": up, "down_proj": down}
    layers = {f"layers.{index}.{name}": shape for index in range(17) for name, shape in shapes.items()}
    size = make_sparse(tmp_path, layers, 4)
    assert size > 2e9
    found = run_child(LOAD, tmp_path, how)
    assert found["layers"] == len(layers)
    assert found["prepared"] - (size if "cop" in how else 0) <= found["layers"]  # a layer's tag is one byte
    # One layer at a time: its source, its layout, and for the first of a kind the copy that the probe compares with.
    assert found["peak"] <= found["prepared"] + 3 * (up[0] * up[1] // 2)


def test_small_tensors_of_a_file_cut_meanwhile_are_an_error(tmp_path: Path) -> None:
    """What detection looks at is read, not mapped: a file that became shorter is an error, and no signal."""
    make_sparse_model(tmp_path, "gptq", {"proj": (64, 256)}, 1)
    files = find_files(tmp_path)
    assert files.load_small("proj.g_idx").tolist() == [0] * 128 + [1] * 128
    shard = tmp_path / "model-0.safetensors"
    os.truncate(shard, shard.stat().st_size - 8)
    with pytest.raises(q4.CheckpointError, match="as when it was opened") as caught:
        files.load_small("proj.g_idx")
    assert caught.value.where == str(shard)
