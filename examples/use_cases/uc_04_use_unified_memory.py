"""UC-04: unified memory is asked for by policy: preferred with a recorded reason, required or refused at once.

    python examples/use_cases/uc_04_use_unified_memory.py

It needs the provider of managed memory, actors and kernels: pip install "q4core[actors,cpu,cuda]". Actors on Ray need
ray: pip install "q4-actors[ray]"
"""

from __future__ import annotations

import importlib.util
import sys

import torch
from acceptance import Acceptance

import q4core as q4
from q4_actors import ActorSystem, MutableMode, MutableTensor
from q4core import memory

STATEMENTS = (
    "`PREFER_UNIFIED` asks what the device can do and falls back with a recorded reason and the same numbers.",
    "Actors' tensors on threads and processes do so, too.",
    "Actors' tensors on Ray do so, too.",
    "`REQUIRE_UNIFIED` that can't be met fails at once and names the device attributes that decided.",
    "Converted tensors are managed by the driver's own word, and both views show the same bytes.",
    "Activations are never copied under `PREFER_UNIFIED`.",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def said(decision: memory.MemoryDecision) -> str:
    """Return what was done with a tensor, and why."""
    return f"{decision.action}: {decision.reason}"


def managed() -> memory.MemoryProvider | None:
    """Return a provider that has managed memory on the device here, or None."""
    providers = q4.default_registry().memory_providers()
    return next((item for item in providers if item.is_available(torch.device(DEVICE))), None)


def prefer(case: Acceptance, weight: q4.PackedWeight, x: torch.Tensor) -> None:
    """Compare the result with that of the same layer without a policy."""
    results, lines = [], []
    for policy in (q4.UnifiedMemoryPolicy.DISABLED, q4.UnifiedMemoryPolicy.PREFER_UNIFIED):
        with q4.Session(q4.SessionConfig(device=DEVICE, unified_memory=policy)) as session:
            layer = session.linear(weight)
            results.append(layer(x))
            lines = [f"{policy.value}: {line}" for line in layer.diagnostics().memory]
    word = "fallback" if managed() is None else "managed"
    holds = torch.equal(*results) and bool(lines) and all(word in line for line in lines)
    case.judge(STATEMENTS[0], *lines, f"the same bits as without a policy: {torch.equal(*results)}", holds=holds)


def share(case: Acceptance, statement: str, *runtimes: str) -> None:
    """Make an actors' tensor by each runtime, and read why it lies where it does."""
    lines, right = [], []
    for runtime in runtimes:
        with ActorSystem(runtime) as system:
            state = system.mutable(torch.arange(64.0), name="state", unified_memory="prefer_unified")
            placement, kept = state.placement, state.snapshot().tensor
        lines.append(f"{runtime}: {said(placement)}")
        right.append(bool(placement.reason) and torch.equal(kept.cpu(), torch.arange(64.0)))
    case.judge(statement, *lines, holds=all(right))


def require(case: Acceptance, weight: q4.PackedWeight) -> None:
    """Require what is not there."""
    if managed() is not None:
        case.leave(STATEMENTS[3], f"{DEVICE} has managed memory, so that nothing is refused")
        return
    try:
        with q4.Session(q4.SessionConfig(device=DEVICE, unified_memory="require_unified")) as session:
            session.linear(weight)
    except q4.UnifiedMemoryError as error:
        named = [f"{key}={value}" in str(error) for key, value in error.attributes.items()]
        case.judge(STATEMENTS[3], error, holds=bool(named) and all(named))
    else:
        case.judge(STATEMENTS[3], "nothing was refused", holds=False)


def convert(case: Acceptance) -> None:
    """Convert a tensor, and write on one side of it."""
    provider = managed()
    if provider is None or not hasattr(provider, "dual_view"):
        case.leave(STATEMENTS[4], f"no provider has managed memory on {DEVICE}")
        return
    given = torch.arange(64.0)
    placer = q4.default_registry().placer(q4.UnifiedMemoryPolicy.REQUIRE_UNIFIED, device=DEVICE)
    placed, decision = placer.mutable(given)
    view = provider.dual_view(placed)
    with MutableTensor(placed, mode=MutableMode.IN_PLACE, copy=False, sides=view) as state:
        with state.write(device="cpu") as tensor:
            is_same = torch.equal(tensor, given)
            tensor.add_(1.0)
        with state.read(device="cuda") as seen:
            is_same = is_same and torch.equal(seen.tensor.cpu(), given + 1.0)
        is_managed = provider.is_managed(placed)
    lines = [said(decision), f"is_managed: {is_managed}", f"what one side writes the other reads: {is_same}"]
    case.judge(STATEMENTS[4], *lines, holds=is_managed and is_same)


def leave_activations(case: Acceptance) -> None:
    """Place an activation, and compare the storage."""
    placer = q4.default_registry().placer(q4.UnifiedMemoryPolicy.PREFER_UNIFIED, device=DEVICE)
    x = torch.randn(8, 128, device=DEVICE)
    placed, decision = placer.input(x)
    same = placed.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    case.judge(
        STATEMENTS[5], said(decision), f"the same storage: {same}; bytes copied: {decision.bytes or 0}", holds=same
    )


def main() -> int:
    """Judge each statement."""
    case = Acceptance("UC-04: Keep tensors in unified memory, by policy")
    torch.manual_seed(0)
    weight = q4.quantize(torch.randn(64, 128), "nf4")
    x = torch.randn(3, 128, device=DEVICE)
    prefer(case, weight, x)
    share(case, STATEMENTS[1], "threads", *(["processes"] if sys.platform == "linux" else []))
    if importlib.util.find_spec("ray") is None:
        case.leave(STATEMENTS[2], "ray is not installed")
    else:
        share(case, STATEMENTS[2], "ray")
    require(case, weight)
    convert(case)
    leave_activations(case)
    return case.end()


if __name__ == "__main__":
    sys.exit(main())
