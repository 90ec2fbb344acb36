"""The exception and warning tree: one class per kind of failure, each with a stable ``code``.

Messages read ``<what failed>: <name> must be <rule>, got <value>. <What to do.>``, and the parts stand on
attributes, so that callers and tests match data instead of prose. Every class also derives from the builtin
exception that fits it best.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "PLUGIN_FAULTS",
    "BackendError",
    "BackendUnavailableError",
    "CheckpointError",
    "ConfigError",
    "DialectError",
    "FormatError",
    "InputError",
    "LifecycleError",
    "PluginError",
    "PoisonedError",
    "PolicyConflictError",
    "PrepareError",
    "Q4Error",
    "Q4FallbackWarning",
    "Q4PluginWarning",
    "Q4ProbeWarning",
    "Q4Warning",
    "SchemaError",
    "UnifiedMemoryError",
    "UnknownBackendError",
    "WeightError",
    "WriteConflictError",
    "closest_name",
]

PLUGIN_FAULTS: tuple[type[BaseException], ...] = (Exception, SystemExit)
"""What is caught at the plugin boundary and reported; a plugin that exits must not take the process along."""

_MAX_VALUE_CHARACTERS = 200
_MAX_PROBLEMS = 20


def closest_name(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like ``name``, for a hint, or None where none is like it.

    Args:
        name: What was asked for.
        known: The names there are.
        cutoff: How alike they must be, 0 to 1, by ``difflib``.
    """
    found = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=cutoff)
    return found[0] if found else None


class Q4Error(Exception):
    """Base of every error that q4core raises on purpose.

    Args:
        what: What failed, for example ``"q4.linear"`` or ``"layer 'proj'"``.
        name: The argument, key or field at fault.
        rule: What it must be, to be read after "must be".
        value: What it was; shown with ``repr``, shortened. Leave it out where there is no value.
        where: The file, layer or plugin concerned.
        hint: What to do about it, as a whole sentence.
        **data: Further facts, kept in ``details``.
    """

    code: ClassVar[str] = "q4"

    def __init__(
        self,
        what: str,
        *,
        name: str | None = None,
        rule: str | None = None,
        where: str | None = None,
        hint: str | None = None,
        **data: Any,
    ) -> None:
        self.what = what
        self.name = name
        self.rule = rule
        self.where = where
        self.hint = hint
        self.has_value = "value" in data
        self.value = data.get("value")
        self.details: dict[str, Any] = {key: item for key, item in data.items() if key != "value"}
        self._arguments = {"name": name, "rule": rule, "where": where, "hint": hint, **data}
        super().__init__(self._compose())

    @property
    def summary(self) -> str:
        """What failed and why, as the message begins: without the hint."""
        text = self.what
        if self.rule is not None:
            text += f": {self.name or 'value'} must be {self.rule}"
            if self.has_value:
                text += f", got {_shorten(self.value)}"
        elif self.name is not None:
            text += f": {self.name}"
            if self.has_value:
                text += f" (got {_shorten(self.value)})"
        if self.where is not None:
            text += f" [{self.where}]"
        return text

    def _compose(self) -> str:
        text = self.summary
        if not text.endswith((".", "!", "?")):
            text += "."
        return f"{text} {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Callable[..., Q4Error], tuple[type[Q4Error], str, dict[str, Any]]]:
        """Pickle by arguments, so that errors cross process borders whole."""
        return _rebuild, (type(self), self.what, self._arguments)


def _rebuild(kind: type[Q4Error], what: str, arguments: dict[str, Any]) -> Q4Error:
    return kind(what, **arguments)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}…"


class FormatError(Q4Error, ValueError):
    """A format, block size, packing or scale kind is unknown or not legal for the weight at hand."""

    code = "format"


class WeightError(Q4Error, ValueError):
    """A ``PackedWeight`` would break its own rules (shapes, dtypes, non-finite or negative scales)."""

    code = "weight"


class DialectError(Q4Error, ValueError):
    """A dialect is unknown, ambiguous, or can't express the weight that it was asked to write."""

    code = "dialect"


class SchemaError(Q4Error, ValueError):
    """A mapping of tensors is not a valid 4-bit checkpoint.

    ``problems`` has everything that is wrong; the message shows the first twenty and counts the others. ``schema`` is
    the ``Schema`` that was found, if there is one.
    """

    code = "schema"

    def __init__(self, what: str, *, problems: Sequence[Any] = (), schema: Any = None, **data: Any) -> None:
        self.problems = tuple(problems)
        self.schema = schema
        super().__init__(what, **data)
        self._arguments.update(problems=self.problems, schema=schema)

    def _compose(self) -> str:
        text = super()._compose()
        text = "\n  - ".join([text, *(str(problem) for problem in self.problems[:_MAX_PROBLEMS])])
        more = len(self.problems) - _MAX_PROBLEMS
        return text if more <= 0 else f"{text}\n  … and {more} more; the error's `problems` has all of them"


