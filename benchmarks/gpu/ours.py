"""Our layers on the device: the formats of each backend, and the calls that are timed."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from benchmarks.candidate import OURS, Calls, Candidate
from benchmarks.weights import FORMATS, exact_value, weight_of
from q4core.extension import LayerHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.place import Place
    from benchmarks.problem import Problem

__all__ = [
    "BACKENDS",
    "EXACT",
    "FP4",
    "Made",
    "backends",
    "candidate",
    "formats_of",
    "make",
    "path_candidate",
    "session",
]

BACKENDS = "nf4-cuda,nvfp4-native"
"""Backends that are measured; ``Q4_BENCH_BACKENDS`` names others."""
EXACT, FP4 = "exact", "fp4"
DTYPE = torch.bfloat16
_LIMITS = {EXACT: 1e-5, FP4: 4e-2}
"""bfloat16 rounds y by 2^-8 at most, a mean square error of 2.6e-6; 4-bit activations are off by a tenth each."""


@functools.cache
def registry() -> q4.Registry:
    """Return one registry for the process, which remembers what has been proven."""
    return q4.Registry()


def names() -> list[str]:
    """Return the names of the backends that are measured."""
    return [name.strip() for name in os.environ.get("Q4_BENCH_BACKENDS", BACKENDS).split(",")]


def backends() -> dict[str, q4.Backend]:
    """Return those of ``names`` that are here."""
    found = registry().backends()
    return {name: found[name] for name in names() if name in found}


def formats_of(backend: q4.Backend) -> list[str]:
    """Return which of ``FORMATS`` a backend declares."""
    declared = backend.capabilities.formats
    return [name for name in FORMATS if declared & {q4.EVERY_FORMAT, name.split(maxsplit=1)[0]}]


def precisions_of(backend: q4.Backend) -> list[str]:
    """Return the activation precisions that a backend declares: ``exact``, and ``fp4`` where it has such paths."""
    return [EXACT, FP4] if q4.Precision.W4A4 in backend.capabilities.precisions else [EXACT]


def session(
    backend: str, place: Place, precision: str = EXACT, *, own: q4.Registry | None = None, gradients: bool = False
) -> q4.Session:
    """Return a session with one backend alone."""
    config = q4.SessionConfig(
        device=str(place.device),
        backend=backend,
        activation_precision=precision,
        compute_dtype=DTYPE,
        gradients=gradients,
    )
    return q4.Session(config, registry=own or registry())


@attrs.frozen(eq=False, slots=False)
class Made:
    """One weight in enough prepared copies that it comes from memory.

    Args:
        backend: Whose layout it is in.
        format: Its name in ``FORMATS``.
        precision: ``exact`` or ``fp4``.
        layers: The copies.
        weight: The weight, as a backend of these formats reads it.
        request: The layers' request, as the backend sees it.
        reference: float64 [P, K] on the device: the weight's pattern.
    """

    backend: str
    format: str
    precision: str
    layers: list[q4.Q4Linear]
    weight: q4.PackedWeight
    request: q4.Request
    reference: torch.Tensor

    @functools.cached_property
    def handle(self) -> LayerHandle:
        """The backend, tensors and paths of the first copy."""
        return LayerHandle(self.layers[0])

    @property
    def linear(self) -> Callable[..., object]:
        """The backend's own ``linear``."""
        call: Callable[..., object] = self.handle.backend.linear
        return call

    @property
    def gradients(self) -> tuple[q4.Segment, ...]:
        """Which of the backend's input gradients serves which rows."""
        return self.layers[0].diagnostics().gradients

    def gradient(self, copy: int, grad: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        """Return the call of the backend's own ``input_gradient`` in a backward, without autograd's own time."""
        handle, rows = LayerHandle(self.layers[copy]), grad.shape[0]
        backend: Any = handle.backend
        (path,) = (item.path.name for item in self.gradients if item.low <= rows <= (item.high or rows))
        return functools.partial(backend.input_gradient, handle.prepared, grad, out, path=path)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one prepared copy."""
        return self.layers[0].diagnostics().prepared_bytes

    @property
    def name(self) -> str:
        """Name in results."""
        return f"{self.format} {self.precision}"

    def paths(self) -> list[q4.KernelPath]:
        """Return every path that the backend offers for the precision, also those that a better one covers."""
        offered = self.handle.backend.check(self.request).paths
        return [path for path in offered if self.request.allows(path.precision)]

    @functools.cached_property
    def prepared(self) -> list[q4.Prepared]:
        """The copies once more, prepared for every path: a layer's own hold code for the paths that serve it alone."""
        context = q4.PrepareContext(self.request.device)
        return [self.handle.backend.prepare(self.weight, self.request, context) for _ in self.layers]


def make(  # noqa: PLR0913  # what a layer is
    backend: str, name: str, problem: Problem, place: Place, precision: str = EXACT, *, gradients: bool = False
) -> Made:
    """Return a problem's weight, prepared by a backend.

    Raises:
        BackendUnavailableError: The backend does not serve it here.
    """
    pattern = weight_of(name, problem.pattern)
    weight = q4.cat([pattern.to(place.device)] * problem.repeats)
    made = session(backend, place, precision, gradients=gradients)
    first = made.linear(weight)
    asked = q4.Request.for_weight(weight, dtype=first.dtype)
    request = q4.select(asked, made.config, registry=made.registry).backend_request
    copies = problem.copies(first.diagnostics().prepared_bytes, place.rotation_bytes)
    layers = [first, *(made.linear(weight) for _ in range(copies - 1))]
    return Made(backend, name, precision, layers, weight, request, exact_value(pattern).to(place.device))


def candidate(made: Made) -> Candidate:
    """Return ``Q4Linear.forward`` with ``out=``, by the path that the layer chose for each M."""

    def calls(copy: int, x: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        return functools.partial(made.layers[copy].forward, x, out=out)

    return _candidate(made, made.name, calls)


def path_candidate(made: Made, path: str) -> Candidate:
    """Return one path of the backend, called directly, whether it is the one that is chosen for some M or not."""

    def calls(copy: int, x: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        return functools.partial(made.linear, made.prepared[copy], x, out, bias=None, path=path)

    return _candidate(made, f"{made.name}, path {path}", calls)


def _candidate(made: Made, name: str, calls: Callable[..., Callable[[], object]]) -> Candidate:
    def make_calls(x: torch.Tensor, threads: int, resident: bool) -> Calls:  # noqa: FBT001  # the contract of make
        del threads
        given = x.to(DTYPE)
        out = torch.empty(x.shape[0], made.layers[0].out_features, dtype=DTYPE, device=x.device)
        used = range(1 if resident else len(made.layers))
        return Calls([calls(copy, given, out) for copy in used], lambda: out)

    return Candidate(
        name=name,
        library="q4core",
        role=OURS,
        format=made.format,
        precision=made.precision,
        weight_bytes=made.weight_bytes,
        make=make_calls,
        reference=made.reference,
        limit=_LIMITS[made.precision],
    )


def native_states(place: Place) -> dict[str, dict[str, Any]]:
    """Return what each backend says of the device, format by format, without preparing anything."""
    found: dict[str, dict[str, Any]] = {}
    for name in names():
        backend = backends().get(name)
        if backend is None:
            faults = [f"{record.name}: {'; '.join(record.errors)}" for record in registry().records() if record.errors]
            found[name] = {"here": False, "faults": faults}
            continue
        verdicts: dict[str, Any] = {}
        for format_ in formats_of(backend):
            sample = weight_of(format_, torch.zeros(16, 256))
            request = q4.Request.for_weight(sample, device=place.device, dtype=DTYPE)
            try:
                verdict = backend.check(request)
            except Exception as error:  # noqa: BLE001  # the plugin boundary: recorded, as by the core
                verdicts[format_] = {"fault": f"check raised {type(error).__name__}: {error}"}
                continue
            verdicts[format_] = {
                "native_state": verdict.native_state,
                "paths": [str(path) for path in verdict.paths],
                "reasons": [str(reason) for reason in verdict.reasons],
            }
        found[name] = {"here": True, "formats": verdicts}
    return found
