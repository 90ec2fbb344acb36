"""Prepared layers outside their process: told as JSON and tensors, and taken up again without their source.

What is taken up is selected as any weight is, and must come to the same plan: the same backend, layout, paths (and so
the same instruction set), dtypes and shapes. Then the first of its kind is probed, on its own values.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.backend import Prepared, Request
from q4core.diagnostics.describe_exception import describe_exception
from q4core.diagnostics.events import bound, emit, muted
from q4core.errors import PLUGIN_FAULTS, LifecycleError
from q4core.formats import BlockOrder, as_bytes
from q4core.layers.preparation import tell_selection
from q4core.layers.prepared_module import Content
from q4core.machine import outside_inference, without_casts
from q4core.ops.registration import LiveLayer
from q4core.policy import UnifiedMemoryPolicy
from q4core.probes.runner import can_export, exported_rows, prove_adopted
from q4core.selection.cache import apply_config, select_for
from q4core.selection.plan import make_plan
from q4core.selection.probe_results import probe_results
from q4core.weight import Feature, WeightSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from q4core.backend import Backend
    from q4core.layers.linear import Q4Linear
    from q4core.plugins.registry import Registry
    from q4core.policy import SessionConfig

_VERSION = 1
_WEIGHT_DTYPES = ("scale_dtype", "second_dtype")
_DISABLED = UnifiedMemoryPolicy.DISABLED


def export_prepared(layer: Q4Linear) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """Tell a prepared layer, without its bias, as what ``adopt_prepared`` takes up in this process or another one.

    Args:
        layer: A prepared layer.

    Returns:
        What JSON holds of it, and the backend's tensors: the layer's own memory, contiguous, not to be written to.

    Raises:
        LifecycleError: The layer is closed or waits for its weight, its backend lacks ``describe``, ``meta_from`` or
            ``export``, or its tensors are not contiguous (views of a mapped file).
    """
    content = layer._content  # noqa: SLF001  # same room
    live = layer._require_ready()  # noqa: SLF001  # same room
    plan, request = live.plan, live.selection.request
    backend: Any = plan.backend
    tensors = live.prepared.tensors
    if not _can_tell(backend):
        what = f"layer {layer.name!r} can't be exported: backend {backend.name!r} does not describe its layout"
        raise LifecycleError(what, hint="Export its packed_weight() instead; it is prepared again where it is used.")
    if not all(tensor.is_contiguous() for tensor in tensors):
        what = f"layer {layer.name!r} can't be exported: backend {backend.name!r} keeps views of its source"
        raise LifecycleError(what, hint="Export its packed_weight() instead; it costs the backend nothing to prepare.")
    header = {
        "version": _VERSION,
        "plan": plan.stem,
        "backend": backend.name,
        "meta": backend.describe(plan.meta),
        "spec": json.loads(content.spec.to_json()),
        "features": sorted(feature.value for feature in request.features),
        **{name: _name_of(getattr(request, name)) for name in _WEIGHT_DTYPES},
        "dtype": _name_of(plan.dtype),
        "m": list(request.m),
        "tensors": [{"dtype": _name_of(item.dtype), "shape": list(item.shape)} for item in tensors],
        **content.labels,
        "name": layer.name,
    }
    return header, tensors


def adopted_content(
    header: Mapping[str, Any], tensors: Sequence[torch.Tensor], config: SessionConfig, registry: Registry
) -> Content:
    """Return the layer's content; see ``q4core.adopt_prepared``."""
    heard = muted() if config.diagnostics is False else contextlib.nullcontext()
    name = None if header.get("name") is None else str(header["name"])
    with heard, without_casts("cpu"), without_casts("cuda"), outside_inference(), bound(layer=name):
        try:
            labels = {"name": name, "dialect": header.get("dialect"), "notes": (*header.get("notes", ()),)}
            text = json.dumps({key: value for key, value in header.items() if key not in labels}, sort_keys=True)
            return _adopted(header, text, labels, tensors, config, registry)
        except LifecycleError:
            raise
        except PLUGIN_FAULTS as error:  # whatever the header holds
            raise _foreign(name, describe_exception(error)) from error


