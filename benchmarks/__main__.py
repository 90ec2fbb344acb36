"""Command that runs every benchmark, or those named, with options last.

There are: ``python -m benchmarks [overhead] [cpu] [generate] [contexts] [opening] [threads] [memory] [precision]
[certify] [waiting] [busy] [embeddings] [encoders] [batches] [actors] [scaling] [microcircuit] [spikes] [snn]
[transformers]``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from benchmarks import (
    actors,
    batches,
    busy,
    certify,
    contexts,
    cpu,
    embeddings,
    encoders,
    generate,
    huggingface,
    memory,
    microcircuit,
    opening,
    overhead,
    precision,
    scaling,
    spikes,
    spiking,
    threads,
    waiting,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BENCHMARKS: dict[str, Callable[[Sequence[str]], None]] = {
    "overhead": overhead.main,
    "cpu": cpu.main,
    "generate": generate.main,
    "contexts": contexts.main,
    "opening": opening.main,
    "threads": threads.main,
    "memory": memory.main,
    "precision": precision.main,
    "certify": certify.main,
    "waiting": waiting.main,
    "busy": busy.main,
    "embeddings": embeddings.main,
    "encoders": encoders.main,
    "batches": batches.main,
    "actors": actors.main,
    "scaling": scaling.main,
    "microcircuit": microcircuit.main,
    "spikes": spikes.main,
    "snn": spiking.main,
    "transformers": huggingface.main,
}


def main() -> int:
    """Run the benchmarks that were named, all of them where none was; options go to the one that was."""
    words = sys.argv[1:]
    count = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    names, options = words[:count] or list(BENCHMARKS), words[count:]
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    if options and len(names) > 1:
        print("options are taken by one benchmark at a time; name it first", file=sys.stderr)
        return 2
    for name in names:
        BENCHMARKS[name](options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
