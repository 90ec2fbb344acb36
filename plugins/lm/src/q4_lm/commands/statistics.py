"""The cost of a generation: speed, memory, and which paths ran how often, as data and as a table."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

    from q4_lm.generation.language_model import LanguageModel
    from q4_lm.generation.run import Generation

_ROUNDED = {
    "int8": " in int8: rounded by up to 1/254 of the largest number of each head and token",
    "float16": " in float16: rounded by up to 1/2048 of each number",
}
"""What a cache's dtype costs; one of float32 rounds nothing."""

__all__ = ["Statistics", "collect_statistics", "peak_resident_bytes", "print_statistics"]


def peak_resident_bytes() -> int | None:
    """Return the peak of this process's resident memory, mapped files included; None where unknown."""
    with contextlib.suppress(OSError):  # Linux; ru_maxrss would begin at the peak of the process that started this one
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource  # noqa: PLC0415  # not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@attrs.define
class PathUse:
    """One path, the layers of one kind that it runs, and its calls.

    Args:
        layer: Their name, with ``*`` for the numbers in which they differ.
        shape: (N, K) of each.
        format: Format of the layers.
        backend: The backend that runs them.
        path: The path.
        kind: What it does with the weight.
        rows: (lowest, highest) M that it runs; None for no upper end.
        layers: How many layers have it.
        calls: How often it ran, over all of them.
    """

    layer: str
    shape: tuple[int, int]
    format: str
    backend: str
    path: str
    kind: str
    rows: tuple[int, int | None]
    layers: int = 0
    calls: int = 0


@attrs.frozen(kw_only=True)
class Statistics:
    """The record of one generation.

    Args:
        prompt_tokens: Length of the prompt.
        new_tokens: Length of the answer.
        stop_reason: Why it ended.
        open_seconds: Opening the file, preparing the layers, and the vocabulary.
        first_token_seconds: From the prompt to the first token.
        decode_seconds: From there to the end.
        prompt_tokens_per_second: Prefill.
        tokens_per_second: Decoding; None for an answer of less than two tokens.
        prepared_bytes: Of all layers.
        source_bytes: Those of them that are the source, retained because a backend can't export.
        cache_bytes: Of keys and values.
        cache_dtype: What they are held in.
        peak_resident_bytes: Of the process, mapped files included; None where unknown.
        paths: Which paths ran.
        reasons: Why others did not: fallback reasons and rejections, each once.
    """

    prompt_tokens: int
    new_tokens: int
    stop_reason: str | None
    open_seconds: float
    first_token_seconds: float
    decode_seconds: float
    prompt_tokens_per_second: float | None
    tokens_per_second: float | None
    prepared_bytes: int
    source_bytes: int
    cache_bytes: int
    cache_dtype: str
    peak_resident_bytes: int | None
    paths: tuple[PathUse, ...]
    reasons: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, texts and numbers, ready for JSON."""
        return attrs.asdict(self)


def collect_statistics(model: LanguageModel, generation: Generation, *, open_seconds: float) -> Statistics:
    """Return the record of a generation that has ended; ``open_seconds`` is as there."""
    report = model.session.report()
    uses: dict[tuple[Any, ...], PathUse] = {}
    reasons: dict[str, None] = {}
    for record in report.layers:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", record.layer)
        for segment, calls in zip(record.segments, record.calls, strict=True):
            path = segment.path
            rows = (segment.low, segment.high)
            key = (pattern, record.shape, record.format, record.backend, path.name, path.kind.value, rows)
            use = uses.setdefault(key, PathUse(*key))
            use.layers += 1
            use.calls += calls
        if record.fallback_reason:
            reasons[f"fallback: {record.fallback_reason}"] = None
        reasons.update((f"not {rejection}", None) for rejection in record.rejections)
    if not reasons and len({record.backend for record in report.layers}) == 1:
        reasons["no other backend is installed; `q4 doctor` shows what is here"] = None
    reasons.update((line.strip(), None) for program in report.section("programs") for line in str(program).splitlines())
    seconds = generation.prefill_seconds
    return Statistics(
        prompt_tokens=len(generation.prompt),
        new_tokens=len(generation.tokens),
        stop_reason=generation.stop_reason.value if generation.stop_reason else None,
        open_seconds=open_seconds,
        first_token_seconds=seconds,
        decode_seconds=generation.decode_seconds,
        prompt_tokens_per_second=len(generation.prompt) / seconds if seconds > 0 else None,
        tokens_per_second=generation.tokens_per_second,
        prepared_bytes=report.prepared_bytes,
        source_bytes=report.source_bytes,
        cache_bytes=generation.cache.nbytes if generation.cache else 0,
        cache_dtype=str(generation.cache.dtype).removeprefix("torch.") if generation.cache else "",
        peak_resident_bytes=peak_resident_bytes(),
        paths=tuple(uses.values()),
        reasons=tuple(reasons),
    )


def _megabytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 1e6:,.1f} MB"


def _rate(value: float | None) -> str:
    return "—" if value is None else f"{value:,.1f} tokens/s"


def print_statistics(statistics: Statistics, console: Console) -> None:
    """Print the record as two tables, and why other backends did not run."""
    facts = Table(show_header=False, box=None, pad_edge=False)
    own = f" (of which {_megabytes(statistics.source_bytes)} are the source itself)" if statistics.source_bytes else ""
    for name, value in (
        ("prompt", f"{statistics.prompt_tokens} tokens, {_rate(statistics.prompt_tokens_per_second)}"),
        ("answer", f"{statistics.new_tokens} tokens, {_rate(statistics.tokens_per_second)}"),
        ("ended by", statistics.stop_reason or "—"),
        ("time to first token", f"{statistics.first_token_seconds * 1e3:,.0f} ms"),
        ("opening and preparing", f"{statistics.open_seconds * 1e3:,.0f} ms"),
        ("prepared weights", _megabytes(statistics.prepared_bytes) + own),
        ("key-value cache", _megabytes(statistics.cache_bytes) + _ROUNDED.get(statistics.cache_dtype, "")),
        ("peak memory of the process", _megabytes(statistics.peak_resident_bytes)),
    ):
        facts.add_row(Text(name, style="bold"), Text(value))
    console.print(facts)
    paths = Table("layers", "shape", "format", "backend", "path", "kind", "rows", "ran", box=None, pad_edge=False)
    for use in statistics.paths:
        low, high = use.rows
        rows = f"{low}…{'∞' if high is None else high}"
        layers = f"{use.layer} ({use.layers})" if use.layers > 1 else use.layer
        shape = "×".join(map(str, use.shape))
        words = (layers, shape, use.format, use.backend, use.path, use.kind, rows, f"{use.calls:,} ×")
        paths.add_row(*map(Text, words))
    console.print()
    console.print(paths)
    for reason in statistics.reasons:
        console.print(Text(reason, style="dim"))
