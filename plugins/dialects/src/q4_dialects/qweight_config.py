"""What ``config.json`` says of layers whose codes are called ``qweight``: GPTQ's, AWQ's and AutoRound's.

Three libraries write these keys, and one of them with three meanings:

============  =================================================  =======  ====================
quant_method  ``checkpoint_format`` / ``packing_format``         layout   stored zero point
============  =================================================  =======  ====================
gptq          ``gptq`` or absent                                 GPTQ     z - 1, word by word
gptq          ``gptq_v2``                                        GPTQ     z
awq           (``version``: any whose layout shapes show)        AWQ      z
auto-round    ``auto_round``, ``auto_round:gptqmodel``           GPTQ     z
auto-round    ``auto_round:auto_gptq``, ``auto`` or absent       GPTQ     z - 1, code by code
auto-round    ``auto_round:auto_awq``                            AWQ      z
============  =================================================  =======  ====================

Reference:
    gptqmodel 7.7.0: quantization/config.py (``dynamic``, ``pack_dtype``). auto-round 0.16.1: inference/backend.py,
    inference/convert_model.py. autoawq 0.2.9: models/_config.py.
"""

from __future__ import annotations

import contextlib
import enum
import re
import weakref
from typing import TYPE_CHECKING, Any

import attrs
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from q4core import Catalogue

__all__ = ["PACK_DTYPES", "Stated", "Zeros", "stated_by"]

PACK_DTYPES = {"int8": torch.int8, "int16": torch.int16, "int32": torch.int32, "int64": torch.int64}
"""The words that codes may be packed in, by GPTQ's names."""
_V1, _V2 = {"gptq"}, {"gptq_v2", "gptq-v2"}
_AUTO_ROUND_V2 = {"auto_round", "auto_round:gptqmodel"}
_AUTO_ROUND_V1 = {"auto_round:auto_gptq", "auto_round:gptq", "auto"}
_AUTO_ROUND_AWQ = {"auto_round:auto_awq", "auto_round:awq"}
_AUTO_ROUND = {"auto-round", "intel/auto-round"}


class Zeros(enum.Enum):
    """How zero points are stored."""

    PLAIN = "z"
    """As they are."""
    WORDS = "z - 1 by words"
    """A one less in each code, subtracted from the packed word: a zero point of 0 borrows from the next code."""
    CODES = "z - 1 by codes"
    """A one less in each code, where the writer clamps at 0."""


@attrs.frozen(kw_only=True)
class Stated:
    """What the config says of one module; None where it says nothing.

    Args:
        method: ``quant_method``.
        layout: ``"gptq"``, ``"awq"`` or ``"awq-gemv"``.
        zeros: How GPTQ's zero points are stored.
        refused: The name of a layout that nothing here reads.
        bits: Width of the codes.
        group_size: In-features per scale; -1 for one group.
        pack_dtype: The words' dtype.
    """

    method: str | None = None
    layout: str | None = None
    zeros: Zeros | None = None
    refused: str | None = None
    bits: int | None = None
    group_size: int | None = None
    pack_dtype: torch.dtype | None = None


def stated_by(catalogue: Catalogue, module: str) -> Stated:
    """Return what the config says of a module."""
    found = _FOUND.setdefault(catalogue, {})
    if module not in found:
        found[module] = _stated(catalogue, module)
    return found[module]


def _stated(catalogue: Catalogue, module: str) -> Stated:
    config = catalogue.quantization_config
    method = config.get("quant_method")
    if not isinstance(method, str):
        return Stated()
    if catalogue not in _ENTRIES:
        _ENTRIES[catalogue] = _Entries(config)
    own = {**config, **_ENTRIES[catalogue].of(module)}
    facts: dict[str, Any] = {
        "method": method,
        "bits": _whole(own.get("bits", own.get("w_bit"))),
        "group_size": _whole(own.get("group_size", own.get("q_group_size"))),
    }
    if method == "gptq":
        facts["pack_dtype"] = PACK_DTYPES.get(str(own.get("pack_dtype")).removeprefix("torch."))
        return Stated(**facts, **_gptq(_text(own.get("checkpoint_format", own.get("format"))) or "gptq"))
    if method == "awq":
        version = _text(own.get("version", own.get("format"))) or "gemm"
        return Stated(**facts, layout="awq-gemv" if version == "gemv" else "awq")
    if method in _AUTO_ROUND:
        return Stated(**facts, **_auto_round(_text(own.get("packing_format")) or "auto"))
    return Stated(**facts, refused=method)


def _gptq(form: str) -> dict[str, Any]:
    if form in _V1:
        return {"layout": "gptq", "zeros": Zeros.WORDS}
    return {"layout": "gptq", "zeros": Zeros.PLAIN} if form in _V2 else {"refused": f"gptq {form}"}


def _auto_round(form: str) -> dict[str, Any]:
    if form in _AUTO_ROUND_AWQ:
        return {"layout": "awq"}
    if form in _AUTO_ROUND_V1 | _AUTO_ROUND_V2:
        return {"layout": "gptq", "zeros": Zeros.CODES if form in _AUTO_ROUND_V1 else Zeros.PLAIN}
    return {"refused": f"auto-round {form}"}


class _Entries:
    """What a config says of single modules: gptqmodel's ``dynamic``, AutoRound's ``extra_config``.

    Modules are named whole, or by an end of the name (models nest others), or by a regular expression.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._named: dict[str, Mapping[str, Any]] = {}
        self._ends: dict[str, Mapping[str, Any]] = {}
        self._expressions: list[tuple[re.Pattern[str], Mapping[str, Any]]] = []
        for name in ("dynamic", "extra_config"):
            entries = config.get(name)
            for pattern, entry in entries.items() if isinstance(entries, dict) else ():
                if isinstance(pattern, str) and isinstance(entry, dict):
                    self._add(pattern.removeprefix("+:"), entry)

    def _add(self, pattern: str, entry: Mapping[str, Any]) -> None:
        if any(sign in pattern for sign in "*+?[(^$\\|"):
            with contextlib.suppress(re.error, RecursionError, OverflowError):
                self._expressions.append((re.compile(pattern), entry))
            return
        self._named.setdefault(pattern, entry)
        for end in _ends(pattern):
            self._ends.setdefault(end, entry)

    def of(self, module: str) -> Mapping[str, Any]:
        """Return the entry of a module; an empty one where there is none."""
        if module in self._ends:
            return self._named.get(module, self._ends[module])
        for end in _ends(module):
            if end in self._named:
                return self._named[end]
        return next((entry for expression, entry in self._expressions if expression.match(module)), {})


_FOUND: weakref.WeakKeyDictionary[Catalogue, dict[str, Stated]] = weakref.WeakKeyDictionary()
_ENTRIES: weakref.WeakKeyDictionary[Catalogue, _Entries] = weakref.WeakKeyDictionary()
"""What was found, because several dialects ask for the same."""


def _ends(name: str) -> Iterator[str]:
    """Yield a dotted name, and each part of it that begins after a dot."""
    parts = name.split(".")
    return (".".join(parts[place:]) for place in range(len(parts)))


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str:
    return value.lower() if isinstance(value, str) else ""
