"""Options that several commands share, and the readers of their small languages."""

from __future__ import annotations

import re
from typing import Annotated

import torch
import typer

import q4core as q4
from q4core.plugin_api import closest_name

__all__ = [
    "Backend",
    "ComputePath",
    "Device",
    "Dialect",
    "Dtype",
    "Json",
    "Precision",
    "make_config",
    "parse_dtype",
    "parse_rows",
    "parse_rows_list",
    "parse_shape",
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead.")]
Device = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:<index>.")]
Backend = Annotated[str | None, typer.Option("--backend", metavar="NAME", help="This backend or none.")]
ComputePath = Annotated[
    str | None,
    typer.Option(
        "--compute-path", metavar="POLICY", help="auto, kernel_only, kernel_or_fallback or dequant_matmul_only."
    ),
]
Precision = Annotated[
    str | None,
    typer.Option("--precision", metavar="KIND", help="How x may be rounded: auto, exact, int8 or fp4."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="DTYPE", help="dtype of x: float32, bfloat16 or float16.")
]
Dialect = Annotated[
    str | None,
    typer.Option("--dialect", metavar="NAME", help="How to read keys that several dialects use."),
]

_LONG_NAMES = ("float32", "bfloat16", "float16")
_SHORT_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "fp32": "float32", "fp16": "float16"}
_MOST = 1 << 31


def make_config(
    *,
    device: str | None = None,
    backend: str | None = None,
    compute_path: str | None = None,
    precision: str | None = None,
    dtype: str | None = None,
) -> q4.SessionConfig:
    """Return the configuration that a command's options ask for; what is not given asks context and environment.

    Raises:
        ConfigError: A value is not legal.
    """
    return q4.SessionConfig(
        device=device,
        backend=backend,
        compute_path=compute_path,
        activation_precision=precision,
        compute_dtype=None if dtype is None else parse_dtype(dtype),
    )


def parse_dtype(text: str) -> torch.dtype:
    """Return a dtype of x by name.

    Raises:
        ConfigError: It is none of the three.
    """
    name = text.strip().lower().removeprefix("torch.")
    name = _SHORT_NAMES.get(name, name)
    if name in _LONG_NAMES:
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    close = closest_name(name, _LONG_NAMES)
    hint = f"Did you mean {close!r}?" if close else None
    raise q4.ConfigError("option", name="--dtype", rule=f"one of {', '.join(_LONG_NAMES)}", value=text, hint=hint)


def parse_rows(text: str) -> tuple[int, int | None]:
    """Return (lowest, highest) rows of x from ``LOW:HIGH``, ``LOW:`` (no upper end) or one number.

    Raises:
        ConfigError: It is nothing of that kind.
    """
    match = re.fullmatch(r"\s*(\d{1,99})\s*(?:(:)\s*(\d{1,99})?)?\s*", text)
    rule = "LOW:HIGH with 1 <= LOW <= HIGH, LOW: for no upper end, or one number"
    if match:
        low = int(match[1])
        high = (int(match[3]) if match[3] else None) if match[2] else low
        if max(low, high or 0) > _MOST:
            rule = f"at most {_MOST}"
        elif low >= 1 and (high is None or low <= high):
            return low, high
    raise q4.ConfigError("option", name="--m", rule=rule, value=text)


def parse_rows_list(text: str) -> tuple[int, ...]:
    """Return numbers of rows of x from a list with commas, in rising order.

    Raises:
        ConfigError: It is no such list.
    """
    parts = [part.strip() for part in text.split(",")]
    if all(re.fullmatch(r"\d{1,6}", part) and int(part) >= 1 for part in parts):
        return tuple(sorted({int(part) for part in parts}))
    raise q4.ConfigError(
        "option", name="--m", rule="numbers from 1 with commas between them, such as 1,8,64", value=text
    )


def parse_shape(text: str) -> tuple[int, int]:
    """Return (N, K) from ``NxK``.

    Raises:
        ConfigError: It is no such text, or a size is 0 or absurd.
    """
    match = re.fullmatch(r"\s*(\d{1,7})\s*[x×*,]\s*(\d{1,7})\s*", text, re.IGNORECASE)
    if match and int(match[1]) and int(match[2]):
        return int(match[1]), int(match[2])
    raise q4.ConfigError("option", name="--shape", rule="NxK, such as 4096x4096 (at most 9999999 each)", value=text)
