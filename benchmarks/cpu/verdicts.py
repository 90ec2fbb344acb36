"""Targets and verdicts, computed from the results of a run alone, as ratios within its rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from benchmarks.cpu import rounds
from benchmarks.cpu.quantized_torch import PORTABLE
from benchmarks.verdict import CALL_TARGETS_US, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["best_peer", "judge"]

_CONTENDERS = {"ggml", "onnxruntime"}
_WIDE = {"q8_0": 8, "Q8_0": 8, "int8 g32": 8}
"""Formats of 8 bits, which are compared with one another; all others have 4."""
_SPARSE_SCALES = {"int4 g128"}
"""Peers' formats with fewer scales, which are compared with ours of the same kind alone."""


Stage = dict[str, Any]
Call = dict[str, Any]


def _calls(stage: Stage, **wanted: str) -> dict[str, Call]:
    return {
        name: call for name, call in stage["calls"].items() if all(call[key] == value for key, value in wanted.items())
    }


def _is_decode(stage: Stage) -> bool:
    return bool(stage["rows"] == 1 and stage["weights_from"] == "memory")


def _nearest(call: Call, rivals: Mapping[str, Call]) -> tuple[str, float | None]:
    """Return the rival against which a call does worst, and how many times as fast as that one it is."""
    ratios = {name: rounds.ratio(rival, call) for name, rival in rivals.items()}
    name = min(ratios, key=lambda item: ratios[item], default="")
    return name, ratios.get(name)


def _rivals(stage: Stage, format_: str) -> dict[str, Call]:
    """Return the calls of ggml and ONNX Runtime that a format of ours is compared with."""
    return {
        name: call
        for name, call in stage["calls"].items()
        if call["library"] in _CONTENDERS
        and _WIDE.get(call["format"], 4) == _WIDE.get(format_, 4)
        and (call["format"] not in _SPARSE_SCALES or call["format"] == format_)
    }


def _faster(stage: Stage, target: str, limit: float) -> Iterator[Verdict]:
    for call in _calls(stage, role="ours", precision="int8").values():
        against, ratio = _nearest(call, _rivals(stage, call["format"]))
        yield Verdict(target, f"{call['format']}, {stage['name']}", ratio, limit, against=against)


def _share(stage: Stage, target: str, precision: str, limit: float) -> Iterator[Verdict]:
    readers = _calls(stage, format="read")
    for call in _calls(stage, role="ours", precision=precision).values():
        shares = {
            name: rounds.ratio(reader, call) * call["weight_bytes"] / reader["weight_bytes"]
            for name, reader in readers.items()
        }
        against = min(shares, key=lambda name: shares[name], default="")
        yield Verdict(target, f"{call['format']}, {stage['name']}", shares.get(against), limit, against=against)


def _against(stage: Stage, target: str, ours: str, rivals: Mapping[str, Call], limit: float) -> Iterator[Verdict]:
    call = stage["calls"].get(ours)
    if call is not None:
        against, ratio = _nearest(call, rivals)
        yield Verdict(target, f"{call['format']}, {stage['name']}", ratio, limit, against=against)


def _decode_verdicts(stage: Stage) -> Iterator[Verdict]:
    single = stage["threads"] == 1
    yield from _faster(stage, "decode, int8: faster than the best of ggml and ONNX Runtime", 1.0)
    limit = 0.90 if single else 0.88
    yield from _share(
        stage,
        f"decode, int8, {'one thread' if single else 'all threads'}: {limit} of the read bandwidth",
        "int8",
        limit,
    )
    limit = 0.80 if single else 0.85
    yield from _share(
        stage,
        f"decode, int16, {'one thread' if single else 'all threads'}: {limit} of the read bandwidth",
        "int16",
        limit,
    )
    if not single:
        yield from _share(stage, "decode, exact, all threads: 0.45 of the read bandwidth", "exact", 0.45)
    for verdict in _against(
        stage,
        "decode: NVFP4 in 0.65 of the time of ggml's",
        "nvfp4 int8",
        _calls(stage, library="ggml", format="NVFP4"),
        0.65,
    ):
        yield attrs.evolve(verdict, ratio=None if verdict.ratio is None else 1 / verdict.ratio, is_most=True)
    portable = {name: call for name, call in _calls(stage, library="bitsandbytes").items() if name.endswith(PORTABLE)}
    target = "decode: NF4 40 times as fast as bitsandbytes"
    yield from _against(stage, target, "nf4 int8", _calls(stage, library="bitsandbytes"), 40)
    yield from _against(stage, f"{target} on CPUs without AVX512-BF16", "nf4 int8", portable, 40)
    yield from _against(
        stage, "decode: NVFP4 500 times as fast as torchao", "nvfp4 int8", _calls(stage, library="torchao"), 500
    )


