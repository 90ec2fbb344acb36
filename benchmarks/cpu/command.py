"""``python -m benchmarks cpu``: measure, write JSON and pictures, print tables and verdicts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import record
from benchmarks.cpu import (
    decode_picture,
    ours,
    peers,
    plan,
    prefill_picture,
    report,
    roofline_picture,
    small_layers,
    verdicts,
)
from benchmarks.problem import last_level_cache_bytes, rotation_bytes
from q4_lm.commands.statistics import peak_resident_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.verdict import Verdict

__all__ = ["main"]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks cpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one shape and few samples, for development")
    parser.add_argument("--only", metavar="WHAT", help="ours, peers, or a part of the names that are measured")
    parser.add_argument("--types", action="store_true", help="measure nothing but the types that checkpoints hold")
    parser.add_argument("--from", metavar="FILE", dest="file", help="judge and draw a stored result again")
    return parser.parse_args(arguments)


def _pictures(result: dict[str, Any], written: Path) -> list[Path]:
    """Draw what the result has, next to its file."""
    if not result["stages"]:
        return []
    stem = written.with_suffix("")
    drawn = [
        prefill_picture.draw(result, Path(f"{stem}-prefill.png")),
        roofline_picture.draw(result, Path(f"{stem}-roofline.png")),
    ]
    counts = sorted({stage["threads"] for stage in result["stages"]}, reverse=True)
    drawn += [decode_picture.draw(result, threads, Path(f"{stem}-decode-{threads}.png")) for threads in counts]
    return [path for path in drawn if path is not None]


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run, without its verdicts."""
    found = peers.facts()
    is_whole = not options.types
    stages = plan.measure(plan.QUICK if options.quick else plan.FULL, found, options.only) if is_whole else []
    types = plan.measure_types(plan.QUICK_TYPES if options.quick else plan.FULL_TYPES, found, options.only)
    small = small_layers.measure(is_quick=options.quick) if is_whole and options.only in {None, "ours"} else []
    return {
        "environment": record.environment(),
        "unit": "us",
        "isa": ours.isa(),
        "torch_threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "rotation_bytes": rotation_bytes(),
        "is_quick": options.quick,
        "only": options.only,
        "peers": found,
        "stages": stages,
        "type_stages": types,
        "small_layers": small,
        "peak_resident_bytes": peak_resident_bytes(),
    }


def _judge(result: dict[str, Any]) -> list[Verdict]:
    """Put the verdicts into a result, and return them."""
    judged = verdicts.judge(result["stages"], result["small_layers"], result.get("type_stages", ()))
    result["verdicts"] = [one.to_json() for one in judged]
    return judged


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``cpu-<isa>.json`` and its pictures, and print tables and verdicts.

    A quick or partial run writes under ``build/benchmarks`` instead of ``benchmarks/results``.
    """
    options = _options(arguments)
    if options.file is None:
        result = _measure(options)
        folder = record.BUILD if options.quick or options.only is not None else record.RESULTS
        judged = _judge(result)
        written = record.write(f"cpu-{result['isa']}{'-types' if options.types else ''}", result, folder=folder)
    else:
        written = Path(options.file)
        result = json.loads(written.read_text(encoding="utf-8"))
        judged = _judge(result)
        record.write(written.stem, result, folder=written.parent)  # with the environment that it has
    for line in report.lines(result, judged):
        print(line)
    for path in (written, *_pictures(result, written)):
        print(f"written: {path}")
