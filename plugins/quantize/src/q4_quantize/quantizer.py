"""Quantises by a backend's native quantiser that is proven on this machine, else by the reference codec."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core import codec
from q4core.backend import Request
from q4core.diagnostics.events import emit
from q4core.errors import BackendUnavailableError, InputError, LifecycleError, Q4Error
from q4core.formats import Format, find_format
from q4core.plugins.registry import default_registry
from q4core.policy import Rounding, SessionConfig, to_option
from q4core.probes.quantizer import call_quantizer, probe_quantizer
from q4core.selection.cache import select_for
from q4core.selection.plan import given_weight
from q4core.selection.probe_results import probe_results, warn_of_fault

if TYPE_CHECKING:
    from q4core.formats import Packing, ScaleKind
    from q4core.plugins.registry import Registry
    from q4core.selection.result import Selection
    from q4core.weight import PackedWeight

_SEEDS = 1 << 31


def quantize(  # noqa: PLR0913  # one argument per wish
    dense: torch.Tensor,
    format: str | Format,  # noqa: A002  # the contract's name
    *,
    block_size: int | None = None,
    scale_kind: ScaleKind | None = None,
    packing: Packing | None = None,
    symmetric: bool = False,
    name: str | None = None,
    rounding: Rounding | str = Rounding.NEAREST,
    seed: int = 0,
    registry: Registry | None = None,
) -> PackedWeight:
    """Return a dense weight in four bits: on CUDA by a proven native quantiser, else by the reference codec.

    Rounded to nearest, the bytes are the same whoever wrote them. The event ``q4.quantize`` says who did.

    Args:
        dense: float32, bfloat16 or float16 [N, K], any strides, finite; it is only read.
        format: Name of the format, or a ``Format``.
        block_size: In-features per scale; None for the format's own.
        scale_kind: How scales are stored; None for the format's own.
        packing: The nibble order; None for the format's own.
        symmetric: For int4: no zero points, code 8 stands for 0.
        name: The layer's name, for messages.
        rounding: By chance only where a backend's quantiser declares it: the reference has none.
        seed: For rounding by chance, 0 … 2^31 - 1: equal seeds give equal bytes.
        registry: The plugins to choose among; the process's unless told.

    Raises:
        InputError, FormatError: As ``codec.quantize``; or the seed is not legal.
        ConfigError: The rounding is unknown.
        BackendUnavailableError: Nobody rounds by chance here; the rejections say why not.
        BackendError: The native quantiser failed.
    """
    plugins = registry or default_registry()
    kind = format if isinstance(format, Format) else find_format(format, plugins.formats().values())
    chosen = to_option(Rounding, rounding, "quantize", "rounding")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _SEEDS:
        raise InputError("quantize", name="seed", rule="in 0 … 2^31 - 1", value=seed)
    choices: dict[str, Any] = {
        "block_size": block_size, "scale_kind": scale_kind, "packing": packing, "symmetric": symmetric,
    }  # fmt: skip
    codec.check_dense(dense, name)
    found: Selection | None = None
    why = "CPU tensors are quantised by the reference codec"
    if chosen is not Rounding.NEAREST or dense.device.type != "cpu":
        try:
            request = quantize_request(dense, kind, rounding=chosen, **choices)
        except Q4Error:
            codec.quantize(dense, kind, name=name, **choices)  # whose own words fit the caller's tensor
            raise
        try:
            found = find_quantizer(plugins, request)
        except BackendUnavailableError as error:
            if chosen is not Rounding.NEAREST:
                raise BackendUnavailableError(
                    f"quantize {kind.name} {request.out_features}×{request.in_features} on {request.device}",
                    name="rounding",
                    rule="'nearest', or one that a backend's quantiser declares and may serve here",
                    value=chosen.value,
                    rejections=error.rejections,
                    hint="Round to nearest, as the reference does everywhere, or quantise where such a backend serves.",
                ) from None
            why = "; ".join(map(str, error.rejections))
    emit(
        "q4.quantize",
        level=logging.INFO,
        layer=name,
        format=kind.name,
        device=str(dense.device),
        rounding=chosen.value,
        backend="reference" if found is None else found.backend,
        path=None if found is None else found.path.name,
        fallback_reason=None if found is not None else why,
    )
    if found is None:
        return codec.quantize(dense, kind, name=name, **choices)
    # In a capture nothing can be said of values: they are the caller's to know. Elsewhere one look, and one wait for
    # the device, where all is well: the extremes of a tensor with NaN are NaN.
    if not _is_capturing(dense.device) and not bool(torch.isfinite(torch.stack(dense.detach().aminmax())).all()):
        codec.check_finite(dense, name)
    backend = plugins.backends()[found.backend]
    call = functools.partial(call_quantizer, backend, dense.detach(), found.request, seed)
    packed = given_weight(backend, "quantize", tuple(dense.shape), call)
    return packed if name is None else packed.relabelled(name=name)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=256)
def _sample(kind: Format, columns: int, dtype: torch.dtype, choices: tuple[tuple[str, Any], ...]) -> PackedWeight:
    return codec.quantize(torch.zeros(1, columns, dtype=dtype), kind, **dict(choices))


def quantize_request(
    dense: torch.Tensor,
    format: str | Format,  # noqa: A002  # the contract's name
    *,
    rounding: Rounding = Rounding.NEAREST,
    **choices: Any,
) -> Request:
    """Return what a quantiser is asked: the facts of the weight that the reference codec makes of ``dense`` [N, K]."""
    kind = find_format(format)
    rows, columns = dense.shape
    block = choices.get("block_size") or kind.block_size
    sample = _sample(kind, block + columns % block, dense.dtype, tuple(sorted(choices.items())))
    request = Request.for_weight(sample, device=dense.device, dtype=dense.dtype)
    return attrs.evolve(request, op="quantize", out_features=rows, in_features=columns, rounding=rounding)


def find_quantizer(registry: Registry, request: Request) -> Selection:
    """Return who is best for a request of op ``"quantize"``, proven; what is proven stays so.

    Raises:
        BackendUnavailableError: There is none; ``rejections`` holds every reason.
        LifecycleError: It would have to be proven inside a CUDA-graph capture.
    """
    results = probe_results(registry)
    while True:
        selection = select_for(request, SessionConfig(), registry)
        backend, path = registry.backends()[selection.backend], selection.path
        result = results.result(backend.name, path, request)
        if result is None:
            if _is_capturing(request.device):
                hint = "Quantise a weight of this kind once before the capture."
                what = f"no quantiser of {request.format.name} is proven yet, and none can be inside a capture"
                raise LifecycleError(what, hint=hint)
            result = probe_quantizer(backend, request)
            results.record(backend.name, path, request, result)
        if result.fault is None:
            return attrs.evolve(selection, proven=True)
        warn_of_fault(backend.name, path, request, result.fault)
