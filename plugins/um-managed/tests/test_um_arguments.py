"""What the provider is given: tensors, shapes and devices that can't be served are refused by typed errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from pretended_driver import CONCURRENT, CUDA, GB10, Pretended, pretend

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4_um_managed import ManagedProvider

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

UNFIT: dict[str, Callable[[], Any]] = {
    "torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "torch.sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "torch.quint8": lambda: torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.quint8),
    "meta": lambda: torch.zeros(3, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "torch.jagged": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    "NoneType": lambda: None,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning", "ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("attributes", [CONCURRENT, GB10], ids=["discrete", "GB10"])
@pytest.mark.parametrize("kind", UNFIT)
def test_tensors_without_plain_contents_are_refused(kind: str, attributes: dict[str, int]) -> None:
    """What has no strided contents is refused with its kind, is in no managed memory, and is not mapped."""
    provider, tensor = pretend(attributes).provider, UNFIT[kind]()
    for call in (
        lambda: provider.to_managed(tensor, device=CUDA, read_mostly=True, prefetch=True),
        lambda: provider.place(tensor, device=CUDA),
        lambda: provider.place(tensor, device=CUDA, placement="pinned"),
        lambda: provider.advise(tensor, "read_mostly", CUDA),
    ):
        with pytest.raises(q4.InputError) as caught:
            call()
        assert (caught.value.name, caught.value.value) == ("tensor", kind)
        assert caught.value.rule is not None
    for take in (provider.free, provider.dual_view, lambda item: provider.record_stream(item, 7)):
        with pytest.raises(q4.InputError):
            take(tensor)
    assert provider.is_managed(tensor) is False
    assert provider.placement_of(tensor) is None
    assert provider.map(tensor, device=CUDA) is None
    assert provider.stats().in_use_bytes == 0


DEVICE_TAKERS: dict[str, Callable[[ManagedProvider, Any], object]] = {
    "is_available": lambda provider, device: provider.is_available(device),
    "empty": lambda provider, device: provider.empty((3,), torch.float32, device),
    "to_managed": lambda provider, device: provider.to_managed(
        torch.ones(3), device=device, read_mostly=True, prefetch=True
    ),
    "prefetch": lambda provider, device: provider.prefetch(provider.empty((3,), torch.float32, CUDA), device),
    "advise": lambda provider, device: provider.advise(
        provider.empty((3,), torch.float32, CUDA), "accessed_by", device
    ),
    "place": lambda provider, device: provider.place(torch.ones(3), device=device),
    "map": lambda provider, device: provider.map(torch.ones(3), device=device),
    "dual_view": lambda provider, device: provider.dual_view(provider.empty((3,), torch.float32, CUDA), device=device),
}


@pytest.mark.parametrize("call", DEVICE_TAKERS)
def test_a_device_may_be_text(call: str) -> None:
    """A device is taken as torch takes it; one that torch does not know is refused, with what was given."""
    case: Pretended = pretend(GB10)
    for device in ("cuda:0", "cuda"):
        DEVICE_TAKERS[call](case.provider, device)
    for wrong in ("gpu", 1.5, None) if call != "dual_view" else ("gpu", 1.5):
        with pytest.raises(q4.ConfigError) as caught:
            DEVICE_TAKERS[call](case.provider, wrong)
        assert (caught.value.name, caught.value.value) == ("device", wrong)


@pytest.mark.parametrize("call", ["prefetch", "advise", "dual_view"])
def test_a_device_without_part_in_managed_memory_is_refused(call: str) -> None:
    """Neither CPU nor CUDA is no place for pages, instead of standing for the current device."""
    with pytest.raises(q4.ConfigError, match="CUDA"):
        DEVICE_TAKERS[call](pretend().provider, "mps")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "shape", [(2**62, 4), (2**62, 2**62), (0, 2**62, 4), (2**70,), (-1,), (-1, -2), (3, -1), (2.5,), 4, "ab"], ids=str
)
def test_a_shape_that_no_tensor_has_is_refused(shape: Any, device: str) -> None:
    """Negative, broken and endless sizes are refused before any memory is taken."""
    case = pretend()
    with pytest.raises(q4.InputError) as caught:
        case.provider.empty(shape, torch.float32, torch.device(device))
    assert caught.value.name == "shape"
    assert caught.value.value == shape
    assert case.runtime.count("mallocManaged") == 0


@pytest.mark.parametrize("dtype", ["float32", None])
def test_a_dtype_that_is_none_is_refused(dtype: Any) -> None:
    """Only torch's dtypes have a size."""
    with pytest.raises(q4.InputError) as caught:
        pretend().provider.empty((3,), dtype, CUDA)
    assert (caught.value.name, caught.value.value) == ("dtype", dtype)
