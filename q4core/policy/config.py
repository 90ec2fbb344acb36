"""A user's options: compute path, unified memory, activation precision, and the configuration that holds them.

Precedence, field by field (an unset field asks the next): argument, then context (``with using(config)``), then
environment variable, then default.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import os
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch

from q4core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OptionT = TypeVar("_OptionT", bound=enum.Enum)


class ComputePath(enum.Enum):
    """Which kinds of path may serve."""

    AUTO = "auto"
    """The fastest proven path, of any kind."""
    KERNEL_ONLY = "kernel_only"
    """A kernel path for every M asked for, or ``BackendUnavailableError``."""
    KERNEL_OR_FALLBACK = "kernel_or_fallback"
    """A kernel path, else the reference, with a reason and one warning."""
    DEQUANT_MATMUL_ONLY = "dequant_matmul_only"
    """The reference path, to check logic."""


class UnifiedMemoryPolicy(enum.Enum):
    """Where weights, mutable tensors and activations may live."""

    DISABLED = "disabled"
    """Everything is left as it is."""
    PREFER_UNIFIED = "prefer_unified"
    """Weights and mutable tensors are promoted where a provider can; activations are never copied."""
    REQUIRE_UNIFIED = "require_unified"
    """Everything is promoted, or ``UnifiedMemoryError``."""


class ActivationPrecision(enum.Enum):
    """To what precision a path may round the activations."""

    AUTO = "auto"
    """int16 or exact on CPU, whichever is faster; exact on GPU, and where gradients are asked for."""
    EXACT = "exact"
    """Activations as they come, float32 accumulation."""
    INT16 = "int16"
    """Quantised per block to int16 on the fly (w4i16)."""
    INT8 = "int8"
    """Quantised per block to int8 on the fly (w4a8)."""
    FP4 = "fp4"
    """Quantised to four bits (w4a4)."""


class Rounding(enum.Enum):
    """How a quantiser rounds values to codes."""

    NEAREST = "nearest"
    """To the very bytes of the reference codec."""
    STOCHASTIC = "stochastic"
    """To one of the two neighbours, by chance, so that the mean is the value; a seed fixes the draws. For training."""


def to_option(kind: type[_OptionT], value: object, what: str, name: str) -> _OptionT:
    """Return an option that may be given as text, in any case.

    Raises:
        ConfigError: It is none; in words, ``name`` of ``what``.
    """
    if isinstance(value, kind):
        return value
    text = value.strip().lower().replace("-", "_") if isinstance(value, str) else value
    for member in kind:
        if text in (member, member.value):
            return member
    legal = ", ".join(repr(member.value) for member in kind)
    raise ConfigError(what, name=name, rule=f"one of {legal}", value=value)


def _to_compute_path(value: ComputePath | str | None) -> ComputePath | None:
    return None if value is None else to_option(ComputePath, value, "configuration", "compute_path")


def _to_precision(value: ActivationPrecision | str | None) -> ActivationPrecision | None:
    return None if value is None else to_option(ActivationPrecision, value, "configuration", "activation_precision")


def _to_unified_memory(value: UnifiedMemoryPolicy | str | None) -> UnifiedMemoryPolicy | None:
    return None if value is None else to_option(UnifiedMemoryPolicy, value, "configuration", "unified_memory")


def _to_device(value: str | torch.device | None) -> str | None:
    text = str(value) if isinstance(value, torch.device) else value
    if text is None or text == "auto":
        return text
    with contextlib.suppress(RuntimeError):
        if isinstance(text, str) and torch.device(text).type in {"cpu", "cuda", "meta"}:
            return text
    raise ConfigError("configuration", name="device", rule="'auto', 'cpu', 'cuda' or 'cuda:<index>'", value=value)


def _to_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if value is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise ConfigError("configuration", name="compute_dtype", rule="a floating-point torch dtype", value=value)


@attrs.frozen(kw_only=True, cache_hash=True)
class SessionConfig:
    """What a session asks for; a field left at None asks the context, the environment and the default in turn.

    Args:
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``. Default ``"auto"``: the weight's own device.
        backend: Override by name: obeyed or refused, never replaced.
        compute_path: Default ``ComputePath.AUTO``.
        activation_precision: Default ``ActivationPrecision.AUTO``.
        gradients: Whether gradients to the input will be asked for. Default False.
        unified_memory: Default ``UnifiedMemoryPolicy.DISABLED``.
        compute_dtype: dtype of the activations x. Default: the weight's own dtype where a kernel takes it.
        diagnostics: Whether decisions are sent as events. Default True. Records and counters are always there.

    Raises:
        ConfigError: A value is not legal.
    """

    device: str | None = attrs.field(default=None, converter=_to_device)
    backend: str | None = None
    compute_path: ComputePath | None = attrs.field(default=None, converter=_to_compute_path)
    activation_precision: ActivationPrecision | None = attrs.field(default=None, converter=_to_precision)
    gradients: bool | None = None
    unified_memory: UnifiedMemoryPolicy | None = attrs.field(default=None, converter=_to_unified_memory)
    compute_dtype: torch.dtype | None = attrs.field(default=None, converter=_to_dtype)
    diagnostics: bool | None = None

    def __attrs_post_init__(self) -> None:
        """Check what needs no conversion."""
        if self.backend is not None and not (isinstance(self.backend, str) and self.backend.strip()):
            rule = "the name of a backend or None"
            raise ConfigError("configuration", name="backend", rule=rule, value=self.backend)
        for name in ("gradients", "diagnostics"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ConfigError("configuration", name=name, rule="True, False or None", value=value)

    def over(self, other: SessionConfig) -> SessionConfig:
        """Return this configuration with its unset fields taken from ``other``."""
        names = (field.name for field in attrs.fields(SessionConfig))
        return attrs.evolve(self, **{name: getattr(other, name) for name in names if getattr(self, name) is None})


_EMPTY = SessionConfig()
_DEFAULT = SessionConfig(
    device="auto",
    compute_path=ComputePath.AUTO,
    activation_precision=ActivationPrecision.AUTO,
    gradients=False,
    unified_memory=UnifiedMemoryPolicy.DISABLED,
    diagnostics=True,
)
_ACTIVE: contextvars.ContextVar[SessionConfig] = contextvars.ContextVar("q4core_config", default=_EMPTY)
_VARIABLES = {
    "Q4_DEVICE": "device",
    "Q4_BACKEND": "backend",
    "Q4_COMPUTE_PATH": "compute_path",
    "Q4_PRECISION": "activation_precision",
    "Q4_UNIFIED_MEMORY": "unified_memory",
}
_KEYS = [os.environ.encodekey(name) for name in _VARIABLES]


def _from_environment(values: tuple[str | None, ...]) -> SessionConfig:
    found = SessionConfig()
    for (variable, field), value in zip(_VARIABLES.items(), values, strict=True):
        given: Any = value or None  # empty is unset
        try:
            found = attrs.evolve(found, **{field: given})
        except ConfigError as error:
            what, hint = f"environment variable {variable}", f"Correct or unset {variable}."
            raise ConfigError(what, name=variable, rule=error.rule, value=value, hint=hint) from None
    return found


def resolve_config(
    config: SessionConfig | None = None, *, environment: Mapping[str, str] | None = None
) -> SessionConfig:
    """Fill the unset fields of ``config`` from the context, the environment and the defaults.

    Args:
        config: What the caller asked for; None asks for nothing.
        environment: Taken instead of ``os.environ``.

    Returns:
        A configuration in which only ``backend`` and ``compute_dtype`` may still be None, which asks for nothing.

    Raises:
        ConfigError: ``config`` is something else, or a ``Q4_*`` variable holds a value that is not legal.
    """
    if config is not None and not isinstance(config, SessionConfig):
        raise ConfigError("configuration", name="config", rule="a SessionConfig or None", value=config)
    # Without ``os.environ.get``, which raises and catches a KeyError for each unset variable: 3 µs.
    source: Any = os.environ._data if environment is None else environment  # type: ignore[attr-defined]  # noqa: SLF001
    values = tuple(map(source.get, _KEYS if environment is None else _VARIABLES))
    return _resolve(config or _EMPTY, _ACTIVE.get(), values)


@functools.lru_cache(maxsize=512)  # asked for every selection; merging costs 20 µs
def _resolve(config: SessionConfig, active: SessionConfig, values: tuple[str | bytes | None, ...]) -> SessionConfig:
    texts = tuple(None if value is None else os.fsdecode(value) for value in values)
    return config.over(active).over(_from_environment(texts)).over(_DEFAULT)


@contextlib.contextmanager
def using(config: SessionConfig | Any) -> Iterator[SessionConfig]:
    """Make ``config`` the context's configuration inside the ``with`` block, over any outer one.

    The context is a ``contextvars`` one, so that each task has its own. A new thread has an empty one, before Python
    3.14 and unless ``-X thread_inherit_context`` is on: start it by ``contextvars.copy_context().run``, as
    ``threading.Thread(target=contextvars.copy_context().run, args=(function,))`` does. ``asyncio.to_thread`` does that
    by itself; pools and ``run_in_executor`` do not. Actors have the configuration of their spawner.

    Args:
        config: A ``SessionConfig``, or a ``Session``, whose configuration is taken.

    Raises:
        ConfigError: It is neither.
    """
    wanted = getattr(config, "config", config)
    if not isinstance(wanted, SessionConfig):
        raise ConfigError("q4.using", name="config", rule="a SessionConfig or a Session", value=config)
    merged = wanted.over(_ACTIVE.get())
    token = _ACTIVE.set(merged)
    try:
        yield merged
    finally:
        _ACTIVE.reset(token)
