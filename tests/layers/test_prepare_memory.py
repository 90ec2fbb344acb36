"""Where prepared weights lie under a unified-memory policy: in managed memory from the start where it can be had."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_um_managed import q4_placers
from q4core.memory import Availability
from tests.support.fakes import FakeBackend, plugin

if TYPE_CHECKING:
    import types

PREFER = q4.UnifiedMemoryPolicy.PREFER_UNIFIED
REQUIRE = q4.UnifiedMemoryPolicy.REQUIRE_UNIFIED


class Provider:
    """A provider over ordinary memory that remembers what it gave, and can be configured to fail."""

    name = "fake-memory"

    def __init__(self, *, can_allocate: bool = True) -> None:
        self.can_allocate = can_allocate
        self.given: set[int] = set()
        self.copies = 0

    def is_available(self, device: torch.device) -> Availability:
        """Say yes."""
        return Availability(is_available=True, reason="it can", attributes={"managedMemory": 1})

    def is_managed(self, tensor: torch.Tensor) -> bool:
        """Decide by address."""
        return tensor.data_ptr() in self.given

    def to_managed(self, tensor: torch.Tensor, **_: Any) -> torch.Tensor:
        """Copy."""
        self.copies += tensor.numel() > 1  # one value is a trial
        managed = tensor.clone()
        self.given.add(managed.data_ptr())
        return managed

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate, or fail as configured."""
        if not self.can_allocate:
            raise MemoryError("no managed memory left")
        managed = torch.empty(shape, dtype=dtype, device=device)
        self.given.add(managed.data_ptr())
        return managed

    def prefetch(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Do nothing."""

    def free(self, tensor: torch.Tensor) -> None:
        """Forget."""
        self.given.discard(tensor.data_ptr())


class Careful(FakeBackend):
    """Allocates through the context, as the contract asks."""

    def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
        """Copy each tensor into what the context gives."""
        tensors = []
        for index, (_, tensor) in enumerate(weight.tensors()):
            if index:
                tensors.append(context.keep(tensor))
            else:
                own = context.empty(tuple(tensor.shape), tensor.dtype)
                tensors.append(own.copy_(tensor))
        return q4.Prepared(tuple(tensors), q4.WeightSpec.of(weight))


def _registry(provider: Provider) -> q4.Registry:
    module: types.ModuleType = plugin(Careful("careful"), q4_memory_providers=lambda: [provider], q4_placers=q4_placers)
    return q4.Registry([("a", module)])


def _weight() -> q4.PackedWeight:
    return q4.quantize(torch.randn(24, 128, generator=torch.Generator().manual_seed(3)), "nf4")


@pytest.mark.parametrize("policy", [PREFER, REQUIRE])
def test_a_context_allocates_managed_memory(policy: q4.UnifiedMemoryPolicy) -> None:
    """What a backend allocates through its context is managed at once: nothing is copied afterwards."""
    provider = Provider()
    layer = q4.Session(q4.SessionConfig(unified_memory=policy), registry=_registry(provider)).linear(_weight())
    assert provider.copies == 0
    assert all("already managed" in line for line in layer.diagnostics().memory)
    assert layer.diagnostics().memory


def test_an_allocation_that_fails_is_promoted_later() -> None:
    """Where the provider can't allocate but can promote, ordinary memory is promoted after prepare."""
    provider = Provider(can_allocate=False)
    layer = q4.Session(q4.SessionConfig(unified_memory=PREFER), registry=_registry(provider)).linear(_weight())
    assert provider.copies == len(layer.diagnostics().memory) > 0
    assert all(line.startswith("promoted") for line in layer.diagnostics().memory)


def test_disabled_asks_no_provider() -> None:
    """Under DISABLED the context is torch's own."""
    provider = Provider()
    q4.Session(registry=_registry(provider)).linear(_weight())
    assert provider.given == set()
    assert provider.copies == 0


def test_a_copy_of_a_managed_layer_is_managed() -> None:
    """deepcopy places the copy's own bytes under the same policy, and says so."""
    provider = Provider()
    layer = q4.Session(q4.SessionConfig(unified_memory=PREFER), registry=_registry(provider)).linear(_weight())
    twin = copy.deepcopy(layer)
    assert all(line.startswith("promoted") for line in twin.diagnostics().memory)
    assert len(twin.diagnostics().memory) == len(layer.diagnostics().memory) > 0
    x = torch.ones(1, 128)
    assert torch.equal(twin(x), layer(x))


def test_keep_allocates_once_and_writes_once() -> None:
    """What is held is the context's own memory, of the shape and dtype asked for, with the tensor's values."""
    given: list[tuple[tuple[int, ...], torch.dtype]] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        given.append((shape, dtype))
        return torch.empty(shape, dtype=dtype)

    context = q4.PrepareContext("cpu", empty=empty)
    source = torch.arange(6, dtype=torch.float16).reshape(2, 3)
    same = context.keep(source.T)
    assert torch.equal(same, source.T)
    assert same.is_contiguous()
    wide = context.keep(source, (6,), torch.float32)
    assert torch.equal(wide, torch.arange(6, dtype=torch.float32))
    assert torch.equal(context.keep(source, dtype=torch.uint8), source.to(torch.uint8))
    scalar = context.keep(torch.tensor(3.0), (1,))
    assert scalar.tolist() == [3.0]
    float16, float32 = torch.float16, torch.float32
    assert given == [((3, 2), float16), ((6,), float32), ((2, 3), torch.uint8), ((1,), float32)]
    source.zero_()
    assert wide.sum() == 15


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 3), (2, 3, 2), (-1,)])
def test_keep_neither_repeats_nor_drops_values(shape: tuple[int, ...]) -> None:
    """A shape that holds another number of values is refused, though it could be broadcast to."""
    with pytest.raises(q4.ConfigError, match="shape must be one of 6 values"):
        q4.PrepareContext("cpu").keep(torch.zeros(2, 3), shape)
