"""UC-03: the core and the reference alone, then what this machine's own kernels add.

    python examples/use_cases/uc_03_run_on_this_machine.py

It needs the reference: pip install "q4core[cpu]", or "q4core[cuda]" where there is an NVIDIA GPU
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch
from acceptance import Acceptance

import q4core as q4

STATEMENTS = (
    "With the core and the reference alone, a session is made and a forward runs, without compiled code of ours.",
    "On a CUDA device the native quantiser gives exactly the reference's bytes.",
    "Where the hardware multiplies FP4 itself, the product is finite and as exact as its operands.",
)
BARE = """
import json
import torch
import q4core as q4

torch.manual_seed(0)
weight = q4.PackedWeight(
    format=q4.find_format("nf4"), out_features=48, in_features=128, block_size=64,
    qdata=torch.randint(0, 256, (48, 64), dtype=torch.uint8), scale=torch.rand(48, 2),
)
x = torch.randn(3, 128)
with q4.Session(q4.SessionConfig(device="cpu")) as session:
    layer = session.linear(weight)
    y = layer(x)
    backend = layer.diagnostics().backend
dense = q4.dequantize(weight, torch.float64)
exact = x.double() @ dense.T
bound = q4.error_bound(exact, x.double().abs() @ dense.abs().T, 128, torch.float32)
with open("/proc/self/maps") as maps:
    mapped = {line.split()[-1] for line in maps if ".so" in line}
print(json.dumps({
    "plugins": [item.name for item in q4.default_registry().records() if item.state == "loaded"],
    "backend": backend,
    "error": float(((y - exact).abs() / bound).max()),
    "native": sorted(path for path in mapped if "/q4_" in path),
}))
"""
"""Another process, in which the reference is the only plugin."""
FP4_TENSOR_CORES = ((10, 0), (10, 3), (12, 0), (12, 1))
"""Compute capabilities of GPUs that multiply FP4."""


def run_bare(case: Acceptance) -> None:
    """Run a layer where no other plugin is loaded."""
    if sys.platform != "linux":
        case.leave(STATEMENTS[0], "/proc/self/maps names the libraries of a process, on Linux")
        return
    variables = {name: text for name, text in os.environ.items() if not name.startswith("Q4_")}
    variables |= {"Q4_PLUGINS": "dequant-fallback", "Q4_DISABLE_PLUGINS": "quantize"}
    command = [sys.executable, "-c", BARE]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)  # noqa: S603  # of its own
    seen = json.loads(done.stdout)
    case.judge(
        STATEMENTS[0],
        f"plugins: {', '.join(seen['plugins'])}; {seen['backend']} ran",
        f"largest error: {seen['error']:.0%} of the bound of float32 sums",
        f"compiled files of ours in the process: {len(seen['native'])}",
        holds=seen["plugins"] == [seen["backend"]] == ["dequant-fallback"]
        and seen["error"] <= 1.0
        and seen["native"] == [],
    )


def quantise(case: Acceptance) -> None:
    """Quantise the same numbers on both devices."""
    if not torch.cuda.is_available():
        case.leave(STATEMENTS[1], "torch has no CUDA device")
        return
    lines, equal = [], []
    for kind in ("nvfp4", "mxfp4"):
        dense = torch.randn(256, 512)
        ours, reference = q4.quantize(dense.to("cuda"), kind), q4.quantize(dense, kind)
        equal += [torch.equal(ours.qdata.cpu(), reference.qdata)]
        equal += [torch.equal(ours.scale.cpu().view(torch.uint8), reference.scale.view(torch.uint8))]
        lines.append(f"{kind}: {reference.nbytes:,} bytes, codes and scales equal: {equal[-2:]}")
    case.judge(STATEMENTS[1], *lines, holds=all(equal))


def multiply_fp4(case: Acceptance) -> None:
    """Multiply in FP4 activations that FP4 holds exactly, so that sums alone are rounded."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() not in FP4_TENSOR_CORES:
        case.leave(STATEMENTS[2], "no device with FP4 tensor cores")
        return
    weight = q4.quantize(torch.randn(256, 512), "nvfp4")
    x = q4.grid_activations(64, 512, q4.Precision.W4A4)
    config = q4.SessionConfig(device="cuda", activation_precision="fp4", compute_path="kernel_only")
    with q4.Session(config) as session:
        layer = session.linear(weight.to("cuda"))
        y = layer(x.cuda()).cpu()
        record = layer.diagnostics()
    dense = q4.dequantize(weight, torch.float64)
    exact = x.double() @ dense.T
    bound = q4.error_bound(exact, x.double().abs() @ dense.abs().T, 512, torch.float32)
    error = float(((y - exact).abs() / bound).max())
    seen = f"{record.backend} ran {record.path_name}; largest error: {error:.0%} of the bound of float32 sums"
    case.judge(STATEMENTS[2], seen, holds=bool(y.isfinite().all()) and error <= 1.0)


def main() -> int:
    """Judge each statement."""
    case = Acceptance("UC-03: Run on the machine at hand, from the bare core to native kernels")
    torch.manual_seed(0)
    run_bare(case)
    quantise(case)
    multiply_fp4(case)
    return case.end()


if __name__ == "__main__":
    sys.exit(main())
