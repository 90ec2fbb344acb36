"""UC-06: the record of every mix of backend, policy and weight, odd inputs, and what a kernel allocates.

    python examples/use_cases/uc_06_learn_what_ran.py

It needs kernels for CPUs, and those for GPUs, which are rejected for a CPU: pip install "q4core[cpu,cuda]"
"""

from __future__ import annotations

import itertools
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from acceptance import Acceptance, held_bytes

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable

STATEMENTS = (
    (
        "Diagnostics are complete and true in every mix of override, path and availability: five fields and every "
        "rejection."
    ),
    "Odd shapes, odd blocks and unaligned or strided inputs are refused with a diagnostic or computed right.",
    "The record of what ran is true for every number of rows, and a path that says KERNEL makes no dense weight.",
)
FIELDS = ["format", "backend", "compute_path", "fallback_reason", "native_load_state"]
KINDS = {"kernel_only": {"kernel"}, "kernel_or_fallback": {"kernel"}, "dequant_matmul_only": {"reference"}}
"""Policy → the kinds of path that it allows; with ``kernel_or_fallback`` any, where a reason is given."""
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def weights() -> dict[str, q4.PackedWeight]:
    """Return weights that all, some, and one of the backends for CPUs can run."""
    nf4 = q4.quantize(torch.randn(64, 128), "nf4")
    sizes = {"out_features": 64, "in_features": 128, "block_size": 64, "qdata": nf4.qdata, "scale": nf4.scale}
    own = q4.PackedWeight(format=nf4.format, codebook=torch.linspace(-1.0, 1.0, 16), **sizes)
    return {"nf4": nf4, "nvfp4": q4.quantize(torch.randn(64, 128), "nvfp4"), "a codebook of its own": own}


def is_true(record: q4.Diagnostics, backend: str | None, policy: str, names: set[str]) -> bool:
    """Return whether a record of one call agrees with what was asked and with itself."""
    summary = record.summary()
    kinds = {segment.path.kind.value for segment, calls in zip(record.segments, record.calls, strict=True) if calls}
    rejected = [item.backend for item in record.rejections]
    return (
        list(summary) == FIELDS
        and all(summary[name] for name in FIELDS if name != "fallback_reason")
        and summary["compute_path"] == policy
        and (backend in {None, record.backend} or bool(record.fallback_reason))
        and (kinds <= KINDS.get(policy, kinds) or bool(record.fallback_reason))
        and sorted([record.backend, *rejected]) == sorted(names)
        and all(item.reasons for item in record.rejections)
        and sum(record.calls) == 1
    )


def mix(case: Acceptance) -> None:
    """Ask for everything together, and read each answer."""
    names = set(q4.default_registry().backends())
    policies = [item.value for item in q4.ComputePath]
    counts = {"ran": 0, "ran, with a fallback's reason": 0, "refused, with the reasons": 0}
    wrong, example = [], ""
    for (what, weight), backend, policy in itertools.product(weights().items(), (None, *sorted(names)), policies):
        config = q4.SessionConfig(device="cpu", backend=backend, compute_path=policy)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", q4.Q4FallbackWarning)
                with q4.Session(config) as session:
                    layer = session.linear(weight, name="up")
                    layer(torch.ones(2, 128))
                    record = layer.diagnostics()
            counts["ran, with a fallback's reason" if record.fallback_reason else "ran"] += 1
            good = is_true(record, backend, policy, names)
            example = str(record)
        except (q4.BackendUnavailableError, q4.PolicyConflictError) as error:
            counts["refused, with the reasons"] += 1
            rejections = getattr(error, "rejections", ())
            asked = {backend} if backend else names
            good = asked <= {item.backend for item in rejections} or isinstance(error, q4.PolicyConflictError)
        if not good:
            wrong.append(f"wrong: {what}, {backend}, {policy}")
    mixes = len(weights()) * (len(names) + 1) * len(policies)
    lines = [f"{mixes} mixes: {', '.join(f'{count} {what}' for what, count in counts.items())}", *wrong, example]
    case.judge(STATEMENTS[0], *lines, holds=not wrong and sum(counts.values()) == mixes and min(counts.values()) > 0)


