"""Backends and providers that stand for one that is judged, with some facts changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from q4core import Reason, ReasonCode, Support

if TYPE_CHECKING:
    from q4core import Backend, Capabilities, Request


class Wrapper:
    """A wrapped object, with other attributes where they are given."""

    def __init__(self, wrapped: Any, **facts: Any) -> None:
        self._wrapped = wrapped
        vars(self).update(facts)

    def __getattr__(self, name: str) -> Any:
        """Leave everything else to whom it wraps."""
        return getattr(self._wrapped, name)


class Proxy(Wrapper):
    """A backend with other facts, or another answer (an exception is raised) to every request."""

    name: str
    api_version: tuple[int, int]
    capabilities: Capabilities

    def __init__(self, backend: Backend, *, verdict: Support | BaseException | None = None, **facts: Any) -> None:
        super().__init__(backend, **facts)
        self._verdict = verdict
        self.checks = 0
        """How often it was asked."""

    def check(self, request: Request) -> Support:
        """Answer as ``verdict`` says, else as the backend does."""
        self.checks += 1
        if isinstance(self._verdict, BaseException):
            raise self._verdict
        answer: Support = self._wrapped.check(request) if self._verdict is None else self._verdict
        return answer


def unavailable(backend: Backend, message: str) -> Proxy:
    """Return the backend as it is where its native part was not built."""
    reason = Reason(ReasonCode.NOT_BUILT, message)
    return Proxy(backend, verdict=Support.no([reason], native_state="missing"))
