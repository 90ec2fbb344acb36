"""``python -m benchmarks cpu``: measure, write JSON and pictures, print tables and verdicts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch

from benchmarks import record
from benchmarks.cpu import ours, plan, report, small_layers, verdicts
from benchmarks.cpu.problem import last_level_cache_bytes, rotation_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks cpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one shape and few samples, for development")
    parser.add_argument("--only", metavar="WHAT", help="ours, peers, or a part of the names that are measured")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``cpu-<isa>.json`` and its pictures, and print tables and verdicts.

    A quick or partial run writes under ``build/benchmarks`` instead of ``benchmarks/results``.
    """
    options = _options(arguments)
    name = f"cpu-{ours.isa()}"
    peers = plan.peers()
    stages = plan.measure(plan.QUICK if options.quick else plan.FULL, peers, options.only)
    small = small_layers.measure(is_quick=options.quick) if options.only in {None, "ours"} else []
    judged = verdicts.judge(stages, small)
    result = {
        "unit": "us",
        "isa": ours.isa(),
        "torch_threads": torch.get_num_threads(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "rotation_bytes": rotation_bytes(),
        "is_quick": options.quick,
        "only": options.only,
        "peers": peers,
        "stages": stages,
        "small_layers": small,
        "verdicts": [verdict.to_json() for verdict in judged],
    }
    is_partial = options.quick or options.only is not None
    written = record.write(name, result, folder=record.BUILD if is_partial else record.RESULTS)
    for line in report.lines(result, judged):
        print(line)
    print(f"written: {written}")
