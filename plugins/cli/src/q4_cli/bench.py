"""``q4 bench``: speed of the selected paths on this machine, compared with a copy in memory."""

from __future__ import annotations

import contextlib
import statistics
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from q4_cli import values
from q4_cli.doctor_report import versions
from q4_cli.files import open_file
from q4_cli.output import open_output, print_table, say
from q4_cli.timing import COLD_BYTES, copies_for, copy_bandwidth, quantile, require_right, time_calls
from q4core.plugin_api import counted, resolve_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console

    Subject = tuple[str, q4.PackedWeight, int]
    """A layer's name, its weight, and how many layers are like it."""

__all__ = ["bench"]

_MOST_SECONDS = 3600.0
_TITLES = ("layer", "M", "median", "path", "GB/s", "N×K", "of copy", "p10 … p90", "GFLOP/s")


def bench(  # noqa: PLR0913  # one argument per option
    file: str | None,
    *,
    shape: str | None,
    format: str | None,  # noqa: A002  # the option's name
    layer: str | None,
    m: str,
    seconds: float,
    warm: bool,
    device: str | None,
    backend: str | None,
    compute_path: str | None,
    dtype: str | None,
    precision: str | None,
    dialect: str | None,
    as_json: bool,
) -> None:
    """Time the paths that would serve, after checking what they compute."""
    rows = values.parse_rows_list(m)
    if not 0 < seconds <= _MOST_SECONDS:
        raise values.illegal("--seconds", f"above 0 and at most {_MOST_SECONDS:.0f}", seconds)
    if (file is None) == (shape is None):
        value = "neither" if file is None else "both"
        raise values.illegal("FILE, --shape", "given as exactly one of the two", value)
    if (format is None) != (shape is None):
        raise values.illegal("--format", "given with --shape, and with it alone", format)
    if shape is not None and (layer is not None or dialect is not None):
        raise values.illegal("--layer, --dialect", "used with FILE", "with --shape")
    config = values.resolve_config(
        device=device, backend=backend, compute_path=compute_path, precision=precision, dtype=dtype
    )
    with open_output(as_json=as_json) as output, contextlib.ExitStack() as stack:
        if file is None:
            subjects = [_made_up(values.parse_shape(str(shape)), str(format))]
        else:
            checkpoint = stack.enter_context(open_file(file, dialect=dialect))
            subjects = _of_each_kind(checkpoint, (rows[0], rows[-1])) if layer is None else [_named(checkpoint, layer)]
        results: list[dict[str, Any]] = []
        with output.progress("measuring", len(subjects) * len(rows) + 1) as step:
            bandwidth = copy_bandwidth(resolve_device(config, torch.device("cpu")), min(1.0, seconds))
            step("copy")
            for subject in subjects:
                for result in _measure(subject, config, rows, seconds, is_cold=not warm):
                    share = round(result["packed_bytes_per_s"] / bandwidth, 4)
                    results.append(result | {"share_of_copy": share})
                    step(subject[0])
        record = {
            "versions": versions(q4.default_registry()),
            "machine": q4.machine_facts(),
            "config": config,
            "seconds": seconds,
            "rotated_bytes": None if warm else COLD_BYTES,
            "copy_bytes_per_s": round(bandwidth),
            "results": results,
        }
        output.answer(record, lambda console: _show(console, record))


def _made_up(shape: tuple[int, int], format_name: str) -> Subject:
    available = q4.machine_facts().memory_available_bytes
    if available is not None and 12 * shape[0] * shape[1] > available:
        rule = f"small enough to be quantised here ({available:,} bytes of memory are free)"
        raise values.illegal("--shape", rule, f"{shape[0]}x{shape[1]}")
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    name = f"{format_name}-{shape[0]}x{shape[1]}"
    return name, q4.quantize(dense, format_name, name=name), 1


def _named(checkpoint: q4.Checkpoint, layer: str) -> Subject:
    try:
        return layer, checkpoint[layer], 1
    except KeyError as error:
        hint = str(error.args[0])
        raise q4.CheckpointError("q4 bench", name="--layer", rule="one of the file", value=layer, hint=hint) from None


