"""Requests under a resolved configuration, and the cache of selections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.errors import ConfigError, PolicyConflictError
from q4core.policy.config import ActivationPrecision, ComputePath
from q4core.selection.probe_results import probe_results
from q4core.selection.select import select_backend

if TYPE_CHECKING:
    from q4core.backend import Reason, Request
    from q4core.plugins.registry import Registry
    from q4core.policy.config import SessionConfig
    from q4core.selection.result import Selection

_CACHE_LIMIT = 4096


def resolve_device(config: SessionConfig, weight_device: torch.device) -> torch.device:
    """Return the device that a configuration means for a weight.

    Raises:
        ConfigError: It names a device that is not available.
    """
    return weight_device if config.device in {None, "auto"} else _available(torch.device(str(config.device)))


def _available(device: torch.device) -> torch.device:
    """Return the device with its index, if this machine has it."""
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        what = f"device {str(device)!r} is not available: torch sees {count} CUDA devices"
        raise ConfigError(what, value=str(device), hint='Use device="cpu", or see `q4 doctor`.')
    return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())


def apply_config(request: Request, config: SessionConfig) -> Request:
    """Return a request with the options of a resolved configuration, as a layer would make it.

    Raises:
        ConfigError: The device of either is not available.
        PolicyConflictError: The two contradict each other.
    """
    auto, asked, changes = ActivationPrecision.AUTO, _available(request.device), dict[str, Any]()
    precision, device = config.activation_precision or auto, resolve_device(config, asked)
    if precision is not auto and precision is not request.precision:
        if request.precision is not auto:
            raise _conflict("precision", precision.value, request.precision.value)
        changes["precision"] = precision
    if config.compute_dtype is not None and config.compute_dtype is not request.dtype:
        raise _conflict("dtype", str(config.compute_dtype), str(request.dtype))
    if config.gradients and not request.gradients:
        changes["gradients"] = True
    if device != request.device:
        if device != asked and asked.type != "cpu":  # a weight on the CPU moves to where the session computes
            raise _conflict("device", str(device), str(request.device))
        changes["device"] = device
    return attrs.evolve(request, **changes) if changes else request


def _conflict(name: str, wanted: str, asked: str) -> PolicyConflictError:
    what = f"the request's {name} is {asked}, and the configuration asks for {wanted}"
    hint = f"Give Request.for_weight({name}=…), or leave it to the configuration."
    return PolicyConflictError(what, value=asked, hint=hint)


def select_for(
    request: Request, config: SessionConfig, registry: Registry, failures: dict[str, tuple[Reason, ...]] | None = None
) -> Selection:
    """Select as ``select_backend`` under a resolved configuration; warm answers come from a cache.

    ``failures`` are the backends that could not prepare just now, with the reasons; they are passed over.
    """
    results = probe_results(registry)
    compute_path = config.compute_path or ComputePath.AUTO
    key = (results.generation, request, compute_path, config.backend)
    known: Selection | None = None if failures else registry.selections.get(key)
    if known is not None:
        return known
    selection = select_backend(
        request,
        registry.backends(),
        compute_path=compute_path,
        override=config.backend,
        invalid=registry.invalid_backends(),
        results=results,
        failures=failures or {},
    )
    if not failures:
        if len(registry.selections) >= _CACHE_LIMIT:
            registry.selections.clear()
        registry.selections[key] = selection
    return selection
