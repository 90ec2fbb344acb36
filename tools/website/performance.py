"""The page of measurements, made from ``benchmarks/results/*.json`` while the documentation is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from benchmarks.verdict import Verdict
from tools.website.tables import cell, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["RESULTS", "TITLES", "ResultsError", "page", "read", "verdicts"]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TITLES = {
    "cpu-avx512": ("Layers on a CPU with AVX-512", "python -m benchmarks cpu", ""),
    "cpu-avx2": ("Layers on a CPU with AVX2", "Q4_CPU_ISA=avx2 python -m benchmarks cpu", ""),
    "cpu-avx2-types": ("Types that checkpoints hold, AVX2", "Q4_CPU_ISA=avx2 python -m benchmarks cpu --types", ""),
    "cpu-avx512-types": ("Types that checkpoints hold, AVX-512", "python -m benchmarks cpu --types", ""),
    "generate-gemma3-avx2": (
        "Gemma 3 270M in Q4_K_M, AVX2",
        "Q4_CPU_ISA=avx2 python -m benchmarks generate --model gemma3",
        "models-from-files.md",
    ),
    "generate-gemma3-avx512": (
        "A whole language model, Gemma 3 270M",
        "python -m benchmarks generate --model gemma3",
        "models-from-files.md",
    ),
    "generate-avx512": ("A whole language model, SmolLM2", "python -m benchmarks generate", "precision.md"),
    "generate-avx2": (
        "A whole language model, SmolLM2, AVX2",
        "Q4_CPU_ISA=avx2 python -m benchmarks generate",
        "precision.md",
    ),
    "transformers-avx512": ("4-bit models inside transformers", "python -m benchmarks transformers", "huggingface.md"),
    "transformers-avx2": (
        "4-bit models inside transformers, AVX2",
        "Q4_CPU_ISA=avx2 python -m benchmarks transformers",
        "huggingface.md",
    ),
    "transformers-generate-smollm2-avx512": (
        "SmolLM2 inside transformers",
        "python -m benchmarks transformers --generate smollm2",
        "huggingface.md",
    ),
    "transformers-generate-gemma3-avx512": (
        "Gemma 3 270M inside transformers",
        "python -m benchmarks transformers --generate gemma3",
        "huggingface.md",
    ),
    "transformers-generate-smollm2-avx2": (
        "SmolLM2 inside transformers, AVX2",
        "Q4_CPU_ISA=avx2 python -m benchmarks transformers --generate smollm2",
        "huggingface.md",
    ),
    "transformers-generate-gemma3-avx2": (
        "Gemma 3 270M inside transformers, AVX2",
        "Q4_CPU_ISA=avx2 python -m benchmarks transformers --generate gemma3",
        "huggingface.md",
    ),
    "contexts-avx512": ("Long contexts, SmolLM2", "python -m benchmarks contexts", "models-from-files.md"),
    "contexts-avx2": (
        "Long contexts, SmolLM2, AVX2",
        "Q4_CPU_ISA=avx2 python -m benchmarks contexts",
        "models-from-files.md",
    ),
    "batches-avx512": ("Several sequences at once, SmolLM2", "python -m benchmarks batches", "models-from-files.md"),
    "batches-avx2": (
        "Several sequences at once, SmolLM2, AVX2",
        "Q4_CPU_ISA=avx2 python -m benchmarks batches",
        "models-from-files.md",
    ),
    "opening": ("Opening a model", "python -m benchmarks opening", "models-from-files.md"),
    "overhead": ("What q4core adds to a call", "python -m benchmarks overhead", ""),
    "overhead-xeon-2.5ghz": ("What q4core adds to a call, on an older Xeon", "python -m benchmarks overhead", ""),
    "threads": ("Threads next to torch's", "python -m benchmarks threads", ""),
    "waiting": ("A machine with busy cores", "python -m benchmarks waiting", "cli.md"),
    "busy-avx512": ("With one busy core", "python -m benchmarks busy", "cli.md"),
    "busy-avx2": ("With one busy core, AVX2", "Q4_CPU_ISA=avx2 python -m benchmarks busy", "cli.md"),
    "precision": ("What a precision costs", "python -m benchmarks precision", "precision.md"),
    "embeddings": ("Sentence embeddings in four bits", "python -m benchmarks embeddings", "models-from-files.md"),
    "encoders-avx512": ("MiniLM in four bits", "python -m benchmarks encoders", "models-from-files.md"),
    "encoders-avx2": (
        "MiniLM in four bits, AVX2",
        "Q4_CPU_ISA=avx2 python -m benchmarks encoders",
        "models-from-files.md",
    ),
    "vllm": ("Served by vLLM: right tokens", "nox -s vllm", "serve.md"),
    "vllm-speed-avx512": ("Served by vLLM: speed", "python -m benchmarks.serving", "serve.md"),
    "gpu-nvidia-h100-80gb-hbm3": ("An NVIDIA H100", "nox -s gpu", "gpu.md"),
    "snn": ("Spiking networks", "python -m benchmarks snn", "spiking.md"),
    "snn-avx2": ("Spiking networks, AVX2", "Q4_CPU_ISA=avx2 python -m benchmarks snn", "spiking.md"),
    "spikes": ("Products of spikes", "python -m benchmarks spikes", "spiking.md"),
    "microcircuit": ("The cortical microcircuit", "python -m benchmarks microcircuit", "spiking.md"),
    "actors": ("Actors", "python -m benchmarks actors", "actors.md"),
    "scaling": ("Networks on several actors", "python -m benchmarks scaling", "actors.md"),
    "scaling-avx2": ("Networks on several actors, AVX2", "Q4_CPU_ISA=avx2 python -m benchmarks scaling", "actors.md"),
    "memory": ("Mutable tensors", "python -m benchmarks memory", "memory.md"),
    "sharing": ("Locks of mutable tensors", "python -m benchmarks.memory.sharing", "memory.md"),
    "sharing-stress": ("Races over shared tensors", "nox -s soak", "memory.md"),
    "sharing-stress-native": ("Races over shared tensors, today's protocol", "nox -s soak", "memory.md"),
    "certify": ("Time of a contract case", "python -m benchmarks certify", "write-a-backend/certify.md"),
    "examples": ("Examples that learn", "nox -s examples", "networks.md"),
    "soak": ("Checks that take hours", "nox -s soak", ""),
}
"""Stored result → its title, the command that measures it, and the page that discusses it, in the order of the page."""
NOT_RECORDED = "not recorded"


class ResultsError(RuntimeError):
    """Stored results and the page's table of them differ, or a stored verdict is not that of its ratio."""


