"""UC-02: a backend and a path that are named are obeyed, or refused with every reason.

    python examples/use_cases/uc_02_choose_who_computes.py

It needs kernels for CPUs, and those for GPUs, which are refused for a CPU: pip install "q4core[cpu,cuda]"
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
from acceptance import Acceptance

import q4core as q4

STATEMENTS = (
    "The backend and path that are named serve, and the record says so.",
    "Where they can't, `KERNEL_ONLY` is an error with every reason, and `KERNEL_OR_FALLBACK` falls back and says why.",
    "By default the dispatcher picks the native kernel for an NVFP4 weight on CUDA.",
    "A CUDA-only backend named for a CPU target fails at once, and what a backend does not declare, the core refuses.",
)
LEGAL = (
    ("cpu-native", "kernel_only"),
    ("cpu-native", "kernel_or_fallback"),
    ("dequant-fallback", "dequant_matmul_only"),
)
WAYS = ("argument", "context", "variables")


def run(weight: q4.PackedWeight, config: q4.SessionConfig, way: str = "argument") -> q4.Diagnostics:
    """Return the record of one call, configured in one of three ways."""
    nothing = q4.SessionConfig()
    if way == "variables":
        os.environ["Q4_DEVICE"], os.environ["Q4_BACKEND"] = str(config.device), str(config.backend)
        os.environ["Q4_COMPUTE_PATH"] = q4.ComputePath(config.compute_path).value
    try:
        of_context, of_session = (config if way == item else nothing for item in ("context", "argument"))
        with q4.using(of_context), q4.Session(of_session) as session:
            layer = session.linear(weight, name="up")
            layer(torch.ones(3, weight.in_features))
            return layer.diagnostics()
    finally:
        for name in ("Q4_DEVICE", "Q4_BACKEND", "Q4_COMPUTE_PATH"):
            os.environ.pop(name, None)


def obey(case: Acceptance, weight: q4.PackedWeight) -> None:
    """Name each backend with each policy that allows it."""
    lines, right = [], []
    for backend, policy in LEGAL:
        config = q4.SessionConfig(device="cpu", backend=backend, compute_path=policy)
        try:
            records = [run(weight, config, way) for way in WAYS]
        except q4.BackendUnavailableError as error:  # kernels that were not built, say
            case.judge(STATEMENTS[0], error, holds=False)
            return
        named = [(record.backend, record.override, record.compute_path.value) for record in records]
        right += [item == (backend, backend, policy) for item in named]
        right += [sum(record.calls) == 1 for record in records]
        lines.append(f"{backend}, {policy}: {records[0].path_name} ran, named by {', '.join(WAYS)}")
    case.judge(STATEMENTS[0], *lines, holds=all(right))


def refuse(case: Acceptance, weight: q4.PackedWeight) -> None:
    """Name a backend that has no device here."""
    named = {"device": "cpu", "backend": "nf4-cuda"}
    try:
        run(weight, q4.SessionConfig(compute_path="kernel_only", **named))
        rejections: tuple[q4.Rejection, ...] = ()
    except q4.BackendUnavailableError as error:
        rejections = error.rejections
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = run(weight, q4.SessionConfig(compute_path="kernel_or_fallback", **named))
    case.judge(
        STATEMENTS[1],
        *(f"kernel_only: refused, {item}" for item in rejections),
        f"kernel_or_fallback: {record.backend} ran; {record.fallback_reason}",
        holds=[item.backend for item in rejections] == ["nf4-cuda"]
        and record.backend == "dequant-fallback"
        and str(rejections[0]) in str(record.fallback_reason)
        and [item.category for item in caught] == [q4.Q4FallbackWarning],
    )


def dispatch(case: Acceptance) -> None:
    """Name nothing, on a GPU."""
    if not torch.cuda.is_available():
        case.leave(STATEMENTS[2], "torch has no CUDA device")
        return
    weight = q4.quantize(torch.randn(512, 512), "nvfp4").to("cuda")
    with q4.Session(q4.SessionConfig(device="cuda")) as session:
        record = session.linear(weight).diagnostics()
    case.judge(STATEMENTS[2], record, holds=record.backend == "nvfp4-native")


def reject(case: Acceptance, weight: q4.PackedWeight) -> None:
    """Name a backend for GPUs for a weight on the CPU, and one for CPUs for a codebook that it does not declare."""
    own = q4.PackedWeight(
        format=weight.format,
        out_features=weight.out_features,
        in_features=weight.in_features,
        block_size=weight.block_size,
        qdata=weight.qdata,
        scale=weight.scale,
        codebook=torch.linspace(-1.0, 1.0, 16),
    )
    lines, codes = [], []
    for backend, given in (("nvfp4-native", weight), ("cpu-native", own)):
        try:
            run(given, q4.SessionConfig(device="cpu", backend=backend, compute_path="kernel_only"))
        except q4.BackendUnavailableError as error:
            lines += map(str, error.rejections)
            codes += [{reason.code.value for reason in item.reasons} for item in error.rejections]
    case.judge(STATEMENTS[3], *lines, holds=codes == [{"format", "device"}, {"feature"}])


def main() -> int:
    """Judge each statement."""
    case = Acceptance("UC-02: Choose who computes, and be obeyed or refused")
    torch.manual_seed(0)
    weight = q4.quantize(torch.randn(64, 128), "nf4")
    obey(case, weight)
    refuse(case, weight)
    dispatch(case)
    reject(case, weight)
    return case.end()


if __name__ == "__main__":
    sys.exit(main())
