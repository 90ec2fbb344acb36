"""``Nvfp4Native``: FP4 tensor cores where asked for, the shared weight-only kernels otherwise, a native quantiser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from q4_nvfp4_native.native import Native, Tools
from q4_nvfp4_native.operands import BYTE_KINDS, OperandMeta, export_operand, prepare_operand
from q4_nvfp4_native.quantizer import KINDS, MOST_ELEMENTS, quantize_packed
from q4_triton_kernels import WeightOnlyBackend
from q4core import (
    ActivationPrecision,
    KernelPath,
    PackedWeight,
    Packing,
    Precision,
    PrepareContext,
    Prepared,
    Reason,
    ReasonCode,
    Request,
    Rounding,
    ScaleKind,
    Support,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from q4_triton_kernels import Facts

__all__ = ["Nvfp4Native"]


class Nvfp4Native(WeightOnlyBackend):
    """NVFP4 and MXFP4.

    ``ActivationPrecision.FP4`` asks for the FP4 paths (w4a4) and gets nothing else; every other precision gets the
    weight-only ones.

    Args:
        facts: Of the machine. Defaults to those of this one.
        tools: What the FP4 paths are built with.
        devices: Device types in addition to those of the weight-only kernels; a test brings ``"cpu"``.
    """

    name = "nvfp4-native"
    formats = frozenset({"nvfp4", "mxfp4"})
    scale_kinds = frozenset({ScaleKind.E4M3, ScaleKind.E4M3_MUL, ScaleKind.E4M3_DIV, ScaleKind.E8M0})

    def __init__(self, facts: Facts | None = None, tools: Tools | None = None, devices: Iterable[str] = ()) -> None:
        super().__init__(facts)
        own = self.capabilities
        self.capabilities = attrs.evolve(
            own,
            devices=own.devices | set(devices),
            precisions=own.precisions | {Precision.W4A4},
            ops=own.ops | {"quantize"},
            precision_scale_kinds={Precision.W4A4: BYTE_KINDS},
            roundings=Rounding,
        )
        self.native = Native(self.facts, tools or Tools())

    def check(self, request: Request) -> Support:
        """Offer the FP4 paths where FP4 activations are asked for, the quantiser, or weight-only paths or gradients.

        With weight-only paths the state says why there are no FP4 paths.
        """
        if request.op == "quantize":
            return self._check_quantize(request)
        if request.precision is ActivationPrecision.FP4 and request.op == "input_gradient":
            message = "the layout of the FP4 paths has no input gradient"
            return Support.no([Reason(ReasonCode.FEATURE, message)], native_state="no input gradient")
        if request.precision is ActivationPrecision.FP4:
            return self.native.check(request)
        support = super().check(request)
        if not support.paths or request.op == "input_gradient":
            return support
        lacks = "; ".join(map(str, self.native.check(request).reasons))
        state = f"{support.native_state}; no FP4 paths: {lacks}" if lacks else support.native_state
        return attrs.evolve(support, native_state=state)

    def _check_quantize(self, request: Request) -> Support:
        target = self.target(request.device)
        reasons = list(target) if isinstance(target, tuple) else []
        if request.scale_kind not in KINDS[request.format.name]:
            message = f"the quantiser writes no {request.scale_kind.value} scales"
            reasons.append(Reason(ReasonCode.FORMAT, message))
        if request.packing != Packing.LOW_FIRST:
            message = f"the quantiser writes low_first codes, not {request.packing}"
            reasons.append(Reason(ReasonCode.FORMAT, message))
        if request.in_features % request.block_size:
            message = f"K must be a multiple of {request.block_size}, got {request.in_features}"
            reasons.append(Reason(ReasonCode.SHAPE, message))
        if request.out_features * request.in_features > MOST_ELEMENTS:
            message = f"the quantiser takes at most 2^33 elements, got {request.out_features} x {request.in_features}"
            reasons.append(Reason(ReasonCode.SHAPE, message))
        if reasons:
            return Support.no(reasons, native_state="no quantiser")
        path = KernelPath.quantizer("quantize", interpreted=not isinstance(target, tuple) and target.is_interpreted)
        return Support.yes([path], native_state=f"Triton {self.facts.triton} ({target})")

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        """Lay the weight out for the paths that its request is served by, and compile and load their kernels."""
        if request.precision is not ActivationPrecision.FP4:
            return super().prepare(weight, request, context)
        served = [item.path for item in context.paths] or self.native.check(request).paths
        self.native.load(request, {path.name for path in served})
        return Prepared(*prepare_operand(weight, context))

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        """Return the weight, whole or the given rows, bit for bit."""
        if isinstance(prepared.meta, OperandMeta):
            return export_operand(prepared, rows)
        return super().export(prepared, rows)

    def describe(self, meta: Any) -> dict[str, Any]:
        """Return the layout as what JSON holds."""
        facts: dict[str, Any] = meta.to_dict()
        return facts

    def meta_from(self, facts: dict[str, Any]) -> Any:
        """Return the layout that ``describe`` gave; a ``ConfigError`` or ``WeightError`` says what is invalid."""
        return OperandMeta.from_dict(facts) if "operand" in facts else super().meta_from(facts)

    def linear(
        self,
        prepared: Prepared,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        path: str,
    ) -> None:
        """Launch the kernels of a path on the current stream."""
        meta = prepared.meta
        if isinstance(meta, OperandMeta):
            self.native.linear(meta, prepared.tensors, x, out, bias, path)
        else:
            super().linear(prepared, x, out, bias=bias, path=path)

    def quantize(
        self,
        dense: torch.Tensor,
        request: Request,
        *,
        rounding: Rounding = Rounding.NEAREST,
        seed: int = 0,
    ) -> PackedWeight:
        """Quantise finite values on the device; to nearest the bytes equal the reference codec's on the CPU."""
        chance = rounding is Rounding.STOCHASTIC
        kind, scale_kind = request.format, request.scale_kind
        return quantize_packed(dense, kind, scale_kind=scale_kind, stochastic=chance, seed=seed, is_finite=True)
