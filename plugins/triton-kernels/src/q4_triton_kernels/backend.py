"""``WeightOnlyBackend``: a base class, to which a plugin adds a name and a list of formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_triton_kernels.configs import config_for
from q4_triton_kernels.factory import family_for
from q4_triton_kernels.gradient import gradient_for, has_row_globals
from q4_triton_kernels.layout import WeightMeta, block_problem, export_weight, half_of, prepare_weight
from q4_triton_kernels.plan import plan_for
from q4_triton_kernels.schedule import gradient_schedule_for, schedule_for
from q4_triton_kernels.target import Facts, Target, machine_facts
from q4core import (
    BackendError,
    Capabilities,
    Feature,
    KernelPath,
    PackedWeight,
    PathKind,
    Precision,
    PrepareContext,
    Prepared,
    PrepareError,
    Reason,
    ReasonCode,
    Request,
    ScaleKind,
    Segment,
    Support,
    Tier,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from q4_triton_kernels.gradient import Gradient
    from q4_triton_kernels.spiking import SpikingRunner

__all__ = ["WeightOnlyBackend", "weight_only_capabilities"]

_GEMV_ROWS = 8
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
        ops={"linear", "input_gradient", "spiking", "sparse"},
    )


class WeightOnlyBackend:
    """Weight-only kernels: 4-bit weights, activations of 16 or 32 bits, sums in float32.

    A plugin's backend derives from it, sets ``name``, ``formats`` and ``scale_kinds``, and may add paths of its own by
    extending ``check``, ``prepare`` and ``linear``.

    Args:
        facts: Of the machine. Defaults to those of this one.
    """

    name: str
    formats: frozenset[str]
    scale_kinds: frozenset[ScaleKind] = frozenset()
    api_version: tuple[int, int] = (2, 0)
    capabilities: Capabilities

    def __init__(self, facts: Facts | None = None) -> None:
        self.facts = machine_facts() if facts is None else facts
        devices = ("cpu",) if self.facts.is_interpreted else ("cuda",)
        self.capabilities = weight_only_capabilities(self.formats, self.scale_kinds, devices=devices)
        self._targets: dict[torch.device, Target | tuple[Reason, ...]] = {}

    def target(self, device: torch.device) -> Target | tuple[Reason, ...]:
        """Return what runs the kernels on a device, or all the reasons why nothing does."""
        found = self._targets.get(device)
        if found is None:
            found = self._targets[device] = self.facts.target(device)
        return found

    def check(self, request: Request) -> Support:
        """Offer the weight-only paths, or those of input gradients; or say what is missing."""
        target = self.target(request.device)
        reasons = [] if isinstance(target, Target) else [*target]
        problem = block_problem(request.block_size, request.in_features)
        if problem is not None:
            reasons.append(Reason(ReasonCode.SHAPE, problem))
        if reasons or not isinstance(target, Target):
            return Support.no(reasons, native_state="not usable" if not isinstance(target, Target) else str(target))
        paths = self.gradient_paths(request, target) if request.op == "input_gradient" else self.paths(request, target)
        return Support.yes(paths, native_state=f"Triton {self.facts.triton} ({target})")

    def paths(self, request: Request, target: Target) -> list[KernelPath]:
        """Return the weight-only paths for a request that can be served on a target."""
        config = config_for(target.arch)
        family = family_for(request)
        is_wide = request.dtype is torch.float32
        precision = Precision.W4A32 if is_wide else Precision.W4A16
        tier = Tier.TUNED if config.measured else Tier.GENERIC
        half = half_of(request.block_size, request.in_features)
        shape = (request.out_features, request.in_features, half, target.processors)
        schedule = schedule_for(target.arch, family, *shape)
        paths = [
            KernelPath(
                f"{kind}_{precision.value}",
                rows,
                PathKind.KERNEL,
                precision,
                tier,
                interpreted=target.is_interpreted,
                probe_rows=schedule.probe_rows(kind),
                variant=schedule.variant(kind),
            )
            for kind, rows in (("gemv", (1, _GEMV_ROWS)), ("gemm", (_GEMV_ROWS + 1, None)))
        ]
        if family == "weights" or request.dtype is torch.bfloat16:
            above = config.dequant_above.get(family)
            # Without a record it is offered, so that it can be measured, and claims nothing; with one it is preferred
            # from that M on.
            low, claimed = (_GEMV_ROWS + 1, Tier.DEQUANT_GEMM) if above is None else (above + 1, tier + 1)
            name, rows = f"dequant_{precision.value}", (low, None)
            paths.append(
                KernelPath(name, rows, PathKind.DEQUANT, precision, claimed, interpreted=target.is_interpreted)
            )
        return paths

    def gradient_paths(self, request: Request, target: Target) -> list[KernelPath]:
        """Return the paths of the input gradient for a request that can be served on a target."""
        precision = Precision.W4A32 if request.out_dtype is torch.float32 else Precision.W4A16
        family = family_for(attrs.evolve(request, dtype=request.out_dtype))
        if family == "weights" and Feature.ROW_GLOBAL_SCALE in request.features:
            family = "blocks"
        schedule = gradient_schedule_for(
            target.arch, family, request.out_features, request.in_features, target.processors
        )
        return [
            KernelPath(
                f"gradient_{precision.value}",
                (1, None),
                PathKind.KERNEL,
                precision,
                Tier.GENERIC,  # what is measured of an architecture is linear alone, so far
                interpreted=target.is_interpreted,
                probe_rows=schedule.probe_rows("gradient"),
                variant=schedule.variant("gradient"),
            )
        ]

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        """Lay the weight out, and compile and load every kernel that the selected paths launch for their rows.

        Raises:
            PrepareError: Code does not compile (``TOOLCHAIN``), or the driver does not load it (``DRIVER``).
        """
        target = self.target(request.device)
        if not isinstance(target, Target):
            raise BackendError(
                f"{self.name}: prepare", name="device", rule="one that check allowed", value="; ".join(map(str, target))
            )
        tensors, meta = prepare_weight(weight, context)
        plan = plan_for(meta, request.dtype, request.out_dtype, target, request.device)
        served = context.paths or [Segment(*_within(path.m, request.m), path) for path in self.paths(request, target)]
        for segment in served:
            plan.load(frozenset({segment.path.name.partition("_")[0]}), (segment.low, segment.high))
        gradients = [item.m for item in context.gradient_paths]
        if request.gradients and not context.paths:
            gradients = [request.m]
        prepared = Prepared(tensors, meta)
        for m in gradients:
            self._gradient(prepared, request.out_dtype, request.dtype, target, request.device).load(m)
        return prepared

    def export(self, prepared: Prepared, rows: torch.Tensor | None = None) -> PackedWeight:
        """Return the weight, whole or the given rows, bit for bit."""
        return export_weight(prepared, rows)

    def describe(self, meta: Any) -> dict[str, Any]:
        """Return the layout as what JSON holds."""
        facts: dict[str, Any] = meta.to_dict()
        return facts

    def meta_from(self, facts: dict[str, Any]) -> Any:
        """Return the layout that ``describe`` gave; a ``ConfigError`` or ``WeightError`` says what is invalid."""
        return WeightMeta.from_dict(facts)

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
        target = self._served_target(x.device, path)
        plan = plan_for(prepared.meta, x.dtype, out.dtype, target, x.device)
        if path.startswith("gemv"):
            plan.gemv(prepared.tensors, x, out, bias)
        elif path.startswith("gemm"):
            plan.gemm(prepared.tensors, x, out, bias)
        else:
            plan.dequant(prepared.tensors, x, out, bias)

    def input_gradient(self, prepared: Prepared, grad: torch.Tensor, out: torch.Tensor, *, path: str) -> None:
        """Launch the kernels of an input gradient on the current stream."""
        target = self._served_target(grad.device, path)
        self._gradient(prepared, grad.dtype, out.dtype, target, grad.device)(prepared.tensors, grad, out)

    @staticmethod
    def _gradient(
        prepared: Prepared, dtype: torch.dtype, out_dtype: torch.dtype, target: Target, device: torch.device
    ) -> Gradient:
        is_by_row = has_row_globals(prepared.meta, prepared.tensors)
        return gradient_for(prepared.meta, dtype, out_dtype, target, device, is_by_row=is_by_row)

    def bind_program(self, program: Any, buffers: Sequence[torch.Tensor], layers: Sequence[Any]) -> SpikingRunner:
        """Bind a program of spiking networks to graphs of its rounds.

        Raises:
            PrepareError: Nothing runs kernels on the device, or there is none for an operation.
        """
        from q4_triton_kernels.spiking import SpikingRunner  # noqa: PLC0415  # for programs alone

        target = self.target(buffers[0].device)
        if not isinstance(target, Target):
            raise PrepareError([*target])
        return SpikingRunner(program, buffers, layers, target, self._run_bound)

    def _run_bound(self, layer: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        """Run a packed layer of a program by the path that was selected for so many rows."""
        rows = len(x)
        names = [item.path.name for item in layer.segments if item.low <= rows <= (item.high or rows)]
        self.linear(layer.prepared, x, out, bias=layer.bias, path=names[0])

    def _served_target(self, device: torch.device, path: str) -> Target:
        target = self.target(device)
        if not isinstance(target, Target):
            raise BackendError(f"{self.name}: {path}", name="device", rule="one that check allowed", value=str(device))
        return target


def _within(path: tuple[int, int | None], asked: tuple[int, int | None]) -> tuple[int, int | None]:
    """Return the rows of a path that are asked for."""
    ends = [end for end in (path[1], asked[1]) if end is not None]
    return max(path[0], asked[0]), min(ends, default=None)
