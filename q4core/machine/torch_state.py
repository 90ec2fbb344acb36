"""The state of torch round a call: dispatch and function modes, transforms, forward mode, recorders.

There are no public ways to ask, so every private name of torch that says it is here.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from q4core.errors import LifecycleError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

below_autograd = torch._C._AutoDispatchBelowAutograd  # noqa: SLF001
casts = torch._C._is_any_autocast_enabled  # noqa: SLF001
dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
function_modes = torch._C._len_torch_function_stack  # noqa: SLF001
innermost_transform = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001
is_recorded = torch._C._is_tracing  # noqa: SLF001
"""Returns whether ``torch.jit.trace`` records."""

_NOTHING = contextlib.nullcontext()


def is_forward_mode() -> bool:
    """Return whether forward-mode differentiation is on, in which any tensor may carry a tangent."""
    return forward_ad._current_level >= 0  # noqa: SLF001


def is_transformed() -> bool:
    """Return whether a ``torch.func`` transform is being run."""
    return innermost_transform() is not None


def is_plain_call() -> bool:
    """Return whether nothing records, transforms or casts the operations of torch that are called now."""
    modes = dispatch_modes() or function_modes() or casts() or is_recorded() or torch.compiler.is_compiling()
    return not (modes or is_transformed() or is_forward_mode())


def require_outside_trace(what: str, hint: str) -> None:
    """Raise a ``LifecycleError`` inside a trace or a CUDA-graph capture."""
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or is_recorded() or capturing:
        raise LifecycleError(f"{what} inside a trace or a capture", hint=hint)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return what makes a CUDA device the current one inside a ``with`` block; on a CPU it does nothing."""
    if device.type != "cuda" or device.index in {None, torch.cuda.current_device()}:
        return _NOTHING
    return torch.cuda.device(device)


def outside_inference() -> AbstractContextManager[Any]:
    """Return a context in which new tensors are ordinary ones, whether or not its caller is in inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING  # noqa: FBT003  # torch's signature


def without_casts(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which a backend computes as it was written to, also under its caller's autocast."""
    return torch.autocast(device_type, enabled=False) if casts() else _NOTHING
