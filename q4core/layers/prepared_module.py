"""``WeightOwner``: a module that owns one prepared weight and a bias: takes it, tells of it, and lets it go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4core.errors import InputError, LifecycleError
from q4core.formats import as_bytes
from q4core.layers.fast_path import make_fast_path
from q4core.layers.input_checks import fits_as_bias, refuse_bias
from q4core.layers.preparation import PreparedLayer, prepare_layer
from q4core.machine import outside_inference
from q4core.ops import registration
from q4core.plugins.registry import Registry, default_registry
from q4core.policy import SessionConfig, UnifiedMemoryPolicy, resolve_config
from q4core.weight import PackedWeight, WeightSpec

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from q4core.layers.fast_path import FastPath

__all__ = ["Content", "WeightOwner"]

_BUFFER = "packed_"
_DISABLED = UnifiedMemoryPolicy.DISABLED
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
class Content:
    """A weight made ready for a layer, before the layer takes it; ``prepared`` is None on the meta device."""

    spec: WeightSpec
    origin: tuple[str | None, str | None, tuple[str, ...]]
    config: SessionConfig
    dtype: torch.dtype
    device: torch.device
    buffers: tuple[torch.Tensor, ...]
    prepared: PreparedLayer | None


class WeightOwner(nn.Module):
    """The owner of one prepared weight and of its bias.

    What can fail is done first (``_prepare``), and what was made is taken whole (``_take``), so that a load or a move
    that fails leaves the layer as it was. Arguments and errors are those of ``Q4Linear``.
    """

    in_features: int
    out_features: int
    _ready: PreparedLayer | None
    _fast: FastPath | None
    _live: registration.LiveLayer | None
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
        config: SessionConfig | None = None,
        registry: Registry | None = None,
        name: str | None = None,
        m: tuple[int, int | None] = (1, None),
    ) -> None:
        super().__init__()
        if not isinstance(weight, PackedWeight):
            raise InputError(
                type(self).__name__,
                name="weight",
                rule="a PackedWeight",
                value=type(weight).__name__,
                hint="Use q4.quantize(dense, format=…) or q4.open(path)[name].",
            )
        self.out_features, self.in_features = weight.shape
        self.name = name or weight.name or "linear"
        self._registry = registry
        self._m = m
        self._closed = False
        self._let_go()
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)
        self._take(self._prepare(weight, None, resolve_config(config)))
        self.bias = None if bias is None else self._as_bias(bias)

    # -- preparing and letting go

    def _prepare(self, weight: PackedWeight, dtype: torch.dtype | None, config: SessionConfig) -> Content:
        """Prepare ``weight`` without touching the layer."""
        origin = (weight.name, weight.dialect, weight.notes)
        if weight.device.type == "meta":
            wanted = dtype or config.compute_dtype or weight.dtype
            tensors = tuple(as_bytes(tensor) for _, tensor in weight.tensors())
            return Content(WeightSpec.of(weight), origin, config, wanted, weight.device, tensors, None)
        registry = self._registry or default_registry()
        prepared = prepare_layer(weight, config, registry, m=self._m, dtype=dtype, name=self.name)
        device = prepared.selection.request.device
        return Content(WeightSpec.of(weight), origin, config, prepared.plan.dtype, device, prepared.buffers, prepared)

    def _take(self, content: Content) -> None:
        """Make what was prepared the layer's own; nothing here can fail."""
        self._let_go()
        self._spec, self._origin, self._config = content.spec, content.origin, content.config
        self._dtype, self._device = content.dtype, content.device
        self._ready = prepared = content.prepared
        if prepared is None:
            self._add_buffers(list(content.buffers))
            return
        with outside_inference():
            tag = torch.zeros(1, dtype=torch.uint8, device=content.device)
        if all(buffer.is_shared() for buffer in content.buffers):
            tag.share_memory_()  # so that all of a shared layer is shared
        self._add_buffers([*content.buffers, tag])
        self._counts = [0] * len(prepared.plan.segments)
        self._plan_key = prepared.plan.key
        self._tag_address = tag.data_ptr()
        self._live = registration.LiveLayer(prepared.plan, prepared.prepared, (*prepared.buffers, tag), self._counts)
        registration.register_layer(tag, self._live)
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

    def __enter__(self) -> Self:
        """Return the layer.

        Raises:
            LifecycleError: It is closed.
        """
        if self._closed:
            self._require_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the layer."""
        self.close()

    def _forget_tag(self) -> None:
        live = self.__dict__.get("_live")
        if live is not None:
            registration.forget_layer(self._tag_address, live)
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
        if isinstance(bias, nn.Parameter) and fits_as_bias(self, bias) and not bias.is_inference():
            return bias
        with outside_inference():
            data = bias.detach().to(self.device, self._dtype).contiguous()
            return nn.Parameter(data.clone() if data.is_inference() else data, requires_grad=bias.requires_grad)

    def _own_bias(self) -> nn.Parameter | None:
        """Return the bias where it is the layer's own parameter: neither parametrized, pruned nor deleted."""
        return self._parameters.get("bias")

    def _kept(self) -> dict[str, Any]:
        """Return the attributes that a copy keeps, in dicts of its own: all but what is prepared for each layer."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch's; leaves out what compile() made for this layer
        own = set(self._buffer_names)
        state = {key: value for key, value in state.items() if key not in _PREPARED}
        state["_parameters"] = dict(self._parameters)
        state["_buffers"] = {key: value for key, value in self._buffers.items() if key not in own}
        state["_non_persistent_buffers_set"] = self._non_persistent_buffers_set - own
        return state

    def _content(self, buffers: tuple[torch.Tensor, ...], prepared: PreparedLayer | None) -> Content:
        """Return the layer's own weight as content for a copy."""
        return Content(self._spec, self._origin, self._config, self._dtype, self._device, buffers, prepared)

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
            if self._closed:
                raise LifecycleError(f"layer {self.name!r} is closed", hint="Make it again from its weight.")
            what = f"layer {self.name!r} is on the meta device and has no weight yet"
            raise LifecycleError(what, hint="Load a state dict first (assign=True).")
        return self._ready

    def packed_weight(self) -> PackedWeight:
        """Return the canonical weight: exported by the backend, or the source that was kept."""
        ready = self._require_ready()
        name, dialect, notes = self._origin
        with torch.no_grad():
            weight = ready.plan.weight(self._own_buffers())
        return weight.relabelled(name=name, dialect=dialect, notes=notes, dtype=self._spec.dtype)
