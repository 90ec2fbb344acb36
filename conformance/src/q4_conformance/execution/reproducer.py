"""What to type to run one case again."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import attrs

from q4_conformance.subjects.temporary_plugin import is_installed
from q4core import default_registry, dialects

if TYPE_CHECKING:
    from collections.abc import Iterable

    from q4_conformance.contract.case import Case
    from q4_conformance.outcome import CaseResult

_PROFILES = {"dialect": "dialect", "provider": "memory"}
"""What a subject calls whom it stands for → the profile, where a backend may have the same name."""


def command_of(words: Iterable[str], case: str) -> str:
    """Return the command that runs one case, made of the words that ask for its subject."""
    return shlex.join([*words, "--case", case])


def with_command(result: CaseResult, case: Case, subject: Any) -> CaseResult:
    """Return a result with what to type to run its case again."""
    return attrs.evolve(result, reproducer=_command(case, subject))


def _command(case: Case, subject: Any) -> str:
    if getattr(subject, "function", None) is not None:
        return f'q4_conformance.check_linear(function, "{case.weight_recipe.format.name}", only=["{case.id}"], …)'
    if not _is_installed(subject):
        return f'q4_conformance.run_case(case, subject), where case.id is "{case.id}"'
    words = ["q4", "conform", getattr(subject, "name", "q4core")]
    words += [word for name, profile in _PROFILES.items() if hasattr(subject, name) for word in ("--profile", profile)]
    device = getattr(subject, "device", None)
    if device is not None and device.type != "cpu":
        words += ["--device", str(device)]
    return command_of(words, case.id)


def _is_installed(subject: Any) -> bool:
    """Say whether a command finds who is judged; the core is always there."""
    if hasattr(subject, "dialect"):
        return any(item is subject.dialect for item in dialects())
    if hasattr(subject, "provider"):
        return any(item is subject.provider for item in default_registry().memory_providers())
    return subject is None or (hasattr(subject, "backend") and is_installed(subject.backend))
