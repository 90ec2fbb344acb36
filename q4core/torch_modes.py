"""What torch has switched on round a call: dispatch and function modes, transforms, forward mode.

There are no public ways to ask, so every private name of torch that tells it stands here.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = [
    "below_autograd",
    "dispatch_modes",
    "function_modes",
    "innermost_transform",
    "is_forward_mode",
    "is_transformed",
]

below_autograd = torch._C._AutoDispatchBelowAutograd  # noqa: SLF001
dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
function_modes = torch._C._len_torch_function_stack  # noqa: SLF001
innermost_transform = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001


def is_forward_mode() -> bool:
    """Return whether forward-mode differentiation is on, in which any tensor may carry a tangent."""
    return forward_ad._current_level >= 0  # noqa: SLF001


def is_transformed() -> bool:
    """Return whether a ``torch.func`` transform is being run."""
    return innermost_transform() is not None
