"""``PackedModule``: how a module that owns a packed weight is moved, copied, pickled, saved and loaded."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.diagnostics.events import emit
from q4core.errors import LifecycleError, Q4Error
from q4core.formats import FLOATS
from q4core.layers.preparation import copy_prepared
from q4core.layers.prepared_module import Content, WeightOwner
from q4core.layers.state_dict import load_weight, save_weight, split_state
from q4core.machine import outside_inference
from q4core.memory import provider_of
from q4core.plugins.registry import default_registry
from q4core.weight.sending import Temporary, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from q4core.layers.preparation import PreparedLayer

__all__ = ["PackedModule"]

_PICKLED = "packed_weight"
_SHARED_BUFFERS = "shared_buffers"
_SHARED = frozenset({"_spec", "_origin", "_config", "_registry", "_m"})
"""Attributes that copies of a layer share, because nothing changes them in place."""


class PackedModule(WeightOwner):
    """What ``Q4Linear`` is but for its arithmetic: an owner of one weight that follows ``nn.Module``'s own methods.

    Arguments and errors are those of ``Q4Linear``.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002  # nn.Module's signature
        """Follow ``.to()``, ``.half()`` and the like: codes and scales keep their bytes; see ``docs/decisions``."""
        probe = fn(torch.empty(0, dtype=self._dtype, device=self.device))
        dtype = probe.dtype if probe.dtype in FLOATS else self._dtype
        same = dtype == self._dtype and probe.device == self.device
        content = None
        if not self._closed and not same:
            content = self._moved(probe.device, dtype)
        elif self._ready is not None and probe.is_cpu and probe.is_shared() and not self._is_shared():
            content = self._shared_content()
        own = {key: self._buffers.pop(key) for key in self._buffer_names}  # moved as a weight, not as bytes
        try:
            with outside_inference():
                super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        finally:
            self._buffers.update(own)
        if content is not None:
            self._take(content)
        bias = self._own_bias()
        if bias is not None and bias.dtype != self._dtype:
            bias.data = bias.data.to(self._dtype)  # .double(), say
        return self

    def _is_shared(self) -> bool:
        """Return whether ``share_memory`` has shared the packed buffers with other processes."""
        return self._device.type == "cpu" and any(buffer.is_shared() for buffer in self._own_buffers())

    def _shared_content(self) -> Content:
        """Return the layer's weight in shared memory, without touching the layer: another thread may be using it.

        Raises:
            LifecycleError: The buffers are in a memory provider's memory.
        """
        ready = self._require_ready()
        owner = next((found for buffer in ready.buffers if (found := provider_of(buffer))), None)
        if owner is not None:
            raise LifecycleError(
                f"Layer {self.name!r} can't be shared: its buffers are in memory of {owner.name}. "
                "Make it with unified_memory='disabled'."
            )
        return self._content_over(tuple(buffer.clone().share_memory_() for buffer in ready.buffers), ready)

    def _content_over(self, buffers: tuple[torch.Tensor, ...], prepared: PreparedLayer) -> Content:
        """Return content whose buffers hold what was prepared in another place."""
        view = prepared.plan.prepared(buffers)
        return self._content(buffers, attrs.evolve(prepared, buffers=buffers, prepared=view))

    def _moved(self, device: torch.device, dtype: torch.dtype) -> Content:
        """Prepare the layer for another device or dtype, without touching it."""
        config = self._config
        if device != self.device and device.type != "meta":
            config = attrs.evolve(config, device=str(device))
        if self._ready is not None:
            weight = self.packed_weight()  # brought to its device by whoever prepares it, as the memory policy says
            return self._prepare(weight.to(device) if device.type == "meta" else weight, dtype, config)
        buffers = tuple(torch.empty_like(buffer, device=device) for buffer in self._own_buffers())
        return attrs.evolve(self._content(buffers, None), config=config, dtype=dtype, device=device)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001  # nn.Module's signature
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._require_ready()
        save_weight(self.packed_weight(), destination, prefix)

    def _load_from_state_dict(  # noqa: PLR0913  # nn.Module's signature
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,  # noqa: FBT001  # nn.Module's signature
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own, rest = split_state(state_dict, prefix)
        formats = (self._registry or default_registry()).formats().values()
        device = None if self.device.type == "meta" else self.device
        content = None
        try:
            if self._closed:
                self._require_ready()
            shape = (self.out_features, self.in_features)
            weight = load_weight(own, prefix, shape, device, formats, missing_keys, unexpected_keys)
            if weight is not None:
                name, dialect, notes = self._origin
                weight = weight.relabelled(name=name, dialect=dialect, notes=notes)
                content = self._prepare(weight, self._dtype, self._config)
                if self._is_shared():
                    self._require_same_layout(content)
        except Q4Error as error:  # nothing is loaded, the bias neither
            error_msgs.append(f"{prefix}weight: {error}")
            return
        if own and content is None:
            return  # part of the weight is missing: the load will be refused, and the bias stays as it is
        faults: list[str] = []
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, faults)
        error_msgs.extend(faults)
        if content is not None and not faults:
            if self._is_shared() and content.prepared is not None:
                buffers = self._require_ready().buffers
                for buffer, loaded in zip(buffers, content.buffers, strict=True):
                    buffer.copy_(loaded)  # in place, as torch loads a shared parameter: the other processes see it
                content = attrs.evolve(self._content_over(buffers, content.prepared), origin=content.origin)
            self._take(content)
        bias = self._own_bias()
        if bias is not None and not faults and bias.device.type != "meta":
            self.bias = self._as_bias(bias)  # assign=True takes whatever dtype the state has

    def _require_same_layout(self, content: Content) -> None:
        """Refuse a weight that can't be written into the buffers that other processes use.

        Raises:
            LifecycleError: It was prepared in another way than the layer's own.
        """
        if content.prepared is None or content.prepared.plan is not self._require_ready().plan:
            raise LifecycleError(
                f"Layer {self.name!r} is shared with other processes, which can't follow a load of another format "
                "or layout. Load before share_memory()."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent copy: its own bytes, the same plan, counters at zero; hooks and attributes as well."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        with outside_inference():
            for key, value in self._kept().items():
                twin.__dict__[key] = value if key in _SHARED else copy.deepcopy(value, memo)
        with outside_inference():
            buffers = [buffer.clone(memory_format=torch.contiguous_format) for buffer in self._own_buffers()]
        prepared = self._ready
        if prepared is not None:
            prepared = copy_prepared(prepared, buffers[:-1], self._config, self._registry or default_registry())
            buffers = list(prepared.buffers)
        twin._take(self._content(tuple(buffers), prepared))  # noqa: SLF001  # own class
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the canonical weight, and all that a user put on the layer, as any module is pickled.

        The plugins stay out: the other process selects among its own, and prepares for itself. After
        ``share_memory`` it then takes the shared buffers in place of its own, if it has chosen the same plan. A layer
        on the meta device takes its empty tensors along.

        Raises:
            LifecycleError: The layer is closed.
        """
        is_meta = self._ready is None and not self._closed
        weight = tuple(self._own_buffers()) if is_meta else Temporary(self.packed_weight())
        shared = (self._require_ready().plan.stem, self._require_ready().buffers) if self._is_shared() else None
        return {**self._kept(), "_registry": None, _PICKLED: weight, _SHARED_BUFFERS: shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Prepare the unpickled weight with this process's plugins."""
        rest = dict(state)
        weight, shared = unwrapped(rest.pop(_PICKLED)), rest.pop(_SHARED_BUFFERS)
        super().__setstate__(rest)  # type: ignore[no-untyped-call]  # torch's
        if isinstance(weight, tuple):
            self._take(self._content(weight, None))
            return
        content = self._prepare(weight, self._dtype, self._config)
        if shared is not None and content.prepared is not None:
            content = self._adopted(content, content.prepared, *shared)
        self._take(content)
        bias = self._own_bias()
        if bias is not None:
            self.bias = self._as_bias(bias)  # the device may be another one here

    def _adopted(
        self, content: Content, prepared: PreparedLayer, stem: str, buffers: tuple[torch.Tensor, ...]
    ) -> Content:
        """Return content over another process's shared buffers, if they came shared and hold what this one prepared."""
        if not all(buffer.is_shared() for buffer in buffers):
            return content  # from a file, or a copy within this process
        if prepared.plan.stem != stem:
            emit("q4.share", level=logging.WARNING, layer=self.name, shared=stem, prepared=prepared.plan.stem)
            return content
        return attrs.evolve(self._content_over(buffers, prepared), spec=content.spec, origin=content.origin)
