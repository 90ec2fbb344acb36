"""Style of this benchmark's pictures: one colour for each library, and lookups in a result file."""

from __future__ import annotations

from typing import Any

from benchmarks import style
from benchmarks.style import plt, save, tidy

__all__ = ["COLORS", "bandwidth", "caption", "color", "find", "is_wide", "plt", "save", "tidy"]

COLORS = {
    "ours int8": "#0b6e4f",
    "ours int16": "#3f9b74",
    "ours exact": "#4fae87",
    "ggml": "#d1731f",
    "onnxruntime": "#3b6fb6",
    "torch": "#8c8c8c",
    "bitsandbytes": "#8a4fa3",
    "torchao": "#c25b8a",
    "read": "#222222",
}
_WIDE = {"q8_0", "Q8_0", "int8 g32"}


def color(call: dict[str, Any]) -> str:
    """Return the colour of whose call it is."""
    return COLORS[f"ours {call['precision']}" if call["role"] == "ours" else call["library"]]


def is_wide(call: dict[str, Any]) -> bool:
    """Say whether a format has 8 bits or more."""
    return call["format"] in _WIDE or call["format"] in {"fp32", "bf16"}


def find(result: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """Return the stages that have all the given values."""
    return [stage for stage in result["stages"] if all(stage[key] == value for key, value in wanted.items())]


def bandwidth(stage: dict[str, Any]) -> float | None:
    """Return GB/s of the best reader of a stage."""
    return max((call["gb_per_s"] for call in stage["calls"].values() if call["format"] == "read"), default=None)


def caption(result: dict[str, Any]) -> str:
    """Return the line that says where and when it was measured, and with which instructions."""
    return style.caption(result, result["isa"])
