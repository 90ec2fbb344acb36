"""The eager fast path of ``Q4Linear``: straight to the backend when nothing is out of the ordinary.

A call through the registered op costs four to seven times what this one adds to the kernel (see
``benchmarks/results/overhead*.json``), and a layer of a small model runs for 10-20 µs in all. So plain eager calls (no
gradients, no dispatch modes, no transforms, nothing that records, the layer's own buffers) skip it. Everything is bound
once, when the layer is prepared: an attribute of an ``nn.Module`` costs up to 0.5 µs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad, profiler

from q4core.errors import PLUGIN_FAULTS
from q4core.machine.torch_state import casts, dispatch_modes, function_modes, innermost_transform, is_recorded
from q4core.selection.plan import raise_broken_call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from q4core.ops.prepared_weight import PreparedWeight

    FastPath = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]

PLAIN: type[torch.Tensor] = torch.Tensor
"""The one class of tensors that is taken; of another one torch might ask anything."""


def make_fast_path(
    weight: PreparedWeight, buffers: Mapping[str, Any], names: Sequence[str], parameters: Mapping[str, Any]
) -> FastPath | None:
    """Return ``fast(x, out)`` for a layer: y, or None where the call is not a plain one; None off CPU and CUDA.

    Args:
        weight: What the layer runs.
        buffers: The layer's own, any of which a functional call may replace.
        names: The names among them of the weight's buffers.
        parameters: The layer's own, its bias among them.
    """
    device = weight.device
    if device.type not in {"cpu", "cuda"}:
        return None
    own = tuple(zip(names, weight.buffers, strict=True))
    if device.type == "cpu":
        return _make_anywhere(weight, own, buffers, parameters, torch.empty, is_cpu=True)
    empty = functools.partial(torch.empty, device=device)
    anywhere = _make_anywhere(weight, own, buffers, parameters, empty, is_cpu=False)
    index, plain, current = device.index, PLAIN, torch.cuda.current_device

    def fast(x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
        if type(x) is not plain or not x.is_cuda or x.get_device() != index or current() != index:
            return None
        bias = parameters["bias"]
        if bias is not None and (not bias.is_cuda or bias.get_device() != index):
            return None
        if out is not None and (type(out) is not plain or not out.is_cuda or out.get_device() != index):
            return None
        return anywhere(x, out)

    return fast


def _make_anywhere(  # noqa: C901, PLR0913  # one flat list of conditions: each function call would cost 0.1 µs
    weight: PreparedWeight,
    own: tuple[tuple[str, torch.Tensor], ...],
    buffers: Mapping[str, Any],
    parameters: Mapping[str, Any],
    empty: Callable[..., torch.Tensor],
    *,
    is_cpu: bool,
) -> FastPath:
    """Return the fast path for tensors on the CPU, or for those that are known to be on the layer's other device."""
    plan, prepared, counts = weight.plan, weight.prepared, weight.counts
    linear = plan.backend.linear
    features, outputs, dtype = plan.in_features, plan.out_features, plan.dtype
    # Three without a loop, which costs as much as they do; the backend's one and the tag are the least.
    (name_0, buffer_0), (name_1, buffer_1), (name_2, buffer_2), *further = (*own[:2], *(own[2:] or own[:1]))
    bias_shape = (outputs,)
    in_bytes, out_bytes = features * dtype.itemsize, outputs * dtype.itemsize
    names = [segment.path.name for segment in plan.segments]
    one_row, one_token = ((1, features), (1, 1, features)) if plan.segments[0].low == 1 else (None, None)
    one_result, token_result, one_before = (1, outputs), (1, 1, outputs), -out_bytes
    segment_index, grad_enabled, plain = plan.segment_index, torch.is_grad_enabled, PLAIN
    modes, overrides, transform, autocast = dispatch_modes, function_modes, innermost_transform, casts
    recorded, default_dtype = is_recorded, torch.get_default_dtype

    def fast(  # noqa: C901, PLR0911, PLR0912  # as above
        x: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        if (
            type(x) is not plain
            or x.dtype is not dtype
            or x.is_cpu is not is_cpu
            or modes()
            or overrides()
            or transform() is not None
            or autocast()
            or recorded()
            or profiler._is_profiler_enabled  # noqa: SLF001  # public in all but its name
            or x.is_neg()
            or forward_ad._current_level >= 0  # noqa: SLF001  # is_forward_mode, without the call
            or not x.is_contiguous()
        ):
            return None
        # A functional call may have swapped any of the buffers.
        if buffers[name_0] is not buffer_0 or buffers[name_1] is not buffer_1 or buffers[name_2] is not buffer_2:
            return None
        if further and any(buffers[name] is not buffer for name, buffer in further):
            return None
        bias: Any = parameters["bias"]
        if bias is not None and (
            bias.dtype is not dtype
            or bias.shape != bias_shape
            or bias.is_cpu is not is_cpu
            or not bias.is_contiguous()
            or bias.is_neg()
        ):  # replaced since; the slow way says what is wrong
            return None
        shape = x.shape
        expected: tuple[int, ...]
        if shape == one_row:  # a token's, of which every further step counts
            two, rows, index, expected, before, after = True, 1, 0, one_result, one_before, in_bytes
        elif shape == one_token:
            two, rows, index, expected, before, after = False, 1, 0, token_result, one_before, in_bytes
        else:
            if not shape or shape[-1] != features:
                return None
            two = len(shape) == 2  # noqa: PLR2004  # [M, K] needs no view
            rows = shape[0] if two else x.numel() // features
            found = segment_index(rows) if rows else None
            if found is None:
                return None
            index, expected, before, after = found, (*shape[:-1], outputs), -rows * out_bytes, rows * in_bytes
        if grad_enabled() and (
            x.requires_grad or (bias is not None and bias.requires_grad) or (out is not None and out.requires_grad)
        ):
            return None
        if out is None:
            # Sizes one by one: a tuple of them costs 0.8 µs more, and dtype= 0.2 µs.
            out = empty(*expected) if default_dtype() is dtype else empty(*expected, dtype=dtype)
        else:
            gap = out.data_ptr() - x.data_ptr()
            if (
                type(out) is not plain
                or out.dtype is not dtype
                or out.shape != expected
                or out.is_cpu is not is_cpu
                or not out.is_contiguous()
                or out.is_neg()
                or before < gap < after  # they overlap
            ):
                return None
        try:
            if two:
                outliers = linear(prepared, x, out, bias=bias, path=names[index])
            else:
                outliers = linear(
                    prepared, x.view(rows, features), out.view(rows, outputs), bias=bias, path=names[index]
                )
        except PLUGIN_FAULTS as error:
            raise_broken_call(error, plan.backend, "linear", names[index])
        counts[index] += 1
        if type(outliers) is int and outliers:  # other backends may return anything
            weight.outlier_rows += outliers
        return out

    return fast