def views(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Return activations that are no plain matrix in memory."""
    store = torch.randn(2 * rows + 1, 2 * columns + 1)
    flat = torch.randn(rows * columns + 1)
    return {
        "plain": torch.randn(rows, columns),
        "every other column": store[:rows, : 2 * columns : 2],
        "every other row": store[: 2 * rows : 2, :columns],
        "transposed": torch.randn(columns, rows).T,
        "four bytes off": flat[1:].view(rows, columns),
        "one row, repeated": torch.randn(1, columns).expand(rows, columns),
    }


def odd(case: Acceptance) -> None:
    """Try shapes and blocks that no kernel likes."""
    computed, refused, wrong, example = 0, 0, [], ""
    sizes = itertools.product((1, 3, 7, 65), (16, 24, 33, 48, 80, 100, 128), (16, 24, 32, 64))
    config = q4.SessionConfig(device="cpu", activation_precision="exact")
    for n, k, block in sizes:
        try:
            weight = q4.quantize(torch.randn(n, k), "nf4", block_size=block)
        except q4.Q4Error as error:
            refused += 1
            example = f"{n}×{k}, blocks of {block}: {error}"
            continue
        dense = q4.dequantize(weight, torch.float64)
        with q4.Session(config) as session:
            layer = session.linear(weight)
            for what, x in views(5, k).items():
                exact = x.double() @ dense.T
                bound = q4.error_bound(exact, x.double().abs() @ dense.abs().T, k, torch.float32)
                if ((layer(x).double() - exact).abs() <= bound).all():
                    computed += 1
                else:
                    wrong.append(f"wrong: {n}×{k}, blocks of {block}, x {what}")
    lines = [f"{computed} products right, element by element; {refused} weights refused, such as", example, *wrong]
    case.judge(STATEMENTS[1], *lines, holds=not wrong and computed > 0 and refused > 0)


def peak_rise(call: Callable[[], object]) -> int:
    """Return by how many bytes the memory of this process peaks in a call, after a first one."""

    def status(field: str) -> int:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    call()
    held_bytes()  # gives freed memory back, so that taking it again is seen
    CLEAR.write_text("5", encoding="ascii")  # the peak begins anew
    before = status("VmRSS:")
    call()
    return status("VmHWM:") - before


def count(case: Acceptance) -> None:
    """Call a layer with many numbers of rows, and watch the memory of a large one."""
    right, lines = [], []
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        layer = session.linear(weights()["nf4"])
        for rows in range(1, 130):
            before = layer.diagnostics()
            layer(torch.ones(rows, 128))
            ticked = [new - old for new, old in zip(layer.diagnostics().calls, before.calls, strict=True)]
            right.append(ticked == [int(item.low <= rows <= (item.high or rows)) for item in before.segments])
        ran = zip(before.segments, layer.diagnostics().calls, strict=True)
        lines.append(f"1 to 129 rows: {', '.join(f'{item.path.name} {calls} ×' for item, calls in ran)}")
    if not CLEAR.exists():
        case.leave(STATEMENTS[2], "the peak of memory is read from /proc, on Linux")
        return
    weight = q4.quantize(torch.randn(4096, 4096), "nf4")
    dense, x = weight.out_features * weight.in_features * 4, torch.ones(1, 4096)
    with q4.Session(q4.SessionConfig(device="cpu", compute_path="kernel_only")) as session:
        layer = session.linear(weight)
        of_kernel, kind = peak_rise(lambda: layer(x)), layer.diagnostics().segments[0].path.kind.value
    of_dense = peak_rise(lambda: q4.dequantize(weight))
    lines.append(f"a path of kind {kind}: a call of a 4096×4096 layer takes {of_kernel:,} bytes at most")
    lines.append(f"for comparison, q4.dequantize takes {of_dense:,}, and the dense weight {dense:,}")
    right += [kind == "kernel", of_kernel < dense // 16, of_dense >= dense]
    case.judge(STATEMENTS[2], *lines, holds=all(right))


def main() -> int:
    """Judge each statement."""
    case = Acceptance("UC-06: Learn what ran, and why nothing else did")
    torch.manual_seed(0)
    mix(case)
    odd(case)
    count(case)
    return case.end()


if __name__ == "__main__":
    sys.exit(main())
