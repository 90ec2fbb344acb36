"""``ManagedProvider``: q4core's memory provider over CUDA's managed, pageable and pinned memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from q4_um_managed.arguments import check_source, size_of, to_device
from q4_um_managed.blocks import PoolStats
from q4_um_managed.budget import Budget, host_memory
from q4_um_managed.device_attributes import choose, reads_system_memory
from q4_um_managed.driver import CPU
from q4_um_managed.dual import DualView
from q4_um_managed.errors import DriverFaultError
from q4_um_managed.lease import Lease
from q4_um_managed.machine import Machine
from q4_um_managed.mapping import MappedMemory
from q4_um_managed.ownership import Ownership
from q4_um_managed.pool import Pool
from q4_um_managed.probe_driver import find_driver
from q4_um_managed.storage import address_of, has_storage, is_dense, is_readable_in_place, span_of
from q4core import ConfigError, InputError, UnifiedMemoryError
from q4core.memory import Placement, note_provider

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from q4_um_managed.driver import Driver
    from q4_um_managed.probe_driver import Missing, Prospect
    from q4core.memory import Availability

__all__ = ["MAX_CACHED_BYTES", "ManagedProvider"]

MAX_CACHED_BYTES = 256 << 20
"""Bytes that the pool caches for the next tensors by default."""
_ADVICE = ("read_mostly", "preferred_location", "accessed_by")
_PLACEMENTS = ("auto", "managed", "pageable", "pinned")


class ManagedProvider:
    """Managed memory: one address, which the CPU and the GPU both use.

    Nothing is loaded or asked until the first question; the answers are remembered. All methods may be called by any
    thread.

    Args:
        find: Finds CUDA's runtime, or says what is missing.
        host: Gives the host's available and whole memory, and the source of the counts.
        max_cached_bytes: Limit of the pool's cache.
    """

    name = "um-managed"

    def __init__(
        self,
        find: Callable[[], Driver | Prospect | Missing] = find_driver,
        *,
        host: Callable[[], tuple[int, int, str]] = host_memory,
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        self._machine = Machine(find)
        self._host, self._max_cached_bytes = host, max_cached_bytes
        self._lock = threading.Lock()
        self._pool: Pool | None = None
        self._ownership = Ownership()
        self._hints_refused = 0

    # -- questions

    def is_available(self, device: torch.device | str) -> Availability:
        """Return whether managed memory can be had that ``device`` reaches, and by which attributes.

        Raises:
            ConfigError: ``device`` is none.
        """
        return self._machine.availability(to_device("unified memory", device))

    def is_managed(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's memory is managed, as the driver reports it; False once it was given back."""
        if not has_storage(tensor):
            return False
        owner = self._ownership.of(tensor)
        if owner is not None and owner.is_given_back:
            return False
        address = address_of(tensor)
        driver = self._machine.driver_if_any()
        return address != 0 and driver is not None and driver.is_managed(address)

    def placement_of(self, tensor: torch.Tensor) -> Placement | None:
        """Return where a tensor of this provider's lies, and which attribute decided it.

        None for any other memory, and for what was given back.
        """
        owner = self._ownership.of(tensor)
        if owner is not None:
            return None if owner.is_given_back else owner.placement
        return Placement("managed", "pointerGetAttributes") if self.is_managed(tensor) else None

    @property
    def hints_refused(self) -> int:
        """How often the driver did not take a hint (advice, prefetch) that was given on the way."""
        return self._hints_refused + self.stats().hints_refused

    def stats(self) -> PoolStats:
        """Return what the pool holds and has done."""
        return PoolStats(0, 0, 0, 0, 0, 0) if self._pool is None else self._pool.stats()

    # -- memory

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """Return a contiguous managed tensor with unspecified content: on the CPU or on a CUDA device, as asked.

        Raises:
            ConfigError: ``device`` is none.
            InputError: No tensor has that shape, or ``dtype`` is none.
            UnifiedMemoryError: There is none, or it does not fit into the budget; with the numbers.
            LifecycleError: A CUDA graph is being captured.
        """
        device = to_device(f"empty of {self.name}", device)
        return self._made(shape, dtype, device, self._managed(device))

    def to_managed(
        self, tensor: torch.Tensor, *, device: torch.device | str, read_mostly: bool, prefetch: bool
    ) -> torch.Tensor:
        """Return a copy in managed memory that ``device`` reaches.

        Args:
            tensor: Any strided tensor.
            device: The device that will compute with it.
            read_mostly: Written once, then only read.
            prefetch: Move the pages to ``device`` now.

        Raises:
            ConfigError, UnifiedMemoryError: As for ``empty``.
            InputError: ``tensor`` has no plain contents: sparse, nested, quantised or on the meta device.
            LifecycleError: As for ``empty``; or ``tensor`` was given back.
        """
        what = f"to_managed of {self.name}"
        device = to_device(what, device)
        check_source(what, tensor)
        self._ownership.in_use(tensor, what)
        managed = self._made(tuple(tensor.shape), tensor.dtype, device, self._managed(device), tensor)
        index = self._machine.index(device)
        if self._machine.attributes(index)["concurrentManagedAccess"]:
            size = max(1, managed.nbytes)
            address = address_of(managed)
            if read_mostly:
                self._hint(lambda: self._machine.driver().advise(address, size, "read_mostly", index))
                self._ownership.lease_of(managed, what).require_block(what).is_read_mostly = True
            if prefetch:
                self._hint(lambda: self.prefetch(managed, device))
        return managed

    def prefetch(self, tensor: torch.Tensor, device: torch.device | str) -> None:
        """Queue the move of a managed tensor's pages to ``device``; the address stays.

        Where the driver moves pages by itself alone (``concurrentManagedAccess=0``, pinned or pageable memory, a graph
        that is being captured) nothing is done.

        Raises:
            ConfigError: ``device`` is neither the CPU nor a CUDA device.
            LifecycleError: The memory was given back.
            UnifiedMemoryError: The driver refuses.
        """
        device = to_device("prefetch", device)
        driver, index = self._machine.driver(), self._machine.index(device)
        placement = self.placement_of(tensor)
        if placement is None:
            self._ownership.in_use(tensor, f"prefetch of {self.name}")
            return
        if placement.kind != "managed" or not tensor.numel():
            return
        if not self._machine.attributes(index)["concurrentManagedAccess"] or driver.is_capturing(index):
            return
        start, size = span_of(tensor)
        driver.prefetch(start, size, CPU if device.type == "cpu" else index, index)

    def advise(self, tensor: torch.Tensor, advice: str, device: torch.device | str, *, is_set: bool = True) -> None:
        """Advise the driver how a managed tensor will be used.

        Args:
            tensor: In managed memory.
            advice: ``"read_mostly"``, ``"preferred_location"`` or ``"accessed_by"``.
            device: The device that the advice names.
            is_set: False takes the advice back.

        Raises:
            ConfigError: There is no such advice, or ``device`` is neither the CPU nor a CUDA device.
            InputError: ``tensor`` has no plain contents: sparse, nested, quantised or on the meta device.
            LifecycleError: The memory was given back.
            UnifiedMemoryError: The driver refuses.
        """
        what = f"advise of {self.name}"
        if advice not in _ADVICE:
            rule = f"one of {', '.join(_ADVICE)}"
            raise ConfigError("advice on managed memory", name="advice", rule=rule, value=advice)
        device = to_device(what, device)
        check_source(what, tensor)
        owner = self._ownership.in_use(tensor, what)
        driver, index = self._machine.driver(), self._machine.index(device)
        if not tensor.numel():
            return
        start, size = span_of(tensor)
        driver.advise(start, size, advice, CPU if device.type == "cpu" else index, is_set=is_set)
        if advice == "read_mostly" and is_set and isinstance(owner, Lease) and owner.block is not None:
            owner.block.is_read_mostly = True

    def free(self, tensor: torch.Tensor) -> None:
        """Take a tensor's memory back once the device work queued so far is done; nothing may use it afterwards.

        Raises:
            InputError: The memory is not this provider's.
            LifecycleError: It was given back before.
        """
        self._ownership.lease_of(tensor, f"free of {self.name}").give_back()

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """Keep the memory, once it comes back, until a further stream has passed, as ``Tensor.record_stream`` does.

        Args:
            tensor: This provider's.
            stream: The handle of a stream that uses it and was not current when the tensor was made.

        Raises:
            InputError: The memory is not this provider's.
            LifecycleError: It was given back.
        """
        self._ownership.lease_of(tensor, f"record_stream of {self.name}").streams.add(stream)

    def trim(self) -> int:
        """Free all cached blocks of the pool; return the bytes that were freed. Waits for the device."""
        return 0 if self._pool is None else self._pool.trim()

    # -- further placements

    def place(
        self, tensor: torch.Tensor, *, device: torch.device | str, placement: str = "auto"
    ) -> tuple[torch.Tensor, Placement]:
        """Return a tensor with the same values in memory that CPU and GPU share, and where that is.

        Args:
            tensor: Any strided tensor.
            device: A CUDA device.
            placement: ``"auto"``; ``"pageable"``: the very same bytes, uncopied; ``"managed"``; ``"pinned"``.

        Raises:
            ConfigError: There is no such placement, or ``device`` is no CUDA device.
            InputError: ``tensor`` has no plain contents: sparse, nested, quantised or on the meta device.
            LifecycleError: ``tensor`` was given back, or a CUDA graph is being captured.
            UnifiedMemoryError: The device's attributes don't allow it; with their values.
        """
        device = to_device("placing a tensor", device)
        if placement not in _PLACEMENTS or device.type != "cuda":
            wrong = placement not in _PLACEMENTS
            rule = f"one of {', '.join(_PLACEMENTS)}" if wrong else "a CUDA device"
            name, value = ("placement", placement) if wrong else ("device", str(device))
            raise ConfigError("placing a tensor", name=name, rule=rule, value=value)
        what = f"place of {self.name}"
        check_source(what, tensor)
        self._ownership.in_use(tensor, what)
        attributes = self._machine.attributes(self._machine.index(device))
        chosen = choose(attributes, wanted=placement, is_readable_in_place=is_readable_in_place(tensor))
        if chosen.kind == "pageable":
            return self._mapped(tensor, device, chosen), chosen
        return self._made(tuple(tensor.shape), tensor.dtype, device, chosen, tensor), chosen

    def map(self, tensor: torch.Tensor, *, device: torch.device | str) -> torch.Tensor | None:
        """Return a CUDA tensor over the same bytes as a CPU tensor, where the device reads those well; else None.

        A mapped checkpoint becomes a CUDA tensor this way, without a copy. The CPU tensor lives as long as the result.

        Raises:
            ConfigError: ``device`` is none.
            LifecycleError: ``tensor`` was given back.
            UnifiedMemoryError: The driver or torch refuses.
        """
        device = to_device(f"map of {self.name}", device)
        if device.type != "cuda" or not is_readable_in_place(tensor) or not self.is_available(device):
            return None
        if reads_system_memory(self._machine.attributes(self._machine.index(device))) is None:
            return None
        return self.place(tensor, device=device, placement="pageable")[0]

    def dual_view(self, tensor: torch.Tensor, *, device: torch.device | str | None = None) -> DualView:
        """Return a CPU side and a CUDA side of the same bytes.

        Args:
            tensor: This provider's, contiguous, managed or pinned.
            device: The CUDA device of the other side. Defaults to the tensor's own.

        Raises:
            ConfigError: ``device`` is neither the CPU nor a CUDA device.
            InputError: The memory is not this provider's, or the tensor is not contiguous.
            LifecycleError: The memory was given back.
        """
        what = f"dual_view of {self.name}"
        lease = self._ownership.lease_of(tensor, what)
        block = lease.require_block(what)
        if not tensor.is_contiguous() or not tensor.numel():
            value = f"{list(tensor.shape)} with strides {list(tensor.stride())}"
            raise InputError("dual_view", name="tensor", rule="contiguous, and not empty", value=value)
        driver, index = self._machine.driver(), block.device
        if device is not None:
            index = self._machine.index(to_device(what, device))
        attributes = self._machine.attributes(index)
        start, size = span_of(tensor)

        def typed(raw: torch.Tensor) -> torch.Tensor:
            self._ownership.note(raw, lease)
            note_provider(raw, self)
            return raw.view(tensor.dtype).view(tensor.shape)

        is_concurrent = block.is_pinned or bool(attributes["concurrentManagedAccess"])
        if is_concurrent and tensor.device.type != "cpu":
            lease.wait()  # the CPU side follows no stream
        cuda = tensor if tensor.device.type == "cuda" else typed(driver.cuda_bytes(lease, start, size, index))

        def make_cpu() -> torch.Tensor:
            lease.wait()
            return (
                tensor if tensor.device.type == "cpu" and is_concurrent else typed(driver.cpu_bytes(lease, start, size))
            )

        return DualView(cuda, make_cpu, driver, index, attributes, lease, is_concurrent=is_concurrent)

    # -- inside

    def _pool_of(self, driver: Driver) -> Pool:
        with self._lock:
            if self._pool is None:
                self._pool = Pool(driver, Budget(driver, self._host), max_cached_bytes=self._max_cached_bytes)
            return self._pool

    def _managed(self, device: torch.device) -> Placement:
        """Return the placement in managed memory; raise where there is none."""
        answer = self.is_available(device)
        if not answer:
            rule = f"managed memory for device {device}"
            raise UnifiedMemoryError(
                "unified memory", name="memory", rule=rule, value=answer.reason, attributes=answer.attributes
            )
        return choose(self._machine.attributes(self._machine.index(device)), wanted="managed")

    def _made(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        placement: Placement,
        source: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a new contiguous tensor, with the values of ``source``."""
        what, is_for_cpu = "unified memory", device.type == "cpu"
        size = size_of(what, shape, dtype)
        driver, index = self._machine.driver(), self._machine.index(device)
        attributes, is_pinned = self._machine.attributes(index), placement.kind == "pinned"
        # Plain bytes, which a library may copy.
        address = 0 if source is None or is_for_cpu or not is_dense(source) else source.data_ptr()
        pool = self._pool_of(driver)
        block, stream = pool.take(max(1, size), index, attributes, is_pinned=is_pinned, source=address)
        lease = Lease(pool, block, size, placement, stream)
        if is_for_cpu:
            lease.wait()
        if block.is_read_mostly:
            self._hint(lambda: driver.advise(block.address, block.size, "read_mostly", index, is_set=False))
            block.is_read_mostly = False
        # A storage of no bytes would have no address to know the memory by.
        if is_for_cpu:
            raw = driver.cpu_bytes(lease, block.address, max(1, size))
        else:
            address = driver.device_address(block.address) if block.is_pinned else block.address
            raw = driver.cuda_bytes(lease, address, max(1, size), index)
        self._ownership.note(raw, lease)
        note_provider(raw, self)
        made = raw[:size].view(dtype).view(shape)
        if source is not None:
            if not block.is_filled:
                made.copy_(source.detach())
            lease.note_written()
        return made

    def _mapped(self, tensor: torch.Tensor, device: torch.device, placement: Placement) -> torch.Tensor:
        driver, index = self._machine.driver(), self._machine.index(device)
        start, size = span_of(tensor)
        memory = MappedMemory(tensor.detach(), driver, index, placement)
        raw = driver.cuda_bytes(memory, start, size, index)
        self._ownership.note(raw, memory)
        return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _hint(self, give: Callable[[], None]) -> None:
        """Give the driver a hint, which only affects speed."""
        try:
            give()
        except DriverFaultError:
            self._hints_refused += 1
