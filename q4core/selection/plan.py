"""``Plan``: how one kind of prepared layer is called, told apart from its tensors.

A plan is named by a text that depends on what it says only, never on the order in which plans were made, so that a
compiled graph that carries the name means the same in another process, and layers of one shape and source share one
graph. Where the backend can describe its layout, the text goes on with JSON, of which a process that has never prepared
such a layer makes the plan anew: an exported program brings nothing else along but the buffers.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch

from q4core.backend import Prepared
from q4core.diagnostics.describe_exception import describe_exception
from q4core.errors import PLUGIN_FAULTS, BackendError, LifecycleError, Q4Error
from q4core.formats import as_bytes
from q4core.machine.torch_state import on_device
from q4core.weight import PackedWeight, WeightSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4core.backend import Backend, Segment
    from q4core.selection.result import Selection


Layouts = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@attrs.frozen(eq=False, kw_only=True)
class Shapes:
    """What a fake kernel needs to know of a plan.

    Args:
        layouts: Shape and strides of each byte buffer, which is what the backend may read.
        out_features: N.
        in_features: K.
        dtype: dtype of x and of y.
    """

    layouts: Layouts
    out_features: int
    in_features: int
    dtype: torch.dtype


@attrs.frozen(eq=False, kw_only=True)
class Plan(Shapes):
    """One way of calling one backend.

    Args:
        key: Its name; see ``make_plan``.
        backend: Who computes.
        meta: ``Prepared.meta``.
        dtypes: dtype behind each byte buffer: the prepared tensors, then the source's, then the layer's tag (uint8).
        prepared_count: How many of the buffers are the backend's.
        source: Spec of the source weight, whose tensors follow, for a backend without ``export``; else None.
        segments: Which path serves which M.
        gradients: Which of the backend's input gradients serves which M; empty where the core computes them.
    """

    key: str
    backend: Backend
    meta: Any
    dtypes: tuple[torch.dtype, ...]
    prepared_count: int
    source: WeightSpec | None
    segments: tuple[Segment, ...]
    gradients: tuple[Segment, ...]

    @property
    def stem(self) -> str:
        """Return the key without the JSON and the number, by which this process's instances of a backend differ."""
        return short_name(self.key).partition("#")[0]

    def segment_index(self, rows: int) -> int | None:
        """Return which segment serves ``rows`` rows of x, or None outside the range asked for."""
        for index, segment in enumerate(self.segments):
            if segment.low <= rows <= (segment.high or rows):
                return index
        return None

    def gradient_path(self, rows: int) -> str | None:
        """Return which of the backend's input gradients serves ``rows`` rows; None where the core computes it."""
        serving = (item.path.name for item in self.gradients if item.low <= rows <= (item.high or rows))
        return next(serving, None)

    def prepared(self, buffers: Sequence[torch.Tensor]) -> Prepared:
        """Return the backend's own view of the buffers."""
        count = self.prepared_count
        return Prepared(typed(buffers[:count], self.dtypes[:count]), self.meta)

    def weight(self, buffers: Sequence[torch.Tensor], rows: torch.Tensor | None = None) -> PackedWeight:
        """Return the canonical weight behind the buffers, whole or (with a backend's export) some of its rows."""
        if self.source is None:
            return exported_weight(self.backend, self.prepared(buffers), rows, (self.out_features, self.in_features))
        start, stop = self.prepared_count, len(self.dtypes) - 1
        return self.source.build(typed(buffers[start:stop], self.dtypes[start:stop]))


