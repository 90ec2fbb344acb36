"""The buffers that a model saves, such as running means: a forward pass changes them before its loss is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["copy_buffers", "restore_buffers"]

Copies = list[tuple["nn.Module", str, torch.Tensor, torch.Tensor]]


def copy_buffers(model: nn.Module) -> Copies:
    """Return a copy of each buffer that a model's state holds; what is packed is none, and is not copied."""
    return [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()  # noqa: SLF001  # of this module alone, to be put back there
        if buffer is not None and name not in module._non_persistent_buffers_set  # noqa: SLF001  # as above
    ]


@torch.no_grad()
def restore_buffers(copies: Copies) -> None:
    """Restore every buffer from its copy."""
    for module, name, buffer, numbers in copies:
        buffer.copy_(numbers)
        module._buffers[name] = buffer  # noqa: SLF001  # a forward pass may have set another tensor
