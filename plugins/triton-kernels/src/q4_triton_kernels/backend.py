"""``WeightOnlyBackend``: what a plugin makes its own by a name and a list of formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4_triton_kernels.layout import block_problem, export_weight, prepare_weight
from q4_triton_kernels.target import Facts, Target, machine_facts
from q4core import (
    Capabilities,
    Feature,
    KernelPath,
    PackedWeight,
    PathKind,
    Precision,
    PrepareContext,
    Prepared,
    Reason,
    ReasonCode,
    Request,
    ScaleKind,
    Tier,
    Verdict,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["WeightOnlyBackend", "weight_only_capabilities"]

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def weight_only_capabilities(
    formats: Iterable[str], scale_kinds: Iterable[ScaleKind], *, devices: Iterable[str] = ("cuda",)
) -> Capabilities:
    """Return the manifest of a backend that computes by these kernels alone.

    Args:
        formats: Names of 4-bit formats.
        scale_kinds: The scale kinds that its formats are read with; PLAIN is always among them.
        devices: ``("cuda",)``, or ``("cpu",)`` in the interpreter.
    """
    return Capabilities(
        formats=formats,
        scale_kinds={ScaleKind.PLAIN, *scale_kinds},
        devices=devices,
        dtypes=_DTYPES,
        precisions={Precision.W4A32, Precision.W4A16},
        features={
            Feature.OFFSET,
            Feature.ZERO_POINT,
            Feature.FLOAT_ZERO_POINT,
            Feature.TAIL_BLOCK,
            Feature.ROW_GLOBAL_SCALE,
            Feature.GRADIENTS,
        },
    )


class WeightOnlyBackend:
    """Weight-only kernels: 4-bit weights, activations of 16 or 32 bits, sums in float32.

    A plugin's backend derives from it, sets ``name``, ``formats`` and ``scale_kinds``, and may add paths of its own by
    extending ``check``, ``prepare`` and ``linear``.

    Args:
        facts: Of the machine; those of this one unless told.
    """

    name: str
    formats: frozenset[str]
    scale_kinds: frozenset[ScaleKind] = frozenset()
    api_version: tuple[int, int] = (1, 0)
    capabilities: Capabilities

    def __init__(self, facts: Facts | None = None) -> None:
        self.facts = machine_facts() if facts is None else facts
        devices = ("cpu",) if self.facts.is_interpreted else ("cuda",)
        self.capabilities = weight_only_capabilities(self.formats, self.scale_kinds, devices=devices)

    def target(self, device: torch.device) -> Target | tuple[Reason, ...]:
        """Return what runs the kernels on a device, or all the reasons why nothing does."""
        return self.facts.target(device)

    def check(self, request: Request) -> Verdict:
        """Offer the weight-only paths, or say what is missing."""
        raise NotImplementedError

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        """Lay the weight out and compile every kernel that its paths launch."""
        raise NotImplementedError

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        """Return the weight, whole or the given rows, bit for bit."""
        return export_weight(prepared, rows)

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
        raise NotImplementedError
