"""The verdicts of the benchmarks: numbers on either side of a target."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

import q4core as q4
from benchmarks import contexts, generate, weights
from benchmarks.cpu import report, rounds, verdicts
from benchmarks.verdict import CALL_TARGETS_US, Verdict, lines
from tests.support.benchmark_results import decode_stage, prefill_stage, stage_of


def _missed(stage: dict[str, Any]) -> set[str]:
    return {verdict.target.split(":")[0] for verdict in verdicts.judge([stage], []) if not verdict.is_met}


@pytest.mark.parametrize("stage", [decode_stage(), decode_stage(threads=1), prefill_stage(), prefill_stage(rows=4)])
def test_numbers_that_meet_every_target_are_said_to(stage: dict[str, Any]) -> None:
    """No verdict is missed, and there are verdicts."""
    assert verdicts.judge([stage], [])
    assert _missed(stage) == set()


@pytest.mark.parametrize(
    ("stage", "targets"),
    [
        (decode_stage(ggml=249), {"decode, int8"}),
        (decode_stage(ort=249), {"decode, int8"}),
        (decode_stage(read=230 * 0.94), {"decode, int8, all threads"}),
        (decode_stage(threads=1, read=224), {"decode, int8, one thread"}),
        (decode_stage(exact=515), {"decode, exact, all threads"}),
        (decode_stage(nvfp4=380), {"decode"}),
        (decode_stage(bitsandbytes=9_990), {"decode"}),
        (decode_stage(torchao=124_900), {"decode"}),
        (prefill_stage(ort=4390), {"prefill, int8"}),
        (prefill_stage(ggml=4390), {"prefill, int8"}),
        (prefill_stage(torch=7190), {"prefill, exact, M >= 64"}),
        (prefill_stage(rows=16, torch=1000), set()),
    ],
)
def test_one_number_flips_its_verdict(stage: dict[str, Any], targets: set[str]) -> None:
    """A number just beyond a target misses that target and no other."""
    assert _missed(stage) == targets


def test_bitsandbytes_counts_at_its_best_and_as_most_machines_run_it() -> None:
    """Its kernels for AVX512-BF16 alone can miss the target that its other path meets."""
    stage = decode_stage(bitsandbytes=500)
    found = {one.target: one.word for one in verdicts.judge([stage], []) if "bitsandbytes" in one.target}
    target = "decode: NF4 40 times as fast as bitsandbytes"
    assert found == {target: "MISSED", f"{target} on CPUs without AVX512-BF16": "met"}


def test_the_best_reader_is_the_yardstick() -> None:
    """The share is of the fastest reader, which the verdict names."""
    shares = [one for one in verdicts.judge([decode_stage()], []) if "read bandwidth" in one.target]
    assert {one.against for one in shares} == {"read: a"}
    assert shares[0].ratio == pytest.approx(230 / 250)


def test_a_machine_of_two_speeds_is_judged_within_its_rounds() -> None:
    """Where all go twice as fast for half of a run, one median may be of that half and another one not."""
    stage = decode_stage()
    for name, call in stage["calls"].items():
        fast = 16 if name.startswith("read") else 14
        samples = [call["median"] / (2 if index < fast else 1) for index in range(30)]
        stage["calls"][name] = call | {"samples": samples, "median": statistics.median(samples)}
    assert _missed(stage) == set()
    shares = [one.ratio for one in verdicts.judge([stage], []) if "read bandwidth" in one.target]
    assert shares[0] == pytest.approx(230 / 250)


def test_few_samples_are_compared_with_those_of_their_rounds() -> None:
    """A slow call is sampled in every third round, and set against what the other took there."""
    slow = {"median": 0.0, "samples": [20.0, 40.0, 20.0]}
    quick = {"median": 0.0, "samples": [5.0, 5.0, 1.0, 5.0, 5.0, 2.0, 5.0, 5.0, 1.0]}
    assert rounds.ratio(slow, quick) == 20
    assert rounds.ratio(quick, slow) == 0.05


def test_formats_are_compared_with_their_equals() -> None:
    """Eight bits are compared with eight, and sparse scales against four bits with as many, whichever is faster."""
    stage = stage_of(
        1,
        2,
        {
            "q8_0 int8": ("q4core", "q8_0", "int8", 500),
            "nf4 int8": ("q4core", "nf4", "int8", 250),
            "int4 g128 int8": ("q4core", "int4 g128", "int8", 250),
            "ggml Q4_0": ("ggml", "Q4_0", "int8", 300),
            "ggml Q8_0": ("ggml", "Q8_0", "int8", 600),
            "onnxruntime int4 g128": ("onnxruntime", "int4 g128", "int8", 200),
        },
    )
    found = {
        one.subject.split(",")[0]: one.against for one in verdicts.judge([stage], []) if "faster than" in one.target
    }
    assert found == {"q8_0": "ggml Q8_0", "nf4": "ggml Q4_0", "int4 g128": "onnxruntime int4 g128"}


def _types(**changed: float) -> dict[str, Any]:
    us = {"k": 250.0, "words": 300.0, "order": 250.0, "ggml": 300.0, "ort": 260.0} | changed
    calls = {
        "Q6_K int8": ("q4core", "Q6_K", "int8", us["k"]),
        "Q6_K int16": ("q4core", "Q6_K", "int16", us["words"]),
        "int4 g128 act-order int8": ("q4core", "int4 g128 act-order", "int8", us["order"]),
        "ggml Q6_K": ("ggml", "Q6_K", "int8", us["ggml"]),
        "ggml Q6_K repack": ("ggml", "Q6_K", "int8", us["ggml"] + 100),
        "ggml Q4_0": ("ggml", "Q4_0", "int8", 1.0),
        "onnxruntime int4 g128 zero": ("onnxruntime", "int4 g128 zero", "int8", us["ort"]),
    }
    return stage_of(1, 2, calls) | {"group": "a"}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, set()),
        ({"ggml": 249}, {"Q6_K", "2 rows"}),
        ({"ort": 249}, {"int4 g128 act-order", "2 rows"}),
        ({"words": 326}, {"Q6_K"}),
    ],
)
def test_types_are_compared_with_the_same_type(changed: dict[str, float], missed: set[str]) -> None:
    """Neither another type nor a slower order of the same one counts, and nine rows of ten suffice for decode."""
    judged = verdicts.judge([], [], [_types(**changed)])
    assert len(judged) == 4
    assert {one.subject.split(",")[0] for one in judged if not one.is_met} == missed


def test_each_type_has_a_line_with_its_word() -> None:
    """The line has the times of all precisions, the best peer's, and which of them is ahead."""
    stage = _types()
    stage["calls"] |= {"Q6_K exact": stage["calls"]["Q6_K int8"] | {"precision": "exact"}}
    result: dict[str, Any] = {
        "stages": [],
        "type_stages": [stage],
        "small_layers": [],
        "peak_resident_bytes": None,
        "peers": {},
    }
    (line,) = [line for line in report.lines(result, []) if line.startswith("  Q6_K")]
    assert line.split() == ["Q6_K", "250", "300", "250", "300", "1.20", "ahead", "(ggml", "Q6_K)"]