def _prefill_verdicts(stage: Stage) -> Iterator[Verdict]:
    yield from _faster(stage, "prefill, int8: 1.1 times the best of ggml and ONNX Runtime", 1.1)
    if stage["rows"] >= 64:  # noqa: PLR2004  # from there on
        dense = {name: call for name, call in stage["calls"].items() if name == "torch fp32"}
        for call in _calls(stage, role="ours", precision="exact").values():
            against, ratio = _nearest(call, dense)
            target = "prefill, exact, M >= 64: 0.9 of torch fp32"
            yield Verdict(target, f"{call['format']}, {stage['name']}", ratio, 0.9, against=against)


def _small_verdicts(small: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    for layer in small:
        for words, name in (("with out=", "forward, out="), ("without out=", "forward")):
            limit = CALL_TARGETS_US[name]
            over = layer["calls"][f"forward {words}"]["median"] - layer["calls"]["backend"]["median"]
            target = f"small layers: forward {words} adds {limit:g} µs to the backend's own call"
            yield Verdict(target, layer["name"], over, limit, is_most=True, against="backend.linear")


def best_peer(stage: Stage, format_: str) -> tuple[str, float | None]:
    """Return the fastest peer with the same type as ours in int8, and how many times as fast as that one we are.

    Act-order, which no peer has, is compared with the same codes in plain order.
    """
    same = format_.replace("act-order", "zero")
    rivals = {name: call for name, call in _calls(stage, role="peer").items() if call["format"] == same}
    return _nearest(stage["calls"][f"{format_} int8"], rivals)


def _type_verdicts(stages: Sequence[Stage]) -> Iterator[Verdict]:
    decoded = []
    for stage in stages:
        rows = stage["rows"]
        kind = "decode" if rows == 1 else "M >= 16" if rows >= 16 else "1 < M < 16"  # noqa: PLR2004  # the targets' own
        for call in _calls(stage, role="ours", precision="int8").values():
            subject = f"{call['format']}, {stage['name']}"
            against, ratio = best_peer(stage, call["format"])
            found = Verdict(
                f"types, {kind}, int8: ahead of the best peer's same type", subject, ratio, 1.0, against=against
            )
            decoded += [found] if rows == 1 and ratio is not None else []
            yield found
            if (words := stage["calls"].get(f"{call['format']} int16")) is not None:
                ratio = rounds.ratio(words, call)
                yield Verdict(
                    f"types, {kind}: int16 in 1.3 of int8's time", subject, ratio, 1.3, is_most=True, against="int8"
                )
    if decoded:
        share = sum(bool(one.is_met) for one in decoded) / len(decoded)
        yield Verdict(
            "types, decode, int8: ahead in 0.9 of the rows", f"{len(decoded)} rows", share, 0.9, against="peers"
        )


def judge(stages: Sequence[Stage], small: Sequence[dict[str, Any]], types: Sequence[Stage] = ()) -> list[Verdict]:
    """Return a verdict for each target and each subject that was measured.

    Args:
        stages: The results of ``plan.measure``.
        small: The results of ``small_layers.measure``.
        types: The results of ``plan.measure_types``.
    """
    rules: list[tuple[Callable[[Stage], bool], Callable[[Stage], Iterator[Verdict]]]] = [
        (_is_decode, _decode_verdicts),
        (lambda stage: bool(stage["rows"] > 1), _prefill_verdicts),
    ]
    found = [verdict for stage in stages for fits, rule in rules if fits(stage) for verdict in rule(stage)]
    return [*found, *_small_verdicts(small), *_type_verdicts(types)]
