"""``Q4Linear``: a linear layer over a packed weight."""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4core.codec import dequantize
from q4core.errors import InputError, LifecycleError, Q4Error
from q4core.formats import FLOATS, BlockOrder
from q4core.layers.calls import argument_error, call_op, check_options, place_input, raise_unplaceable
from q4core.layers.diagnosis import Diagnostics
from q4core.layers.fast_path import make_fast_path
from q4core.layers.preparation import copy_weight, prepare_weight
from q4core.layers.state import (
    STATE,
    over_shared,
    shared_with_others,
    to_shared,
    weight_entries,
    weight_of_entries,
    written_to,
)
from q4core.layers.weight_info import WeightInfo
from q4core.machine.torch_state import is_recorded, outside_inference
from q4core.memory import provider_of
from q4core.ops.call_check import check_linear_call, refuse_bias
from q4core.ops.prepared_weight import LATEST_CHANGE, LayerWeight, PreparedWeight, forget_weight, register_weight
from q4core.plugins.registry import Registry, default_registry
from q4core.policy.config import SessionConfig, UnifiedMemoryPolicy, resolve_config
from q4core.weight import PackedWeight
from q4core.weight.sending import Temporary, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

    from q4core.layers.fast_path import FastPath

_is_tracing = torch.compiler.is_dynamo_compiling  # other tracers work through dispatch modes
_STRIDED = torch.strided
_DISABLED = UnifiedMemoryPolicy.DISABLED
_RELEASED: dict[str, Any] = {"_fast": None, "_plan_key": "", "_is_managed": False, "_buffer_names": ()}
"""What a layer that can't run has of its weight; a copy gets its own."""


def require_weight(what: str, weight: object) -> None:
    """Raise for what is no ``PackedWeight``."""
    if not isinstance(weight, PackedWeight):
        hint = "Use q4.quantize(dense, format=…) or q4.open(path)[name]."
        raise InputError(what, name="weight", rule="a PackedWeight", value=type(weight).__name__, hint=hint)


