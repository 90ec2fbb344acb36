"""Which formats a manifest declares, and which of them the kit has cases of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from q4core import BUILTIN_FORMATS, EVERY_FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from q4_conformance.subjects.profiles import ConformanceTarget


def with_cases(declared: Iterable[str]) -> tuple[str, ...]:
    """Return the formats that the kit has cases of, among those declared."""
    told = {*declared}
    return tuple(item for item in BUILTIN_FORMATS if told & {EVERY_FORMAT, item})


def declared_in(manifest: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the formats that a manifest declares, of a backend or of a dialect; None where it tells none."""
    told = manifest.get("formats") or manifest.get("capabilities", {}).get("formats")
    return None if told is None else tuple(sorted({item for item in told if isinstance(item, str)}))


def narrowed(target: ConformanceTarget, manifest: Mapping[str, Any]) -> ConformanceTarget:
    """Return a target on the formats that it turned out to declare once ``module:function`` had made it.

    Where it could not be made there is no manifest, and the target stays as it is: every case then says why.
    """
    declared = declared_in(manifest)
    if ":" not in target.name or not declared:
        return target
    return attrs.evolve(target, formats=[item for item in target.formats if item in with_cases(declared)])


def undeclared(subject: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Return in words what a subject was judged on although its manifest does not declare it.

    Args:
        subject: Formats and device, as a document has them.
        manifest: As a document has it.
    """
    told = []
    declared = declared_in(manifest)
    if declared is not None:
        lacking = [item for item in subject["formats"] if item not in with_cases(declared)]
        if lacking:
            words = f"{_many('format', lacking)}; it declares {', '.join(declared) or 'none'}"
            told.append(f"the manifest does not declare {words}")
    devices = manifest.get("capabilities", {}).get("devices")
    kind = subject["device"].partition(":")[0]
    if devices is not None and kind not in devices:
        told.append(f"the manifest does not declare device {kind}; it declares {', '.join(devices) or 'none'}")
    return told


def _many(noun: str, names: list[str]) -> str:
    return f"{noun}{'s' if len(names) > 1 else ''} {', '.join(names)}"
