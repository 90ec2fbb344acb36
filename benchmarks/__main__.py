"""Run every benchmark, or those named: ``python -m benchmarks [overhead] [cpu]``."""

from __future__ import annotations

import sys

from benchmarks import cpu, overhead

BENCHMARKS = {"overhead": overhead.main, "cpu": cpu.main}


def main() -> int:
    """Run the benchmarks that were named, all of them where none was."""
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in names:
        BENCHMARKS[name]()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