def _adopted(  # noqa: PLR0913  # the facts of one layer
    told: Mapping[str, Any],
    text: str,
    labels: dict[str, Any],
    tensors: Sequence[torch.Tensor],
    config: SessionConfig,
    registry: Registry,
) -> Content:
    name, warm = labels["name"], registry.selections  # layers of one shape tell the same ``text``
    asked = warm.get(("adopt", text))
    if asked is None:
        asked = warm["adopt", text] = _asked(text, registry)
    spec, request = asked
    if (config.unified_memory or _DISABLED) is not _DISABLED:
        raise _foreign(name, "unified memory is asked for, and what is adopted stays where it is")
    found = [{"dtype": _name_of(item.dtype), "shape": list(item.shape)} for item in tensors]
    if found != told["tensors"] or not all(item.is_contiguous() for item in tensors):
        raise _foreign(name, f"its tensors are {found}, contiguous or not, and not {told['tensors']}")
    selection = select_for(apply_config(request, config), config, registry)
    backend: Any = registry.backends()[selection.backend]
    if backend.name != told["backend"] or not _can_tell(backend):
        raise _foreign(name, f"prepared by {told['backend']!r}, and {backend.name!r} serves it here")
    own = [item.to(selection.request.device) for item in tensors]
    key = ("adopt", text, selection.segments, selection.gradients)
    plan = warm.get(key)
    if plan is None:
        prepared = Prepared(own, backend.meta_from(told["meta"]))
        some = None if spec.blocks is BlockOrder.FLAT else torch.zeros(1, dtype=torch.int64)
        exported_rows(backend, prepared, request, some)  # refused where the layout is of other sizes than the tensors
        plan = warm[key] = make_plan(selection, backend, prepared, None)
    if plan.stem != told["plan"]:
        raise _foreign(name, f"prepared under plan {told['plan']}, and {plan.stem} serves it here")
    if not prove_adopted(probe_results(registry), selection, backend, Prepared(own, plan.meta)):
        raise _foreign(name, f"backend {backend.name!r} computes wrong numbers with it")
    selection = attrs.evolve(selection, proven=True)
    live = LiveLayer(plan=plan, tensors=tuple(as_bytes(item) for item in own), selection=selection)
    emit("q4.adopt", layer=name, backend=backend.name, bytes=sum(item.nbytes for item in own))
    tell_selection(selection, name, spec.format.name)
    return Content(spec, labels, config, plan.dtype, live.device, live)


def _asked(text: str, registry: Registry) -> tuple[WeightSpec, Request]:
    """Return the weight's spec and the request that was made for it."""
    told = json.loads(text)
    if told["version"] != _VERSION:
        raise _foreign(None, f"its header is of version {told['version']}, not {_VERSION}")
    spec = WeightSpec.from_json(json.dumps(told["spec"]), formats=registry.formats().values())
    same = ("format", "scale_kind", "packing", "block_size", "out_features", "in_features")
    low, high = told["m"]
    request = Request(
        **{name: getattr(spec, name) for name in same},
        features=frozenset(map(Feature, told["features"])),
        has_activation_scale="activation_scale" in spec.fields,
        scale_dtype=_dtype(told["scale_dtype"]),
        second_dtype=None if told["second_dtype"] is None else _dtype(told["second_dtype"]),
        dtype=_dtype(told["dtype"]),
        m=(low, high),
    )
    return spec, request


def _can_tell(backend: Backend) -> bool:
    names = ("describe", "meta_from")
    return can_export(backend) and all(callable(getattr(backend, name, None)) for name in names)


def _name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype: Any = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise _foreign(None, f"{name!r} is no dtype")
    return dtype


def _foreign(name: str | None, why: str) -> LifecycleError:
    emit("q4.adopt", level=logging.WARNING, layer=name, refused=why)
    hint = "Prepare the layer from its weight (session.linear)."
    return LifecycleError(f"prepared layer {name or ''!r} can't be taken up here: {why}", hint=hint)
