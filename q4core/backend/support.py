"""A backend's answers: the paths that it offers, or every reason why not, each a stable code and a sentence."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from q4core.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

ROW_RANGE = "(low >= 1, high >= low or None)"
"""What ``is_row_range`` asks, for messages."""
_MOST_PROBE_ROWS = 8
_LARGEST_PROBE = 4096
"""What is probed is computed in float64 on the CPU as well."""


class ReasonCode(enum.Enum):
    """Why a backend does not serve, in a form that never changes.

    Each has a ``domain``, ``hardware``, ``build``, ``scheme`` or ``policy``: a choice must never read as a fault of the
    machine.
    """

    _value_: str
    domain: str

    DEVICE = "device", "hardware"
    FORMAT = "format", "scheme"
    DTYPE = "dtype", "scheme"
    SHAPE = "shape", "scheme"
    ALIGNMENT = "alignment", "scheme"
    ARCH = "arch", "hardware"
    NOT_BUILT = "not_built", "build"
    DRIVER = "driver", "hardware"
    LIBRARY = "library", "build"
    TOOLCHAIN = "toolchain", "build"
    FEATURE = "feature", "scheme"
    PROBE_FAILED = "probe_failed", "build"
    POLICY = "policy", "policy"
    PLUGIN_ERROR = "plugin_error", "build"
    API_VERSION = "api_version", "build"
    OUTRANKED = "outranked", "policy"
    """It could serve; another one is better or was asked for."""

    def __new__(cls, value: str, domain: str) -> Self:
        """Return the member; its domain is no part of its value."""
        member = object.__new__(cls)
        member._value_, member.domain = value, domain
        return member


def require(condition: bool, what: str, name: str, rule: str, value: object) -> None:  # noqa: FBT001  # reads as a sentence
    """Raise ``ConfigError`` where a value of a plugin's is not legal."""
    if not condition:
        raise ConfigError(what, name=name, rule=rule, value=value)


@attrs.frozen
class Reason:
    """One reason why not: a stable code, and a sentence for people."""

    code: ReasonCode
    message: str

    def __attrs_post_init__(self) -> None:
        """Check the types, because a plugin makes this."""
        require(isinstance(self.code, ReasonCode), "reason", "code", "a ReasonCode", self.code)
        require(isinstance(self.message, str) and bool(self.message), "reason", "message", "a sentence", self.message)

    def __str__(self) -> str:
        """Return ``code: message``."""
        return f"{self.code.value}: {self.message}"


class PathKind(enum.Enum):
    """What a path does with the weight."""

    KERNEL = "kernel"
    """Computes from 4-bit data."""
    DEQUANT = "dequant"
    """Materialises the weight, then a library GEMM; legitimate at large M."""
    REFERENCE = "reference"
    """The slow, clear path that the others are compared with."""
    QUANTIZE = "quantize"
    """Writes 4-bit data; see ``KernelPath.quantizer``."""


class Precision(enum.Enum):
    """Weights by activations, in bits, inside the product."""

    W4A32 = "w4a32"
    W4A16 = "w4a16"
    W4A8 = "w4a8"
    W4A4 = "w4a4"
    W4I16 = "w4i16"
    """Activations rounded to whole numbers up to 16383 at least, each 32 in-features with a scale of their own."""

    @property
    def is_exact(self) -> bool:
        """Whether activations are multiplied as they come, not quantised first."""
        return self in {Precision.W4A32, Precision.W4A16}


class Tier(enum.IntEnum):
    """How good a path claims to be; the highest wins, ties by name."""

    REFERENCE = 0
    DEQUANT_GEMM = 10
    GENERIC = 20
    TUNED = 30


def is_row_range(m: object) -> bool:
    """Return whether ``m`` is (lowest, highest or None) of at least one row."""
    match m:
        case (int(low), int() | None as high):
            return low >= 1 and (high is None or low <= high)
        case _:
            return False


def _sorted_rows(rows: object) -> object:
    """Return whole numbers as a rising tuple, and anything else as it is, for the check to refuse."""
    given = tuple(rows) if isinstance(rows, Iterable) else rows
    return tuple(sorted(given)) if isinstance(given, tuple) and all(type(item) is int for item in given) else given


