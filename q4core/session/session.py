"""``Session``: a policy plus the layers prepared under it; ``linear`` and ``select`` for the simple things."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.backend import Request
from q4core.diagnostics.events import bound
from q4core.errors import ConfigError, InputError, LifecycleError, counted
from q4core.extension import records_of
from q4core.formats import FLOATS
from q4core.layers.diagnosis import Report
from q4core.layers.linear import Q4Linear, require_weight
from q4core.ops.imports import export_weight, import_weight
from q4core.plugins.registry import Registry, default_registry
from q4core.policy.config import SessionConfig, resolve_config
from q4core.selection.cache import apply_config, select_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from q4core.selection.result import Selection
    from q4core.weight import PackedWeight

_numbers = itertools.count(1)


class Session:
    """A policy, and the lifetime of what was prepared under it.

    ``close()`` (or leaving ``with``) gives every byte back and makes later use of its layers a ``LifecycleError``;
    without it, prepared weights live as long as the layers that use them. Sessions share no mutable state.

    Args:
        config: What to ask for; unset fields ask the context, the environment and the default, when a layer is made.
        registry: The plugins to choose among. Defaults to the process's.
        name: For logs. Defaults to ``session-1`` and so on.

    Raises:
        ConfigError: The configuration, or a ``Q4_*`` variable, is not legal.
    """

    def __init__(
        self, config: SessionConfig | None = None, *, registry: Registry | None = None, name: str | None = None
    ) -> None:
        self.config = config or SessionConfig()
        """What was asked for; unset fields are resolved whenever a layer is made."""
        resolve_config(self.config)  # what is not legal is rejected here, not at the first layer
        self.name = name or f"session-{next(_numbers)}"
        self._registry = registry
        self._layers: weakref.WeakValueDictionary[int, Q4Linear] = weakref.WeakValueDictionary()
        self._by_weight: weakref.WeakKeyDictionary[PackedWeight, dict[Any, Q4Linear]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def registry(self) -> Registry:
        """The plugins that the session chooses among."""
        return self._registry or default_registry()

    def _require_open(self) -> None:
        if self._closed:
            raise LifecycleError("session is closed", hint="Make a new session.")

    def linear(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        name: str | None = None,
        m: tuple[int, int | None] = (1, None),
    ) -> Q4Linear:
        """Return a layer over ``weight``, prepared and proven.

        Args:
            weight: The packed weight; once prepared, the layer holds no reference to it.
            bias: [N] or None.
            name: For messages and reports. Defaults to the weight's own.
            m: Rows of x that must be served: (lowest, highest), None for no upper end.

        Raises:
            LifecycleError: The session is closed.
            InputError: ``weight`` is no ``PackedWeight``, or the bias does not fit.
            BackendUnavailableError, PolicyConflictError, UnknownBackendError, WeightError, UnifiedMemoryError: See
                ``prepare_weight``.
        """
        self._require_open()
        require_weight("session.linear", weight)
        return self._layer(weight, bias, config=self.config, name=name, m=m)

    def _layer(self, weight: PackedWeight, bias: torch.Tensor | None = None, **options: Any) -> Q4Linear:
        """Return a new layer."""
        with bound(session=self.name):
            layer = Q4Linear(weight, bias, registry=self._registry, **options)
        return self._own(layer)

    def _own(self, layer: Q4Linear) -> Q4Linear:
        """Return the layer as the session's; one that is ready only after the session was closed is closed, too."""
        layer.session_name = self.name
        with self._lock:  # close() takes the layers under the same lock: none slips in behind it
            if not self._closed:
                self._layers[id(layer)] = layer
        if self._closed:
            layer.close()
        self._require_open()
        return layer

    def apply(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x @ wᵀ + bias`` through a layer that is cached as long as ``weight`` lives.

        Raises:
            As ``linear``, and as ``Q4Linear.forward``.
        """
        self._require_open()
        require_weight("q4.linear", weight)
        if not isinstance(x, torch.Tensor):
            raise InputError("q4.linear", name="x", rule="a tensor", value=type(x).__name__)
        if x.dtype not in FLOATS:
            rule, hint = f"of {', '.join(map(str, FLOATS))}", "Use x.to(torch.float32)."
            raise InputError("q4.linear", name="x", rule=rule, value=x.dtype, hint=hint)
        config = resolve_config(self.config)
        key = (x.dtype, x.device, config)
        with self._lock:
            layer = self._by_weight.get(weight, {}).get(key)
        if layer is None:
            device = str(x.device) if config.device == "auto" else config.device
            layer = self._layer(weight, config=attrs.evolve(config, compute_dtype=x.dtype, device=device))
            with self._lock:
                layer = self._by_weight.setdefault(weight, {}).setdefault(key, layer)
        y: torch.Tensor = layer(x) if bias is None else layer.with_bias(x, bias)
        return y

    def layers(self) -> list[Q4Linear]:
        """Return the living layers, in the order in which they were made."""
        with self._lock:
            return list(self._layers.values())

    def report(self) -> Report:
        """Return what ran for which M, and why not the others, layer by layer."""
        self._require_open()
        layers = [layer for layer in self.layers() if layer.is_prepared]
        return Report(tuple(layer.diagnostics() for layer in layers), records_of(layers))

    def close(self) -> None:
        """Give every prepared byte back; closing twice is allowed."""
        with self._lock:
            self._closed = True
            layers = list(self._layers.values())
            self._by_weight.clear()
            self._layers.clear()
        for layer in layers:
            layer.close()

    def __enter__(self) -> Self:
        """Return the session."""
        self._require_open()
        return self

    def __exit__(self, *error: object) -> None:
        """Close the session."""
        self.close()

    def __repr__(self) -> str:
        """Return state and number of layers."""
        return f"Session({'closed' if self._closed else 'open'}, {counted(len(self.layers()), 'layer')}, {self.config})"


_default: Session | None = None
_default_lock = threading.Lock()


def default_session() -> Session:
    """Return the process's default session, made on first use; a closed one is replaced."""
    global _default  # noqa: PLW0603  # one per process
    with _default_lock:
        if _default is None or _default._closed:  # noqa: SLF001  # own class
            _default = Session()
        return _default


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ wᵀ + bias`` in the default session, which caches the prepared weight as long as ``weight`` lives.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: The packed weight [N, K].
        bias: [N] or None.

    Returns:
        [..., N] of x's dtype.

    Raises:
        InputError: x does not fit the weight.
        BackendUnavailableError, PolicyConflictError, UnknownBackendError, WeightError: Nothing may serve.
    """
    return default_session().apply(x, weight, bias)


def select(request: Request, config: SessionConfig | None = None, *, registry: Registry | None = None) -> Selection:
    """Return which backend and paths would serve a request, and why not the others; nothing is prepared.

    Args:
        request: What is asked; see ``Request.for_weight``.
        config: Options; unset fields ask the context, the environment and the default. Its device, precision and
            gradients join the request, as they would for a layer.
        registry: The plugins to choose among. Defaults to the process's.

    Raises:
        ConfigError: ``request`` is no ``Request``, or its device is not there.
        PolicyConflictError: Request and configuration contradict each other, or an override and its policy do.
        UnknownBackendError, BackendUnavailableError: See ``select_backend``.
    """
    if not isinstance(request, Request):
        raise ConfigError(
            "q4.select",
            name="request",
            rule="a Request",
            value=type(request).__name__,
            hint="Use q4.Request.for_weight(weight).",
        )
    resolved = resolve_config(config)
    return select_for(apply_config(request, resolved), resolved, registry or default_registry())


def export_prepared(layer: Q4Linear) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """Return a prepared layer, without its bias, as what ``adopt_prepared`` takes in this process or another one.

    Args:
        layer: A prepared layer.

    Returns:
        What JSON holds of it, and the backend's tensors: the layer's own memory, contiguous, not to be written to.

    Raises:
        LifecycleError: The layer is closed or waits for its weight, its backend lacks ``describe``, ``meta_from`` or
            ``export``, or its tensors are not contiguous (views of a mapped file).
    """
    return export_weight(layer._require_ready(), layer.name)  # noqa: SLF001  # of the core


def adopt_prepared(
    header: Mapping[str, Any],
    tensors: Sequence[torch.Tensor],
    session: Session | None = None,
    *,
    bias: torch.Tensor | None = None,
    name: str | None = None,
) -> Q4Linear:
    """Return a layer over tensors that another process prepared, as they are: nothing is copied or prepared.

    It is selected as any weight is, and reused only where the same backend runs it by the same paths and layout.
    The first of its kind in this process is probed on its own values. Their meaning is the caller's to vouch for:
    tensors that hold other bytes than were exported give other numbers.

    Args:
        header: From ``export_prepared``, possibly by way of JSON.
        tensors: The tensors, of the same dtypes and shapes, contiguous and aligned to 64 bytes; never written to, so
            they may be a mapped file or shared memory. On another device than the session's they are copied there.
        session: Whose layer it becomes. Defaults to the default session.
        bias: [N] or None.
        name: For messages and reports. Defaults to the header's name.

    Raises:
        LifecycleError: The session is closed, or asks for something else than was prepared; the header is malformed, of
            another version, or of a backend, layout or instruction set that does not serve here; or the numbers are
            wrong. Prepare the layer from its weight then.
        InputError: The bias does not fit.
    """
    owner = default_session() if session is None else session
    owner._require_open()  # noqa: SLF001  # same module
    config = resolve_config(owner.config)
    with bound(session=owner.name):
        weight = import_weight(header, tensors, config, owner.registry)
        layer = Q4Linear.of_prepared(weight, bias, registry=owner._registry, name=name)  # noqa: SLF001  # same module
    return owner._own(layer)  # noqa: SLF001  # same module


def explain(what: torch.nn.Module | Session) -> Report:
    """Return the report of every prepared ``Q4Linear`` in a module, or of a session.

    Args:
        what: A module (a ``Q4Linear`` itself, too) or a ``Session``.

    Raises:
        InputError: It is neither.
    """
    if isinstance(what, Session):
        return what.report()
    if not isinstance(what, torch.nn.Module):
        raise InputError("q4.explain", name="what", rule="an nn.Module or a Session", value=type(what).__name__)
    layers = [(name, item) for name, item in what.named_modules() if isinstance(item, Q4Linear) and item.is_prepared]
    records = tuple(attrs.evolve(item.diagnostics(), layer=name or item.name) for name, item in layers)
    return Report(records, records_of(item for _, item in layers))
