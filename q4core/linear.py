"""``Q4Linear``: a linear layer over a packed weight."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4core import ops
from q4core.codec import dequantize
from q4core.diagnostics import Diagnostics, diagnose
from q4core.errors import InputError, LifecycleError, Q4Error
from q4core.fast_path import make_fast_path
from q4core.linear_input import FLOATS, check_out, refuse_input
from q4core.linear_state import load_weight, save_weight, split_state
from q4core.memory import apply_input_policy
from q4core.plan import as_bytes
from q4core.policy import SessionConfig, UnifiedMemoryPolicy
from q4core.preparation import PreparedLayer, prepare_layer
from q4core.registry import Registry, default_registry
from q4core.weight_info import WeightInfo
from q4core.weight_spec import WeightSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from q4core.fast_path import FastPath
    from q4core.weight import PackedWeight

__all__ = ["Q4Linear"]

_BUFFER = "packed_"
_is_tracing = torch.compiler.is_dynamo_compiling  # other tracers work through dispatch modes
_LINEAR = torch.ops.q4core.linear.default
_LINEAR_OUT = torch.ops.q4core.linear_out.default


class Q4Linear(nn.Module):
    """``y = x @ wᵀ + bias`` with a 4-bit w; made by ``Session.linear``.

    ``state_dict`` holds, strictly and in no dialect: ``weight.spec`` (uint8, the JSON of ``WeightSpec``), one
    ``weight.<field>`` for each tensor field of ``PackedWeight`` that is present, and ``bias``. What the backend
    prepared stands in non-persistent uint8 buffers ``packed_0 …``.

    Args:
        weight: The packed weight; on the meta device the layer waits for ``load_state_dict``.
        bias: [N] or None. A Parameter is taken as it is; a tensor becomes one without gradients.
        config: A resolved configuration.
        registry: The plugins to choose among; the process's unless told.
        name: The layer's name, for messages and reports.
        m: Rows of x that must be served.

    Raises:
        InputError: The bias does not fit.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError, WeightError, UnifiedMemoryError: See
            ``prepare_layer``.
    """

    in_features: int
    out_features: int

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
        self._config = config
        self._registry = registry
        self._m = m
        self._closed = False
        self._counts: list[int] = []
        self._ready: PreparedLayer | None = None
        self._fast: FastPath | None = None
        self._managed = False
        self._plan_key = ""
        self._buffer_names: tuple[str, ...] = ()
        self._live: ops.LiveLayer | None = None
        self._tag_address = 0
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)
        self._install(weight, None)
        self.bias = self._as_bias(bias)

    # -- preparing and letting go

    def _install(self, weight: PackedWeight, dtype: torch.dtype | None) -> None:
        """Prepare ``weight`` and take it as the layer's own."""
        self._spec = WeightSpec.of(weight)
        self._origin = (weight.name, weight.dialect, weight.notes)
        if weight.device.type == "meta":
            wanted = dtype or self._config.compute_dtype or weight.dtype
            self._set_buffers(
                [tensor if tensor.dtype == torch.uint8 else as_bytes(tensor) for _, tensor in weight.tensors()]
            )
            self._ready = None
            self._fast = None
            self._plan_key = ""
            self._dtype = wanted
            self._device = weight.device
            return
        prepared = prepare_layer(weight, self._config, self._registry or default_registry(), m=self._m, dtype=dtype)
        self._adopt(prepared)

    def _adopt(self, prepared: PreparedLayer) -> None:
        tag = torch.zeros(1, dtype=torch.uint8, device=prepared.selection.request.device)
        self._set_buffers([*prepared.buffers, tag])
        self._ready = prepared
        self._dtype = prepared.plan.dtype
        self._device = prepared.selection.request.device
        self._counts = [0] * len(prepared.plan.segments)
        self._plan_key = prepared.plan.key
        self._tag_address = tag.data_ptr()
        self._live = ops.LiveLayer(
            prepared.plan, prepared.prepared, [buffer.data_ptr() for buffer in prepared.buffers], self._counts
        )
        ops.register_layer(tag, self._live)
        self._fast = make_fast_path(self, prepared) if self._may_go_fast() else None
        self._managed = not self._may_go_fast()

    def _may_go_fast(self) -> bool:
        return (self._config.unified_memory or UnifiedMemoryPolicy.DISABLED) is UnifiedMemoryPolicy.DISABLED

    def _set_buffers(self, tensors: list[torch.Tensor]) -> None:
        for old in [key for key in self._buffers if key.startswith(_BUFFER)]:
            del self._buffers[old]
        self._buffer_names = tuple(f"{_BUFFER}{index}" for index in range(len(tensors)))
        for key, tensor in zip(self._buffer_names, tensors, strict=True):
            self.register_buffer(key, tensor, persistent=False)

    def close(self) -> None:
        """Give every byte back; later use is a ``LifecycleError``. Closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        self._forget_tag()
        self._ready = None
        self._fast = None
        self._set_buffers([])

    def _forget_tag(self) -> None:
        live = self.__dict__.get("_live")
        if live is not None:
            ops.forget_layer(self._tag_address, live)
            self._live = None

    def __del__(self) -> None:
        """Let the counters forget the layer."""
        self._forget_tag()

    def _as_bias(self, bias: torch.Tensor | None) -> nn.Parameter | None:
        if bias is None:
            return None
        if tuple(bias.shape) != (self.out_features,) or not bias.is_floating_point():
            raise InputError(
                f"layer {self.name!r}",
                name="bias",
                rule=f"a float vector of {self.out_features}",
                value=f"{bias.dtype} {list(bias.shape)}",
            )
        if isinstance(bias, nn.Parameter) and bias.dtype == self._dtype and bias.device == self.device:
            return bias
        return nn.Parameter(bias.detach().to(self.device, self._dtype), requires_grad=bias.requires_grad)

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
    def weight(self) -> WeightInfo:
        """Shape, dtype and device, as code written for ``nn.Linear`` asks for them."""
        size = sum(buffer.numel() for buffer in self._own_buffers())
        shape = torch.Size((self.out_features, self.in_features))
        return WeightInfo(shape, self._dtype, self.device, self._spec.format.name, size)

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

    def rows(self, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return dequantised rows of the weight (embedding look-up in a tied head).

        Args:
            index: int64, any shape, values in 0 … N - 1.
            dtype: dtype of the result; the layer's own unless told.

        Returns:
            [*index.shape, K].

        Raises:
            InputError: An index is out of range or not int64.
        """
        ready = self._require_ready()
        flat = index.reshape(-1)
        if index.dtype not in {torch.int64, torch.int32} or (
            flat.numel() and not (int(flat.min()) >= 0 and int(flat.max()) < self.out_features)
        ):
            raise InputError(
                f"layer {self.name!r}", name="index", rule=f"integers in 0 … {self.out_features - 1}", value=index.dtype
            )
        wanted = dtype or self._dtype
        if not flat.numel():
            return torch.empty((*index.shape, self.in_features), dtype=wanted, device=self.device)
        flat = flat.to(self.device, torch.int64)
        with torch.no_grad():
            if ready.plan.source is None:
                dense = dequantize(ready.plan.weight(self._own_buffers(), flat), wanted)
            else:
                dense = dequantize(ready.plan.weight(self._own_buffers()), wanted, rows=flat)
        return dense.reshape(*index.shape, self.in_features)

    def diagnostics(self) -> Diagnostics:
        """Return which backend and paths serve, what ran how often, and why not the others."""
        return diagnose(self._require_ready(), layer=self.name, calls=self._counts, notes=self._origin[2])

    def extra_repr(self) -> str:
        """Return the facts that ``print(model)`` shows."""
        state = "closed" if self._closed else "not prepared"
        if self._ready is not None:
            state = f"{self._ready.selection.backend}/{self._ready.selection.path.name}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self._spec.format.name}, dtype={self._dtype}, backend={state}"
        )

    # -- running

    def forward(
        self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``x @ wᵀ + bias``.

        Args:
            x: [..., K] of the layer's dtype, on its device.
            out_dtype: dtype of the result; the layer's own unless told.
            out: [..., N] to write to; no gradient flows through it.

        Returns:
            [..., N]; ``out`` where given.

        Raises:
            InputError: x or out has the wrong shape, dtype or device.
            LifecycleError: The layer is closed, or waits for its state.
        """
        if not _is_tracing():
            fast = self._fast
            if fast is not None and out_dtype is None:
                y = fast(x, out)
                if y is not None:
                    return y
        return self._forward(x, out_dtype, out)

    def _forward(  # noqa: C901  # the checks of one call, in the order of their cost
        self, x: torch.Tensor, out_dtype: torch.dtype | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Check everything, then call the registered op."""
        tracing = _is_tracing()
        if not tracing:  # inside a trace the op's fake kernel refuses, in a way that tracing understands
            if self._ready is None:
                self._require_ready()
            if not isinstance(x, torch.Tensor):
                refuse_input(self, x)
        if x.dtype is not self._dtype and x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
            x = x.to(self._dtype)
        if not tracing and (
            x.dtype is not self._dtype or x.dim() < 1 or x.shape[-1] != self.in_features or x.device != self._device
        ):
            refuse_input(self, x)
        if out is not None or out_dtype is not None:
            check_out(self, x, out, out_dtype)
        if self._managed:
            x = self._placed_input(x)
        bias = self._parameters["bias"]
        buffers = self._own_buffers()
        if out is None:
            y: torch.Tensor = _LINEAR(x, buffers, bias, self._plan_key)
            return y if out_dtype is None or out_dtype is y.dtype else y.to(out_dtype)
        if tracing or out.dtype is not self._dtype:
            out.copy_(_LINEAR(x, buffers, bias, self._plan_key))
            return out
        if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            raise InputError(
                f"layer {self.name!r}",
                name="out",
                rule="None where gradients are recorded",
                value="a tensor",
                hint="Call under torch.no_grad(), or leave out= away.",
            )
        _LINEAR_OUT(x, buffers, bias, self._plan_key, out)
        return out

    def _placed_input(self, x: torch.Tensor) -> torch.Tensor:
        policy = self._config.unified_memory or UnifiedMemoryPolicy.DISABLED
        registry = self._registry or default_registry()
        placed, _ = apply_input_policy(x, policy, device=self.device, providers=registry.memory_providers())
        return placed

    # -- moving, copying, saving

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Q4Linear:  # noqa: ARG002, FBT001, FBT002  # nn.Module's signature
        """Follow ``.to()``, ``.half()`` and the like: codes and scales keep their bytes; see ``docs/decisions``."""
        probe = fn(torch.empty(0, dtype=self._dtype, device=self.device))
        dtype = probe.dtype if probe.dtype in FLOATS else self._dtype
        if self._closed or (dtype == self._dtype and probe.device == self.device):
            return self._apply_bias(fn)
        if self._ready is None:
            if probe.device.type != "meta":
                self._set_buffers([torch.empty_like(buffer, device=probe.device) for buffer in self._own_buffers()])
                self._device = probe.device
            self._dtype = dtype
            return self._apply_bias(fn)
        weight = self.packed_weight()
        moved = weight.to(probe.device)
        if probe.device != self.device and probe.device.type != "meta":
            self._config = attrs.evolve(self._config, device=str(probe.device))
        self._forget_tag()
        self._install(moved, dtype)
        return self._apply_bias(fn)

    def _apply_bias(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Q4Linear:
        if self.bias is not None:
            with torch.no_grad():
                bias = fn(self.bias)
            if bias.device != self.bias.device or bias.dtype != self.bias.dtype:
                self.bias = nn.Parameter(bias.to(self._dtype), requires_grad=self.bias.requires_grad)
        return self

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
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        formats = (self._registry or default_registry()).formats().values()
        device = None if self.device.type == "meta" else self.device
        try:
            shape = (self.out_features, self.in_features)
            weight = load_weight(own, prefix, shape, device, formats, missing_keys, unexpected_keys)
            if weight is not None:
                name, dialect, notes = self._origin
                self._forget_tag()
                self._install(attrs.evolve(weight, name=name, dialect=dialect, notes=notes), self._dtype)
                self._closed = False
        except Q4Error as error:
            error_msgs.append(f"{prefix}weight: {error}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Q4Linear:
        """Return an independent copy: its own bytes, the same plan, counters at zero."""
        twin = Q4Linear.__new__(Q4Linear)
        memo[id(self)] = twin
        nn.Module.__init__(twin)
        twin.register_parameter("bias", None)
        for key in (
            "in_features",
            "out_features",
            "name",
            "_config",
            "_registry",
            "_m",
            "_closed",
            "_spec",
            "_origin",
            "_dtype",
            "_device",
            "training",
        ):
            setattr(twin, key, getattr(self, key))
        for key, blank in (
            ("_counts", []),
            ("_ready", None),
            ("_fast", None),
            ("_managed", False),
            ("_plan_key", ""),
            ("_buffer_names", ()),
            ("_live", None),
            ("_tag_address", 0),
        ):
            setattr(twin, key, blank)
        if self._ready is None:
            twin._set_buffers([buffer.clone() for buffer in self._own_buffers()])  # noqa: SLF001  # own class
        else:
            buffers = tuple(buffer.clone(memory_format=torch.contiguous_format) for buffer in self._ready.buffers)
            copied = attrs.evolve(self._ready, buffers=buffers, prepared=self._ready.plan.prepared(buffers))
            twin._adopt(copied)  # noqa: SLF001  # own class
        twin.bias = copy.deepcopy(self.bias, memo)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the canonical weight; the other process selects and prepares for itself."""
        return {
            "weight": self.packed_weight(),
            "bias": self.bias,
            "config": self._config,
            "dtype": self._dtype,
            "name": self.name,
            "m": self._m,
            "training": self.training,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Prepare the unpickled weight with this process's plugins."""
        config = attrs.evolve(state["config"], compute_dtype=state["dtype"])
        self.__init__(state["weight"], state["bias"], config=config, name=state["name"], m=state["m"])  # type: ignore[misc]  # nn.Module unpickles without __init__
        self.train(state["training"])