def _of_each_kind(checkpoint: q4.Checkpoint, m: tuple[int, int]) -> list[Subject]:
    kinds: dict[q4.Request, list[str]] = {}
    for name in checkpoint:
        kinds.setdefault(q4.Request.for_weight(checkpoint[name], m=m), []).append(name)
    if not kinds:
        where = str(checkpoint.path)
        raise q4.CheckpointError("q4 bench", name="FILE", rule="a file with a 4-bit layer", value="none", where=where)
    return [(names[0], checkpoint[names[0]], len(names)) for names in kinds.values()]


def _measure(
    subject: Subject, config: q4.SessionConfig, rows: Sequence[int], seconds: float, *, is_cold: bool
) -> Iterator[dict[str, Any]]:
    """Yield the measurement for each number of rows, after its result was checked."""
    name, weight, count = subject
    copies = copies_for(weight.nbytes, is_cold=is_cold)
    with q4.Session(config) as session:
        span = (rows[0], rows[-1])
        layers = [session.linear(weight, name=name, m=span)]
        layers += [session.linear(weight.contiguous(), name=name, m=span) for _ in range(copies - 1)]
        record = layers[0].diagnostics()
        for m in rows:
            path = next(s.path for s in record.segments if s.low <= m and (s.high is None or m <= s.high))
            ratio = require_right(layers[0], weight, path, m)
            samples = time_calls(_calls(layers, weight, m), layers[0].device, seconds)
            median = statistics.median(samples)
            yield {
                "layer": name,
                "layers_like_it": count,
                "format": weight.format.name,
                "shape": weight.shape,
                "packed_bytes": weight.nbytes,
                "m": m,
                "device": record.device,
                "dtype": record.dtype,
                "backend": record.backend,
                "path": path.name,
                "kind": path.kind,
                "precision": path.precision,
                "copies": copies,
                "error_over_bound": ratio,
                "median_us": median,
                "p10_us": quantile(samples, 0.1),
                "p90_us": quantile(samples, 0.9),
                "packed_bytes_per_s": round(weight.nbytes / (median * 1e-6)),
                "flop_per_s": round(2 * m * weight.out_features * weight.in_features / (median * 1e-6)),
                "samples_us": samples,
            }


def _calls(layers: Sequence[q4.Q4Linear], weight: q4.PackedWeight, rows: int) -> list[Callable[[], Any]]:
    device, dtype = layers[0].device, layers[0].dtype
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, weight.in_features, generator=generator).to(device, dtype)
    out = torch.empty(rows, weight.out_features, device=device, dtype=dtype)
    return [lambda layer=layer: layer(x, out=out) for layer in layers]  # type: ignore[misc]


def _show(console: Console, record: Mapping[str, Any]) -> None:
    rows = [
        [
            item["layer"] + (f" (×{item['layers_like_it']})" if item["layers_like_it"] > 1 else ""),
            str(item["m"]),
            _time(item["median_us"]),
            f"{item['backend']}/{item['path']}",
            f"{item['packed_bytes_per_s'] / 1e9:.2f}",
            f"{item['shape'][0]}×{item['shape'][1]}",
            f"{100 * item['share_of_copy']:.1f} %",
            f"{_time(item['p10_us'])} … {_time(item['p90_us'])}",
            f"{item['flop_per_s'] / 1e9:.1f}",
        ]
        for item in record["results"]
    ]
    print_table(console, _TITLES, rows)
    machine, head = record["machine"], record["results"][0]
    source = "from caches where they hold it" if record["rotated_bytes"] is None else "from memory"
    say(console)
    text = (
        f"{head['device']}, x {head['dtype']}, {counted(machine.torch_threads, 'thread')}, {machine.processor}; "
        f"a copy moves {record['copy_bytes_per_s'] / 1e9:.1f} GB/s (read + written). "
        f"GB/s counts the packed weight, read once per call {source}. Every answer was checked first."
    )
    say(console, (text, "dim"))


def _time(microseconds: float) -> str:
    if microseconds < 1000:  # noqa: PLR2004  # µs, ms, s
        return f"{microseconds:.1f} µs"
    return f"{microseconds / 1e3:.2f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"  # noqa: PLR2004
