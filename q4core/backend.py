"""What a backend is: the contract between the core and whoever computes.

A backend has few duties; the core does everything else (registered op, fake kernel, autograd, flattening of leading
dimensions, ``out=``, M = 0, device guard, current stream, input checks), once, for all. ``docs/backend-api.md`` is the
same contract on one page.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs
import torch

from q4core.errors import ConfigError
from q4core.formats import BlockOrder, Format, ScaleKind
from q4core.policy import ActivationPrecision
from q4core.weight import Feature, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from q4core.packing import Packing

__all__ = [
    "API_VERSION",
    "Backend",
    "Capabilities",
    "Features",
    "KernelPath",
    "PathKind",
    "Precision",
    "PrepareContext",
    "Prepared",
    "Reason",
    "ReasonCode",
    "Request",
    "Tier",
    "Verdict",
]

API_VERSION = (1, 0)
"""Version of this contract. A backend of another major version, or of a newer minor one, is refused."""


class PathKind(enum.Enum):
    """What a path does with the weight."""

    KERNEL = "kernel"
    """Computes from 4-bit data."""
    DEQUANT = "dequant"
    """Materialises the weight, then a library GEMM; legitimate at large M."""
    REFERENCE = "reference"
    """The slow, clear path that the others are compared with."""


class Precision(enum.Enum):
    """Weights by activations, in bits, inside the product."""

    W4A32 = "w4a32"
    W4A16 = "w4a16"
    W4A8 = "w4a8"
    W4A4 = "w4a4"


class Tier(enum.IntEnum):
    """How good a path claims to be; the highest wins, ties by name."""

    REFERENCE = 0
    DEQUANT_GEMM = 10
    GENERIC = 20
    TUNED = 30
    NATIVE = 40


class ReasonCode(enum.Enum):
    """Why a backend does not serve, in a form that never changes."""

    DEVICE = "device"
    FORMAT = "format"
    DTYPE = "dtype"
    SHAPE = "shape"
    ALIGNMENT = "alignment"
    ARCH = "arch"
    NOT_BUILT = "not_built"
    DRIVER = "driver"
    LIBRARY = "library"
    TOOLCHAIN = "toolchain"
    FEATURE = "feature"
    PROBE_FAILED = "probe_failed"
    POLICY = "policy"
    PLUGIN_ERROR = "plugin_error"
    API_VERSION = "api_version"
    OUTRANKED = "outranked"
    """It could serve; another one is better or was asked for."""

    @property
    def domain(self) -> str:
        """``hardware``, ``build``, ``scheme`` or ``policy``: a choice must never read as a fault of the machine."""
        return _DOMAINS[self]


_DOMAINS = {
    ReasonCode.DEVICE: "hardware",
    ReasonCode.ARCH: "hardware",
    ReasonCode.DRIVER: "hardware",
    ReasonCode.NOT_BUILT: "build",
    ReasonCode.LIBRARY: "build",
    ReasonCode.TOOLCHAIN: "build",
    ReasonCode.PLUGIN_ERROR: "build",
    ReasonCode.API_VERSION: "build",
    ReasonCode.PROBE_FAILED: "build",
    ReasonCode.FORMAT: "scheme",
    ReasonCode.DTYPE: "scheme",
    ReasonCode.SHAPE: "scheme",
    ReasonCode.ALIGNMENT: "scheme",
    ReasonCode.FEATURE: "scheme",
    ReasonCode.POLICY: "policy",
    ReasonCode.OUTRANKED: "policy",
}


@attrs.frozen
class Reason:
    """One reason why not: a stable code, and a sentence for people."""

    code: ReasonCode
    message: str

    def __str__(self) -> str:
        """Return ``code: message``."""
        return f"{self.code.value}: {self.message}"


@attrs.frozen
class KernelPath:
    """One way of computing, over a range of M (rows of x).

    Args:
        name: Stable name, unique within the backend, such as ``"gemv_w4a8_avx2"``.
        m: (lowest, highest) number of rows, both included; None for no upper end.
        kind: What it does with the weight.
        precision: Weights by activations.
        tier: How good it claims to be; see ``Tier``.
        codebook: The values that the path really uses, where it approximates the format's codebook by a table (NF4 in
            int8, say). The probe and the kit judge the path against it, and it once against the format.

    Raises:
        ConfigError: The range is empty or starts below 1.
    """

    name: str
    m: tuple[int, int | None]
    kind: PathKind
    precision: Precision
    tier: int
    codebook: tuple[float, ...] | None = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        """Check the range."""
        low, high = self.m
        if low < 1 or (high is not None and high < low):
            raise ConfigError(f"path {self.name!r}", name="m", rule="(low >= 1, high >= low or None)", value=self.m)

    def covers(self, rows: int) -> bool:
        """Return whether the path may run with that many rows."""
        low, high = self.m
        return low <= rows and (high is None or rows <= high)

    def __str__(self) -> str:
        """Return name, M range, kind and precision."""
        low, high = self.m
        return f"{self.name} (M {low}…{'∞' if high is None else high}, {self.kind.value}, {self.precision.value})"


def _paths(items: Iterable[KernelPath]) -> tuple[KernelPath, ...]:
    return tuple(items)


def _reasons(items: Iterable[Reason]) -> tuple[Reason, ...]:
    return tuple(items)


@attrs.frozen
class Verdict:
    """A backend's answer to a request: the paths that it offers, or every reason why not.

    Args:
        native_state: What is loaded, built or missing, in a few words, such as ``"loaded (avx2)"``.
        paths: The offered paths; empty when refused.
        reasons: *All* the reasons why not; empty when paths are offered.

    Raises:
        ConfigError: Both or neither are given.
    """

    native_state: str
    paths: tuple[KernelPath, ...] = attrs.field(default=(), converter=_paths)
    reasons: tuple[Reason, ...] = attrs.field(default=(), converter=_reasons)

    def __attrs_post_init__(self) -> None:
        """Check that exactly one of paths and reasons is there."""
        if bool(self.paths) == bool(self.reasons):
            raise ConfigError("verdict", name="paths, reasons", rule="given as exactly one of the two", value=self)

    @classmethod
    def offer(cls, paths: Iterable[KernelPath], *, native_state: str) -> Verdict:
        """Return a verdict that offers paths."""
        return cls(native_state, tuple(paths))

    @classmethod
    def refuse(cls, reasons: Iterable[Reason], *, native_state: str) -> Verdict:
        """Return a verdict that gives every reason why not."""
        return cls(native_state, (), tuple(reasons))


Features = frozenset[Feature]


@attrs.frozen(kw_only=True, cache_hash=True)
class Request:
    """Everything that a backend may decide on: facts of the weight, the call and the machine's device.

    Args:
        op: ``"linear"`` or ``"quantize"``.
        format: The weight's format.
        scale_kind: How its scales are stored.
        packing: Its nibble order.
        blocks: Along what its blocks run.
        block_size: In-features per scale.
        scale_dtype: dtype of the stored scales.
        features: What it needs beyond the plain formula.
        out_features: N.
        in_features: K.
        device: Where x and the prepared weight live.
        dtype: dtype of x (float32, bfloat16, float16).
        out_dtype: dtype of y.
        precision: To what precision activations may be rounded; AUTO is resolved by the backend.
        gradients: Whether gradients to the input will be asked for.
        m: (lowest, highest) rows of x that must be served; None for no upper end.
    """

    op: str = "linear"
    format: Format
    scale_kind: ScaleKind
    packing: Packing
    blocks: BlockOrder = BlockOrder.ROW
    block_size: int
    scale_dtype: torch.dtype = torch.float32
    features: Features = frozenset()
    out_features: int
    in_features: int
    device: torch.device = attrs.field(default=torch.device("cpu"), converter=torch.device)
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = attrs.field(default=attrs.Factory(lambda self: self.dtype, takes_self=True))
    precision: ActivationPrecision = ActivationPrecision.AUTO
    gradients: bool = False
    m: tuple[int, int | None] = (1, None)

    def __attrs_post_init__(self) -> None:
        """Check op and M range."""
        low, high = self.m
        if low < 1 or (high is not None and high < low):
            raise ConfigError("request", name="m", rule="(low >= 1, high >= low or None)", value=self.m)
        if self.op not in {"linear", "quantize"}:
            raise ConfigError("request", name="op", rule="'linear' or 'quantize'", value=self.op)

    @classmethod
    def for_weight(  # noqa: PLR0913  # one argument per fact that the weight does not know
        cls,
        weight: PackedWeight,
        *,
        m: tuple[int, int | None] = (1, None),
        dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        precision: ActivationPrecision = ActivationPrecision.AUTO,
        gradients: bool = False,
    ) -> Request:
        """Return the request that a linear layer over ``weight`` makes.

        Args:
            weight: The weight.
            m: Rows of x to serve.
            dtype: dtype of x; the weight's own unless told.
            out_dtype: dtype of y; that of x unless told.
            device: Where to compute; the weight's own device unless told.
            precision: To what precision activations may be rounded.
            gradients: Whether gradients to the input will be asked for.
        """
        x_dtype = dtype or weight.dtype
        return cls(
            format=weight.format,
            scale_kind=weight.scale_kind,
            packing=weight.packing,
            blocks=weight.blocks,
            block_size=weight.block_size,
            scale_dtype=weight.scale.dtype,
            features=weight.features,
            out_features=weight.out_features,
            in_features=weight.in_features,
            device=device if device is not None else weight.device,
            dtype=x_dtype,
            out_dtype=out_dtype or x_dtype,
            precision=precision,
            gradients=gradients,
            m=m,
        )

    @property
    def needs(self) -> Features:
        """The features that must be declared: the weight's, and GRADIENTS where asked for."""
        return self.features | {Feature.GRADIENTS} if self.gradients else self.features

    def serves(self, rows: int) -> bool:
        """Return whether ``rows`` lies in the range of M that was asked for."""
        low, high = self.m
        return low <= rows <= (math.inf if high is None else high)


