"""``PackedModule``: a module that owns a packed weight: how it is prepared, moved, copied, saved and let go."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4core import ops
from q4core.errors import LifecycleError, Q4Error
from q4core.fast_path import make_fast_path
from q4core.linear_input import FLOATS, fits_as_bias, refuse_bias
from q4core.linear_state import load_weight, save_weight, split_state
from q4core.plan import as_bytes
from q4core.policy import SessionConfig, UnifiedMemoryPolicy
from q4core.preparation import PreparedLayer, copy_prepared, prepare_layer
from q4core.registry import Registry, default_registry
from q4core.weight_spec import WeightSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from q4core.fast_path import FastPath
    from q4core.weight import PackedWeight

__all__ = ["PackedModule"]

_BUFFER = "packed_"
_PICKLED = "packed_weight"
_DISABLED = UnifiedMemoryPolicy.DISABLED
_SHARED = frozenset({"_spec", "_origin", "_config", "_registry", "_m"})
"""Attributes that copies of a layer share, because nothing changes them in place."""
_PREPARED = frozenset(
    {
        "_ready",
        "_fast",
        "_live",
        "_tag_address",
        "_plan_key",
        "_managed",
        "_counts",
        "_input_memory",
        "_buffer_names",
    }
)
"""Attributes that ``_let_go`` blanks: a copy gets its own from what is prepared for it."""


@attrs.frozen(eq=False)
class _Content:
    """A weight made ready for a layer, before the layer takes it; ``prepared`` is None on the meta device."""

    spec: WeightSpec
    origin: tuple[str | None, str | None, tuple[str, ...]]
    config: SessionConfig
    dtype: torch.dtype
    device: torch.device
    buffers: tuple[torch.Tensor, ...]
    prepared: PreparedLayer | None


class PackedModule(nn.Module):
    """What ``Q4Linear`` is but for its arithmetic: the owner of one prepared weight and of its bias.

    What can fail is done first (``_prepare``), and what was made is taken whole (``_take``), so that a load or a move
    that fails leaves the layer as it was. Arguments and errors are those of ``Q4Linear``.
    """

    in_features: int
    out_features: int
    _ready: PreparedLayer | None
    _fast: FastPath | None
    _live: ops.LiveLayer | None
    _tag_address: int
    _plan_key: str
    _managed: bool
    _counts: list[int]
    _input_memory: dict[str, int]
    _buffer_names: tuple[str, ...]

    def __init__(  # noqa: PLR0913  # one argument per fact
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        config: SessionConfig,
        registry: Registry | None = None,
        name: str | None = None,
        m: tuple[int, int | None] = (1, None),
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.name = name or weight.name or "linear"
        self._registry = registry
        self._m = m
        self._closed = False
        self._let_go()
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)
        self._take(self._prepare(weight, None, config))
        self.bias = None if bias is None else self._as_bias(bias)

    # -- preparing and letting go

    def _prepare(self, weight: PackedWeight, dtype: torch.dtype | None, config: SessionConfig) -> _Content:
        """Prepare ``weight`` without touching the layer."""
        origin = (weight.name, weight.dialect, weight.notes)
        if weight.device.type == "meta":
            wanted = dtype or config.compute_dtype or weight.dtype
            tensors = tuple(as_bytes(tensor) for _, tensor in weight.tensors())
            return _Content(WeightSpec.of(weight), origin, config, wanted, weight.device, tensors, None)
        registry = self._registry or default_registry()
        prepared = prepare_layer(weight, config, registry, m=self._m, dtype=dtype, name=self.name)
        device = prepared.selection.request.device
        return _Content(WeightSpec.of(weight), origin, config, prepared.plan.dtype, device, prepared.buffers, prepared)

    def _take(self, content: _Content) -> None:
        """Make what was prepared the layer's own; nothing here can fail."""
        self._let_go()
        self._spec, self._origin, self._config = content.spec, content.origin, content.config
        self._dtype, self._device = content.dtype, content.device
        self._ready = prepared = content.prepared
        if prepared is None:
            self._add_buffers(list(content.buffers))
            return
        tag = torch.zeros(1, dtype=torch.uint8, device=content.device)
        self._add_buffers([*content.buffers, tag])
        self._counts = [0] * len(prepared.plan.segments)
        self._plan_key = prepared.plan.key
        self._tag_address = tag.data_ptr()
        self._live = ops.LiveLayer(
            prepared.plan, prepared.prepared, [buffer.data_ptr() for buffer in prepared.buffers], self._counts
        )
        ops.register_layer(tag, self._live)
        self._managed = (content.config.unified_memory or _DISABLED) is not _DISABLED
        self._fast = None if self._managed else make_fast_path(self, prepared)

    def _add_buffers(self, tensors: list[torch.Tensor]) -> None:
        self._buffer_names = tuple(f"{_BUFFER}{index}" for index in range(len(tensors)))
        for key, tensor in zip(self._buffer_names, tensors, strict=True):
            self.register_buffer(key, tensor, persistent=False)

    def _let_go(self) -> None:
        """Keep nothing of what was prepared; what a user put on the layer stays."""
        self._forget_tag()
        for key in self.__dict__.get("_buffer_names", ()):
            del self._buffers[key]
        self._buffer_names = ()
        self._ready = None
        self._fast = None
        self._live = None
        self._tag_address = 0
        self._plan_key = ""
        self._managed = False
        self._counts = []
        self._input_memory = {}

    def close(self) -> None:
        """Give every byte back; later use is a ``LifecycleError``. Closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        self._let_go()

    def _forget_tag(self) -> None:
        live = self.__dict__.get("_live")
        if live is not None:
            ops.forget_layer(self._tag_address, live)
            self._live = None

    def __del__(self) -> None:
        """Let the counters forget the layer."""
        self._forget_tag()

    def _as_bias(self, bias: torch.Tensor) -> nn.Parameter:
        """Return a Parameter for a bias: the very same one where it is one that fits."""
        if not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
            refuse_bias(self, bias)
        if tuple(bias.shape) != (self.out_features,):
            refuse_bias(self, bias)
        if isinstance(bias, nn.Parameter) and fits_as_bias(self, bias):
            return bias
        data = bias.detach().to(self.device, self._dtype).contiguous()
        return nn.Parameter(data, requires_grad=bias.requires_grad)

    # -- what it is

    @property
    def device(self) -> torch.device:
        """Where the layer runs."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the activations that the layer takes."""
        return self._dtype

    @property
    def is_prepared(self) -> bool:
        """Whether the layer can run."""
        return self._ready is not None

    def _own_buffers(self) -> list[torch.Tensor]:
        buffers = self._buffers
        return [buffers[key] for key in self._buffer_names]  # type: ignore[misc]  # never None

    def _require_ready(self) -> PreparedLayer:
        if self._ready is None:
            rule = "open" if self._closed else "prepared"
            raise LifecycleError(
                f"layer {self.name!r}",
                name="layer",
                rule=rule,
                value="closed" if self._closed else "on the meta device",
                hint="Make it again from its weight." if self._closed else "Load a state dict first (assign=True).",
            )
        return self._ready

    def packed_weight(self) -> PackedWeight:
        """Return the canonical weight: exported by the backend, or the source that was kept."""
        ready = self._require_ready()
        name, dialect, notes = self._origin
        with torch.no_grad():
            weight = ready.plan.weight(self._own_buffers())
        return attrs.evolve(weight, name=name, dialect=dialect, notes=notes, dtype=self._spec.dtype)

    # -- moving, copying, saving

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002  # nn.Module's signature
        """Follow ``.to()``, ``.half()`` and the like: codes and scales keep their bytes; see ``docs/decisions``."""
        probe = fn(torch.empty(0, dtype=self._dtype, device=self.device))
        dtype = probe.dtype if probe.dtype in FLOATS else self._dtype
        same = dtype == self._dtype and probe.device == self.device
        content = None if self._closed or same else self._moved(probe.device, dtype)
        own = {key: self._buffers.pop(key) for key in self._buffer_names}  # moved as a weight, not as bytes
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        finally:
            self._buffers.update(own)
        if content is not None:
            self._take(content)
        if self.bias is not None and self.bias.dtype != self._dtype:
            self.bias.data = self.bias.data.to(self._dtype)  # .double(), say
        return self

    def _moved(self, device: torch.device, dtype: torch.dtype) -> _Content:
        """Prepare the layer for another device or dtype, without touching it."""
        config = self._config
        if device != self.device and device.type != "meta":
            config = attrs.evolve(config, device=str(device))
        if self._ready is not None:
            return self._prepare(self.packed_weight().to(device), dtype, config)
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
                weight = attrs.evolve(weight, name=name, dialect=dialect, notes=notes)
                content = self._prepare(weight, self._dtype, self._config)
        except Q4Error as error:  # nothing is loaded, the bias neither
            error_msgs.append(f"{prefix}weight: {error}")
            return
        if own and content is None:
            return  # part of the weight is missing: the load will be refused, and the bias stays as it is
        faults: list[str] = []
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, faults)
        error_msgs.extend(faults)
        if content is not None and not faults:
            self._take(content)
        if self.bias is not None and not faults and self.bias.device.type != "meta":
            self.bias = self._as_bias(self.bias)  # assign=True takes whatever dtype the state has

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent copy: its own bytes, the same plan, counters at zero; hooks and attributes as well."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for key, value in self._kept().items():
            twin.__dict__[key] = value if key in _SHARED else copy.deepcopy(value, memo)
        buffers = [buffer.clone(memory_format=torch.contiguous_format) for buffer in self._own_buffers()]
        prepared = self._ready
        if prepared is not None:
            prepared = copy_prepared(prepared, buffers[:-1], self._config, self._registry or default_registry())
            buffers = list(prepared.buffers)
        twin._take(self._content(tuple(buffers), prepared))  # noqa: SLF001  # own class
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the canonical weight, and all that a user put on the layer, as any module is pickled.

        The plugins stay out: the other process selects among its own, and prepares for itself. A layer on the meta
        device takes its empty tensors along.

        Raises:
            LifecycleError: The layer is closed.
        """
        is_meta = self._ready is None and not self._closed
        weight = tuple(self._own_buffers()) if is_meta else self.packed_weight()
        return {**self._kept(), "_registry": None, _PICKLED: weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Prepare the unpickled weight with this process's plugins."""
        rest = dict(state)
        weight = rest.pop(_PICKLED)
        super().__setstate__(rest)  # type: ignore[no-untyped-call]  # torch's
        if isinstance(weight, tuple):
            self._take(self._content(weight, None))
            return
        self._take(self._prepare(weight, self._dtype, self._config))
        if self.bias is not None:
            self.bias = self._as_bias(self.bias)  # the device may be another one here

    def _kept(self) -> dict[str, Any]:
        """Return the attributes that a copy keeps, in dicts of its own: all but what is prepared for each layer."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch's; leaves out what compile() made for this layer
        own = set(self._buffer_names)
        state = {key: value for key, value in state.items() if key not in _PREPARED}
        state["_parameters"] = dict(self._parameters)
        state["_buffers"] = {key: value for key, value in self._buffers.items() if key not in own}
        state["_non_persistent_buffers_set"] = self._non_persistent_buffers_set - own
        return state

    def _content(self, buffers: tuple[torch.Tensor, ...], prepared: PreparedLayer | None) -> _Content:
        """Return the layer's own weight as content for a copy."""
        return _Content(self._spec, self._origin, self._config, self._dtype, self._device, buffers, prepared)
