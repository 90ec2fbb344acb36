"""``python benchmarks/gpu/run.py``: run stages while there is time, write after each, print tables and verdicts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import record
from benchmarks.gpu import merged, page, report, stages, verdicts
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.place import NoPlaceError, find_place, versions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.gpu.place import Place

__all__ = ["main"]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu/run.py",
        description="Run every contract case and every measurement of the GPU backends.",
        epilog="Stages: " + "; ".join(f"{name}: {stage.text}" for name, stage in stages.STAGES.items()) + ".",
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="defaults to all")
    parser.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="begin nothing after that (540)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where results go. Defaults to benchmarks/results")
    parser.add_argument("--device", type=int, default=0, metavar="INDEX", help="which CUDA device (0)")
    parser.add_argument("--jobs", type=int, default=8, help="processes that run cases at once (8)")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="cases whose id starts so")
    parser.add_argument("--tiny", action="store_true", help="sizes for the interpreter; checks the plumbing")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and what each backend answers")
    parser.add_argument(
        "--from", nargs="+", dest="files", type=Path, metavar="FILE", help="judge and draw results again, as one"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] = ()) -> int:
    """Run stages, write ``gpu-<device>.json`` after each, draw pictures, and print tables and verdicts.

    A tiny or interpreted run writes under ``build/benchmarks`` instead of ``benchmarks/results``.

    Returns:
        0; 1 where a stage broke, or a case or test failed; 2 where nothing can run or a stage is unknown.
    """
    options = _options(arguments)
    unknown = [name for name in options.stages if name not in stages.STAGES]
    if unknown:
        print(f"stage must be one of {', '.join(stages.STAGES)}, got {unknown[0]!r}", file=sys.stderr)
        return 2
    chosen = [
        name
        for name, stage in stages.STAGES.items()
        if name in options.stages or (not options.stages and stage.is_default)
    ]
    if options.files is not None:
        result = merged.merge([json.loads(file.read_text(encoding="utf-8")) for file in options.files])
        return _finish(result, options.out or (record.BUILD if result["is_tiny"] else record.RESULTS))
    try:
        place = find_place(options.device)
    except NoPlaceError as error:
        if options.dry_run:
            return _dry_run(chosen, None, str(error))
        print(f"nothing was measured: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        return _dry_run(chosen, place, "")
    return _run(chosen, place, options)


def _dry_run(chosen: Sequence[str], place: Place | None, why: str) -> int:
    print(f"device: {place or why}")
    print(f"versions: {versions()}")
    for name in chosen:
        print(f"stage {name}: {stages.STAGES[name].text}")
    for backend, state in stages.native_states(place).items():
        print(f"backend {backend}: {json.dumps(state, indent=1, ensure_ascii=False)}")
    return 0


def _run(chosen: Sequence[str], place: Place, options: argparse.Namespace) -> int:
    is_tiny = options.tiny or not place.is_cuda
    folder = options.out or (record.BUILD if is_tiny else record.RESULTS)
    deadline = Deadline(options.budget)
    work = stages.Work(place, deadline, is_tiny=is_tiny, jobs=options.jobs, only=tuple(options.only))
    environment = record.environment()
    run = environment["date"]
    result: dict[str, Any] = {
        "device": place.to_json(),
        "is_tiny": is_tiny,
        "backends": stages.native_states(place),
        "runs": {run: {"environment": environment, "limits": None}},
        "stages": {},
    }
    if any(stages.STAGES[name].has_ratios for name in chosen):
        result["runs"][run]["limits"] = stages.limits(work)
    for name in chosen:
        print(f"== {name}, {deadline.left:.0f} s left", flush=True)
        started = time.perf_counter()
        found = stages.STAGES[name].guarded(work)
        result["stages"][name] = {"run": run, "seconds": round(time.perf_counter() - started, 1), **found}
        _write(result, folder)
    return _finish(result, folder)


def _write(result: dict[str, Any], folder: Path) -> Path:
    result["crossovers"] = verdicts.crossovers(result)
    result["verdicts"] = [verdict.to_json() for verdict in verdicts.judge(result)]
    return record.write(f"gpu-{merged.slug_of(result)}", result, folder=folder)


def _finish(result: dict[str, Any], folder: Path) -> int:
    written = _write(result, folder)
    for line in report.lines(result, verdicts.judge(result)):
        print(line)
    for path in (written, *_pictures(result, written)):
        print(f"written: {path}")
    if folder == record.RESULTS:
        print(f"written: {page.write()}")
    is_broken = any("error" in stage for stage in result["stages"].values())
    has_failures = any(
        report["failures"] for stage in result["stages"].values() for report in stage.get("reports", {}).values()
    )
    has_failed_tests = any(
        not done["passed"] for stage in result["stages"].values() for done in stage.get("folders", {}).values()
    )
    return 1 if is_broken or has_failures or has_failed_tests else 0


def _pictures(result: dict[str, Any], written: Path) -> list[Path]:
    """Draw what the result has, next to its file; nothing without matplotlib: --from draws it on another machine."""
    try:
        from benchmarks.gpu import pictures  # noqa: PLC0415  # matplotlib may be missing on a machine with a GPU
    except ImportError:
        print("matplotlib is not installed here; --from draws the pictures where it is")
        return []
    stem = written.with_suffix("")
    drawn = [
        pictures.draw_gemv(result, Path(f"{stem}-gemv.png")),
        pictures.draw_gemm(result, Path(f"{stem}-gemm.png")),
    ]
    return [path for path in drawn if path is not None]