class Q4Linear(nn.Module):
    """``y = x @ wᵀ + bias`` with a 4-bit w, prepared and proven.

    ``Session.linear`` makes one that the session reports and closes; ``Q4Linear(weight)`` makes one that belongs to no
    session, and ``Q4Linear.empty(n, k)`` one that waits for ``adopt(weight)``. ``with`` closes either.

    ``state_dict`` holds, strictly and in no dialect: ``weight.spec`` (uint8, the JSON of ``WeightSpec``), one
    ``weight.<field>`` for each tensor field of ``PackedWeight`` that is present, and ``bias``. What the backend
    prepared lies in non-persistent uint8 buffers ``packed_0 …``. What can fail is done before anything is changed, so
    that a load or a move that fails leaves the layer as it was.

    Args:
        weight: The packed weight; on the meta device the layer waits for ``load_state_dict``.
        bias: [N] or None. A Parameter is taken as it is; a tensor becomes one without gradients.
        config: What to ask for; unset fields ask the context, the environment and the default.
        registry: The plugins to choose among. Defaults to the process's.
        name: The layer's name, for messages and reports.
        m: Rows of x that must be served.

    Raises:
        InputError: ``weight`` is no ``PackedWeight``, or the bias does not fit.
        ConfigError: ``config`` is no ``SessionConfig``, or a ``Q4_*`` variable is not legal.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError, WeightError, UnifiedMemoryError: See
            ``prepare_weight``.
    """

    in_features: int
    out_features: int
    bias: nn.Parameter | None
    casts_input: bool = False
    """Whether x of another floating-point dtype is cast to the layer's, and the result back."""
    session_name: str | None = None
    """Of the session that made the layer, or the layer of which it is a copy: its events name it."""
    _weight: LayerWeight
    _fast: FastPath | None
    _plan_key: str
    _is_managed: bool
    _buffer_names: tuple[str, ...]

    # -- making and closing

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
        require_weight(type(self).__name__, weight)
        self._begin(weight.shape, name or weight.name, registry, m)
        self._take(self._converted(weight, None, resolve_config(config)))
        self.bias = None if bias is None else self._as_bias(bias)

    def _begin(
        self, shape: tuple[int, int], name: str | None, registry: Registry | None, m: tuple[int, int | None]
    ) -> None:
        nn.Module.__init__(self)  # a subclass may be an nn.Linear, too, which would make a dense weight
        self.out_features, self.in_features = shape
        self.name = name or "linear"
        self._registry = registry
        self._m = m
        self._closed = False
        self.register_parameter("bias", None)

    @classmethod
    def of_prepared(
        cls, weight: PreparedWeight, bias: torch.Tensor | None, *, registry: Registry | None, name: str | None
    ) -> Self:
        """Return a layer over a prepared weight."""
        layer, spec = cls.__new__(cls), weight.spec
        shape, m = (spec.out_features, spec.in_features), weight.selection.request.m
        layer._begin(shape, name or weight.labels["name"], registry, m)  # noqa: SLF001  # own class
        layer._take(weight)  # noqa: SLF001  # own class
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
            dtype: dtype of the activations. Defaults to the configuration's ``compute_dtype``, else torch's default.
            config: What to ask for, as in the constructor.
            registry: The plugins to choose among. Defaults to the process's.
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
        layer, asked = cls.__new__(cls), resolve_config(config)
        layer._begin((out_features, in_features), name, registry, m)  # noqa: SLF001  # own class
        wanted = dtype or asked.compute_dtype or torch.get_default_dtype()
        labels = {"name": name, "dialect": None, "notes": ()}
        device = torch.device("meta")
        layer._take(LayerWeight(spec=None, labels=labels, config=asked, dtype=wanted, device=device))  # noqa: SLF001  # own class
        if bias is not None:
            if not isinstance(bias, torch.Tensor) or not bias.is_floating_point() or bias.shape != (out_features,):
                refuse_bias(f"layer {layer.name!r}", bias, wanted, out_features, device)
            made = nn.Parameter(bias, requires_grad=bias.requires_grad)
            layer.bias = bias if isinstance(bias, nn.Parameter) else made
        return layer

    def adopt(self, weight: PackedWeight | Q4Linear) -> Self:
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
                ``prepare_weight``.
        """
        shape, given = (self.out_features, self.in_features), weight
        if self._closed:
            self._require_ready()
        if isinstance(given, Q4Linear):
            taken = given._require_ready()  # noqa: SLF001  # own class
            found, dtype = (given.out_features, given.in_features), given.dtype
        else:
            require_weight(f"layer {self.name!r}", given)
            found, dtype = given.shape, self.dtype
        if found != shape or dtype is not self.dtype or given.device.type == "meta":
            rule = f"{shape[0]}×{shape[1]} for {self.dtype} and hold data"
            raise argument_error(self.name, "weight", rule, f"{found[0]}×{found[1]} for {dtype} on {given.device}")
        if isinstance(given, Q4Linear):
            given.close()  # first, as the op forgets its tag then, which is the layer's own afterwards
            self._take(taken)
        else:
            self._take(self._converted(given, self.dtype, self._weight.config))
        bias = self._own_bias()
        if bias is not None and not bias.is_meta:
            self.bias = self._as_bias(bias)
        return self

    def _converted(self, weight: PackedWeight, dtype: torch.dtype | None, config: SessionConfig) -> LayerWeight:
        """Prepare ``weight`` without touching the layer."""
        return prepare_weight(
            weight, config, self._plugins(), m=self._m, dtype=dtype, name=self.name, session=self.session_name
        )

    def _plugins(self) -> Registry:
        return self._registry or default_registry()

    def _take(self, weight: LayerWeight) -> None:
        """Make a weight the layer's own; nothing here can fail."""
        self._release(self.__dict__.get("_weight"))
        self._weight, LATEST_CHANGE[0] = weight, object()
        buffers = weight.buffers if isinstance(weight, PreparedWeight) else weight.tensors
        self._buffer_names = tuple(f"packed_{index}" for index in range(len(buffers)))
        for key, buffer in zip(self._buffer_names, buffers, strict=True):
            self.register_buffer(key, buffer, persistent=False)
        if isinstance(weight, PreparedWeight):
            self._plan_key = weight.plan.key
            register_weight(weight)
            self._is_managed = (weight.config.unified_memory or _DISABLED) is not _DISABLED
            if not self._is_managed:
                self._fast = make_fast_path(weight, self._buffers, self._buffer_names, self._parameters)

    def _release(self, weight: LayerWeight | None) -> None:
        """Drop what was prepared; what a user put on the layer stays."""
        if isinstance(weight, PreparedWeight):
            forget_weight(weight)
        for key in self.__dict__.get("_buffer_names", ()):
            self._buffers.pop(key, None)
        self.__dict__.update(_RELEASED)

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Let the op forget the layer, except at the interpreter's exit, when names of modules may be gone."""
        if not is_exiting():
            self._release(self.__dict__.get("_weight"))

    def close(self) -> None:
        """Give every byte back; later use is a ``LifecycleError``. Closing twice is allowed."""
        self._closed = True
        weight = self._weight
        # First, so that a call in another thread finds a closed layer where it misses a buffer.
        self._weight, LATEST_CHANGE[0] = weight.without_tensors(), object()
        self._release(weight)

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

    # -- facts

    @property
    def device(self) -> torch.device:
        """Where the layer runs."""
        return self._weight.device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the activations that the layer takes."""
        return self._weight.dtype

    @property
    def is_prepared(self) -> bool:
        """Whether the layer can run."""
        return isinstance(self._weight, PreparedWeight)

    @property
    def weight(self) -> WeightInfo:
        """Shape, dtype and device, as code written for ``nn.Linear`` asks for them."""
        size = sum(buffer.numel() for buffer in self._own_buffers())
        shape, spec = torch.Size((self.out_features, self.in_features)), self._weight.spec
        kind = "" if spec is None else spec.format.name
        return WeightInfo(
            *(shape, self.dtype, self.device, kind, size),
            spec=spec,
            read=self.packed_weight,
            layer=self.name or "layer",
        )

    def packed_weight(self) -> PackedWeight:
        """Return the canonical weight: exported by the backend, or the source that is held."""
        ready = self._require_ready()
        with torch.no_grad():
            weight = ready.plan.weight(self._own_buffers() or self._require_ready().buffers)
        return weight.relabelled(**ready.labels, dtype=ready.spec.dtype)

    def rows(self, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return dequantised rows of the weight (embedding look-up in a tied head).

        Args:
            index: int64, any shape, values in 0 … N - 1.
            dtype: dtype of the result. Defaults to the layer's own.

        Returns:
            [*index.shape, K].

        Raises:
            InputError: An index is out of range or not int64.
        """
        ready, wanted = self._require_ready(), dtype or self.dtype
        rule = f"an int64 or int32 tensor of values in 0 … {self.out_features - 1}"
        if not isinstance(index, torch.Tensor) or index.dtype not in {torch.int64, torch.int32}:
            got = index.dtype if isinstance(index, torch.Tensor) else type(index).__name__
            raise argument_error(self.name, "index", rule, got)
        if not index.numel():
            return torch.empty((*index.shape, self.in_features), dtype=wanted, device=self.device)
        low, high = map(int, torch.aminmax(index))
        if low < 0 or high >= self.out_features:
            raise argument_error(self.name, "index", rule, low if low < 0 else high)
        flat = index.reshape(-1).to(self.device, torch.int64)
        with torch.no_grad():
            # Blocks that straddle rows can't be exported by rows.
            buffers, plan = self._own_buffers() or self._require_ready().buffers, ready.plan
            if plan.source is None and ready.spec.blocks is BlockOrder.ROW:
                dense = dequantize(plan.weight(buffers, flat), wanted)
            else:
                dense = dequantize(plan.weight(buffers), wanted, rows=flat)
        return dense.reshape(*index.shape, self.in_features)

    def diagnostics(self) -> Diagnostics:
        """Return which backend and paths serve, what ran how often, and why not the others."""
        ready, bias = self._require_ready(), self._own_bias()
        memory = [f"{item.action}: {item.reason}" for item in ready.memory]
        if bias is not None and self._is_managed:
            provider = provider_of(bias)
            where = "ordinary memory" if provider is None else f"memory of {provider.name}"
            memory.append(f"left: the bias is its owner's parameter, in {where}")
        return Diagnostics(
            layer=self.name,
            **attrs.asdict(ready.selection, recurse=False),
            calls=tuple(ready.counts),
            prepared_bytes=sum(tensor.numel() for tensor in ready.tensors),
            source_bytes=ready.source_bytes,
            outlier_rows=ready.outlier_rows,
            notes=ready.labels["notes"],
            memory=tuple(memory),
            input_memory=dict(ready.input_memory),
        )

    def extra_repr(self) -> str:
        """Return the facts that ``print(model)`` shows."""
        state, weight, spec = "closed" if self._closed else "not prepared", self._weight, self._weight.spec
        if isinstance(weight, PreparedWeight):
            state = f"{weight.selection.backend}/{weight.selection.path.name}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={'none yet' if spec is None else spec.format.name}, dtype={self.dtype}, backend={state}"
        )

    def _own_buffers(self) -> list[torch.Tensor]:
        buffers = self._buffers
        try:
            return [buffers[key] for key in self._buffer_names]  # type: ignore[misc]  # never None
        except KeyError:
            self._require_ready()  # another thread closes the layer
            raise

    def _require_ready(self) -> PreparedWeight:
        weight = self._weight
        if isinstance(weight, PreparedWeight):
            return weight
        if self._closed:
            raise LifecycleError(f"layer {self.name!r} is closed", hint="Make it again from its weight.")
        what = f"layer {self.name!r} is on the meta device and has no weight yet"
        raise LifecycleError(what, hint="Let it adopt(weight), or load a state dict (assign=True).")

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

    # -- running

    def forward(
        self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``x @ wᵀ + bias``.

        Args:
            x: [..., K] of the layer's dtype, on its device.
            out_dtype: dtype to convert the result to, which is rounded to the layer's own first.
            out: [..., N] to write to; no gradient flows through it.

        Returns:
            [..., N]; ``out`` where given.

        Raises:
            InputError: x or out has the wrong shape, dtype or device.
            LifecycleError: The layer is closed, or waits for its state.
            AttributeError: The bias was deleted, as in ``nn.Linear``.
        """
        if not _is_tracing():
            fast = self._fast
            if fast is not None and out_dtype is None:
                try:
                    y = fast(x, out)
                except KeyError:  # the bias is no parameter: parametrized, pruned or deleted
                    y = None
                if y is not None:
                    return y
        parameters = self._parameters
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401  # self.bias costs 0.5 µs
        if self.casts_input and isinstance(x, torch.Tensor) and x.dtype is not self.dtype and x.is_floating_point():
            x, out_dtype = x.to(self.dtype), out_dtype or x.dtype
        return self._forward(x, bias, out_dtype, out)

    def with_bias(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return ``x @ wᵀ + bias`` for a bias that is not the layer's own; errors as in ``forward``."""
        return self._forward(x, bias, None, None)

    def _forward(  # the checks of one call, in the order of their cost
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Call the registered op, which checks its arguments; errors name the layer."""
        given: object = x
        if not isinstance(given, torch.Tensor):
            raise argument_error(self.name, "x", "a tensor", type(given).__name__, "Use torch.as_tensor(x).")
        weight, dtype = self._weight, self._weight.dtype
        if x.dtype is not dtype and x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
            x = x.to(dtype)
        if out_dtype is not None or out is not None:
            check_options(self.name, dtype, out, out_dtype)
        if _is_tracing() or is_recorded():
            if weight.config.unified_memory is UnifiedMemoryPolicy.REQUIRE_UNIFIED:
                raise_unplaceable()
            return call_op(self.name, x, self._own_buffers(), bias, self._plan_key, out_dtype, out, tracing=True)
        ready = weight if isinstance(weight, PreparedWeight) else self._require_ready()
        own: object = bias
        if own is not None and not isinstance(own, torch.Tensor):
            refuse_bias(f"layer {self.name!r}", own, dtype, self.out_features, self.device)
        if self._is_managed or x.layout is not _STRIDED or (out is not None and out.dtype is not dtype):
            # Before the op is called, because something is done before that.
            check_linear_call(ready.plan, ready.device, x, bias, out, out_dtype=out_dtype, label=f"layer {self.name!r}")
        try:
            if self._is_managed:
                x = place_input(ready, x, self._plugins(), self.name, self.session_name)
            return call_op(self.name, x, self._own_buffers(), bias, self._plan_key, out_dtype, out, tracing=False)
        except InputError as error:
            fault = error
        check_linear_call(ready.plan, ready.device, x, bias, out, out_dtype=out_dtype, label=f"layer {self.name!r}")
        raise fault

    # -- what nn.Module asks for: moving, state dicts, copies, pickles

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002  # nn.Module's signature
        """Follow ``.to()``, ``.half()`` and the like: codes and scales keep their bytes; see ``docs/decisions``."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        dtype = probe.dtype if probe.dtype in FLOATS else self.dtype
        weight, current = None, self._weight
        if not self._closed and (dtype != self.dtype or probe.device != self.device):
            weight = self._moved(probe.device, dtype)
        elif isinstance(current, PreparedWeight) and probe.is_cpu and probe.is_shared():
            weight = None if shared_with_others(self._weight, self._own_buffers()) else to_shared(current, self.name)
        own = {key: self._buffers.pop(key) for key in self._buffer_names}  # moved as a weight, not as bytes
        try:
            with outside_inference():
                super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        finally:
            self._buffers.update(own)
        if weight is not None:
            self._take(weight)
        bias = self._own_bias()
        if bias is not None and bias.dtype != self.dtype:
            bias.data = bias.data.to(self.dtype)  # .double(), say
        return self

    def _moved(self, device: torch.device, dtype: torch.dtype) -> LayerWeight:
        """Return the layer's weight for another device or dtype, without touching the layer."""
        weight, config = self._weight, self._weight.config
        if device != self.device and device.type != "meta":
            config = attrs.evolve(config, device=str(device))
        if self.is_prepared:
            packed = self.packed_weight()  # moved to its device where it is prepared, as the memory policy says
            return self._converted(packed.to(device) if device.type == "meta" else packed, dtype, config)
        tensors = tuple(torch.empty_like(tensor, device=device) for tensor in weight.tensors)
        return attrs.evolve(weight, config=config, dtype=dtype, device=device, tensors=tensors)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001  # nn.Module's signature
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update(weight_entries(self.packed_weight(), prefix))

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
        own = {key: value for key, value in state_dict.items() if key.startswith(prefix + STATE)}
        rest = {key: value for key, value in state_dict.items() if key not in own}
        weight, shared = None, shared_with_others(self._weight, self._own_buffers())
        try:
            if self._closed:
                self._require_ready()
            packed = weight_of_entries(
                *(own, prefix, missing_keys, unexpected_keys),
                shape=(self.out_features, self.in_features),
                device=None if self.device.type == "meta" else self.device,
                formats=self._plugins().formats().values(),
            )
            if packed is not None:
                labelled = packed.relabelled(**self._weight.labels)
                weight = self._converted(labelled, self.dtype, self._weight.config)
            if shared and isinstance(weight, PreparedWeight) and weight.plan is not shared.plan:
                raise LifecycleError(
                    f"Layer {self.name!r} is shared with other processes, which can't follow a load of another format "
                    "or layout. Load before share_memory()."
                )
        except Q4Error as error:  # nothing is loaded, the bias neither
            error_msgs.append(f"{prefix}weight: {error}")
            return
        if own and weight is None:
            return  # part of the weight is missing: the load will be refused, and the bias stays as it is
        faults: list[str] = []
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, faults)
        error_msgs.extend(faults)
        if faults:
            return
        if weight is not None:
            self._take(weight if shared is None else written_to(shared, weight))
        bias = self._own_bias()
        if bias is not None and bias.device.type != "meta":
            self.bias = self._as_bias(bias)  # assign=True takes any dtype that the state has

    def _copied(self) -> dict[str, Any]:
        """Return the attributes that a copy gets, in dicts of its own: all but what is prepared for each layer."""
        attributes: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch's; leaves out what compile() made for this layer
        own = set(self._buffer_names)
        attributes = {key: value for key, value in attributes.items() if key not in _RELEASED and key != "_weight"}
        attributes["_parameters"] = dict(self._parameters)
        attributes["_buffers"] = {key: value for key, value in self._buffers.items() if key not in own}
        attributes["_non_persistent_buffers_set"] = self._non_persistent_buffers_set - own
        return attributes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent copy: its own bytes, the same plan, counters at zero; hooks and attributes as well."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo[id(self._registry)] = self._registry
        with outside_inference():
            twin.__dict__.update(copy.deepcopy(self._copied(), memo))
            buffers = [buffer.clone(memory_format=torch.contiguous_format) for buffer in self._own_buffers()]
        weight = self._weight
        if isinstance(weight, PreparedWeight):
            weight = copy_weight(weight, buffers[:-1], self._plugins())
        else:
            weight = attrs.evolve(weight, tensors=tuple(buffers))
        twin._take(weight)  # noqa: SLF001  # own class
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the canonical weight, and all that a user put on the layer, as any module is pickled.

        The plugins stay out: the other process selects among its own, and prepares for itself. After
        ``share_memory`` it then takes the shared buffers in place of its own, if it has chosen the same plan. A layer
        on the meta device takes its empty tensors along.

        Raises:
            LifecycleError: The layer is closed.
        """
        weight, shared = self._weight, shared_with_others(self._weight, self._own_buffers())
        packed = Temporary(self.packed_weight()) if self.is_prepared or self._closed else None
        facts = weight if packed is None else weight.without_tensors()
        buffers = None if shared is None else (shared.plan.stem, shared.tensors)
        own = {"_registry": None, "_weight": facts, "packed_weight": packed, "shared_buffers": buffers}
        return self._copied() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Prepare the unpickled weight with this process's plugins."""
        rest = dict(state)
        weight, packed, shared = rest.pop("_weight"), unwrapped(rest.pop("packed_weight")), rest.pop("shared_buffers")
        super().__setstate__(rest)  # type: ignore[no-untyped-call]  # torch's
        if packed is not None:
            weight = self._converted(packed, weight.dtype, weight.config)
        if shared is not None:
            weight = over_shared(weight, self.name, *shared)
        self._take(weight)
        bias = self._own_bias()
        if bias is not None:
            self.bias = self._as_bias(bias)  # the device may be another one here
