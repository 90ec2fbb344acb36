"""What ``q4 doctor`` finds out: versions, machine, plugins, and what each backend can do with each format here."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
import platform
from typing import TYPE_CHECKING, Any

import attrs
import torch
from rich.text import Text

from q4core import __version__
from q4core.backend import EVERY_FORMAT, ReasonCode, Request
from q4core.cli.output import clean, to_plain
from q4core.codec import quantize
from q4core.diagnostics import plain_reasons, plain_withheld
from q4core.dispatch import select_backend
from q4core.errors import BackendError, ConfigError, Q4Error
from q4core.formats import Form, Format, ScaleKind
from q4core.memory import is_turned_off
from q4core.policy import resolve_config
from q4core.selection import NO_HISTORY
from q4core.weight import Feature

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from q4core.registry import Registry
    from q4core.selection import Selection

__all__ = [
    "ServiceVerdict",
    "environment_facts",
    "path_text",
    "representative_request",
    "selection_paths",
    "survey_backends",
    "unknown_formats",
    "versions",
    "withheld_lines",
]

VARIABLES = (
    "Q4_BACKEND",
    "Q4_COMPUTE_PATH",
    "Q4_DEBUG",
    "Q4_DEVICE",
    "Q4_DISABLE_PLUGINS",
    "Q4_DISABLE_UM",
    "Q4_LOG",
    "Q4_PLUGINS",
    "Q4_PLUGIN_MODULES",
    "Q4_UNIFIED_MEMORY",
)
_SIZE = 4096
_LIBRARIES = ("attrs", "pluggy", "safetensors", "structlog", "typer", "rich")


@attrs.frozen(kw_only=True)
class ServiceVerdict:
    """Whether one backend serves one format on one device.

    Args:
        device: The device.
        dtype: dtype of x.
        format: Name of the format.
        backend: Name of the backend.
        serves: ``all`` M, ``some`` M, or ``none``.
        native_state: What the backend said of its native part.
        paths: The paths by M.
        reasons: Why not, or why not for every M.
        withheld: Kernels that it can't offer here, and why.
    """

    device: str
    dtype: str
    format: str
    backend: str
    serves: str
    native_state: str
    paths: tuple[Mapping[str, Any], ...] = ()
    reasons: tuple[Mapping[str, str], ...] = ()
    withheld: tuple[Mapping[str, Any], ...] = ()


def versions(registry: Registry) -> dict[str, str]:
    """Return name → version of Python, q4core, torch, the libraries of the core, and the plugins' distributions."""
    found = {
        "python": platform.python_version(),
        "q4core": __version__,
        "torch": str(torch.__version__),
    }
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            is_there = importlib.util.find_spec(name) is not None
            found[name] = "not a distribution" if is_there else "not installed"
    for record in registry.records():
        distribution, _, version = record.source.partition(" ")
        if version:
            found[distribution] = version
    return found


def environment_facts(environment: Mapping[str, str] | None = None) -> tuple[dict[str, str], list[str]]:
    """Return the ``Q4_*`` variables that are set, and what is wrong with them."""
    variables = os.environ if environment is None else environment
    found = {name: variables[name] for name in sorted(variables) if name.startswith("Q4_")}
    problems = []
    for name in found:
        if name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            problems.append(f"nothing here reads the environment variable {name}{meant}")
    for resolve in (resolve_config, is_turned_off):
        try:
            resolve(environment=variables)
        except ConfigError as error:
            problems.append(str(error))
    return found, problems


def unknown_formats(registry: Registry) -> list[str]:
    """Return a line for each format that a backend declares and nobody brings: a typo, or a plugin is missing."""
    known = sorted(registry.formats())
    problems = []
    for backend, item in registry.backends().items():
        for name in sorted(item.capabilities.formats - {EVERY_FORMAT, *known}):
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            told = f"backend {backend!r} declares format {name!r}, and none of that name is known"
            problems.append(f"{told}; {meant}there are: {', '.join(known)}")
    return problems


