"""The exception and warning tree: one class per kind of failure, each with a stable ``code``.

Messages read ``<what failed>: <name> must be <rule>, got <value>. <What to do.>``, and the parts are
attributes, so that callers and tests match data instead of prose. Every class also derives from the builtin
exception that fits it best.
"""

from __future__ import annotations

import difflib
import functools
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from typing_extensions import Self

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


def counted(count: int, noun: str) -> str:
    """Return ``1 layer``, ``2 layers``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


class Q4Error(Exception):
    """Base of every error that q4core raises on purpose.

    Args:
        what: What failed, for example ``"q4.linear"`` or ``"layer 'proj'"``.
        name: The argument, key or field at fault.
        rule: What it must be, to be read after "must be".
        value: What it was; shown with ``repr``, shortened. Leave it out where there is no value.
        where: The file, layer or plugin concerned.
        hint: What to do about it, as a whole sentence.
        **data: Further facts, stored in ``details``.
    """

    code: ClassVar[str] = "q4"
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __init_subclass__(cls, *, code: str | None = None) -> None:
        """Set the ``code``; a class without one has its parent's."""
        super().__init_subclass__()
        if code is not None:
            cls.code = code

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Store the arguments, by which an error crosses process borders whole."""
        error = super().__new__(cls, *arguments)
        error._arguments = arguments, named
        return error

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
        super().__init__(self._compose())

    @property
    def summary(self) -> str:
        """What failed and why, as the message begins: without the hint."""
        text, got = self.what, f"got {_shorten(self.value)}" if self.has_value else ""
        if self.rule is not None:
            text += f": {self.name or 'value'} must be {self.rule}{got and ', '}{got}"
        elif self.name is not None:
            text += f": {self.name}{got and f' ({got})'}"
        return text if self.where is None else f"{text} [{self.where}]"

    def _compose(self) -> str:
        text = self.summary if self.summary.endswith((".", "!", "?")) else f"{self.summary}."
        return f"{text} {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[functools.partial[Q4Error], tuple[Any, ...]]:
        """Pickle by arguments."""
        arguments, named = self._arguments
        return functools.partial(type(self), **named), arguments


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}…"


class FormatError(Q4Error, ValueError, code="format"):
    """A format, block size, packing or scale kind is unknown or not legal for the weight at hand."""


class WeightError(Q4Error, ValueError, code="weight"):
    """A ``PackedWeight`` would break its own rules (shapes, dtypes, non-finite or negative scales)."""


class DialectError(Q4Error, ValueError, code="dialect"):
    """A dialect is unknown, ambiguous, or can't express the weight that it was asked to write."""


class SchemaError(Q4Error, ValueError, code="schema"):
    """A mapping of tensors is not a valid 4-bit checkpoint.

    ``problems`` has everything that is wrong; the message shows the first twenty and counts the others. ``schema`` is
    the ``Schema`` that was found, if there is one.
    """

    def __init__(self, what: str, *, problems: Sequence[Any] = (), schema: Any = None, **data: Any) -> None:
        self.problems = tuple(problems)
        self.schema = schema
        super().__init__(what, **data)

    def _compose(self) -> str:
        text = "\n  - ".join([super()._compose(), *map(str, self.problems[:_MAX_PROBLEMS])])
        more = len(self.problems) - _MAX_PROBLEMS
        return text if more <= 0 else f"{text}\n  … and {more} more; the error's `problems` has all of them"


class UnknownDialectError(SchemaError, code="unknown_dialect"):
    """A file's packed layers have keys that no dialect explains; ``problems`` lists them."""


class CheckpointError(Q4Error, ValueError, code="checkpoint"):
    """A file is malformed, truncated, unreadable or would be written badly; ``where`` names the file."""


class InputError(Q4Error, ValueError, code="input"):
    """A tensor given to a layer has the wrong shape, rank, dtype, device or layout."""


class ConfigError(Q4Error, ValueError, code="config"):
    """A policy or configuration value is not legal."""


class PolicyConflictError(ConfigError, code="policy_conflict"):
    """Two requests contradict each other, such as an override that names the reference under KERNEL_ONLY."""


class BackendError(Q4Error, RuntimeError, code="backend"):
    """A backend broke its contract while it prepared or ran."""


class UnknownBackendError(BackendError, LookupError, code="unknown_backend"):
    """The backend asked for by name is not there; ``available`` and ``closest`` say what is."""

    def __init__(self, what: str, *, available: Sequence[str] = (), closest: str | None = None, **data: Any) -> None:
        self.available = tuple(available)
        self.closest = closest
        super().__init__(what, **data)

    def __str__(self) -> str:
        """Return the message, which ``LookupError`` would otherwise quote."""
        return str(self.args[0])


class BackendUnavailableError(BackendError, code="backend_unavailable"):
    """No backend may serve the request under its policy; ``rejections`` carries every reason."""

    def __init__(self, what: str, *, rejections: Sequence[Any] = (), **data: Any) -> None:
        self.rejections = tuple(rejections)
        super().__init__(what, **data)

    def _compose(self) -> str:
        return "\n  - ".join([super()._compose(), *map(str, self.rejections)])


class PrepareError(BackendError, code="prepare"):
    """Raised by a backend's ``prepare`` that finds out only then that it can't serve weights of this kind.

    Args:
        reasons: All the reasons why not; each a ``Reason``.
        is_for_this_weight: The reasons lie in this weight's own numbers, so that the backend is asked again for the
            next weight of its kind.
    """

    def __init__(self, reasons: Iterable[Any], *, is_for_this_weight: bool = False) -> None:
        self.reasons = tuple(reasons)
        self.is_for_this_weight = is_for_this_weight
        self._arguments = (self.reasons,), {"is_for_this_weight": is_for_this_weight}
        super().__init__(f"prepare refused: {'; '.join(map(str, self.reasons))}")


class PluginError(Q4Error, RuntimeError, code="plugin"):
    """A plugin is missing or can't be loaded, or one of its hooks or commands failed."""


class UnifiedMemoryError(Q4Error, RuntimeError, code="unified_memory"):
    """Unified memory was required and can't be had; ``attributes`` holds the device facts that decided."""

    def __init__(self, what: str, *, attributes: Mapping[str, Any] | None = None, **data: Any) -> None:
        self.attributes = dict(attributes or {})
        super().__init__(what, **data)

    def _compose(self) -> str:
        text = super()._compose()
        facts = ", ".join(f"{key}={value}" for key, value in sorted(self.attributes.items()))
        return f"{text} Device attributes: {facts}." if facts else text


class LifecycleError(Q4Error, RuntimeError, code="lifecycle"):
    """Something was used after it was closed, or before it was prepared."""


class PackedWeightError(Q4Error, AttributeError, code="packed_weight"):
    """A packed weight was asked for what a dense one alone has: its numbers, or to be changed in place."""


class WriteConflictError(Q4Error, RuntimeError, code="write_conflict"):
    """A second writer wanted a mutable tensor that is being written."""


class PoisonedError(Q4Error, RuntimeError, code="poisoned"):
    """A writer of an in-place tensor died half-way; its content is unknown until it is reset."""


class Q4Warning(UserWarning):
    """Base of every warning that q4core gives."""


class Q4FallbackWarning(Q4Warning):
    """A kernel was wanted and the reference path serves instead."""


class Q4PluginWarning(Q4Warning):
    """A plugin can't be used."""


class Q4ProbeWarning(Q4Warning):
    """A kernel path computed wrong numbers on this machine and was disqualified."""
