"""Facts for ``q4 doctor``: versions, variables, and the abilities of each backend for each format."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from q4core.memory import is_turned_off
from q4core.plugin_api import closest_name, parse_log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "VARIABLES",
    "environment_facts",
    "representative_request",
    "requests_of",
    "survey_backends",
    "unknown_formats",
    "versions",
]

VARIABLES = (
    "Q4_BACKEND",
    "Q4_CACHE",
    "Q4_CACHE_LIMIT",
    "Q4_COMPUTE_PATH",
    "Q4_CPU_ISA",
    "Q4_DEBUG",
    "Q4_DEVICE",
    "Q4_DISABLE_PLUGINS",
    "Q4_DISABLE_UM",
    "Q4_LOG",
    "Q4_NVFP4_LIBRARY",
    "Q4_PLUGINS",
    "Q4_PLUGIN_MODULES",
    "Q4_PRECISION",
    "Q4_TRANSFORMERS",
    "Q4_UNIFIED_MEMORY",
)
"""Environment variables that the core and the plugins of its repository read."""
_SIZE = 4096
_LIBRARIES = ("attrs", "pluggy", "safetensors", "structlog", "typer", "rich")
_OPTIONAL = ("ray", "transformers", "triton", "vllm")
"""Libraries of which packages of this repository need their own version; shown where they are installed."""


def versions(registry: q4.Registry) -> dict[str, str]:
    """Return name → version of Python, q4core, torch, libraries, and every ``q4-…`` or plugin's distribution."""
    found = {"python": platform.python_version(), "q4core": q4.__version__, "torch": str(torch.__version__)}
    for name in (*_LIBRARIES, *_OPTIONAL, *_own_distributions()):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _LIBRARIES:
                found[name] = "not installed"
    sources = (record.source.partition(" ") for record in registry.records())
    return found | {distribution: version for distribution, _, version in sources if version}


def _own_distributions() -> list[str]:
    """Return the installed distributions named ``q4-…``; only names of folders are looked at."""
    folders = {item.name.partition("-")[0] for place in sys.path for item in Path(place).glob("q4_*-*.dist-info")}
    return sorted(name.replace("_", "-") for name in folders)


def environment_facts(environment: Mapping[str, str] | None = None) -> tuple[dict[str, str], list[str]]:
    """Return the ``Q4_*`` variables that are set, and what is wrong with them."""
    variables = os.environ if environment is None else environment
    found = {name: variables[name] for name in sorted(variables) if name.startswith("Q4_")}
    problems = []
    for name in sorted(found.keys() - set(VARIABLES)):
        close = closest_name(name, VARIABLES)
        meant = f"; did you mean {close}?" if close else ""
        problems.append(f"nothing here reads the environment variable {name}{meant}")
    for resolve in (q4.resolve_config, is_turned_off, lambda environment: parse_log(environment.get("Q4_LOG", ""))):
        try:
            resolve(environment=variables)
        except q4.ConfigError as error:
            problems.append(str(error))
    return found, problems


def unknown_formats(registry: q4.Registry) -> list[str]:
    """Return a line for each format that a backend declares and no plugin provides: a typo, or a missing plugin."""
    known = sorted(registry.formats())
    problems = []
    for backend, item in registry.backends().items():
        for name in sorted(item.capabilities.formats - {q4.EVERY_FORMAT, *known}):
            close = closest_name(name, known)
            meant = f"did you mean {close!r}? " if close else ""
            found = f"backend {backend!r} declares format {name!r}, and none of that name is known"
            problems.append(f"{found}; {meant}there are: {', '.join(known)}")
    return problems


def representative_request(kind: q4.Format, device: torch.device, dtype: torch.dtype) -> q4.Request:
    """Return the request that a 4096×4096 layer of a format makes, packed and scaled as the format is by default."""
    features = {q4.Feature.OFFSET: kind.has_offset, q4.Feature.ZERO_POINT: kind.form is q4.Form.INTEGER}
    return q4.Request(
        format=kind,
        scale_kind=kind.scale_kind,
        packing=kind.packing,
        block_size=kind.block_size,
        features=frozenset(name for name, has in features.items() if has),
        out_features=_SIZE,
        in_features=-(-_SIZE // kind.block_size) * kind.block_size,
        device=device,
        dtype=dtype,
        out_dtype=dtype,
    )


def survey_backends(
    registry: q4.Registry, devices: Iterable[torch.device], dtype: torch.dtype | None
) -> list[dict[str, Any]]:
    """Return what each backend does with each format on each device; x is float32 on the CPU, bfloat16 elsewhere.

    Each record has device, dtype, format, backend, ``serves`` (``all`` M, ``some`` M, or ``none``), native_load_state,
    paths by M, and the reasons why not (or why not for every M).
    """
    return [
        _verdict(registry, backend, request)
        for device in devices
        for backend in registry.backends()
        for request in requests_of(registry, [device], dtype)
    ]


def requests_of(
    registry: q4.Registry, devices: Iterable[torch.device], dtype: torch.dtype | None
) -> Iterator[q4.Request]:
    """Yield the request of each format on each device."""
    for device in devices:
        for kind in registry.formats().values():
            own = torch.float32 if device.type == "cpu" else torch.bfloat16
            yield representative_request(kind, device, dtype or own)


def _verdict(registry: q4.Registry, backend: str, request: q4.Request) -> dict[str, Any]:
    record: dict[str, Any] = {
        "device": str(request.device),
        "dtype": str(request.dtype).removeprefix("torch."),
        "format": request.format.name,
        "backend": backend,
        "serves": "none",
        "native_load_state": "not asked",
        "paths": [],
        "reasons": [],
    }
    config = q4.SessionConfig(backend=backend, device=str(request.device), compute_path="auto", gradients=False)
    try:
        selection = q4.select(request, config, registry=registry).to_dict()
        return record | {"serves": "all"} | {key: selection[key] for key in ("native_load_state", "paths")}
    except (q4.BackendError, q4.PolicyConflictError) as error:
        own = [item.to_dict() for item in getattr(error, "rejections", ()) if item.backend == backend]
        record["reasons"] = [reason for item in own for reason in item["reasons"]]
        record["reasons"] = record["reasons"] or [{"code": error.code, "domain": "policy", "message": str(error)}]
        record["native_load_state"] = own[0]["native_load_state"] if own else "not asked"
    if any(item["code"] == q4.ReasonCode.SHAPE.value and "M in" in item["message"] for item in record["reasons"]):
        paths: dict[str, Any] = {}  # of a backend that serves some numbers of rows only, as seen from 1, 2, 4 … 65536
        for rows in (1 << power for power in range(17)):
            with contextlib.suppress(q4.BackendError, q4.PolicyConflictError):
                found = q4.select(attrs.evolve(request, m=(rows, rows)), config, registry=registry)
                paths[found.path.name] = found.to_dict()["paths"][0] | {"m": list(found.path.m)}
        if paths:
            record |= {"serves": "some", "paths": [*paths.values()]}
    return record
