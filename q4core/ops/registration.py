"""The registered torch ops and their fake kernels: written once, here, for every backend.

``q4core::linear(x, buffers, bias, plan)`` and ``q4core::linear_out`` compute y; ``q4core::linear_input_grad`` is their
exact gradient to x, and ``q4core::linear_exact`` that one's own gradient. ``buffers`` are the layer's uint8 buffers:
the backend's, then the source's where the backend has no export, then the layer's tag, by whose address the counters
of the layer are found.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

import torch

from q4core.codec import dequantize
from q4core.errors import PLUGIN_FAULTS, InputError
from q4core.machine.torch_state import on_device, without_casts
from q4core.ops.call_check import check_buffers, check_linear_call, check_operand
from q4core.ops.imports import import_plan
from q4core.ops.prepared_weight import BY_TAG
from q4core.selection.plan import PLANS, Plan, raise_broken_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4core.backend import Prepared
    from q4core.ops.prepared_weight import PreparedWeight
    from q4core.selection.plan import Shapes

_CHUNK_BYTES = 16 << 20


def _run_plan(
    plan: Plan, prepared: Prepared, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> tuple[int, int | None] | None:
    """Run a checked call; return which segment of M ran and what the backend returned, or None where M = 0.

    Flattens leading dimensions, copies what a backend may not see (rows that are not contiguous), guards the device.
    """
    rows = x.numel() // plan.in_features
    if rows == 0:
        return None
    index = plan.segment_index(rows)
    if index is None:
        first, last = plan.segments[0].low, plan.segments[-1].high
        raise InputError(
            "q4.linear",
            name="rows of x",
            rule=f"between {first} and {'∞' if last is None else last}, the range that was asked for",
            value=rows,
            hint="Ask for a wider range of M when the layer is made.",
        )
    path = plan.segments[index].path.name
    flat = x if x.dim() == 2 else x.reshape(rows, plan.in_features)  # noqa: PLR2004  # [M, K] as it is
    if flat.is_neg():
        flat = flat.resolve_neg()
    if not flat.is_contiguous() and (flat.stride(1) != 1 or (rows > 1 and flat.stride(0) < plan.in_features)):
        flat = flat.contiguous()
    if bias is not None and (bias.is_neg() or not bias.is_contiguous()):
        bias = bias.resolve_neg().contiguous()
    is_plain = out.is_contiguous() and not out.is_neg()
    if is_plain:
        target = out if out.dim() == 2 else out.view(rows, plan.out_features)  # noqa: PLR2004  # [M, N] as it is
    else:
        target = torch.empty((rows, plan.out_features), dtype=out.dtype, device=out.device)
    try:
        is_cuda = x.is_cuda
        with without_casts("cuda" if is_cuda else "cpu"):
            if is_cuda and x.get_device() != torch.cuda.current_device():
                with torch.cuda.device(x.device):
                    found = plan.backend.linear(prepared, flat, target, bias=bias, path=path)
            else:
                found = plan.backend.linear(prepared, flat, target, bias=bias, path=path)
    except PLUGIN_FAULTS as error:
        raise_broken_call(error, plan.backend, "linear", path)
    if not is_plain:
        out.copy_(target.view(out.shape))
    return index, found


def _widths(plan: Shapes, *, to_input: bool) -> tuple[int, int]:
    """Return how wide the operand and the result of an exact op are."""
    return (plan.out_features, plan.in_features) if to_input else (plan.in_features, plan.out_features)


# -- registration

LIBRARY = torch.library.Library("q4core", "DEF")
LIBRARY.define("linear(Tensor x, Tensor[] buffers, Tensor? bias, str plan) -> Tensor")
LIBRARY.define("linear_out(Tensor x, Tensor[] buffers, Tensor? bias, str plan, Tensor(a!) out) -> ()")
LIBRARY.define("linear_input_grad(Tensor grad, Tensor[] buffers, str plan) -> Tensor")
LIBRARY.define("linear_exact(Tensor x, Tensor[] buffers, str plan) -> Tensor")


def _find(buffers: Sequence[torch.Tensor], key: str) -> tuple[Plan, torch.device, Prepared, PreparedWeight | None]:
    """Return the plan of a call, where its buffers are, the backend's view of them, and the layer with their tag.

    Buffers that are not that layer's own are checked.
    """
    live = BY_TAG.get(buffers[-1].data_ptr()) if buffers else None
    if live is not None and live.plan.key == key:
        if len(buffers) == len(live.buffers) and all(map(operator.is_, buffers, live.buffers)):
            return live.plan, live.device, live.prepared, live
    else:
        live = None
    shapes, device = check_buffers(key, buffers)
    plan = shapes if isinstance(shapes, Plan) else PLANS.setdefault(key, import_plan(key, shapes, buffers))
    return plan, device, plan.prepared(buffers), live


def run_op(
    x: torch.Tensor, buffers: list[torch.Tensor], bias: torch.Tensor | None, key: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the op's own kernel: find the plan, allocate y where there is no ``out``, call the backend, count."""
    plan, device, prepared, live = _find(buffers, key)
    check_linear_call(plan, device, x, bias, out)
    if out is None:
        # Sizes one by one: a tuple of them costs 1 µs more.
        out = torch.empty(*x.shape[:-1], plan.out_features, dtype=plan.dtype, device=device)
    ran = _run_plan(plan, prepared, x, out, bias)
    if live is not None and ran is not None:
        segment, found = ran
        live.counts[segment] += 1
        live.outlier_rows += found if type(found) is int else 0
    return out


