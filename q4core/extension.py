"""The public seam for libraries that run packed layers in ways of their own, as programs and products with spikes do.

``LayerHandle`` is what a layer runs by, ``prove_once`` compares a kind of computation with its reference before its
first use, and ``attach_record`` adds a section to the reports of layers.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from typing import TYPE_CHECKING, Any

import attrs

from q4core.diagnostics.events import warn_once
from q4core.errors import Q4ProbeWarning
from q4core.layers.diagnosis import Record
from q4core.machine.torch_state import outside_inference
from q4core.ops.prepared_weight import LATEST_CHANGE
from q4core.policy.config import SessionConfig
from q4core.probes.comparison import probe_result
from q4core.probes.linear import find_product_fault
from q4core.selection.cache import select_for
from q4core.selection.plan import given_weight, raise_broken_call
from q4core.selection.probe_results import probe_results, warn_of_fault
from q4core.selection.proofs import code_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    import torch

    from q4core.backend import Backend, Prepared, Request, Segment
    from q4core.layers.linear import Q4Linear
    from q4core.plugins.registry import Registry
    from q4core.selection.result import Selection
    from q4core.weight import PackedWeight

__all__ = [
    "LayerHandle",
    "Record",
    "attach_record",
    "find_product_fault",
    "find_refusal",
    "given_weight",
    "prove_once",
    "raise_broken_call",
    "record_of",
    "records_of",
    "select_proven",
    "watch",
]

_shown: weakref.WeakKeyDictionary[Registry, dict[tuple[str, str, Hashable], str | None]] = weakref.WeakKeyDictionary()
"""What probes showed, by purpose, backend and kind: None where it is right."""
_records: weakref.WeakKeyDictionary[Q4Linear, dict[tuple[str, str], Record]] = weakref.WeakKeyDictionary()
"""Records by section and name."""


class LayerHandle:
    """What a packed layer runs by, as it was when the handle was made; valid until ``is_current`` is false.

    Args:
        layer: A prepared layer; the handle keeps it alive.

    Attributes:
        layer: That layer.
        backend: The backend that prepared it.
        prepared: What ``Backend.prepare`` returned: tensors and layout, as each method of the backend takes them.
        tensors: The uint8 buffers behind it; their addresses do not change while the handle is current.
        segments: Which path serves which numbers of rows.
        kind: Equal for layers that a backend runs in the same way: of one backend, format, shape, layout and selection.
        device: Where it runs.
        bias: Its own bias parameter; None without one, and where the bias is parametrized or pruned.
        registry: The plugins that it was selected among.
        calls: Calls by segment. Who runs the layer otherwise than by calling it adds to it.

    Raises:
        LifecycleError: The layer is closed, or waits for its weight.
    """

    def __init__(self, layer: Q4Linear) -> None:
        self.layer = layer
        self._weight = weight = layer._require_ready()
        self.backend: Backend = weight.plan.backend
        self.prepared: Prepared = weight.prepared
        self.tensors: tuple[torch.Tensor, ...] = weight.tensors
        self.segments: tuple[Segment, ...] = weight.plan.segments
        self.kind: Hashable = weight.plan.key
        self.device: torch.device = weight.device
        self.bias = layer._own_bias()
        self.registry: Registry = layer._plugins()
        self.calls: list[int] = weight.counts

    @property
    def is_current(self) -> bool:
        """Whether the layer still runs by this: not closed, moved or loaded again, with the same bias parameter."""
        layer = self.layer
        return layer._weight is self._weight and layer._parameters.get("bias") is self.bias

    @property
    def is_managed(self) -> bool:
        """Whether a unified-memory policy places what the layer runs by."""
        return self.layer._is_managed

    def segment_index(self, rows: int) -> int | None:
        """Return which segment serves a number of rows of x; None outside the range that the layer was made for."""
        return self._weight.plan.segment_index(rows)

    def weight(self) -> PackedWeight:
        """Return the canonical weight, exported by the backend or stored next to it."""
        return self._weight.plan.weight(self._weight.buffers)

    def add_outlier_rows(self, rows: int) -> None:
        """Count rows of x that had outliers, for the layer's report."""
        self._weight.outlier_rows += rows

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Let the block's calls be none: a trial, which no report shows."""
        calls, outlier_rows = self.calls[:], self._weight.outlier_rows
        try:
            yield
        finally:
            self.calls[:], self._weight.outlier_rows = calls, outlier_rows


