"""What would run each layer of a checkpoint, and why nothing else: the record that ``q4 explain`` shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["explain_layers", "grouped", "name_patterns", "natural_key"]


def explain_layers(  # noqa: PLR0913  # the facts of one question
    weights: Mapping[str, q4.PackedWeight],
    config: q4.SessionConfig,
    registry: q4.Registry,
    *,
    m: tuple[int, int | None],
    prove: bool,
    step: Callable[[str], None],
) -> tuple[list[dict[str, Any]], q4.BackendUnavailableError | None]:
    """Ask what would serve each layer.

    Args:
        weights: Module → weight, read one at a time and let go.
        config: A resolved configuration.
        registry: The plugins to choose among.
        m: Rows of x to serve.
        prove: Prepare one layer of each kind first, so that the self-probes run.
        step: Called with a layer's name when it is done.

    Returns:
        ``Selection.to_dict()`` of each layer with its name, its notes and its error, and the first refusal.

    Raises:
        UnknownBackendError, PolicyConflictError, ConfigError: The options themselves are at fault.
    """
    layers: list[dict[str, Any]] = []
    first: q4.BackendUnavailableError | None = None
    proved: set[q4.Request] = set()
    for name in sorted(weights, key=natural_key):
        weight = weights[name]
        request = q4.Request.for_weight(weight, m=m, dtype=config.compute_dtype or weight.dtype)
        record = {"layer": name, "error": None, "notes": [n for n in weight.notes if not n.startswith("stored ")]}
        try:
            if prove and request not in proved:
                proved.add(request)
                with q4.Session(config, registry=registry) as session:
                    session.linear(weight, m=m)
            layers.append(record | q4.select(request, config, registry=registry).to_dict())
        except q4.BackendUnavailableError as error:
            first = first or error
            layers.append(record | _refusal(request, config, error))
        del weight
        step(name)
    return layers, first


def _refusal(request: q4.Request, config: q4.SessionConfig, error: q4.BackendUnavailableError) -> dict[str, Any]:
    """Return the keys of ``Selection.to_dict()`` where nothing was selected."""
    return {
        "format": request.format.name,
        "shape": [request.out_features, request.in_features],
        "device": str(request.device) if config.device in {None, "auto"} else config.device,
        "dtype": str(request.dtype).removeprefix("torch."),
        "compute_path": config.compute_path.value if config.compute_path else "auto",
        **dict.fromkeys(("backend", "native_load_state", "path_name", "fallback_reason")),
        **{key: [] for key in ("paths", "gradients", "gradients_refused", "disqualified")},
        "proven": False,
        "rejections": [item.to_dict() for item in error.rejections],
        "error": str(error).partition("\n")[0],
    }


def grouped(layers: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the layers with those together of which the same is said, in order of appearance."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        size = "{}×{}".format(*layer["shape"])  # a refusal names the shape
        same = {**layer, "layer": "", "shape": (), "error": str(layer["error"]).replace(size, "N×K")}
        groups.setdefault(repr(sorted(same.items())), []).append(layer)
    return list(groups.values())


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which ``layers.2`` comes before ``layers.10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def name_patterns(names: Iterable[str]) -> dict[str, int]:
    """Return names with their numbers as ``*`` → how many there are, in order of appearance."""
    counts: dict[str, int] = {}
    for name in names:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    return counts