@attrs.frozen
class KernelPath:
    """One way of computing, over a range of M (rows of x).

    Args:
        name: Stable name, unique within the backend, such as ``"gemv_w4a8_avx2"``.
        m: (lowest, highest) number of rows, both included; None for no upper end.
        kind: What it does with the weight.
        precision: Weights by activations.
        tier: How good it claims to be; see ``Tier``.
        codebook: The values that a w4i16, w4a8 or w4a4 path really uses, where it approximates the format's codebook by
            a table (NF4 in int8, say). The probe and the kit judge the path against it, and the core judges it against
            the format: at most 1/126 of the largest value away, half a step of a table of ±63; w4i16 1/16382, half a
            step of one of ±8191.
        interpreted: Whether an interpreter computes in the hardware's place, which says nothing about the hardware.
        probe_rows: At most 8 further numbers of rows, inside ``m`` and up to 4096, that the self-probe runs besides the
            ends of the range: one for each launch configuration, because each is other code.
        variant: What the path's code depends on beyond what a proof tells apart (the weight's layout and dtypes, the
            call's dtypes, the device, N modulo 32 and K modulo 256), in any words: a proof holds for one variant.

    Raises:
        ConfigError: A value is not legal.
    """

    name: str
    m: tuple[int, int | None]
    kind: PathKind
    precision: Precision
    tier: int
    codebook: tuple[float, ...] | None = attrs.field(default=None, repr=False)
    interpreted: bool = attrs.field(default=False, kw_only=True)
    probe_rows: tuple[int, ...] = attrs.field(default=(), kw_only=True, converter=_sorted_rows)
    variant: str = attrs.field(default="", kw_only=True, repr=False)

    def __attrs_post_init__(self) -> None:
        """Check every value, because a plugin makes this."""
        what = f"path {self.name!r}"
        require(isinstance(self.name, str) and bool(self.name), what, "name", "a name", self.name)
        require(is_row_range(self.m), what, "m", ROW_RANGE, self.m)
        require(isinstance(self.kind, PathKind), what, "kind", "a PathKind", self.kind)
        require(isinstance(self.precision, Precision), what, "precision", "a Precision", self.precision)
        is_finite = isinstance(self.tier, (int, float)) and math.isfinite(self.tier)
        require(is_finite, what, "tier", "a number", self.tier)
        require(isinstance(self.interpreted, bool), what, "interpreted", "True or False", self.interpreted)
        if self.codebook is not None:
            rounded = not self.precision.is_exact
            require(rounded, what, "codebook", "None for a path of exact weights", self.precision.value)
            numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in self.codebook)
            require(numbers, what, "codebook", "of finite numbers", self.codebook)
        rows: object = self.probe_rows
        is_legal = (
            isinstance(rows, tuple)
            and all(type(item) is int and item <= _LARGEST_PROBE and self.covers(item) for item in rows)
            and len(set(rows)) == len(rows) <= _MOST_PROBE_ROWS
        )
        rule = f"at most {_MOST_PROBE_ROWS} different whole numbers inside m and up to {_LARGEST_PROBE}"
        require(is_legal, what, "probe_rows", rule, rows)
        require(isinstance(self.variant, str), what, "variant", "a text", self.variant)

    @property
    def facts(self) -> str:
        """Kind and precision, and that it is interpreted, in words."""
        return f"{self.kind.value}, {self.precision.value}{', interpreted' if self.interpreted else ''}"

    def covers(self, rows: int) -> bool:
        """Return whether the path may run with a number of rows."""
        low, high = self.m
        return low <= rows and (high is None or rows <= high)

    @classmethod
    def quantizer(cls, name: str, *, tier: int = Tier.GENERIC, interpreted: bool = False) -> KernelPath:
        """Return a path of kind QUANTIZE: its range of M is every one, and its precision means nothing."""
        return cls(name, (1, None), PathKind.QUANTIZE, Precision.W4A32, tier, interpreted=interpreted)

    def __str__(self) -> str:
        """Return name, M range and facts."""
        low, high = self.m
        return f"{self.name} (M {low}…{'∞' if high is None else high}, {self.facts})"


@attrs.frozen
class Segment:
    """A range of M, both ends included (None: no upper end), and the path that serves it."""

    low: int
    high: int | None
    path: KernelPath

    @property
    def m(self) -> tuple[int, int | None]:
        """The range, as a path or a request has it."""
        return self.low, self.high


def _tuple(items: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(items)  # whose types are checked afterwards


@attrs.frozen
class Support:
    """A backend's answer to a request: the paths that it offers, or every reason why not.

    Args:
        native_state: What is loaded, built or missing, in a few words, such as ``"loaded (avx2)"``; where a kernel of
            the backend is not among the paths, also why.
        paths: The offered paths; empty when refused.
        reasons: *All* the reasons why not; empty when paths are offered.

    Raises:
        ConfigError: Both or neither are given, or a value is not legal.
    """

    native_state: str
    paths: tuple[KernelPath, ...] = attrs.field(default=(), converter=_tuple)
    reasons: tuple[Reason, ...] = attrs.field(default=(), converter=_tuple)

    def __attrs_post_init__(self) -> None:
        """Check the types, and that exactly one of paths and reasons is there."""
        require(isinstance(self.native_state, str), "support", "native_state", "a text", self.native_state)
        for name, kind in (("paths", KernelPath), ("reasons", Reason)):
            items = getattr(self, name)
            require(all(isinstance(item, kind) for item in items), "support", name, f"of {kind.__name__}", items)
        if bool(self.paths) == bool(self.reasons):
            raise ConfigError("support", name="paths, reasons", rule="given as exactly one of the two", value=self)

    @classmethod
    def yes(cls, paths: Iterable[KernelPath], *, native_state: str) -> Support:
        """Return an answer that offers paths."""
        return cls(native_state, paths)

    @classmethod
    def no(cls, reasons: Iterable[Reason], *, native_state: str) -> Support:
        """Return an answer that gives every reason why not."""
        return cls(native_state, (), tuple(reasons))
