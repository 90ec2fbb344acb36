"""What a backend answers: the paths that it offers, or every reason why not."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

from q4core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["KernelPath", "PathKind", "Precision", "Reason", "ReasonCode", "Tier", "Verdict"]


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
