"""``Reason``: a stable code and a sentence that say why a backend does not serve."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

from q4core.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


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
