"""The facts that a certificate states: versions, the machine, the plugin's source, and what it declares."""

from __future__ import annotations

import enum
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.contract.cases import weight_recipes
from q4_conformance.subjects.backend import SERVED_BY
from q4core import Capabilities, default_registry, find_format, machine_facts
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from q4_conformance.subjects.profiles import ConformanceTarget

_GROUP = "q4core.plugins"
_IGNORED = {".pyc", ".pyo"}
_DRIVER = Path("/proc/driver/nvidia/version")


def _distribution_of(package: str) -> importlib.metadata.Distribution | None:
    """Return the distribution whose plugin lives in a package; no other one is asked, which would take long."""
    for point in importlib.metadata.entry_points(group=_GROUP):
        if point.value.partition(":")[0].partition(".")[0] == package and point.dist is not None:
            return point.dist
    return None


def _requirements(distribution: importlib.metadata.Distribution) -> Iterator[str]:
    for line in distribution.requires or ():
        match = re.match(r"[\w.-]+", line)
        if match is not None and "extra ==" not in line:
            yield match[0]


def _shared(distribution: importlib.metadata.Distribution) -> Iterator[importlib.metadata.Distribution]:
    """Yield the distributions that a plugin needs and that build on q4core themselves: kernels that plugins share."""
    for name in _requirements(distribution):
        try:
            other = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if "q4core" in _requirements(other):
            yield other


def _files_of(package: str) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of every file of a package, wherever an editable installation has it."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None  # a dotted name imports what it is in
    if spec is None:
        return
    if not spec.submodule_search_locations:
        if spec.origin and Path(spec.origin).is_file():  # a module of the interpreter's own has no file
            yield Path(spec.origin).name, Path(spec.origin)
        return
    for folder in sorted({Path(item) for item in spec.submodule_search_locations}):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix not in _IGNORED and "__pycache__" not in path.parts:
                yield f"{package}/{path.relative_to(folder).as_posix()}", path


def source_of(package: str) -> dict[str, Any]:
    """Return distribution, version and hash of the files of the package that defines the subject."""
    distribution = _distribution_of(package)
    packages = [package]
    shared: dict[str, str] = {}
    if distribution is not None:
        for other in _shared(distribution):
            shared[other.name] = other.version
            packages.append(re.sub(r"[-.]+", "_", other.name))
    files = {name: path for item in packages for name, path in _files_of(item)}
    hashes = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in sorted(files.items()))
    return {
        "distribution": None if distribution is None else distribution.name,
        "version": None if distribution is None else distribution.version,
        "package": package,
        "with": shared,
        "files": len(files),
        "sha256": hashlib.sha256("".join(hashes).encode()).hexdigest(),
    }


def device_facts(device: str) -> dict[str, Any]:
    """Return what the device of a run is."""
    facts = machine_facts()
    kind, _, index = device.partition(":")
    described: dict[str, Any] = {
        "device": device,
        "system": facts.system,
        "machine": facts.machine,
        "processor": facts.processor,
        "cpu_features": list(facts.cpu_features),
        "cores": facts.cpu_count,
        "threads": torch.get_num_threads(),
        "gpu": None,
        "compute_capability": None,
        "cuda": facts.cuda_version,
        "driver": None,
    }
    if kind == "cuda" and int(index or 0) < len(facts.cuda_devices):
        chosen = facts.cuda_devices[int(index or 0)]
        described |= {"gpu": chosen.name, "compute_capability": ".".join(map(str, chosen.capability))}
        described["driver"] = _driver()
    return described


def _driver() -> str | None:
    try:
        text = _DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else None


def _version(name: str) -> str:
    """Return a package's version; ``"source tree"`` where it is imported and not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "source tree"


def survey(target: ConformanceTarget) -> dict[str, Any]:
    """Return the facts of this machine; the source of who is judged is in the manifest, which needs it loaded."""
    broken = {record.name: list(record.errors) for record in default_registry().records() if record.errors}
    own = {name: _version(name) for name in ("q4core", "q4-conformance")}
    return {
        "versions": own | {"torch": torch.__version__, "python": platform.python_version()},
        "device": device_facts(target.device),
        "broken_plugins": broken,
    }


def _plain(item: object) -> str:
    return str(item.value) if isinstance(item, enum.Enum) else str(item).removeprefix("torch.")


def _offered(subject: Any, formats: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the paths that a backend offers for the usual weight of each format, in every dtype and precision."""
    seen: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name in formats:
        weight = weight_recipes(find_format(name))[0].build()
        for dtype in sorted(subject.backend.capabilities.dtypes, key=str):
            for precision in SERVED_BY:
                request = subject.request(weight, dtype=dtype, precision=precision)
                if subject.backend.capabilities.refusals(request):
                    continue
                for path in subject.backend.check(request).paths:
                    row = seen.setdefault((name, path.name, path.precision.value), _path_facts(name, path))
                    if _plain(dtype) not in row["dtypes"]:
                        row["dtypes"].append(_plain(dtype))
    yield from seen.values()


def _path_facts(name: str, path: Any) -> dict[str, Any]:
    row = {"format": name, "path": path.name, "kind": path.kind.value, "precision": path.precision.value}
    row |= {"tier": int(path.tier), "m": list(path.m), "dtypes": []}
    return row | {"standing": "interpreted" if path.interpreted else "ran"}


_JUDGED = ("backend", "provider", "dialect", "layer_type", "reader")
"""Names by which a subject holds what is judged."""


def _judged_in(subject: object) -> object:
    """Return the backend, provider, dialect, layer type or reader of a subject; itself where it is none of these."""
    return next((getattr(subject, name) for name in _JUDGED if hasattr(subject, name)), subject)


def manifest_of(subject: Any, formats: Iterable[str] = ()) -> dict[str, Any]:
    """Return what a subject declares, with its source, and for formats the paths that a backend offers.

    ``fault`` describes an error of it; fields may hold anything that the subject has there.
    """
    judged: Any = _judged_in(subject)
    if judged is None:
        return {"name": "q4core", "source": source_of("q4core")}
    kind = type(judged)
    manifest: dict[str, Any] = {"name": None, "api_version": None, "class": f"{kind.__module__}.{kind.__qualname__}"}
    manifest["source"] = {}
    try:
        manifest["name"] = getattr(judged, "name", None)
        capabilities = getattr(judged, "capabilities", None)
        if isinstance(capabilities, Capabilities):  # before what may raise: it is judged on this
            fields = [field.name for field in attrs.fields(Capabilities)]
            manifest["capabilities"] = {name: sorted(map(_plain, getattr(capabilities, name))) for name in fields}
        manifest["source"] = source_of(getattr(subject, "package", kind.__module__).partition(".")[0])
        version = getattr(judged, "api_version", ())
        manifest["api_version"] = list(version) if isinstance(version, (list, tuple)) else version
        if hasattr(subject, "dialect"):
            manifest["formats"] = sorted(judged.formats)
        if "capabilities" in manifest and hasattr(subject, "request"):
            manifest["offered"] = list(_offered(subject, formats))
    except PLUGIN_FAULTS as error:  # the cases will judge it
        manifest["fault"] = describe_exception(error)
    return manifest
