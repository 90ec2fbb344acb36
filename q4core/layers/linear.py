"""``Q4Linear``: a linear layer over a packed weight."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs
import torch

from q4core.codec import dequantize
from q4core.diagnostics.events import bound
from q4core.errors import InputError, LifecycleError
from q4core.formats import FLOATS, BlockOrder
from q4core.layers.diagnosis import Diagnostics
from q4core.layers.exported import take_up_plan
from q4core.layers.packed_module import PackedModule
from q4core.layers.preparation import placer_for, tell_memory
from q4core.layers.weight_info import WeightInfo
from q4core.machine import is_forward_mode, is_recorded, is_transformed
from q4core.memory import provider_of
from q4core.ops.autograd import linear_function
from q4core.ops.call_check import check_linear_call, refuse_bias
from q4core.policy import UnifiedMemoryPolicy
from q4core.selection.plan import let_take_up

if TYPE_CHECKING:
    from q4core.ops.registration import LiveLayer

_is_tracing = torch.compiler.is_dynamo_compiling  # other tracers work through dispatch modes
_STRIDED = torch.strided
_NO_GRAD = "Call under torch.no_grad(), or leave out= away."
_LINEAR = torch.ops.q4core.linear.default
_LINEAR_OUT = torch.ops.q4core.linear_out.default
let_take_up(take_up_plan)


class Q4Linear(PackedModule):
    """``y = x @ wᵀ + bias`` with a 4-bit w, prepared and proven.

    ``Session.linear`` makes one that the session reports and closes; ``Q4Linear(weight)`` makes one that belongs to no
    session, and ``Q4Linear.empty(n, k)`` one that waits for ``adopt(weight)``. ``with`` closes either.

    ``state_dict`` holds, strictly and in no dialect: ``weight.spec`` (uint8, the JSON of ``WeightSpec``), one
    ``weight.<field>`` for each tensor field of ``PackedWeight`` that is present, and ``bias``. What the backend
    prepared stands in non-persistent uint8 buffers ``packed_0 …``.

    Args:
        weight: The packed weight; on the meta device the layer waits for ``load_state_dict``.
        bias: [N] or None. A Parameter is taken as it is; a tensor becomes one without gradients.
        config: What to ask for; unset fields ask the context, the environment and the default.
        registry: The plugins to choose among; the process's unless told.
        name: The layer's name, for messages and reports.
        m: Rows of x that must be served.

    Raises:
        InputError: ``weight`` is no ``PackedWeight``, or the bias does not fit.
        ConfigError: ``config`` is no ``SessionConfig``, or a ``Q4_*`` variable is not legal.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError, WeightError, UnifiedMemoryError: See
            ``prepare_layer``.
    """

    # -- what it is

    @property
    def weight(self) -> WeightInfo:
        """Shape, dtype and device, as code written for ``nn.Linear`` asks for them."""
        size = sum(buffer.numel() for buffer in self._own_buffers())
        shape, spec = torch.Size((self.out_features, self.in_features)), self._content.known
        kind = "" if spec is None else spec.format.name
        return WeightInfo(
            *(shape, self.dtype, self.device, kind, size),
            spec=spec,
            read=self.packed_weight,
            layer=self.name or "layer",
        )

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
        plan, wanted = self._require_ready().plan, dtype or self.dtype
        rule = f"an int64 or int32 tensor of values in 0 … {self.out_features - 1}"
        if not isinstance(index, torch.Tensor) or index.dtype not in {torch.int64, torch.int32}:
            got = index.dtype if isinstance(index, torch.Tensor) else type(index).__name__
            raise self._refusal("index", rule, got)
        if not index.numel():
            return torch.empty((*index.shape, self.in_features), dtype=wanted, device=self.device)
        low, high = map(int, torch.aminmax(index))
        if low < 0 or high >= self.out_features:
            raise self._refusal("index", rule, low if low < 0 else high)
        flat = index.reshape(-1).to(self.device, torch.int64)
        with torch.no_grad():
            # Blocks that straddle rows can't be exported by rows.
            buffers = self._own_buffers() or self._require_ready().buffers
            if plan.source is None and self._content.spec.blocks is BlockOrder.ROW:
                dense = dequantize(plan.weight(buffers, flat), wanted)
            else:
                dense = dequantize(plan.weight(buffers), wanted, rows=flat)
        return dense.reshape(*index.shape, self.in_features)

    def diagnostics(self) -> Diagnostics:
        """Return which backend and paths serve, what ran how often, and why not the others."""
        live, bias = self._require_ready(), self._own_bias()
        memory = [f"{item.action}: {item.reason}" for item in live.memory]
        if bias is not None and self._is_managed:
            provider = provider_of(bias)
            where = "ordinary memory" if provider is None else f"memory of {provider.name}"
            memory.append(f"left: the bias is its owner's parameter, in {where}")
        return Diagnostics(
            layer=self.name,
            **attrs.asdict(live.selection, recurse=False),
            calls=tuple(live.counts),
            prepared_bytes=sum(tensor.numel() for tensor in live.tensors),
            source_bytes=live.source_bytes,
            outlier_rows=live.outlier_rows,
            notes=self._content.labels["notes"],
            memory=tuple(memory),
            input_memory=dict(live.input_memory),
        )

    def extra_repr(self) -> str:
        """Return the facts that ``print(model)`` shows."""
        state = "closed" if self._closed else "not prepared"
        live, spec = self._content.prepared, self._content.known
        if live is not None:
            state = f"{live.selection.backend}/{live.selection.path.name}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={'none yet' if spec is None else spec.format.name}, dtype={self.dtype}, backend={state}"
        )

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
        """Call the registered op, which checks its arguments; what it refuses is told of the layer by its name."""
        given: object = x
        if not isinstance(given, torch.Tensor):
            raise self._refusal("x", "a tensor", type(given).__name__, "Use torch.as_tensor(x).")
        dtype = self._content.dtype
        if x.dtype is not dtype and x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
            x = x.to(dtype)
        if out_dtype is not None or out is not None:
            self._check_options(out, out_dtype)
        if _is_tracing() or is_recorded():
            if self._content.config.unified_memory is UnifiedMemoryPolicy.REQUIRE_UNIFIED:
                what = "a compiled graph can't place activations, as REQUIRE_UNIFIED asks"
                if _is_tracing():  # where an error of ours can't be made: torch tells this one under fullgraph=True
                    torch._dynamo.graph_break(msg=what)  # noqa: SLF001  # documented in all but its name
                hint = "Ask for PREFER_UNIFIED, and give the graph activations in managed memory."
                raise LifecycleError(what, hint=hint)
            return self._call(x, bias, out_dtype, out, tracing=True)
        live = self._content.prepared or self._require_ready()
        own: object = bias
        if own is not None and not isinstance(own, torch.Tensor):
            refuse_bias(f"layer {self.name!r}", own, dtype, self.out_features, self.device)
        if self._is_managed or x.layout is not _STRIDED or (out is not None and out.dtype is not dtype):
            # Before the op is called, because something is done before that.
            check_linear_call(live.plan, live.device, x, bias, out, out_dtype=out_dtype, label=f"layer {self.name!r}")
        try:
            placed = self._placed(live, x) if self._is_managed else x
            return self._call(placed, bias, out_dtype, out, tracing=False)
        except InputError as error:
            fault = error
        check_linear_call(live.plan, live.device, x, bias, out, out_dtype=out_dtype, label=f"layer {self.name!r}")
        raise fault

    def _check_options(self, out: torch.Tensor | None, out_dtype: torch.dtype | None) -> None:
        dtype = out_dtype or self.dtype
        if out_dtype is not None and out_dtype not in FLOATS:
            hint = "Leave out_dtype= away for the layer's own."
            raise self._refusal("out_dtype", "float32, bfloat16 or float16", out_dtype, hint)
        if out is not None and out.dtype is not dtype:
            hint = "Give a tensor of that dtype, name its dtype by out_dtype=, or leave out= away."
            raise self._refusal("out", f"of dtype {dtype}", out.dtype, hint)
        if out is not None and out.requires_grad and out.is_leaf and torch.is_grad_enabled():
            raise self._refusal("out", "a tensor that does not require gradients", "requires_grad=True", _NO_GRAD)

    def _refusal(self, name: str, rule: str, value: object, hint: str | None = None) -> InputError:
        return InputError(f"layer {self.name!r}", name=name, rule=rule, value=value, hint=hint)

    def _call(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None,
        out: torch.Tensor | None,
        *,
        tracing: bool,
    ) -> torch.Tensor:
        buffers, plan = self._own_buffers(), self._plan_key
        by_function = not tracing and is_transformed()
        if out is None:
            call = linear_function if by_function else _LINEAR
            y: torch.Tensor = call(x, buffers, bias, plan)
            return y if out_dtype is None or out_dtype is y.dtype else y.to(out_dtype)
        if by_function or (not tracing and is_forward_mode()):
            raise self._refusal("out", "None under torch.func and in forward mode", "a tensor")
        if tracing or out.dtype is not x.dtype:
            out.copy_(_LINEAR(x, buffers, bias, plan))
            return out
        if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
            raise self._refusal("out", "None where gradients are recorded", "a tensor", _NO_GRAD)
        _LINEAR_OUT(x, buffers, bias, plan, out)
        return out

    def _placed(self, live: LiveLayer, x: torch.Tensor) -> torch.Tensor:
        """Return x where the unified-memory policy wants it; a temporary goes with its last reference."""
        config = self._content.config
        placed, decision = placer_for(config, self._plugins(), self.device).input(x)
        line = f"{decision.action}: {decision.reason}"
        live.input_memory[line] = live.input_memory.get(line, 0) + 1
        level = logging.INFO if live.input_memory[line] == 1 else logging.DEBUG  # not a line for each call
        with bound(session=self.session_name):
            tell_memory(decision, "activation", config, self.name, level=level)
        return placed
