"""``ReferenceQuantizer``: a backend's native quantiser that is proven on this machine, else the reference rules."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_quantize import checks
from q4_quantize.encode import quantize_reference
from q4_quantize.probe import call_quantizer, probe_quantizer
from q4_quantize.rules import RULES
from q4_quantize.super_blocks import SUPER_SIZE
from q4core import (
    BackendUnavailableError,
    InputError,
    LifecycleError,
    Q4Error,
    Request,
    Rounding,
    ScaleKind,
    find_format,
)
from q4core.extension import given_weight, select_proven
from q4core.plugin_api import emit

if TYPE_CHECKING:
    from q4core import Backend, Format, PackedWeight, Registry, Selection

_SEEDS = 1 << 31


class ReferenceQuantizer:
    """The quantiser that the hook ``q4_quantizers`` brings; see ``q4core.quantize`` for its arguments."""

    name = "reference"
    rules = frozenset(RULES)

    @staticmethod
    def quantize(  # noqa: PLR0913  # the contract's arguments
        dense: torch.Tensor,
        kind: Format,
        *,
        name: str | None,
        rounding: Rounding,
        seed: int,
        registry: Registry,
        **choices: Any,
    ) -> PackedWeight:
        """Return a dense weight in four bits: on CUDA by a proven native quantiser, else by the reference.

        ``choices`` are block_size, scale_kind, packing and symmetric.
        """
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _SEEDS:
            raise InputError("quantize", name="seed", rule="in 0 … 2^31 - 1", value=seed)
        checks.check_dense(dense, name)
        found: Selection | None = None
        why = "CPU tensors are quantised by the reference codec"
        if rounding is not Rounding.NEAREST or dense.device.type != "cpu":
            try:
                request = quantize_request(dense, kind, rounding=rounding, **choices)
            except Q4Error:
                quantize_reference(dense, kind, name=name, **choices)  # whose message fits the caller's tensor
                raise
            try:
                found = find_quantizer(registry, request)
            except BackendUnavailableError as error:
                if rounding is not Rounding.NEAREST:
                    raise BackendUnavailableError(
                        f"quantize {kind.name} {request.out_features}×{request.in_features} on {request.device}",
                        name="rounding",
                        rule="'nearest', or one that a backend's quantiser declares and may serve here",
                        value=rounding.value,
                        rejections=error.rejections,
                        hint="Round to nearest, as the reference does, or quantise where such a backend serves.",
                    ) from None
                why = "; ".join(map(str, error.rejections))
        emit(
            "q4.quantize",
            level=logging.INFO,
            layer=name,
            format=kind.name,
            device=str(dense.device),
            rounding=rounding.value,
            backend="reference" if found is None else found.backend,
            path=None if found is None else found.path.name,
            fallback_reason=None if found is not None else why,
        )
        if found is None:
            return quantize_reference(dense, kind, name=name, **choices)
        if not _is_capturing(dense.device):  # where values can't be checked: they are the caller's responsibility
            checks.check_finite(dense.detach(), name)
        backend = registry.backends()[found.backend]
        call = functools.partial(call_quantizer, backend, dense.detach(), found.request, seed)
        packed = given_weight(backend, "quantize", tuple(dense.shape), call)
        return packed if name is None else packed.relabelled(name=name)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=256)
def _sample(kind: Format, columns: int, dtype: torch.dtype, choices: tuple[tuple[str, Any], ...]) -> PackedWeight:
    return quantize_reference(torch.zeros(1, columns, dtype=dtype), kind, **dict(choices))


def quantize_request(
    dense: torch.Tensor,
    format: str | Format,  # noqa: A002  # the contract's name
    *,
    rounding: Rounding = Rounding.NEAREST,
    **choices: Any,
) -> Request:
    """Return the request to a quantiser: the facts of the weight that the reference makes of ``dense`` [N, K]."""
    kind = find_format(format)
    rows, columns = dense.shape
    is_super = choices.get("scale_kind") is ScaleKind.SUPER_BLOCK
    block = SUPER_SIZE if is_super else choices.get("block_size") or kind.block_size
    sample = _sample(kind, block + columns % block, dense.dtype, tuple(sorted(choices.items())))
    request = Request.for_weight(sample, device=dense.device, dtype=dense.dtype)
    return attrs.evolve(request, op="quantize", out_features=rows, in_features=columns, rounding=rounding)


def find_quantizer(registry: Registry, request: Request) -> Selection:
    """Return the best backend for a request of op ``"quantize"``, proven; proofs are cached.

    Raises:
        BackendUnavailableError: There is none; ``rejections`` holds every reason.
        LifecycleError: It would have to be proven inside a CUDA-graph capture.
    """
    return select_proven(registry, request, _probe)


def _probe(backend: Backend, request: Request) -> str | None:
    if _is_capturing(request.device):
        what = f"no quantiser of {request.format.name} is proven yet, and none can be inside a capture"
        raise LifecycleError(what, hint="Quantise a weight of this kind once before the capture.")
    return probe_quantizer(backend, request)