def _linear_out(
    x: torch.Tensor, buffers: list[torch.Tensor], bias: torch.Tensor | None, key: str, out: torch.Tensor
) -> None:
    run_op(x, buffers, bias, key, out)


def _exact(tensor: torch.Tensor, buffers: list[torch.Tensor], key: str, *, to_input: bool) -> torch.Tensor:
    """Return ``grad @ w`` [..., K] of grad [..., N], or ``x @ wᵀ`` of x, with exact weights and sums in float32.

    The backend computes ``grad @ w`` where its input gradient is proven for these rows; else the core does, chunk by
    chunk of dequantised out-features.
    """
    plan, device, prepared, _ = _find(buffers, key)
    check_operand(plan, device, tensor, to_input=to_input)
    inner, width = _widths(plan, to_input=to_input)
    flat = tensor.reshape(-1, inner)
    path = plan.gradient_path(len(flat)) if to_input and tensor.dtype is plan.dtype else None
    with without_casts(device.type):
        if path is not None:
            result = torch.empty((len(flat), width), dtype=plan.dtype, device=device)
            backend: Any = plan.backend  # ``input_gradient`` is declared by its op
            try:
                with on_device(device):
                    backend.input_gradient(prepared, flat.contiguous(), result, path=path)
            except PLUGIN_FAULTS as error:
                raise_broken_call(error, plan.backend, "input_gradient", path)
        else:
            result = torch.zeros((len(flat), width), dtype=torch.float32, device=device)
            weight, step = plan.weight(buffers), max(1, _CHUNK_BYTES // (4 * plan.in_features))
            for start in range(0, plan.out_features, step):
                rows = slice(start, min(start + step, plan.out_features))
                dense = dequantize(weight, torch.float32, rows=rows, is_checked=True)
                if to_input:
                    result.addmm_(flat[:, rows].to(torch.float32), dense)
                else:
                    result[:, rows] = flat.to(torch.float32) @ dense.T
    return result.to(plan.dtype).reshape(*tensor.shape[:-1], width)


KERNELS: dict[str, Callable[..., Any]] = {
    "linear": run_op,
    "linear_out": _linear_out,
    "linear_input_grad": functools.partial(_exact, to_input=True),
    "linear_exact": functools.partial(_exact, to_input=False),
}
for _name, _kernel in KERNELS.items():
    for _key in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _key)

# torch's own kernel for tensors with the negative bit expects an op to return what it writes to; ours turns the signs.
LIBRARY.impl("linear_out", torch.library.fallthrough_kernel, "Negative")


def _linear_fake(
    x: torch.Tensor, buffers: list[torch.Tensor], bias: torch.Tensor | None, plan: str, out: torch.Tensor | None = None
) -> torch.Tensor | None:
    call, device = check_buffers(plan, buffers)
    check_linear_call(call, device, x, bias, out, is_fake=True)
    return x.new_empty((*x.shape[:-1], call.out_features)) if out is None else None


def _exact_fake(tensor: torch.Tensor, buffers: list[torch.Tensor], plan: str, *, to_input: bool) -> torch.Tensor:
    call, device = check_buffers(plan, buffers)
    check_operand(call, device, tensor, to_input=to_input)
    return tensor.new_empty((*tensor.shape[:-1], _widths(call, to_input=to_input)[1]), dtype=call.dtype)


torch.library.register_fake("q4core::linear", _linear_fake, lib=LIBRARY)
torch.library.register_fake("q4core::linear_out", _linear_fake, lib=LIBRARY)
torch.library.register_fake("q4core::linear_input_grad", functools.partial(_exact_fake, to_input=True), lib=LIBRARY)
torch.library.register_fake("q4core::linear_exact", functools.partial(_exact_fake, to_input=False), lib=LIBRARY)