def _texts(items: Iterable[str]) -> frozenset[str]:
    return frozenset(items)


def _scale_kinds(items: Iterable[ScaleKind]) -> frozenset[ScaleKind]:
    return frozenset(items)


def _packings(items: Iterable[Packing]) -> frozenset[Packing]:
    return frozenset(items)


def _dtypes(items: Iterable[torch.dtype]) -> frozenset[torch.dtype]:
    return frozenset(items)


def _precisions(items: Iterable[Precision]) -> frozenset[Precision]:
    return frozenset(items)


def _features(items: Iterable[Feature]) -> Features:
    return frozenset(items)


@attrs.frozen(kw_only=True)
class Capabilities:
    """A backend's manifest: static, declared, certified by the kit. What is not declared is refused by the core.

    Args:
        formats: Names of the formats that it serves.
        scale_kinds: Scale kinds that it reads; the core resolves others to PLAIN float32 first, if that is declared.
        packings: Packings that ``prepare`` reads; a weight in another one is repacked by the core into the lowest
            declared one (by name) that fits. Empty means every packing.
        devices: Device types (``"cpu"``, ``"cuda"``).
        dtypes: dtypes of x.
        out_dtypes: dtypes of y; those of x unless told.
        precisions: Precisions of its paths.
        features: Features that it serves.
        ops: ``"linear"``, ``"quantize"``.
    """

    formats: frozenset[str] = attrs.field(converter=_texts)
    scale_kinds: frozenset[ScaleKind] = attrs.field(converter=_scale_kinds)
    packings: frozenset[Packing] = attrs.field(default=frozenset(), converter=_packings)
    devices: frozenset[str] = attrs.field(converter=_texts)
    dtypes: frozenset[torch.dtype] = attrs.field(converter=_dtypes)
    out_dtypes: frozenset[torch.dtype] = attrs.field(
        default=attrs.Factory(lambda self: self.dtypes, takes_self=True), converter=_dtypes
    )
    precisions: frozenset[Precision] = attrs.field(converter=_precisions)
    features: Features = attrs.field(default=frozenset(), converter=_features)
    ops: frozenset[str] = attrs.field(default=frozenset({"linear"}), converter=_texts)

    def refusals(self, request: Request) -> tuple[Reason, ...]:
        """Return every reason for which the manifest alone refuses a request; the core's default deny."""
        reasons: list[Reason] = []

        def need(condition: bool, code: ReasonCode, message: str) -> None:  # noqa: FBT001  # reads as a sentence
            if not condition:
                reasons.append(Reason(code, f"{message} is not declared"))

        need(request.op in self.ops, ReasonCode.FEATURE, f"op {request.op!r}")
        need(request.format.name in self.formats, ReasonCode.FORMAT, f"format {request.format.name!r}")
        readable = request.scale_kind in self.scale_kinds or ScaleKind.PLAIN in self.scale_kinds
        need(readable, ReasonCode.FORMAT, f"scale kind {request.scale_kind.value!r}")
        need(request.device.type in self.devices, ReasonCode.DEVICE, f"device {request.device.type!r}")
        need(request.dtype in self.dtypes, ReasonCode.DTYPE, f"dtype {request.dtype} of x")
        need(request.out_dtype in self.out_dtypes, ReasonCode.DTYPE, f"dtype {request.out_dtype} of y")
        for feature in sorted(request.needs - self.features, key=lambda item: item.value):
            need(condition=False, code=ReasonCode.FEATURE, message=f"feature {feature.value!r}")
        return tuple(reasons)


