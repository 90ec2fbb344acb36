"""The entry of compressed-tensors in ``config.json``: what it says of layers, and how it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4core import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from q4core import Catalogue

__all__ = ["config_entry", "group_weights", "stated_formats", "transform_problems"]


def transform_problems(module: str, catalogue: Catalogue) -> Iterator[Problem]:
    """Yield that weights which ``config.json`` says are rotated are not read."""
    transform = catalogue.quantization_config.get("transform_config")
    if transform:
        rule = "without transform_config in config.json: a rotation that is not undone"
        yield Problem("unsupported", module, rule, transform)


def _groups(catalogue: Catalogue) -> list[dict[str, Any]]:
    groups = catalogue.quantization_config.get("config_groups")
    return [item for item in groups.values() if isinstance(item, dict)] if isinstance(groups, dict) else []


def group_weights(catalogue: Catalogue) -> list[dict[str, Any]]:
    """Return what ``config.json`` says of the weights of each group of layers."""
    return [item["weights"] for item in _groups(catalogue) if isinstance(item.get("weights"), dict)]


def stated_formats(catalogue: Catalogue) -> set[str]:
    """Return the formats that ``config.json`` names, of all layers and of each group."""
    found = (item.get("format") for item in (catalogue.quantization_config, *_groups(catalogue)))
    return {item for item in found if isinstance(item, str)}


def config_entry(form: str, groups: Mapping[str, Any], unquantised: tuple[str, ...]) -> dict[str, Any]:
    """Return the package's ``QuantizationConfig`` of compressed layers, given its groups by name."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": dict(groups),
        "ignore": list(unquantised),
        "kv_cache_scheme": None,
    }
