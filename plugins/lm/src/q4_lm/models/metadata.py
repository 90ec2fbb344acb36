"""Typed access to a model file's metadata: each value is checked for presence, type and range."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from q4core import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["Metadata"]

_T = TypeVar("_T")
_MISSING: Any = object()


class Metadata:
    """A model file's metadata by key.

    Args:
        values: Key → int, float, bool, str or a sequence of these.
        where: The file's name, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._asked: set[str] = set()
        self.where = where

    def __contains__(self, key: str) -> bool:
        """Return whether the key is there."""
        self._asked.add(key)
        return key in self._values

    def fail(self, key: str, rule: str, value: object = _MISSING, hint: str | None = None) -> NoReturn:
        """Raise a ``CheckpointError`` that names the file, the key, the rule and the value."""
        data = {} if value is _MISSING else {"value": value}
        raise CheckpointError(
            "model metadata", name=f"metadata {key!r}", rule=rule, where=self.where, hint=hint, **data
        )

    def fail_tensor(self, name: str, rule: str, value: object) -> NoReturn:
        """Raise a ``CheckpointError`` that names the file, a tensor of it, the rule and the value."""
        raise CheckpointError("model", name=f"tensor {name!r}", rule=rule, value=value, where=self.where)

    def pass_over(self, *keys: str) -> None:
        """Count keys as read: with the others given, they change nothing that is computed."""
        self._asked.update(keys)

    def refuse_unread(self, prefix: str, *, idle: Collection[str]) -> None:
        """Refuse a key that was not read: what it says would not be computed.

        Args:
            prefix: Beginning of the keys to check, such as ``"llama."``.
            idle: Keys, without the prefix, that change nothing that is computed.

        Raises:
            CheckpointError: There is one.
        """
        for key in self._values:
            if key.startswith(prefix) and key not in self._asked and key.removeprefix(prefix) not in idle:
                hint = "What this key says is not computed here; the model's answers would be wrong."
                self.fail(key, "one that this architecture supports", self._values[key], hint)

    def _get(self, key: str, default: _T) -> Any | _T:
        self._asked.add(key)
        if key not in self._values:
            if default is _MISSING:
                self.fail(key, "present")
            return default
        return self._values[key]

    def integer(self, key: str, *, low: int = 1, high: int = 2**31 - 1, default: Any = _MISSING) -> Any:
        """Return a whole number from ``low`` to ``high``; ``default`` where the key is absent.

        Raises:
            CheckpointError: Absent without a default, not a whole number, or out of range.
        """
        value = self._get(key, default)
        if value is default and key not in self._values:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(key, f"a whole number from {low} to {high}", value)
        return value

    def number(self, key: str, *, above: float, default: Any = _MISSING) -> Any:
        """Return a finite number greater than ``above``; ``default`` where the key is absent.

        Raises:
            CheckpointError: Absent without a default, not a number, not finite, or too small.
        """
        value = self._get(key, default)
        if value is default and key not in self._values:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= above:
            self.fail(key, f"a finite number greater than {above}", value)
        return float(value)

    def text(self, key: str, *, default: Any = _MISSING) -> Any:
        """Return a text; ``default`` where the key is absent.

        Raises:
            CheckpointError: Absent without a default, or not a text.
        """
        value = self._get(key, default)
        if key in self._values and not isinstance(value, str):
            self.fail(key, "a text", value)
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a truth value; ``default`` where the key is absent.

        Raises:
            CheckpointError: Not a truth value.
        """
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.fail(key, "true or false", value)
        return value

    def numbers(self, key: str) -> list[float]:
        """Return an array of numbers, whole ones among them.

        Raises:
            CheckpointError: Absent, not an array, or with an item of another kind.
        """
        value = self._get(key, _MISSING)
        found = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(found, list) and all(type(item) is int for item in found):
            return [float(item) for item in found]
        return self.items(key, float)

    def items(self, key: str, kind: type[_T]) -> list[_T]:
        """Return an array of texts or of whole numbers.

        Raises:
            CheckpointError: Absent, not an array, or with an item of another kind.
        """
        value = self._get(key, _MISSING)
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
            self.fail(key, f"an array of {kind.__name__}", value)
        found: list[Any] = value.tolist() if hasattr(value, "tolist") else list(value)
        for index, item in enumerate(found):
            if type(item) is not kind:
                self.fail(f"{key}[{index}]", f"of type {kind.__name__}", item)
        return found
