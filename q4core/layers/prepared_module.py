"""``WeightOwner``: a module that owns one prepared weight and a bias: takes it, tells of it, and lets it go."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4core.diagnostics.events import bound
from q4core.errors import InputError, LifecycleError
from q4core.formats import as_bytes
from q4core.layers.fast_path import make_fast_path
from q4core.layers.preparation import prepare_layer
from q4core.machine import outside_inference
from q4core.ops.call_check import refuse_bias
from q4core.ops.registration import forget_layer, register_layer
from q4core.plugins.registry import Registry, default_registry
from q4core.policy import SessionConfig, UnifiedMemoryPolicy, resolve_config
from q4core.weight import PackedWeight, WeightSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from q4core.layers.fast_path import FastPath
    from q4core.ops.registration import LiveLayer

_DISABLED = UnifiedMemoryPolicy.DISABLED
_NO_WEIGHT = "is on the meta device and has no weight yet"
_GIVE = "Let it adopt(weight), or load a state dict (assign=True)."
NOTHING: dict[str, Any] = {"_fast": None, "_plan_key": "", "_is_managed": False, "_buffer_names": ()}
"""What a layer holds of its weight while it can't run; a copy gets its own from what is prepared for it."""


def require_weight(what: str, weight: object) -> None:
    """Refuse what is no ``PackedWeight``."""
    if not isinstance(weight, PackedWeight):
        hint = "Use q4.quantize(dense, format=…) or q4.open(path)[name]."
        raise InputError(what, name="weight", rule="a PackedWeight", value=type(weight).__name__, hint=hint)


@attrs.frozen(eq=False)
class Content:
    """A weight for a layer to take; ``prepared`` is None where it can't run.

    Args:
        known: The weight but for its tensors; None where there is no weight yet.
        labels: Its name, dialect and notes.
        config: What was asked for, resolved.
        dtype: dtype of the activations.
        device: Where the layer runs.
        prepared: What runs; None on the meta device and in a closed layer.
        empty: On the meta device, the weight's tensors as bytes.
    """

    known: WeightSpec | None
    labels: dict[str, Any]
    config: SessionConfig
    dtype: torch.dtype
    device: torch.device
    prepared: LiveLayer | None
    empty: tuple[torch.Tensor, ...] = ()

    @property
    def spec(self) -> WeightSpec:
        """The weight but for its tensors.

        Raises:
            LifecycleError: There is no weight yet.
        """
        if self.known is None:
            raise LifecycleError(f"layer {self.labels['name'] or 'linear'!r} {_NO_WEIGHT}", hint=_GIVE)
        return self.known

    def over(self, tensors: tuple[torch.Tensor, ...]) -> Content:
        """Return the same in tensors that lie elsewhere and hold what was prepared."""
        return attrs.evolve(self, prepared=self.prepared and attrs.evolve(self.prepared, tensors=tensors))

    def written_to(self, tensors: tuple[torch.Tensor, ...]) -> Content:
        """Write what was prepared to tensors that other processes use, as torch loads a shared parameter."""
        if self.prepared is not None:
            for tensor, loaded in zip(tensors, self.prepared.tensors, strict=True):
                tensor.copy_(loaded)
        return self.over(tensors)