def _tensors(items: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(items)


@attrs.frozen
class Prepared:
    """A weight in a backend's own layout.

    Args:
        tensors: A fixed tuple of tensors.
        meta: Hashable description of the layout only (no names, no handles, nothing that differs between layers of
            one shape), so that equal layers share one compiled graph. Its ``repr`` must be stable across processes.
    """

    tensors: tuple[torch.Tensor, ...] = attrs.field(converter=_tensors)
    meta: Hashable = None

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


def _plain_empty(device: torch.device) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
    return lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)


@attrs.frozen
class PrepareContext:
    """Where ``prepare`` puts things.

    Args:
        device: Device of the prepared tensors.
        stream: The current CUDA stream, or None on CPU.
        empty: ``empty(shape, dtype)`` allocates on the device; what comes from it may be managed memory and is written
            once, in place.
    """

    device: torch.device = attrs.field(converter=torch.device)
    stream: object | None = None
    empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] = attrs.field(
        default=attrs.Factory(lambda self: _plain_empty(self.device), takes_self=True)
    )


@runtime_checkable
class Backend(Protocol):
    """One class with few duties.

    Optional methods: ``quantize(dense, request) -> PackedWeight`` (declare op ``"quantize"``) and
    ``export(prepared, rows=None) -> PackedWeight``, the inverse of ``prepare``, whole or for the rows of an int64
    index tensor. A backend without ``export`` keeps its source alive.
    """

    name: str
    api_version: tuple[int, int]
    capabilities: Capabilities

    def check(self, request: Request) -> Verdict:
        """Answer a request that the manifest allows. No side effects; may not raise."""
        ...

    def prepare(self, weight: PackedWeight, request: Request, context: PrepareContext) -> Prepared:
        """Do everything slow (repack, compile, tune). Never called inside a trace or a capture."""
        ...

    def linear(
        self,
        prepared: Prepared,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        path: str,
    ) -> None:
        """Write ``x @ wᵀ + bias`` to ``out``.

        Args:
            prepared: What ``prepare`` gave.
            x: [M, K], contiguous rows (stride 1 along K, any row stride), M ≥ 1 within the path's range.
            out: [M, N] of the request's out_dtype, contiguous rows; written completely, never read.
            bias: [N] of the out_dtype, or None.
            path: Name of one of the offered paths.
        """
        ...
