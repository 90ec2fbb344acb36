"""UC-05: right numbers in every shape, typed errors, analytic gradients, a thousand steps, the same bits everywhere.

    python examples/use_cases/uc_05_compute_and_train.py

It needs kernels for CPUs, and layers that train: pip install "q4core[cpu,nn]"
"""

from __future__ import annotations

import copy
import hashlib
import subprocess
import sys
import threading
from typing import Any

import torch
from acceptance import ROOM, Acceptance, held_bytes

import q4core as q4
from q4_nn import linear_ste

STATEMENTS = (
    "Shape, dtype, device and every element are right, with bias, `out=` and any leading dimensions.",
    "What does not fit is refused by a typed error that names the layer and the nearest legal choice.",
    "Gradients are there, finite and the analytic ones; a thousand steps of a plain loop learn and leak nothing.",
    "The same input gives the same bits, also from threads, copies and other processes.",
)
N, K, NAME = 96, 256, "layers.0.up"
SHAPES = ((K,), (3, K), (2, 5, K), (2, 1, 3, K), (0, K))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALONE = "--product-alone"
"""Argument of the other processes: they print the hash of the product and nothing else."""
STEPS, SETTLED = 1_000, 200
"""Steps of training, and those after which memory is first read: what is made once is there by then."""


def quantised() -> tuple[q4.PackedWeight, torch.Tensor]:
    """Return the weight of every statement, and its numbers in float64."""
    weight = q4.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(1)), "nf4")
    return weight, q4.dequantize(weight, torch.float64)


def exactly(dtype: torch.dtype = torch.float32) -> q4.SessionConfig:
    """Return a configuration that rounds no activation."""
    return q4.SessionConfig(device="cpu", activation_precision="exact", compute_dtype=dtype)


def compute(case: Acceptance) -> None:
    """Compare every element with float64, within the bound of sums in float32 and one rounding."""
    weight, dense = quantised()
    lines, right = [], []
    for dtype in DTYPES:
        bias, worst = torch.randn(N).to(dtype), 0.0
        with q4.Session(exactly(dtype)) as session:
            layer = session.linear(weight, bias, name=NAME)
            for shape in SHAPES:
                x = torch.randn(shape).to(dtype)
                y, out = layer(x), torch.empty((*shape[:-1], N), dtype=dtype)
                exact = x.double() @ dense.T + bias.double()
                bound = q4.error_bound(exact, x.double().abs() @ dense.abs().T + bias.double().abs(), K, dtype)
                worst = max([worst, *((y.double() - exact).abs() / bound).flatten().tolist()])
                right += [(y.shape, y.dtype, y.device) == (out.shape, dtype, x.device)]
                right += [layer(x, out=out) is out and torch.equal(out, y)]
        right.append(worst <= 1.0)
        lines.append(f"{dtype}: {len(SHAPES)} shapes of x with bias and out=; largest error: {worst:.0%} of its bound")
    case.judge(STATEMENTS[0], *lines, holds=all(right))


def refuse(case: Acceptance) -> None:
    """Call the layer with what does not fit."""
    misfits: dict[str, tuple[Any, str]] = {
        "another width": (torch.randn(3, 100), f"{K} features"),
        "another dtype": (torch.randn(3, K).double(), "x.to(torch.float32)"),
        "another device": (torch.randn(3, K, device="meta"), 'x.to("cpu")'),
        "no dimension": (torch.tensor(1.0), f"{K} features"),
        "a list": ([1.0] * K, "torch.as_tensor"),
    }
    lines, right = [], []
    with q4.Session(exactly()) as session:
        layer = session.linear(quantised()[0], name=NAME)
        for what, (x, choice) in misfits.items():
            try:
                layer(x)
                right.append(False)
            except q4.InputError as error:
                right.append(NAME in str(error) and choice in str(error))
                lines.append(f"{what}: {error}")
    case.judge(STATEMENTS[1], *lines, holds=all(right))


