"""``Reason``: a stable code and a sentence that say why a backend does not serve."""

from __future__ import annotations

import enum

import attrs

from q4core.errors import ConfigError

__all__ = ["Reason", "ReasonCode", "require"]


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