def read(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return every stored result by name, in the order of the page.

    Raises:
        ResultsError: A result has no title, or a title no stored result.
    """
    here = {path.stem for path in folder.glob("*.json")}
    if untitled := sorted(here - TITLES.keys()):
        raise ResultsError(f"stored results without a title in tools/website/performance.py: {', '.join(untitled)}")
    if missing := [name for name in TITLES if name not in here]:
        raise ResultsError(f"titles without a stored result in benchmarks/results: {', '.join(missing)}")
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in TITLES}


def verdicts(name: str, result: Mapping[str, Any]) -> list[Verdict]:
    """Return the verdicts of a result: those stored, or those that its stored limits give.

    Raises:
        ResultsError: A stored verdict is not what its ratio and limit give.
    """
    found = []
    for stored in result.get("verdicts", ()):
        verdict = Verdict(**{field.name: stored[field.name] for field in attrs.fields(Verdict)})
        if verdict.word != stored["verdict"]:
            raise ResultsError(f"{name}: {verdict.subject} is stored as {stored['verdict']!r}, and is {verdict.word!r}")
        found.append(verdict)
    own = result.get("over_the_backend", {})
    for subject, limit in result.get("targets", {}).items():
        text = "µs over the backend's own call"
        found.append(Verdict(text, subject, own[subject], limit, is_most=True, against="the backend alone"))
    for subject, seconds in result.get("seconds", {}).items() if "limit_seconds" in result else ():
        if subject != "import torch":
            text = "seconds of a contract case in a process of its own"
            found.append(Verdict(text, subject, seconds["median"], result["limit_seconds"], is_most=True))
    return found


def _facts(result: Mapping[str, Any]) -> str:
    """Return the line that says when, where and of which commit a result was measured."""
    facts = result.get("environment")
    if facts is None:
        machine = f"{result['machine']}, {result['cores']} cores"
        return f"Date {NOT_RECORDED}; commit {NOT_RECORDED}; {machine}; torch {result['torch']}."
    machine = facts["machine"]
    named = f"{machine['processor'] or machine['machine']}, {machine['cpu_count']} cores"
    if device := result.get("device"):
        named = f"{device['name']}, by the runs of {', '.join(_runs(result))}"
    return f"{facts['date'][:10]}; commit `{facts['commit']}`; {named}; torch {facts['torch']}."


def _runs(result: Mapping[str, Any]) -> list[str]:
    runs = (run["environment"] for run in result["runs"].values())
    return list(dict.fromkeys(f"{run['date'][:10]} (commit `{run['commit']}`)" for run in runs))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if abs(value) < 1e4 else f"{value:,.0f}"  # noqa: PLR2004


def _rows(found: Sequence[Verdict]) -> list[list[str]]:
    return [
        [v.word, v.target, v.subject, _number(v.ratio), f"{'≤' if v.is_most else '≥'} {v.limit:g}", v.against or "–"]
        for v in found
    ]


def _count(found: Sequence[Verdict]) -> str:
    missed = sum(v.is_met is False for v in found)
    unmeasured = sum(v.is_met is None for v in found)
    text = f"{sum(v.is_met is True for v in found)} of {len(found)} met"
    text += f", **{missed} MISSED**" if missed else ""
    return text + (f", {unmeasured} not measured" if unmeasured else "")


def _by_target(found: Sequence[Verdict]) -> str:
    """Return one row for each target: how many subjects meet it, and the one that does so least."""
    rows = []
    for target in dict.fromkeys(v.target for v in found):
        own = [v for v in found if v.target == target]
        worst = min(own, key=lambda v: v.margin)
        sign = "≤" if worst.is_most else "≥"
        subject = worst.subject + (f", against {worst.against}" if worst.against else "")
        rows.append([target, f"{sign} {worst.limit:g}", _count(own), f"{_number(worst.ratio)}: {subject}"])
    return table(["target", "limit", "verdict", "nearest to the limit, or farthest past it"], rows)


def _measured(name: str, result: Mapping[str, Any]) -> str:
    """Return the table of a result that has no target."""
    if name == "precision":
        rows = [
            [program, f"{own['kl_divergence']:.1e}", f"{own['equal_next_tokens']:.1%}"]
            for program, own in result["programs"].items()
        ]
        return table(["program", "KL divergence, nats per token", "equal next tokens"], rows)
    if name == "embeddings":
        rows = [[row["format"], row["name"], row["mean_cosine"], row["least_cosine"]] for row in result["rows"]]
        return table(["format", "weights", "mean cosine", "least cosine"], rows)
    if name == "examples":
        rows = [
            [f"`{example}`", own["date"][:10], f"`{own['commit']}`", "; ".join(_figures(own))]
            for example, own in result["examples"].items()
        ]
        return table(["example", "date", "commit", "reached"], rows)
    if name.startswith("sharing-stress"):
        names = ("kind", "mode", "operations", "killed", "torn", "stale")
        rows = [[race[name] for name in names] for race in result["races"]]
        return table(["kind", "mode", "operations", "processes killed", "torn reads", "stale reads"], rows)
    if name == "soak":
        rows = [[part, own["date"][:10], f"`{own['commit']}`"] for part, own in result["parts"].items()]
        return table(["part, green", "date", "commit"], rows)
    return "Measured without a target: the figures are in the file."


def _figures(own: Mapping[str, Any]) -> Iterator[str]:
    for key, value in own.items():
        if key not in {"commit", "date", "seconds"}:
            shown = " and ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield f"{key.replace('_', ' ')} {shown}"


def _section(name: str, result: Mapping[str, Any], found: Sequence[Verdict]) -> Iterator[str]:
    title, command, discussed = TITLES[name]
    yield f"## {title}"
    links = f"[`{name}.json`](../benchmarks/results/{name}.json), by `{command}`"
    yield _facts(result) + f" {links}" + (f"; discussed in [{discussed}]({discussed})." if discussed else ".")
    if not found:
        yield _measured(name, result)
        return
    yield f"{_count(found)}."
    yield _by_target(found)
    head = ["verdict", "target", "subject", "measured", "limit", "against"]
    if missed := [v for v in found if v.is_met is False]:
        yield f"<details><summary>Each of the {len(missed)} that are MISSED</summary>"
        yield table(head, _rows(missed))
        yield "</details>"
    if rest := [v for v in found if v.is_met is not False]:
        yield f"<details><summary>Each of the {len(rest)} others</summary>"
        yield table(head, _rows(rest))
        yield "</details>"


def page(folder: Path = RESULTS) -> str:
    """Return the generated part of the page: an overview, then each result with all its verdicts.

    Raises:
        ResultsError: Titles and stored results differ, or a verdict is wrong.
    """
    results = read(folder)
    found = {name: verdicts(name, result) for name, result in results.items()}
    rows = []
    for name, result in results.items():
        anchor = f"#{_slug(TITLES[name][0])}"
        facts = result.get("environment", {"date": NOT_RECORDED, "commit": NOT_RECORDED})
        date = facts["date"][:10] if facts["date"] != NOT_RECORDED else NOT_RECORDED
        verdict = _count(found[name]) if found[name] else "no target"
        rows.append([f"[{cell(TITLES[name][0])}]({anchor})", verdict, date, f"`{facts['commit']}`"])
    every = [v for own in found.values() for v in own]
    head = ["result", "verdicts", "date", "commit"]
    parts = [f"All results together: {_count(every)}.", table(head, rows, is_raw=True)]
    for name, result in results.items():
        parts += _section(name, result, found[name])
    return "\n\n".join(parts) + "\n"


def _slug(title: str) -> str:
    """Return the anchor that MyST gives a heading."""
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")
