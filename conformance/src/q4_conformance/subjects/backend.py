"""The subject of kernels: a backend behind a session."""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.outcome import FailureError, NotDeclaredError, NotTestableError
from q4_conformance.subjects.reference import REFERENCE, reference_backend, require_device
from q4core import (
    ActivationPrecision,
    BackendUnavailableError,
    ComputePath,
    Precision,
    PrepareContext,
    Registry,
    Request,
    Session,
    SessionConfig,
    default_registry,
    hookimpl,
    select,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4core import Backend, Diagnostics, KernelPath, PackedWeight, Prepared, Q4Linear, Reason, Selection

SERVED_BY = {
    ActivationPrecision.EXACT: frozenset({Precision.W4A32, Precision.W4A16}),
    ActivationPrecision.INT16: frozenset({Precision.W4I16}),
    ActivationPrecision.INT8: frozenset({Precision.W4A8}),
    ActivationPrecision.FP4: frozenset({Precision.W4A4}),
}


def not_declared(manifest: Any, request: Request) -> list[str]:
    """Return what ``Capabilities`` do not declare of a request, its activation precision last."""
    wanted = SERVED_BY.get(request.precision)
    lacks = wanted is not None and not wanted & manifest.precisions
    last = [f"activation precision {request.precision.value!r} is not declared"] if lacks else []
    return [reason.message for reason in manifest.refusals(request)] or last


def plugin_of(*backends: Backend) -> types.SimpleNamespace:
    """Return a plugin that brings these backends."""
    return types.SimpleNamespace(q4_backends=hookimpl(lambda: list(backends)))


def make_registry(*backends: Backend, with_reference: bool = True) -> Registry:
    """Return a registry of these backends and the reference, whichever plugins the environment allows."""
    plugins: list[tuple[str, object]] = [(f"plugin of {item.name}", plugin_of(item)) for item in backends]
    if with_reference and all(item.name != REFERENCE for item in backends):
        plugins.append((REFERENCE, plugin_of(reference_backend())))
    return Registry(plugins, environment={})  # who is judged was found by that list before


@attrs.frozen(eq=False)
class BackendLayer:
    """A ``Q4Linear`` that one backend serves, over a weight and a bias as the subject was given them."""

    module: Q4Linear
    weight: PackedWeight
    bias: torch.Tensor | None
    session: Session
    """Held, because its end would close the layer."""
    paths: Callable[[int], KernelPath]
    ran: set[str] = attrs.field(factory=set)
    """``name|kind|precision|standing`` of every path that the core says has run."""
    tried: set[str] = attrs.field(factory=set)
    """The same of every path whose call raised, which the core does not count."""
    roundings = 0
    """A backend computes from the exact weight."""

    @property
    def device(self) -> torch.device:
        """Where x must be."""
        return self.module.device

    def __call__(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ wᵀ + bias``."""
        try:
            y: torch.Tensor = self.module(x, out=out)
        except BaseException:
            with contextlib.suppress(LookupError):  # a number of rows that no path serves
                self.tried.add(_label(self.paths(max(x.numel() // max(*x.shape[-1:], 1, 1), 1))))
            raise
        record = self.module.diagnostics()
        for segment, calls in zip(record.segments, record.calls, strict=True):
            if calls:
                self.ran.add(_label(segment.path))
        return y

    def precision(self, rows: int) -> Precision:
        """Return the precision of the path that serves that many rows."""
        return self.paths(max(rows, 1)).precision

    def codebook(self, rows: int) -> tuple[float, ...] | None:
        """Return the codebook that this path approximates by, or None."""
        return self.paths(max(rows, 1)).codebook

    def diagnostics(self) -> Diagnostics:
        """Return the layer's record."""
        return self.module.diagnostics()


def _label(path: KernelPath) -> str:
    return f"{path.name}|{path.kind.value}|{path.precision.value}|{'interpreted' if path.interpreted else 'ran'}"


def _require_hardware(reasons: Sequence[Reason]) -> None:
    """Raise ``NotTestableError`` where all reasons, and there are some, speak of hardware."""
    if reasons and all(reason.code.domain == "hardware" for reason in reasons):
        raise NotTestableError("; ".join(reason.message for reason in reasons))


def _with_index(device: torch.device) -> torch.device:
    """Return a CUDA device with its index, as backends are asked about it."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device
    return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())


class BackendSubject:
    """A backend, itself or the name of an installed one, called on a device through sessions that name it.

    Raises:
        LookupError: No backend of that name is installed.
    """

    has_out = True

    def __init__(self, backend: Backend | str, *, device: str = "cpu") -> None:
        if isinstance(backend, str):
            installed = default_registry().backends()
            if backend not in installed:
                raise LookupError(f"no backend {backend!r} is installed; there are {', '.join(installed) or 'none'}")
            backend = installed[backend]
        self.backend = backend
        self.name = backend.name
        self.device = _with_index(torch.device(device))
        self.registry = make_registry(backend)
        self.ran: set[str] = set()
        self.tried: set[str] = set()

    def config(self, **options: Any) -> SessionConfig:
        """Return a configuration that names this backend, with further options."""
        facts: dict[str, Any] = {"backend": self.name, "compute_path": ComputePath.AUTO, "device": str(self.device)}
        return SessionConfig(**facts | options)

    def request(self, weight: PackedWeight, **facts: Any) -> Request:
        """Return the request that a layer over ``weight`` makes."""
        return Request.for_weight(weight, device=self.device, **facts)

    def require_declared(self, request: Request) -> None:
        """Raise ``NotDeclaredError`` where the manifest refuses a request, ``NotTestableError`` without its device."""
        lacking = not_declared(self.backend.capabilities, request)
        if lacking:
            raise NotDeclaredError("; ".join(lacking))
        require_device(self.device)

    def require_hardware(self, request: Request) -> None:
        """Raise ``NotTestableError`` where the backend refuses a request for nothing but this machine's hardware."""
        _require_hardware(self.backend.check(request).reasons)

    def layer(  # noqa: PLR0913  # the facts of one layer
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        precision: ActivationPrecision = ActivationPrecision.EXACT,
        gradients: bool = False,
        compute_path: ComputePath = ComputePath.AUTO,
        m: tuple[int, int | None] = (1, None),
    ) -> BackendLayer:
        """Return a layer that this backend serves; ``m`` are the rows that it must serve.

        Raises:
            NotDeclaredError: The manifest does not declare such a weight.
            FailureError: It does, and the backend does not serve it.
        """
        request = self.request(weight, dtype=dtype, precision=precision, gradients=gradients, m=m)
        self.require_declared(request)
        config = self.config(
            compute_dtype=dtype, activation_precision=precision, gradients=gradients, compute_path=compute_path
        )
        session = Session(config, registry=self.registry)
        try:
            module = session.linear(weight, bias, m=m)
        except BackendUnavailableError as error:
            own = [reason for item in error.rejections if item.backend == self.name for reason in item.reasons]
            _require_hardware(own)
            raise FailureError(f"declared, then refused: {'; '.join(map(str, own)) or error}") from error
        record = module.diagnostics()
        if record.backend != self.name:
            raise FailureError(f"{record.backend!r} serves, although {self.name!r} was asked for")
        names = sorted({segment.path.name for segment in record.segments if segment.path.interpreted})
        if names and self.device.type != "cpu":  # it says nothing about the device
            raise FailureError(f"on {record.device}, by their own account interpreted: {', '.join(names)}")
        paths = select(request, config, registry=self.registry).path_for
        own_bias = None if bias is None else bias.clone()  # a backend that writes to it can't move its own target
        return BackendLayer(module, weight, own_bias, session, paths, self.ran, self.tried)

    def choose(self, request: Request, compute_path: ComputePath = ComputePath.AUTO) -> Selection:
        """Return which paths of this backend would serve a request; raises as ``select`` does where none would."""
        config = self.config(activation_precision=request.precision, compute_path=compute_path)
        return select(request, config, registry=self.registry)

    def prepare(self, weight: PackedWeight, request: Request, compute_path: ComputePath = ComputePath.AUTO) -> Prepared:
        """Prepare a weight without a session, after the core's own conversions of what the backend does not read."""
        seen = self.choose(request, compute_path)
        source = weight.to(self.device)
        if source.scale_kind is not seen.backend_request.scale_kind:
            source = source.with_plain_scale()
        return self.backend.prepare(source, seen.backend_request, PrepareContext(self.device, paths=seen.segments))