def typed(buffers: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> tuple[torch.Tensor, ...]:
    """Return byte buffers as what they hold."""
    views = (buffer.view(dtype) for buffer, dtype in zip(buffers, dtypes, strict=True))
    return tuple(tensor if tensor.dtype.itemsize == 1 else tensor.squeeze(-1) for tensor in views)


def exported_weight(
    backend: Backend, prepared: Prepared, rows: torch.Tensor | None, shape: tuple[int, int]
) -> PackedWeight:
    """Return what a backend exports of a weight [N, K], whole or some rows, as ``given_weight`` does."""
    export: Any = backend.export  # type: ignore[attr-defined]  # optional method of the contract
    device = prepared.tensors[0].device
    if rows is not None:
        shape, rows = (rows.numel(), shape[1]), rows.to(device)
    with on_device(device):
        return given_weight(backend, "export", shape, functools.partial(export, prepared, rows))


def given_weight(backend: Backend, method: str, shape: tuple[int, ...], call: Callable[[], object]) -> PackedWeight:
    """Return the weight that a call of a backend's method gives, once it is known to be one of that shape.

    Raises:
        BackendError: It gave something else, or raised; see ``raise_broken_call``.
    """
    try:
        weight = call()
    except Q4Error as error:  # a refusal of what the method makes of its weight, not of what the caller gave
        if method == "quantize":
            raise
        raise BackendError(f"{method} of backend {backend.name!r} raised {describe_exception(error)}") from error
    except PLUGIN_FAULTS as error:
        raise_broken_call(error, backend, method)
    if not isinstance(weight, PackedWeight) or weight.shape != shape:
        got = f"one of {weight.shape}" if isinstance(weight, PackedWeight) else type(weight).__name__
        rule = f"a PackedWeight of {shape}"
        raise BackendError(f"{method} of backend {backend.name!r}", name="result", rule=rule, value=got)
    return weight


def raise_broken_call(error: BaseException, backend: Backend, method: str, path: str | None = None) -> NoReturn:
    """Raise what a method of a backend raised, as the caller's error.

    Running out of memory is the caller's to handle, and q4core's own errors say enough: they are raised as they are.

    Raises:
        BackendError: For anything else.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, Q4Error)):
        raise error
    place = "" if path is None else f", path {path!r},"
    raise BackendError(
        f"{method} of backend {backend.name!r}{place} raised {describe_exception(error)}",
        hint="A fault of the backend; backend= or Q4_BACKEND names another one, Q4_DISABLE_PLUGINS leaves it out.",
    ) from error


PLANS: dict[str, Plan] = {}
"""Every plan made so far, one per kind of layer; never dropped: a compiled graph or a pending backward may name it."""
_lock = threading.Lock()


def make_plan(  # noqa: PLR0913  # one argument per fact
    selection: Selection,
    backend: Backend,
    prepared: Prepared,
    spec: WeightSpec,
    source: PackedWeight | None = None,
    layouts: Layouts | None = None,
) -> Plan:
    """Return the plan for a prepared weight, the same object for equal facts.

    ``spec`` is the canonical weight's; ``source`` is the weight where there is no export; ``layouts`` default to the
    tensors' own.
    """
    tensors = [*prepared.tensors, *([] if source is None else (tensor for _, tensor in source.tensors()))]
    stored = [as_bytes(tensor.detach()) for tensor in tensors]
    request, kind = selection.backend_request, type(backend)
    facts: dict[str, Any] = {
        "meta": prepared.meta,
        "dtypes": (*(tensor.dtype for tensor in tensors), torch.uint8),
        "layouts": layouts or (*((tuple(tensor.shape), tensor.stride()) for tensor in stored), ((1,), (1,))),
        "prepared_count": len(prepared.tensors),
        "source": None if source is None else WeightSpec.of(source),
        "segments": selection.segments,
        "gradients": selection.gradients,
        "out_features": request.out_features,
        "in_features": request.in_features,
        "dtype": request.dtype,
    }
    text = repr((f"{kind.__module__}.{kind.__qualname__}", backend.api_version, request.format.name, facts))
    stem = f"{backend.name}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    portable = "" if source is not None else _portable(selection, backend, facts, spec)
    with _lock:
        for number in itertools.count(1):  # above 1 over other instances of the backend (other registries')
            key = f"{stem if number == 1 else f'{stem}#{number}'}{portable}"
            plan = PLANS.setdefault(key, Plan(key=key, backend=backend, **facts))
            if plan.backend is backend and plan.meta == prepared.meta:
                break
    return plan


def _portable(selection: Selection, backend: Backend, facts: dict[str, Any], spec: WeightSpec) -> str:
    """Return what another process makes the plan of, as JSON after a space; nothing where the backend can't describe.

    Raises:
        BackendError: What the backend describes is nothing that JSON holds.
    """
    describe: Any = getattr(backend, "describe", None)  # optional method of the contract
    if not callable(describe):
        return ""
    request = selection.request
    made_of = {
        "backend": backend.name,
        "spec": json.loads(spec.to_json()),
        "features": sorted(feature.value for feature in request.features),
        "scale_dtype": name_of(request.scale_dtype),
        "second_dtype": request.second_dtype and name_of(request.second_dtype),
        "dtype": name_of(facts["dtype"]),
        "dtypes": [name_of(dtype) for dtype in facts["dtypes"]],
        "layouts": facts["layouts"],
        "out_features": facts["out_features"],
        "in_features": facts["in_features"],
        "m": request.m,
        "precision": request.precision.value,
        "gradients": request.gradients,
        "compute_path": selection.compute_path.value,
        "paths": _plain(selection.segments),
        "gradient_paths": _plain(selection.gradients),
    }
    try:
        return " " + json.dumps({**made_of, "meta": describe(facts["meta"])}, separators=(",", ":"))
    except PLUGIN_FAULTS as error:
        raise_broken_call(error, backend, "describe")


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name in torch."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return a dtype by its name in torch.

    Raises:
        TypeError, AttributeError: There is none of that name.
    """
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


def _plain(segments: Sequence[Segment]) -> list[tuple[int, int | None, str]]:
    return [(item.low, item.high, item.path.name) for item in segments]


def short_name(key: str) -> str:
    """Return a plan's name without the JSON, for messages."""
    return key.partition(" {")[0]


def portable_facts(key: str) -> dict[str, Any]:
    """Return what a plan's name says as JSON.

    Raises:
        LifecycleError: It says nothing: it is of a process that has prepared the layer, and of no other.
        ValueError: It is damaged.
    """
    name, brace, rest = key.partition(" {")
    if not brace:
        raise LifecycleError(
            f"no layer of this process was prepared under plan {name!r}",
            hint="Prepare the layer first (session.linear, or load its state dict), then compile or call it.",
        )
    facts: dict[str, Any] = json.loads(f"{{{rest}")
    return facts


def shapes_of(key: str) -> Shapes:
    """Return the shapes of a plan by its name, for a fake kernel also of one that this process has not made.

    Raises:
        LifecycleError: There is no such plan, and the name does not hold them.
    """
    plan = PLANS.get(key)
    if plan is not None:
        return plan
    try:
        facts = portable_facts(key)
        layouts = tuple((tuple(map(int, shape)), tuple(map(int, stride))) for shape, stride in facts["layouts"])
        sizes = {name: int(facts[name]) for name in ("out_features", "in_features")}
        return Shapes(layouts=layouts, dtype=dtype_of(facts["dtype"]), **sizes)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged(key) from error


def damaged(key: str) -> LifecycleError:
    """Return the error for a plan whose name is not as it was written."""
    what = f"the plan {short_name(key)!r} of this exported program is damaged"
    return LifecycleError(what, hint="Export the program again.", plan=key)