@pytest.mark.parametrize("name", [name for group in weights.TYPES.values() for name in group])
def test_types_hold_a_weight_nearly(name: str) -> None:
    """Each has codes, scales and second numbers that give the dense weight back, to what its bits allow."""
    dense = torch.randn(16, 512, generator=torch.Generator().manual_seed(0)) / 50
    held = weights.type_of(name, dense)
    held.check_values()
    error = (q4.dequantize(held) - dense).square().sum() / dense.square().sum()
    assert error < {"Q2_K": 0.15, "Q3_K": 0.06}.get(name, 0.02)


def test_a_missing_peer_is_not_measured_instead_of_met() -> None:
    """Without peers nothing is compared, and the words say so."""
    stage = decode_stage()
    for name in [name for name, call in stage["calls"].items() if call["role"] == "peer"]:
        del stage["calls"][name]
    found = [one for one in verdicts.judge([stage], []) if "read bandwidth" not in one.target]
    assert found
    assert {one.word for one in found} == {"not measured"}
    assert all("not measured" in line for line in list(lines(found))[1:])


def test_the_cache_resident_case_proves_no_target() -> None:
    """What comes from the cache is reported and not judged."""
    assert verdicts.judge([decode_stage() | {"weights_from": "cache"}], []) == []


def test_small_layers_are_judged_by_what_they_add() -> None:
    """The backend's own call is taken off, and each way of calling has the limit that ``overhead`` has."""
    calls = {
        "backend": {"median": 8.0},
        "forward with out=": {"median": 9.75},
        "forward without out=": {"median": 9.75},
    }
    with_out, without = verdicts.judge([], [{"name": "q4_0", "calls": calls}])
    assert (with_out.ratio, with_out.word) == (1.75, "MISSED")
    assert (without.ratio, without.word) == (1.75, "met")
    assert (with_out.limit, without.limit) == (CALL_TARGETS_US["forward, out="], CALL_TARGETS_US["forward"])


