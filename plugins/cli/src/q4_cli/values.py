"""Parsers of the options' values; the errors name the option, the rule and the way out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import q4core as q4
from q4core.plugin_api import FLOATS, closest_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = [
    "illegal",
    "parse_dtype",
    "parse_rows",
    "parse_rows_list",
    "parse_shape",
    "parse_size",
    "resolve_config",
]

_MOST_ROWS = 1 << 31
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def illegal(option: str, rule: str, value: object, known: Iterable[str] = ()) -> q4.ConfigError:
    """Return the error for an option's value, with the closest of the known values as its hint."""
    close = closest_name(value, known)
    hint = f"Did you mean {close!r}?" if close else None
    return q4.ConfigError("option", name=option, rule=rule, value=value, hint=hint)


def resolve_config(*, precision: str | None, dtype: str | None, **asked: Any) -> q4.SessionConfig:
    """Return the configuration of some options; what is not given comes from context, environment and defaults."""
    asked |= {"activation_precision": precision, "compute_dtype": parse_dtype(dtype)}
    return q4.resolve_config(q4.SessionConfig(**asked))


def parse_dtype(text: str | None) -> torch.dtype | None:
    """Return a dtype of x by name, or None for None."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
    if text is None:
        return None
    if text not in known:
        raise illegal("--dtype", f"one of {', '.join(known)}", text, known)
    return known[text]


def parse_rows(text: str) -> tuple[int, int | None]:
    """Return (lowest, highest) rows of x from ``LOW:HIGH``, ``LOW:`` (no upper end) or one number."""
    match = re.fullmatch(r"\s*(\d{1,99})\s*(?:(:)\s*(\d{1,99})?)?\s*", text)
    rule = "LOW:HIGH with 1 <= LOW <= HIGH, LOW: for no upper end, or one number"
    if match:
        low = int(match[1])
        high = (int(match[3]) if match[3] else None) if match[2] else low
        if max(low, high or 0) > _MOST_ROWS:
            rule = f"at most {_MOST_ROWS}"
        elif low >= 1 and (high is None or low <= high):
            return low, high
    raise illegal("--m", rule, text)


def parse_rows_list(text: str) -> tuple[int, ...]:
    """Return numbers of rows of x from a list with commas, in rising order."""
    parts = [part.strip() for part in text.split(",")]
    if all(re.fullmatch(r"\d{1,6}", part) and int(part) >= 1 for part in parts):
        return tuple(sorted({int(part) for part in parts}))
    raise illegal("--m", "numbers from 1 with commas between them, such as 1,8,64", text)


def parse_shape(text: str) -> tuple[int, int]:
    """Return (N, K) from ``NxK``."""
    match = re.fullmatch(r"\s*(\d{1,7})\s*[x×*,]\s*(\d{1,7})\s*", text, re.IGNORECASE)
    if match and int(match[1]) and int(match[2]):
        return int(match[1]), int(match[2])
    raise illegal("--shape", "NxK, such as 4096x4096 (at most 9999999 each)", text)


def parse_size(text: str | None) -> int | None:
    """Return a number of bytes from ``5GB``, ``500 MiB`` or a plain number; None means no limit."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,12})\s*([kmg]i?)?b?\s*", text, re.IGNORECASE)
    size = int(match[1]) * _UNITS[(match[2] or "").lower()] if match else 0
    if size < 1:
        raise illegal("--shard-size", "a size such as 5GB or 500MiB", text)
    return size