def watch(handles: Iterable[LayerHandle]) -> Callable[[], bool]:
    """Return a function that says whether all handles are current: for calls of microseconds over many layers.

    It looks at few objects, as products have emptied the processor's caches: at layers once after any has changed. A
    layer that got a parameter of another name counts as changed, too.
    """
    known = [*handles]
    weights = [(handle.layer, handle._weight) for handle in known]
    plain, biases = list[dict[str, Any]](), list[tuple[dict[str, Any], Any]]()
    for handle in known:
        parameters = handle.layer._parameters
        if any(value is not None for value in parameters.values()):
            biases.append((parameters, handle.bias))
        else:
            plain.append(parameters)
    empty = [*map(dict, plain)]
    seen: object = None

    def are_current() -> bool:
        nonlocal seen
        if seen is not (latest := LATEST_CHANGE[0]):
            if any(layer._weight is not weight for layer, weight in weights):
                return False
            seen = latest
        return plain == empty and all(parameters.get("bias") is bias for parameters, bias in biases)

    return are_current


def find_refusal(backend: Backend, op: str, device: torch.device, methods: Iterable[str]) -> str | None:
    """Return why a backend is not asked for an op on a device, or None.

    Args:
        backend: Who would compute.
        op: What its capabilities must declare.
        device: Where it would compute.
        methods: What a backend that declares the op must have.
    """
    declared = backend.capabilities
    if op not in declared.ops or device.type not in declared.devices:
        return f"op {op!r} is not declared for {device.type}"
    missing = [name for name in methods if not callable(getattr(backend, name, None))]
    return f"op {op!r} is declared without the methods {', '.join(missing)}" if missing else None


def prove_once(
    registry: Registry, backend: Backend, purpose: str, kind: Hashable, probe: Callable[[], str | None]
) -> str | None:
    """Return what is wrong with a backend's results of one kind: None where nothing is.

    The probe runs once for a registry, backend, purpose and kind; on CPUs once for a build (decision 0036). A fault is
    warned of once in a process.

    Args:
        registry: The plugins that hold the backend; the result is forgotten with it.
        backend: Who computes.
        purpose: What it is not used for where a fault is found, for the warning: ``"spikes"``, ``"programs"``.
        kind: Distinguishes what the backend might do in different ways; hashable.
        probe: Compares the backend's results with a reference; returns what is wrong, or None. It runs outside of
            inference mode.
    """
    shown, key = _shown.setdefault(registry, {}), (purpose, backend.name, kind)
    if key not in shown:
        proofs = probe_results(registry).proofs if backend.capabilities.devices <= {"cpu"} else None
        remembered = (purpose, kind, code_of(probe.__module__.partition(".")[0])) if proofs else None
        if proofs is not None and proofs.rows(backend.name, remembered) is not None:
            shown[key] = None
        else:
            with outside_inference():
                shown[key] = probe()
            if proofs is not None and shown[key] is None:
                proofs.add(backend.name, remembered, (), purpose)
            elif proofs is not None:
                proofs.forget()
    if (fault := shown[key]) is not None:
        warn_once((backend.name, fault), Q4ProbeWarning, f"backend {backend.name!r} is not used for {purpose}: {fault}")
    return fault


def select_proven(registry: Registry, request: Request, probe: Callable[[Backend, Request], str | None]) -> Selection:
    """Return which backend is best for a request, and proven; no option of a user or of the environment counts.

    For ops that a library calls by itself, such as ``"quantize"``. A path once found wrong is warned of and not
    selected again; what is proven stays so, as the self-probe's results do.

    Args:
        registry: The plugins to choose among.
        request: What is asked.
        probe: Says what is wrong with a backend's results for such a request, or None. It runs once for each kind.

    Raises:
        BackendUnavailableError: There is none; ``rejections`` holds every reason.
    """
    results = probe_results(registry)
    while True:
        selection = select_for(request, SessionConfig(), registry)
        backend, path = registry.backends()[selection.backend], selection.path
        result = results.result(backend.name, path, request)
        if result is None:
            started = time.perf_counter()
            result = probe_result(probe(backend, request), started)
            results.record(backend.name, path, request, result)
        if result.fault is None:
            return attrs.evolve(selection, proven=True)
        warn_of_fault(backend.name, path, request, result.fault)


def attach_record(record: Record, layers: Iterable[Q4Linear], *, name: str = "") -> None:
    """Let the reports of these layers, and of sessions that hold any of them, show a record.

    Args:
        record: Shown as it is when a report is made.
        layers: The layers that it is about.
        name: Distinguishes several records of a section on one layer; one of the same name is replaced.
    """
    for layer in layers:
        _records.setdefault(layer, {})[record.section, name] = record


def record_of(layer: Q4Linear, section: str, *, name: str = "") -> Record | None:
    """Return the record that was attached to a layer, or None."""
    return _records.get(layer, {}).get((section, name))


def records_of(layers: Iterable[Q4Linear]) -> tuple[Record, ...]:
    """Return the records of any of these layers, each once, section by section in the order of their names."""
    found = itertools.chain.from_iterable(list(_records.get(layer, {}).values()) for layer in layers)
    return tuple(sorted({id(record): record for record in found}.values(), key=lambda record: record.section))
