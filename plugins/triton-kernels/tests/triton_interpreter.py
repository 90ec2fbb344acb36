"""What tests in Triton's interpreter share."""

from __future__ import annotations

import functools
import os
from typing import Any

__all__ = ["IGNORED_WARNINGS", "hasten", "require_interpreter"]

IGNORED_WARNINGS = (
    "ignore:invalid value encountered:RuntimeWarning",  # numpy's word on NaN and infinity, which some cases want
    "ignore:overflow encountered:RuntimeWarning",
)


def require_interpreter() -> None:
    """Fail where the process was started without TRITON_INTERPRET=1: kernels are interpreted or not from import on."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "run these by `TRITON_INTERPRET=1 pytest -m interpreted plugins`"


@functools.cache
def hasten() -> None:
    """Let the interpreter patch Triton's language once per nested function, not at each call: four times as fast."""
    from triton.runtime import interpreter  # noqa: PLC0415  # only where kernels are interpreted

    known: set[object] = set()

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.fn not in known:
            known.add(self.fn)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = call