def gradients() -> tuple[list[str], bool]:
    """Compare gradients of x and of a master weight with those of the formula, in float64."""
    weight, dense = quantised()
    x, g = torch.randn(5, K, requires_grad=True), torch.randn(5, N)
    config = q4.SessionConfig(device="cpu", gradients=True)
    with q4.Session(config) as session:
        session.linear(weight, name=NAME)(x).backward(g)
    master = torch.randn(N, K, requires_grad=True)
    linear_ste(x.detach(), master, format="nf4").backward(g)
    lines, right = [], []
    for what, found, left, other, terms in (
        ("x", x.grad, g.double(), dense, N),
        ("the master", master.grad, g.double().T, x.detach().double(), len(g)),
    ):
        bound = q4.error_bound(left @ other, left.abs() @ other.abs(), terms, torch.float32)
        worst = float(((found.double() - left @ other).abs() / bound).max()) if found is not None else float("inf")
        right.append(worst <= 1.0)
        lines.append(f"gradient of {what}: largest error {worst:.0%} of the bound of float32 sums")
    return lines, all(right)


def train(case: Acceptance) -> None:
    """Learn a linear map in a plain loop, and read the memory."""
    lines, right = gradients()
    if held_bytes() is None:
        case.leave(STATEMENTS[2], "memory is read from /proc, on Linux")
        return
    target, x = torch.randn(32, 64), torch.randn(128, 64)
    master = torch.zeros(32, 64, requires_grad=True)
    optimizer = torch.optim.Adam([master], lr=1e-2)
    losses, held = [], []
    for step in range(STEPS):
        loss = torch.nn.functional.mse_loss(linear_ste(x, master, format="nf4"), x @ target.T)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step + 1 in {SETTLED, STEPS}:
            held.append(held_bytes() or 0)
    leak = (STEPS - SETTLED) * master.numel() * master.element_size()
    lines += [
        f"{STEPS:,} steps: loss {losses[0]:.1f} → {losses[-1]:.2f}",
        f"memory since step {SETTLED}: {held[1] - held[0]:+,} bytes; one weight left by each step would be {leak:+,}",
    ]
    case.judge(STATEMENTS[2], *lines, holds=right and losses[-1] < losses[0] / 10 and held[1] - held[0] < ROOM < leak)


def product(layer: q4.Q4Linear) -> str:
    """Return the hash of the bits of one product."""
    x = torch.randn(7, K, generator=torch.Generator().manual_seed(2))
    return hashlib.sha256(layer(x).detach().numpy().tobytes()).hexdigest()[:16]


def repeat(case: Acceptance) -> None:
    """Compute one product again and again, in every place."""
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        layer = session.linear(quantised()[0], name=NAME)
        found = {"here": [product(layer) for _ in range(100)], "by copies": [product(copy.deepcopy(layer))]}
        found["by threads"] = []
        threads = [threading.Thread(target=lambda: found["by threads"].append(product(layer))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    command = [sys.executable, __file__, ALONE]
    done = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]  # noqa: S603  # its own
    found["by other processes"] = [item.stdout.strip() for item in done]
    bits = {item for items in found.values() for item in items}
    lines = [f"{where}: {len(items)} × {', '.join(sorted(set(items)))}" for where, items in found.items()]
    case.judge(STATEMENTS[3], *lines, holds=len(bits) == 1 and len(found["by threads"]) == len(threads))


def main() -> int:
    """Judge each statement."""
    case = Acceptance("UC-05: Compute and train with 4-bit layers, in right numbers")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # operations are so small that threads would wait for each other
    compute(case)
    refuse(case)
    train(case)
    repeat(case)
    return case.end()


if __name__ == "__main__":
    if sys.argv[1:] == [ALONE]:
        with q4.Session(q4.SessionConfig(device="cpu")) as session:
            print(product(session.linear(quantised()[0], name=NAME)))
    else:
        sys.exit(main())
