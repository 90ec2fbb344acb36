"""Shared helpers for tests of interpreted kernels, in this package and in those that build on it."""

from __future__ import annotations

import functools
from typing import Any

from q4_triton_kernels.target import machine_facts
from q4core import BackendError

__all__ = ["IGNORED_WARNINGS", "hasten", "require_interpreter"]

IGNORED_WARNINGS = (
    "ignore:invalid value encountered:RuntimeWarning",  # numpy warns of NaN and infinity, which some cases need
    "ignore:overflow encountered:RuntimeWarning",
)


def require_interpreter() -> None:
    """Fail where the process was started without TRITON_INTERPRET=1: kernels are interpreted or not from import on.

    Raises:
        BackendError: It was.
    """
    if not machine_facts().is_interpreted:
        hint = 'Run these tests by `TRITON_INTERPRET=1 pytest -m "interpreted and not soak" plugins`.'
        raise BackendError("interpreted kernels", name="TRITON_INTERPRET", rule="1", value="unset", hint=hint)


@functools.cache
def hasten() -> None:
    """Let the interpreter patch Triton's language once per nested function, not at each call: four times as fast."""
    from triton.runtime import interpreter  # noqa: PLC0415  # only where kernels are interpreted

    known: set[object] = set()

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.fn not in known:
            known.add(self.fn)
            interpreter._patch_lang(self.fn)  # noqa: SLF001  # it has no public name
        return self.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = call