def test_the_worst_case_is_reported() -> None:
    """The line of a target counts what meets it and names the worst, for limits from below and from above."""
    low = [Verdict("fast", "a", 1.2, 1.0), Verdict("fast", "b", 0.9, 1.0, against="c")]
    assert [line.split()[:2] for line in lines(low)][1:] == [["MISSED", "1/2"], ["MISSED", "0.9"]]
    high = [Verdict("short", "a", -1.0, 3.0, is_most=True), Verdict("short", "b", 2.0, 3.0, is_most=True)]
    assert "worst 2 (b" in list(lines(high))[1]


def test_generation_is_judged_against_llama_cpp() -> None:
    """Tokens per second of the default and of int8 over the fastest peer's and llama.cpp's; not measured without."""

    def programs(ours: float, theirs: float) -> dict[str, Any]:
        return {
            name: {kind: {"median": rate, "p10": rate, "p90": rate} for kind in ("decode", "prefill")}
            for name, rate in ((generate.DEFAULT, ours), (generate.INT8, ours), (generate.LLAMA, theirs))
        }

    judged = generate.judge({"threads": {"2": programs(250, 100), "1": programs(120, 100)}})
    assert [one.word for one in judged] == ["met"] * 7 + ["MISSED", "met", "MISSED", "met"] + ["MISSED"] * 3
    alone = programs(81, 100)
    del alone[generate.LLAMA]
    assert {one.word for one in generate.judge({"threads": {"2": alone}})} == {"not measured"}
    both = programs(250, 100) | {generate.IK_LLAMA: {"prefill": {"median": 230.0}, "decode": {"median": 90.0}}}
    judged = generate.judge({"model": "gemma3", "threads": {"2": both}})
    assert [one.word for one in judged] == ["met", "met", "MISSED"] + ["met"] * 4 + ["MISSED"]
    assert judged[-1].against == generate.IK_LLAMA


def test_contexts_are_judged_against_llama_cpp() -> None:
    """Decode, the prompt and the cache's memory have their own targets; what has no peer is not measured."""

    def context(decode: float, prefill: float, share: float) -> dict[str, Any]:
        rates = {"decode": {"median": decode}, "prefill": {"median": prefill}}
        programs = dict.fromkeys(contexts.OURS, rates)
        peer = {generate.LLAMA: {kind: {"median": 100.0} for kind in rates}}
        return {"threads": {"2": programs | peer}, "cache_bytes_over_numbers": dict.fromkeys(contexts.OURS, share)}

    def words(own: dict[str, Any]) -> list[str]:
        return [one.word for one in contexts.judge({"contexts": {"512": own}})]

    count = len(contexts.OURS)
    assert words(context(175.0, 250.0, 1.0)) == ["met"] * 3 * count
    assert words(context(174.0, 250.0, 1.0)) == ["MISSED", "met"] * count + ["met"] * count
    assert words(context(175.0, 249.0, 1.03)) == ["met", "MISSED"] * count + ["MISSED"] * count
    alone = context(175.0, 250.0, 1.0)
    del alone["threads"]["2"][generate.LLAMA]
    assert words(alone) == ["not measured"] * 2 * count + ["met"] * count