class WeightOwner(nn.Module):
    """The owner of one prepared weight and of its bias.

    What can fail is done first (``_prepare``), and what was made is taken whole (``_take``), so that a load or a move
    that fails leaves the layer as it was. Arguments and errors are those of ``Q4Linear``.
    """

    in_features: int
    out_features: int
    bias: nn.Parameter | None
    _content: Content
    _fast: FastPath | None
    _plan_key: str
    _is_managed: bool
    _buffer_names: tuple[str, ...]
    session_name: str | None = None
    """Of the session that made the layer, or the layer of which it is a copy: its events name it."""

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
        nn.Module.__init__(self)  # a subclass may be an nn.Linear, too, which would make a dense weight
        require_weight(type(self).__name__, weight)
        self._begin(weight.shape, name or weight.name, registry, m)
        self._take(self._prepare(weight, None, resolve_config(config)))
        self.bias = None if bias is None else self._as_bias(bias)

    def _begin(
        self, shape: tuple[int, int], name: str | None, registry: Registry | None, m: tuple[int, int | None]
    ) -> None:
        self.out_features, self.in_features = shape
        self.name = name or "linear"
        self._registry = registry
        self._m = m
        self._closed = False
        self.register_parameter("bias", None)

    @classmethod
    def of_content(
        cls, content: Content, bias: torch.Tensor | None, *, registry: Registry | None, name: str | None
    ) -> Self:
        """Return a layer over what was prepared in another process."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        spec, live = content.spec, content.prepared
        m = (1, None) if live is None else live.selection.request.m
        layer._begin((spec.out_features, spec.in_features), name or content.labels["name"], registry, m)  # noqa: SLF001  # own class
        layer._take(content)  # noqa: SLF001  # own class
        layer.bias = None if bias is None else layer._as_bias(bias)  # noqa: SLF001  # own class
        return layer

    @classmethod
    def empty(  # noqa: PLR0913  # one argument per fact
        cls,
        out_features: int,
        in_features: int,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        config: SessionConfig | None = None,
        registry: Registry | None = None,
        name: str | None = None,
        m: tuple[int, int | None] = (1, None),
    ) -> Self:
        """Return a layer on the meta device that waits for its weight: for ``adopt``, or a state dict.

        Args:
            out_features: N.
            in_features: K.
            bias: [N] or None; it becomes the layer's parameter as it is, on the meta device or not.
            dtype: dtype of the activations; the configuration's ``compute_dtype`` or torch's default unless told.
            config: What to ask for, as in the constructor.
            registry: The plugins to choose among; the process's unless told.
            name: The layer's name, for messages and reports.
            m: Rows of x that must be served.

        Raises:
            InputError: A size is no positive integer, the dtype is no floating-point one, or the bias is not [N].
            ConfigError: ``config`` is no ``SessionConfig``, or a ``Q4_*`` variable is not legal.
        """
        for key, value in (("out_features", out_features), ("in_features", in_features)):
            if not isinstance(value, int) or value < 1:
                raise InputError(cls.__name__, name=key, rule="a positive integer", value=value)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InputError(cls.__name__, name="dtype", rule="a floating-point torch.dtype", value=dtype)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._begin((out_features, in_features), name, registry, m)  # noqa: SLF001  # own class
        asked = resolve_config(config)
        wanted = dtype or asked.compute_dtype or torch.get_default_dtype()
        labels = {"name": name, "dialect": None, "notes": ()}
        layer._take(Content(None, labels, asked, wanted, torch.device("meta"), None))  # noqa: SLF001  # own class
        if bias is not None:
            if not isinstance(bias, torch.Tensor) or not bias.is_floating_point() or bias.shape != (out_features,):
                refuse_bias(f"layer {layer.name!r}", bias, wanted, out_features, layer.device)
            made = nn.Parameter(bias, requires_grad=bias.requires_grad)
            layer.bias = bias if isinstance(bias, nn.Parameter) else made
        return layer

    def adopt(self, weight: PackedWeight | WeightOwner) -> Self:
        """Take a weight in place of what the layer holds, prepared and proven; return the layer.

        It runs where the configuration says, else where the weight is. The dtype of the activations stays. A bias
        follows, unless it waits on the meta device for its values. What can fail leaves the layer as it was.

        Args:
            weight: A packed weight of the layer's shape, with data; or another layer of its shape and dtype, which
                gives what it prepared away, with its configuration and device, and is closed; its bias it keeps.

        Raises:
            InputError: ``weight`` is neither, or is of another shape or dtype or on the meta device.
            LifecycleError: The layer is closed, or the given one holds no weight.
            BackendUnavailableError, PolicyConflictError, UnknownBackendError, WeightError, UnifiedMemoryError: See
                ``prepare_layer``.
        """
        what, shape = f"layer {self.name!r}", (self.out_features, self.in_features)
        if self._closed:
            self._require_ready()
        if isinstance(weight, WeightOwner):
            weight._require_ready()  # noqa: SLF001  # own class
            found, dtype = (weight.out_features, weight.in_features), weight.dtype
        else:
            require_weight(what, weight)
            found, dtype = weight.shape, self.dtype
        if found != shape or dtype is not self.dtype or weight.device.type == "meta":
            rule = f"{shape[0]}×{shape[1]} for {self.dtype} and hold data"
            got = f"{found[0]}×{found[1]} for {dtype} on {weight.device}"
            raise InputError(what, name="weight", rule=rule, value=got)
        if isinstance(weight, WeightOwner):
            content = weight._content  # noqa: SLF001  # own class
            weight.close()  # first, as the op forgets its tag then, which is the layer's own afterwards
        else:
            content = self._prepare(weight, self.dtype, self._content.config)
        self._take(content)
        bias = self._own_bias()
        if bias is not None and not bias.is_meta:
            self.bias = self._as_bias(bias)
        return self

    # -- preparing and letting go

    def _prepare(self, weight: PackedWeight, dtype: torch.dtype | None, config: SessionConfig) -> Content:
        """Prepare ``weight`` without touching the layer."""
        spec, labels = WeightSpec.of(weight), {"name": weight.name, "dialect": weight.dialect, "notes": weight.notes}
        if weight.device.type == "meta":
            wanted = dtype or config.compute_dtype or weight.dtype
            tensors = tuple(as_bytes(tensor) for _, tensor in weight.tensors())
            return Content(spec, labels, config, wanted, weight.device, None, tensors)
        with bound(session=self.session_name):
            prepared = prepare_layer(weight, config, self._plugins(), m=self._m, dtype=dtype, name=self.name)
        return Content(spec, labels, config, prepared.plan.dtype, prepared.selection.request.device, prepared)

    def _plugins(self) -> Registry:
        return self._registry or default_registry()

    def _take(self, content: Content) -> None:
        """Make what was prepared the layer's own; nothing here can fail."""
        self._let_go(self.__dict__.get("_content"))
        self._content, live = content, content.prepared
        buffers = content.empty if live is None else live.buffers
        self._buffer_names = tuple(f"packed_{index}" for index in range(len(buffers)))
        for key, buffer in zip(self._buffer_names, buffers, strict=True):
            self.register_buffer(key, buffer, persistent=False)
        if live is not None:
            self._plan_key = live.plan.key
            register_layer(live)
            self._is_managed = (content.config.unified_memory or _DISABLED) is not _DISABLED
            self._fast = None if self._is_managed else make_fast_path(self, live)

    def _let_go(self, content: Content | None) -> None:
        """Keep nothing of what was prepared; what a user put on the layer stays."""
        if content is not None and content.prepared is not None:
            forget_layer(content.prepared)
        for key in self.__dict__.get("_buffer_names", ()):
            self._buffers.pop(key, None)
        self.__dict__.update(NOTHING)

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Let the op forget the layer, except at the interpreter's exit, when names of modules may be gone."""
        if not is_exiting():
            self._let_go(self.__dict__.get("_content"))

    def close(self) -> None:
        """Give every byte back; later use is a ``LifecycleError``. Closing twice is allowed."""
        self._closed = True
        content = self._content
        # First, so that a call in another thread finds a closed layer where it misses a buffer.
        self._content = attrs.evolve(content, prepared=None, empty=())
        self._let_go(content)

    def __enter__(self) -> Self:
        """Return the layer.

        Raises:
            LifecycleError: It is closed.
        """
        if self._closed:
            self._require_ready()
        return self

    def __exit__(self, *error: object) -> None:
        """Close the layer."""
        self.close()

    # -- what it is

    @property
    def device(self) -> torch.device:
        """Where the layer runs."""
        return self._content.device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the activations that the layer takes."""
        return self._content.dtype

    @property
    def is_prepared(self) -> bool:
        """Whether the layer can run."""
        return self._content.prepared is not None

    def packed_weight(self) -> PackedWeight:
        """Return the canonical weight: exported by the backend, or the source that was kept."""
        plan = self._require_ready().plan
        with torch.no_grad():
            weight = plan.weight(self._own_buffers() or self._require_ready().buffers)
        return weight.relabelled(**self._content.labels, dtype=self._content.spec.dtype)

    def _own_buffers(self) -> list[torch.Tensor]:
        buffers = self._buffers
        try:
            return [buffers[key] for key in self._buffer_names]  # type: ignore[misc]  # never None
        except KeyError:
            self._require_ready()  # another thread closes the layer
            raise

    def _require_ready(self) -> LiveLayer:
        live = self._content.prepared
        if live is None:
            if self._closed:
                raise LifecycleError(f"layer {self.name!r} is closed", hint="Make it again from its weight.")
            raise LifecycleError(f"layer {self.name!r} {_NO_WEIGHT}", hint=_GIVE)
        return live

    def _own_bias(self) -> nn.Parameter | None:
        """Return the bias where it is the layer's own parameter: neither parametrized, pruned nor deleted."""
        return self._parameters.get("bias")

    def _as_bias(self, bias: torch.Tensor) -> nn.Parameter:
        """Return a Parameter for a bias: the very same one where it is one that fits."""
        device, dtype, shape = self.device, self.dtype, (self.out_features,)
        if not isinstance(bias, torch.Tensor) or not bias.is_floating_point() or bias.shape != shape:
            refuse_bias(f"layer {self.name!r}", bias, dtype, self.out_features, device)
        if isinstance(bias, nn.Parameter) and bias.dtype is dtype and bias.device == device and not bias.is_inference():
            return bias
        with outside_inference():
            data = bias.detach().to(device, dtype).contiguous()
            return nn.Parameter(data.clone() if data.is_inference() else data, requires_grad=bias.requires_grad)
