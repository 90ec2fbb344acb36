"""Location of a tensor: its storage, address and size in bytes."""

from __future__ import annotations

import torch

__all__ = ["address_of", "has_storage", "is_dense", "is_plain", "is_readable_in_place", "span_of"]


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has one storage; sparse and jagged ones have none of their own."""
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are those that its shape, strides and dtype describe."""
    return has_storage(tensor) and not tensor.is_nested and not tensor.is_quantized


def address_of(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage begins; 0 for one without memory."""
    return tensor.untyped_storage().data_ptr()


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's first element is, and how many bytes there are up to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are its bytes, one after another from its first element on."""
    return is_plain(tensor) and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_readable_in_place(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in system memory in a way that a GPU could read."""
    # Aligned for its dtype, as any view of a CUDA tensor is: safetensors files promise no more than 8 bytes.
    return (
        is_plain(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and tensor.data_ptr() % tensor.element_size() == 0
    )