class CheckpointError(Q4Error, ValueError):
    """A file is malformed, truncated, unreadable or would be written badly; ``where`` names the file."""

    code = "checkpoint"


class InputError(Q4Error, ValueError):
    """A tensor given to a layer has the wrong shape, rank, dtype, device or layout."""

    code = "input"


class ConfigError(Q4Error, ValueError):
    """A policy or configuration value is not legal."""

    code = "config"


class PolicyConflictError(ConfigError):
    """Two requests contradict each other, such as an override that names the reference under KERNEL_ONLY."""

    code = "policy_conflict"


class BackendError(Q4Error, RuntimeError):
    """A backend broke its contract while it prepared or ran."""

    code = "backend"


class UnknownBackendError(BackendError, LookupError):
    """The backend asked for by name is not there; ``available`` and ``closest`` say what is."""

    code = "unknown_backend"

    def __init__(self, what: str, *, available: Sequence[str] = (), closest: str | None = None, **data: Any) -> None:
        self.available = tuple(available)
        self.closest = closest
        super().__init__(what, **data)
        self._arguments.update(available=self.available, closest=closest)

    def __str__(self) -> str:
        """Return the message, which ``LookupError`` would otherwise quote."""
        return str(self.args[0])


class BackendUnavailableError(BackendError):
    """No backend may serve the request under its policy; ``rejections`` carries every reason."""

    code = "backend_unavailable"

    def __init__(self, what: str, *, rejections: Sequence[Any] = (), **data: Any) -> None:
        self.rejections = tuple(rejections)
        super().__init__(what, **data)
        self._arguments["rejections"] = self.rejections

    def _compose(self) -> str:
        text = super()._compose()
        return "\n  - ".join([text, *(str(rejection) for rejection in self.rejections)])


class PrepareError(BackendError):
    """Raised by a backend's ``prepare`` that finds out only then that it can't serve weights of this kind.

    Args:
        reasons: All the reasons why not; each a ``Reason``.
        is_for_this_weight: The reasons lie in this weight's own numbers, so that the backend is asked again for the
            next weight of its kind.
    """

    code = "prepare"

    def __init__(self, reasons: Iterable[Any], *, is_for_this_weight: bool = False) -> None:
        self.reasons = tuple(reasons)
        self.is_for_this_weight = is_for_this_weight
        super().__init__("prepare refused: " + "; ".join(str(reason) for reason in self.reasons))

    def __reduce__(self) -> tuple[Callable[..., PrepareError], tuple[tuple[Any, ...], bool]]:  # type: ignore[override]  # made from these two alone
        """Pickle by reasons."""
        return _rebuild_refusal, (self.reasons, self.is_for_this_weight)


def _rebuild_refusal(reasons: tuple[Any, ...], is_for_this_weight: bool) -> PrepareError:  # noqa: FBT001  # pickle knows no keywords
    return PrepareError(reasons, is_for_this_weight=is_for_this_weight)


class PluginError(Q4Error, RuntimeError):
    """A plugin can't be loaded, or one of its hooks or commands failed."""

    code = "plugin"


class UnifiedMemoryError(Q4Error, RuntimeError):
    """Unified memory was required and can't be had; ``attributes`` holds the device facts that decided."""

    code = "unified_memory"

    def __init__(self, what: str, *, attributes: Mapping[str, Any] | None = None, **data: Any) -> None:
        self.attributes = dict(attributes or {})
        super().__init__(what, **data)
        self._arguments["attributes"] = self.attributes

    def _compose(self) -> str:
        text = super()._compose()
        facts = ", ".join(f"{key}={value}" for key, value in sorted(self.attributes.items()))
        return f"{text} Device attributes: {facts}." if facts else text


class LifecycleError(Q4Error, RuntimeError):
    """Something was used after it was closed, or before it was prepared."""

    code = "lifecycle"


class WriteConflictError(Q4Error, RuntimeError):
    """A second writer wanted a mutable tensor that is being written."""

    code = "write_conflict"


class PoisonedError(Q4Error, RuntimeError):
    """A writer of an in-place tensor died half-way; its content is unknown until it is reset."""

    code = "poisoned"


class Q4Warning(UserWarning):
    """Base of every warning that q4core gives."""


class Q4FallbackWarning(Q4Warning):
    """A kernel was wanted and the reference path serves instead."""


class Q4PluginWarning(Q4Warning):
    """A plugin can't be used."""


class Q4ProbeWarning(Q4Warning):
    """A kernel path computed wrong numbers on this machine and was disqualified."""
