"""``DequantFallback``: y = x @ dequantise(w)ᵀ, a slice of out-features at a time.

Weights are decoded exactly and multiplied in float32 whatever the dtype of x, so that the result is right to the
float32 bound; the temporary dense slice stays below ``SLICE_BYTES``. The prepared weight is the packed weight itself:
views of a mapped file stay views of it, and cost no anonymous memory.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

import torch

from q4core import (
    EVERY_FORMAT,
    BlockOrder,
    Capabilities,
    Feature,
    KernelPath,
    PackedWeight,
    PathKind,
    Precision,
    PrepareContext,
    Prepared,
    Request,
    ScaleKind,
    Support,
    Tier,
    WeightSpec,
    default_registry,
    dequantize,
)

__all__ = ["SLICE_BYTES", "DequantFallback"]

SLICE_BYTES = 4 << 20
"""Most bytes of dense float32 weights at a time: about what a last-level cache holds in addition to x."""

_ALIGNMENT = 64  # of torch's CPU allocations, in bytes
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class DequantFallback:
    """The reference backend (tier 0)."""

    name: ClassVar[str] = "dequant-fallback"
    api_version: ClassVar[tuple[int, int]] = (2, 0)
    capabilities: ClassVar[Capabilities] = Capabilities(
        formats={EVERY_FORMAT},  # decoded by the core's codec, which reads plugins' formats too
        scale_kinds=frozenset(ScaleKind),
        devices={"cpu", "cuda"},
        dtypes=_DTYPES,
        precisions={Precision.W4A32, Precision.W4A16},
        features=frozenset(Feature),
        ops={"linear"},
    )

    def check(self, request: Request) -> Support:
        """Offer the one path; whatever the manifest allows can be served."""
        precision = Precision.W4A32 if request.dtype == torch.float32 else Precision.W4A16
        path = KernelPath("dequant_matmul", (1, None), PathKind.REFERENCE, precision, Tier.REFERENCE)
        return Support.yes([path], native_state="pure torch, nothing native")

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        """Take the packed tensors as they are."""
        del request, context
        return Prepared(tuple(tensor for _, tensor in weight.tensors()), WeightSpec.of(weight))

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        """Return the weight, whole or the given rows of it."""
        weight = _weight(prepared)
        return weight if rows is None else weight.take_rows(rows)

    def describe(self, meta: WeightSpec) -> dict[str, Any]:
        """Return the weight's spec as what JSON holds."""
        facts: dict[str, Any] = json.loads(meta.to_json())
        return facts

    def meta_from(self, facts: dict[str, Any]) -> WeightSpec:
        """Return the spec that ``describe`` gave; a ``WeightError`` says what is invalid."""
        return WeightSpec.from_json(json.dumps(facts), formats=default_registry().formats().values())

    def linear(
        self,
        prepared: Prepared,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        path: str,
    ) -> None:
        """Decode a slice of rows, multiply in float32, add the bias, round once."""
        del path
        weight = _weight(prepared)
        exact = _aligned(x.to(torch.float32))
        step = max(1, SLICE_BYTES // (4 * weight.in_features))
        if weight.blocks is BlockOrder.FLAT:
            step = weight.out_features
        for start in range(0, weight.out_features, step):
            stop = min(start + step, weight.out_features)
            dense = dequantize(weight, torch.float32, rows=slice(start, stop), is_checked=True)
            y = torch.mm(exact, dense.T)
            if bias is not None:
                y += bias[start:stop]
            out[:, start:stop] = y


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x packed, at an address that torch itself would choose.

    MKL and oneDNN sum in another order for other alignments and strides; the reference gives the same bits for the same
    values, wherever they lie.
    """
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def _weight(prepared: Prepared) -> PackedWeight:
    spec = prepared.meta
    if not isinstance(spec, WeightSpec):
        raise TypeError(f"prepared.meta must be a WeightSpec, got {type(spec).__name__}")
    return spec.build(prepared.tensors)
