"""``PackedModule``: how a module that owns a packed weight is moved, copied, pickled, saved and loaded.

It is saved strictly and in no dialect: ``weight.spec`` (uint8, the JSON of ``WeightSpec``) and one ``weight.<field>``
per tensor field of ``PackedWeight``.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.diagnostics.events import emit
from q4core.errors import LifecycleError, Q4Error, WeightError
from q4core.formats import FLOATS
from q4core.layers.preparation import copy_layer
from q4core.layers.prepared_module import NOTHING, WeightOwner
from q4core.machine import outside_inference
from q4core.memory import provider_of
from q4core.weight import PackedWeight, WeightSpec
from q4core.weight.sending import Temporary, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from q4core.layers.prepared_module import Content

_STATE, _SPEC = "weight.", "weight.spec"
_PICKLED, _SHARED = "packed_weight", "shared_buffers"


class PackedModule(WeightOwner):
    """What ``Q4Linear`` is but for its arithmetic: an owner of one weight that follows ``nn.Module``'s own methods."""

    # -- moving

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002  # nn.Module's signature
        """Follow ``.to()``, ``.half()`` and the like: codes and scales keep their bytes; see ``docs/decisions``."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        dtype = probe.dtype if probe.dtype in FLOATS else self.dtype
        content = None
        if not self._closed and (dtype != self.dtype or probe.device != self.device):
            content = self._moved(probe.device, dtype)
        elif self.is_prepared and probe.is_cpu and probe.is_shared() and not self._is_shared():
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
        if bias is not None and bias.dtype != self.dtype:
            bias.data = bias.data.to(self.dtype)  # .double(), say
        return self

    def _moved(self, device: torch.device, dtype: torch.dtype) -> Content:
        """Prepare the layer for another device or dtype, without touching it."""
        config = self._content.config
        if device != self.device and device.type != "meta":
            config = attrs.evolve(config, device=str(device))
        if self.is_prepared:
            weight = self.packed_weight()  # brought to its device by whoever prepares it, as the memory policy says
            return self._prepare(weight.to(device) if device.type == "meta" else weight, dtype, config)
        empty = tuple(torch.empty_like(tensor, device=device) for tensor in self._content.empty)
        return attrs.evolve(self._content, config=config, dtype=dtype, device=device, empty=empty)

    def _is_shared(self) -> bool:
        """Return whether ``share_memory`` has shared the packed buffers with other processes."""
        return self.device.type == "cpu" and any(buffer.is_shared() for buffer in self._own_buffers())

    def _shared_content(self) -> Content:
        """Return the layer's weight in shared memory, without touching the layer: another thread may be using it.

        Raises:
            LifecycleError: The buffers are in a memory provider's memory.
        """
        tensors = self._require_ready().tensors
        owner = next((found for tensor in tensors if (found := provider_of(tensor))), None)
        if owner is not None:
            raise LifecycleError(
                f"Layer {self.name!r} can't be shared: its buffers are in memory of {owner.name}. "
                "Make it with unified_memory='disabled'."
            )
        return self._content.over(tuple(tensor.clone().share_memory_() for tensor in tensors))

    # -- saving and loading

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001  # nn.Module's signature
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = self.packed_weight()
        text = WeightSpec.of(weight).to_json()
        destination[prefix + _SPEC] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        for field, tensor in weight.tensors():
            destination[prefix + _STATE + field] = tensor

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
        own = {key: value for key, value in state_dict.items() if key.startswith(prefix + _STATE)}
        rest = {key: value for key, value in state_dict.items() if key not in own}
        content = prepared = None
        shared = self._content.prepared if self._is_shared() else None
        try:
            if self._closed:
                self._require_ready()
            weight = self._loaded_weight(own, prefix, missing_keys, unexpected_keys)
            if weight is not None:
                content = self._prepare(weight, self.dtype, self._content.config)
                prepared = content.prepared
            if shared is not None and prepared is not None and prepared.plan is not shared.plan:
                raise LifecycleError(
                    f"Layer {self.name!r} is shared with other processes, which can't follow a load of another format "
                    "or layout. Load before share_memory()."
                )
        except Q4Error as error:  # nothing is loaded, the bias neither
            error_msgs.append(f"{prefix}weight: {error}")
            return
        if own and content is None:
            return  # part of the weight is missing: the load will be refused, and the bias stays as it is
        faults: list[str] = []
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, faults)
        error_msgs.extend(faults)
        if faults:
            return
        if content is not None:
            self._take(content if shared is None else content.written_to(shared.tensors))
        bias = self._own_bias()
        if bias is not None and bias.device.type != "meta":
            self.bias = self._as_bias(bias)  # assign=True takes whatever dtype the state has

    def _loaded_weight(
        self, own: Mapping[str, Any], prefix: str, missing_keys: list[str], unexpected_keys: list[str]
    ) -> PackedWeight | None:
        """Return a state dict's weight in tensors of its own, on the layer's device unless that is the meta device.

        Keys that are missing, or should not be there, are added to the lists; None is returned where one is missing.

        Raises:
            WeightError: The spec or a tensor is not legal, or is that of a layer of another shape.
        """
        device, key = None if self.device.type == "meta" else self.device, prefix + _SPEC
        if key not in own:
            missing_keys.append(key)
            unexpected_keys.extend(own)
            return None
        stored = _checked(key, own[key], needs_data=True)
        if stored.dtype != torch.uint8:
            raise WeightError("load_state_dict", name=key, rule="of dtype uint8", value=stored.dtype)
        text = bytes(stored.cpu().reshape(-1).tolist()).decode("utf-8", errors="replace")
        spec = WeightSpec.from_json(text, formats=self._plugins().formats().values(), where=key)
        if (spec.out_features, spec.in_features) != (self.out_features, self.in_features):
            rule = f"that of a {self.out_features}×{self.in_features} weight"
            got = f"{spec.out_features}×{spec.in_features}"
            raise WeightError("load_state_dict", name=key, rule=rule, value=got)
        fields = [f"{prefix}{_STATE}{field}" for field in spec.fields]
        absent = [field for field in fields if field not in own]
        missing_keys.extend(absent)
        unexpected_keys.extend(field for field in own if field not in {key, *fields})
        if absent:
            return None
        tensors = [_checked(field, own[field], needs_data=device is not None).detach() for field in fields]
        # Copies: a caller's later writes to the state dict must not reach the layer.
        copies = [tensor.to(device or tensor.device).clone(memory_format=torch.contiguous_format) for tensor in tensors]
        return spec.build(copies, name=prefix.rstrip(".") or None).relabelled(**self._content.labels)

    # -- copying

    def _kept(self) -> dict[str, Any]:
        """Return the attributes that a copy keeps, in dicts of its own: all but what is prepared for each layer."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch's; leaves out what compile() made for this layer
        own = set(self._buffer_names)
        state = {key: value for key, value in state.items() if key not in NOTHING and key != "_content"}
        state["_parameters"] = dict(self._parameters)
        state["_buffers"] = {key: value for key, value in self._buffers.items() if key not in own}
        state["_non_persistent_buffers_set"] = self._non_persistent_buffers_set - own
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent copy: its own bytes, the same plan, counters at zero; hooks and attributes as well."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo[id(self._registry)] = self._registry
        with outside_inference():
            twin.__dict__.update(copy.deepcopy(self._kept(), memo))
            buffers = [buffer.clone(memory_format=torch.contiguous_format) for buffer in self._own_buffers()]
        content, prepared = self._content, self._content.prepared
        if prepared is None:
            content = attrs.evolve(content, empty=tuple(buffers))
        else:
            prepared = copy_layer(prepared, buffers[:-1], content.config, self._plugins())
            content = attrs.evolve(content, prepared=prepared)
        twin._take(content)  # noqa: SLF001  # own class
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the canonical weight, and all that a user put on the layer, as any module is pickled.

        The plugins stay out: the other process selects among its own, and prepares for itself. After
        ``share_memory`` it then takes the shared buffers in place of its own, if it has chosen the same plan. A layer
        on the meta device takes its empty tensors along.

        Raises:
            LifecycleError: The layer is closed.
        """
        is_empty = not self.is_prepared and not self._closed
        weight = None if is_empty else Temporary(self.packed_weight())
        live = self._content.prepared if self._is_shared() else None
        shared = None if live is None else (live.plan.stem, live.tensors)
        content = attrs.evolve(self._content, prepared=None)
        return {**self._kept(), "_registry": None, "_content": content, _PICKLED: weight, _SHARED: shared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Prepare the unpickled weight with this process's plugins."""
        rest = dict(state)
        weight, shared, content = unwrapped(rest.pop(_PICKLED)), rest.pop(_SHARED), rest.pop("_content")
        super().__setstate__(rest)  # type: ignore[no-untyped-call]  # torch's
        if weight is not None:
            content = self._prepare(weight, content.dtype, content.config)
            stem, buffers = shared or ("", ())
            # From a file, or a copy within this process, they did not come shared.
            if content.prepared is not None and buffers and all(buffer.is_shared() for buffer in buffers):
                own = content.prepared.plan.stem
                if own == stem:
                    content = content.over(buffers)
                else:
                    emit("q4.share", level=logging.WARNING, layer=self.name, shared=stem, prepared=own)
        self._take(content)
        bias = self._own_bias()
        if bias is not None:
            self.bias = self._as_bias(bias)  # the device may be another one here


def _checked(key: str, value: object, *, needs_data: bool) -> torch.Tensor:
    """Return an entry, once it is known to be a strided tensor, with data where that is needed."""
    if not isinstance(value, torch.Tensor):
        raise WeightError("load_state_dict", name=key, rule="a tensor", value=value)
    if value.layout is not torch.strided or (needs_data and value.is_meta):
        rule = "a strided tensor with data" if needs_data else "a strided tensor"
        raise WeightError("load_state_dict", name=key, rule=rule, value=f"{value.layout} on {value.device}")
    return value