def representative_request(format: Format, device: torch.device, dtype: torch.dtype) -> Request:  # noqa: A002  # the field's name
    """Return the request that a 4096×4096 layer of a format makes, packed and scaled as the reference codec does it."""
    block = format.block_size
    side = -(-_SIZE // block) * block
    facts: dict[str, Any] = {
        "out_features": _SIZE,
        "in_features": side,
        "device": device,
        "dtype": dtype,
        "out_dtype": dtype,
    }
    try:
        weight = quantize(torch.linspace(-1, 1, 2 * block).reshape(2, block), format)
        return attrs.evolve(Request.for_weight(weight), **facts)
    except Q4Error:  # a plugin's format, which the reference codec can't make
        kind = (
            ScaleKind.PLAIN if ScaleKind.PLAIN in format.scale_kinds else min(format.scale_kinds, key=lambda k: k.value)
        )
        features = ({Feature.OFFSET} if format.has_offset else set()) | (
            {Feature.ZERO_POINT} if format.form is Form.INTEGER else set()
        )
        return Request(
            format=format,
            scale_kind=kind,
            packing=format.default_packing(),
            block_size=block,
            features=frozenset(features),
            **facts,
        )


def selection_paths(selection: Selection) -> tuple[dict[str, Any], ...]:
    """Return the paths of a selection by M."""
    return tuple(
        {
            "m": [segment.low, segment.high],
            "name": segment.path.name,
            "kind": segment.path.kind.value,
            "precision": segment.path.precision.value,
            "tier": int(segment.path.tier),
            "standing": segment.path.standing.value,
        }
        for segment in selection.segments
    )


def path_text(path: Mapping[str, Any]) -> Text:
    """Return one path as a line: M, name, kind, precision, tier, standing."""
    low, high = path["m"]
    span = f"M {low}…{'∞' if high is None else high}"
    facts = f"  {path['kind']}, {path['precision']}, tier {path['tier']}, {path['standing']}"
    return Text.assemble(f"{span:<12} ", (clean(path["name"]), "cyan"), facts)


def withheld_lines(items: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Return a line for each reason of each withheld path: which one, and why."""
    for item in items:
        for reason in item["reasons"]:
            yield f"withheld {item['name']} ({item['precision']})", f"{reason['code']}: {reason['message']}"


def _reasons(error: BackendError, backend: str) -> tuple[dict[str, str], ...]:
    rejections = [item for item in getattr(error, "rejections", ()) if item.backend == backend]
    listed = plain_reasons(reason for item in rejections for reason in item.reasons)
    return tuple(listed) or ({"code": error.code, "domain": "policy", "message": str(error)},)


def _verdict(registry: Registry, backend: str, request: Request) -> ServiceVerdict:
    facts: dict[str, Any] = {
        "device": str(request.device),
        "dtype": to_plain(request.dtype),
        "format": request.format.name,
        "backend": backend,
    }
    only = {backend: registry.backends()[backend]}
    try:
        selection = select_backend(request, only, override=backend, history=NO_HISTORY)
    except BackendError as error:
        reasons, failed = _reasons(error, backend), error
    else:
        facts |= {"paths": selection_paths(selection), "withheld": tuple(plain_withheld(selection.withheld))}
        return ServiceVerdict(**facts, serves="all", native_state=selection.native_state)
    states = [item.native_state for item in getattr(failed, "rejections", ()) if item.backend == backend]
    state = states[0] if states else "not asked"
    if any(reason["code"] == ReasonCode.SHAPE.value and "M in" in reason["message"] for reason in reasons):
        facts |= _at_some_rows(request, only, backend)
        if facts["paths"]:
            return ServiceVerdict(**facts, serves="some", native_state=state, reasons=reasons)
    return ServiceVerdict(**facts, serves="none", native_state=state, reasons=reasons)


def _at_some_rows(request: Request, only: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """Return the paths of a backend that serves some numbers of rows only, as seen from M = 1, 2, 4 … 65536.

    And what it withholds there.
    """
    paths: dict[str, Mapping[str, Any]] = {}
    withheld: dict[str, Mapping[str, Any]] = {}
    for power in range(17):
        rows = 1 << power
        try:
            selection = select_backend(
                attrs.evolve(request, m=(rows, rows)), only, override=backend, history=NO_HISTORY
            )
        except BackendError:
            continue
        (path,) = selection_paths(selection)
        low, high = selection.path.m
        paths[path["name"]] = {**path, "m": [low, high]}
        withheld |= {item["name"]: item for item in plain_withheld(selection.withheld)}
    return {"paths": tuple(paths.values()), "withheld": tuple(withheld.values())}


def survey_backends(
    registry: Registry, devices: Iterable[torch.device], dtype: torch.dtype | None
) -> tuple[ServiceVerdict, ...]:
    """Return a verdict for each device × backend × format.

    Args:
        registry: The plugins.
        devices: Where to compute.
        dtype: dtype of x; float32 on the CPU and bfloat16 elsewhere unless told.
    """
    return tuple(
        _verdict(registry, backend, representative_request(format_, device, dtype or _usual_dtype(device)))
        for device in devices
        for backend in registry.backends()
        for format_ in registry.formats().values()
    )


def _usual_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16
