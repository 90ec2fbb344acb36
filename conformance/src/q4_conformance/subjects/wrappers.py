"""Backends that stand for one that is judged, with one fact changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4core import Reason, ReasonCode, Support

if TYPE_CHECKING:
    from q4core import Backend, Capabilities, Request


class Proxy:
    """A backend with another manifest, or another answer (an exception is raised) to every request."""

    def __init__(
        self,
        backend: Backend,
        *,
        capabilities: Capabilities | None = None,
        verdict: Support | BaseException | None = None,
    ) -> None:
        self._backend = backend
        self._verdict = verdict
        self.name = backend.name
        self.api_version = backend.api_version
        self.capabilities = capabilities or backend.capabilities
        self.checks = 0
        """How often it was asked."""

    def check(self, request: Request) -> Support:
        """Answer as told, else as the backend does."""
        self.checks += 1
        if isinstance(self._verdict, BaseException):
            raise self._verdict
        return self._backend.check(request) if self._verdict is None else self._verdict

    def __getattr__(self, name: str) -> Any:
        """Leave everything else to the backend."""
        return getattr(self._backend, name)


def unavailable(backend: Backend, message: str) -> Proxy:
    """Return the backend as it is where its native part was not built."""
    reason = Reason(ReasonCode.NOT_BUILT, message)
    return Proxy(backend, verdict=Support.no([reason], native_state="missing"))


def broken(backend: Backend, message: str) -> Proxy:
    """Return the backend as it is where its ``check`` raises."""
    return Proxy(backend, verdict=RuntimeError(message))


def leaving(backend: Backend, message: str) -> Proxy:
    """Return the backend as it is where its ``check`` exits, which must not end the process."""
    return Proxy(backend, verdict=SystemExit(message))
