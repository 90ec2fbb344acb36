"""Command that measures every way in turns, then Ray, and writes JSON and a picture."""

from __future__ import annotations

import argparse
import functools
import random
from typing import TYPE_CHECKING, Any

from benchmarks import record, verdict
from benchmarks.memory import ray_objects
from benchmarks.memory.actors import Scene, sample
from benchmarks.memory.picture import draw
from benchmarks.memory.ways import CONTEXT, SHARED, ways

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["SCENES", "judge", "main", "measure"]

SCENES = (
    Scene("64 MB, 2 readers without rest", 1 << 24, 2),
    Scene("64 MB, 2 readers with 1 ms of rest", 1 << 24, 2, 1e-3),
    Scene("4 KB, 4 readers without rest", 1 << 10, 4),
)
RAY, LOCK = "Ray objects", "share_memory_ + Lock"
FACTOR = 5.0
"""How much faster than with a lock several processes are to read a small tensor."""


def _merged(samples: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {key: record.summary([one[key] for one in samples]) for key in samples[0]}


def measure(scenes: Sequence[Scene], seconds: float, rounds: int) -> dict[str, Any]:
    """Return what each way does in each scene; a Ray that is not installed is said to be missing."""
    CONTEXT.set_forkserver_preload(["benchmarks.memory.ways"])
    known, order = ways(), random.Random(0)  # noqa: S311  # an order, no secret
    found: dict[str, dict[str, list[dict[str, float]]]] = {scene.name: {name: [] for name in known} for scene in scenes}
    for _ in range(rounds):
        for scene in scenes:
            for name in order.sample(list(known), len(known)):
                found[scene.name][name].append(sample(known[name], scene, seconds))
    peer = ray_objects.facts()
    if peer["installed"]:  # apart, since its processes use the machine even while they are idle
        with ray_objects.cluster(2 + max(scene.readers for scene in scenes)):
            for scene in scenes:
                found[scene.name][RAY] = ray_objects.samples(scene, seconds, rounds)
    return {
        "seconds": seconds,
        "rounds": rounds,
        "peers": {"ray": peer},
        "state_bytes": {scene.name: 4 * scene.elements for scene in scenes},
        "scenes": {name: {way: _merged(own) for way, own in rows.items()} for name, rows in found.items()},
    }


def judge(result: Mapping[str, Any]) -> list[verdict.Verdict]:
    """Return whether reads of a small tensor and copies per update meet their targets."""
    judged = []
    for scene in SCENES:
        rows = result["scenes"].get(scene.name)
        if rows is None:
            continue
        size = 4.0 * scene.elements
        for mode, copies in (("VERSIONED", 1), ("IN_PLACE", 0)):
            for name in (f"q4core {mode}", f"q4core {mode}, threads"):
                copied = rows[name]["bytes_per_update"]["median"] / size
                target = f"{mode}: at most {copies} copies of the state per update"
                judged.append(
                    verdict.Verdict(target, f"{scene.name}: {name}", copied, copies, is_most=True, against="the state")
                )
        if scene.elements < 1 << 20:
            ratio = rows[SHARED]["reads_per_s"]["median"] / rows[LOCK]["reads_per_s"]["median"]
            target = f"processes read a small tensor {FACTOR:g} times as often as with a lock"
            judged.append(verdict.Verdict(target, scene.name, ratio, FACTOR, against=LOCK))
    return judged


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    columns = {
        "updates_per_s": ("updates/s", ",.1f"),
        "reads_per_s": ("reads/s", ",.0f"),
        "read_us": ("a read, µs", ",.1f"),
        "longest_read_us": ("longest, µs", ",.0f"),
        "bytes_per_update": ("bytes/update", ",.0f"),
    }
    for scene, rows in result["scenes"].items():
        yield f"\n{scene:<38}" + "".join(f"{title:>14}" for title, _ in columns.values())
        for name, row in rows.items():
            values = (format(row[key]["median"], form) for key, (_, form) in columns.items())
            yield f"  {name:<36}" + "".join(f"{value:>14}" for value in values)


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, write ``memory.json`` and its picture, and print rates and verdicts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, for development")
    options = parser.parse_args(arguments)
    run = functools.partial(measure, SCENES)
    result = run(seconds=0.2, rounds=2) if options.quick else run(seconds=0.5, rounds=4)
    judged = judge(result)
    result["verdicts"] = [one.to_json() for one in judged]
    written = record.write("memory", result, folder=record.BUILD if options.quick else record.RESULTS)
    print("\n".join(_lines(result)))
    for name, peer in result["peers"].items():
        print(f"{name}: {peer['version'] if peer['installed'] else peer['why']}")
    for line in verdict.lines(judged):
        print(line)
    for path in (written, draw(result, written.with_suffix(".png"))):
        print(f"written: {path}")
