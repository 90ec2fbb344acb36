"""The table of cases is data: stable ids, none twice, each with a check, and every weight can be built."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import q4core as q4
from q4_conformance import (
    Case,
    backend_cases,
    core_cases,
    device_cases,
    dialect_cases,
    file_cases,
    layer_cases,
    linear_cases,
    memory_cases,
    program_cases,
)
from q4_conformance.contract.case import CHECKS, check
from q4_conformance.contract.cases import select_cases, weight_recipes
from q4_conformance.execution.in_process import run_case
from q4_conformance.oracle.decoding import decode_codes
from q4_conformance.oracle.exact import as_given, exact_input_gradient, exact_linear, exact_weight

PLAIN = (*memory_cases(), *dialect_cases(), *layer_cases(), *file_cases(), *program_cases(), *core_cases())
EVERY = (*linear_cases(), *backend_cases(), *device_cases(), *PLAIN)
CONTRACT = {f"TC-{number:02d}" for number in range(1, 24)} - {"TC-13"}  # q4-actors tests its own
EXTENDED = {f"EX-{number:02d}" for number in range(1, 26)}


def test_ids_are_unique() -> None:
    """No id comes twice."""
    ids = [case.id for case in EVERY]
    assert len(ids) == len(set(ids)) > 900


def test_every_check_exists_and_is_used() -> None:
    """Each case names a check that is there, and each check has a case."""
    assert run_case is not None  # its module enters the checks
    assert {case.check for case in EVERY} == set(CHECKS)


def test_contract_is_covered() -> None:
    """Every case of the contract, and every extended one, is in the table."""
    assert {case.contract for case in EVERY} >= CONTRACT | EXTENDED


def test_ids_are_stable() -> None:
    """Ids that certificates and notes refer to stay what they are."""
    ids = {case.id for case in EVERY}
    assert {
        "TC-01/detect",
        "TC-09/values/nf4-plain-high_first-48x256b64-s0/float32/exact",
        "TC-09/values/nvfp4-e4m3_mul-low_first-48x256b16-s0/bfloat16/int8",
        "TC-09/bias/q4_1-plain-half_split32-48x256b32-s0/float16/exact",
        "EX-01/rows/int4-plain-low_first-48x256b128-s0/float32/exact",
        "EX-10/edges/mxfp4-e8m0-low_first-48x256b32-edges-s0/float32/exact",
        "EX-16/export/nf4-double_quant-high_first-80x512b64-s0/float32/exact",
    } <= ids


def test_weights_can_be_built_and_are_legal() -> None:
    """Every weight of the table is one that a checkpoint may hold."""
    recipes = {case.recipe for case in EVERY if case.recipe is not None}
    for recipe in recipes:
        recipe.build().check_values()


@pytest.mark.parametrize("name", sorted(q4.BUILTIN_FORMATS))
def test_recipes_cover_the_format(name: str) -> None:
    """All scale kinds and block sizes of a format occur, and its features together use every one there is."""
    kind = q4.BUILTIN_FORMATS[name]
    recipes = weight_recipes(kind)
    assert {recipe.scale_kind for recipe in recipes} == set(kind.scale_kinds)
    small = {size for size in kind.block_sizes if size <= 256}
    assert {recipe.block_size for recipe in recipes} >= small
    assert {recipe.packing.order for recipe in recipes} >= (
        {q4.NibbleOrder.BYTES} if kind.bits == 8 else set(q4.NibbleOrder) - {q4.NibbleOrder.BYTES}
    )


def test_features_are_all_judged() -> None:
    """Each feature but GRADIENTS, which a check of its own asks for, is that of some weight."""
    recipes = {case.recipe for case in EVERY if case.recipe is not None}
    seen = {feature for recipe in recipes for feature in recipe.build().features}
    assert seen == set(q4.Feature) - {q4.Feature.GRADIENTS}


def test_a_plugins_format_has_cases_too() -> None:
    """A format that is not built in gets the same table."""
    kind = q4.Format("ternary4", q4.Form.CODEBOOK, 4, 32, tuple(float(i % 3 - 1) for i in range(16)))
    cases = linear_cases([kind])
    assert {case.check for case in cases} == {case.check for case in linear_cases(["nf4"])}
    cases[0].weight_recipe.build()


def test_cases_are_selected_by_the_start_of_their_id() -> None:
    """A partial run takes the ids that start so; nothing named takes all."""
    chosen = select_cases(EVERY, ["TC-01", "EX-03/repeat/nf4"])
    assert [case.id for case in chosen if case.contract == "TC-01"] == [
        "TC-01/detect/nf4",
        "TC-01/detect/fp4",
        "TC-01/detect",
    ]
    assert {case.contract for case in chosen} == {"TC-01", "EX-03"}
    assert select_cases(EVERY, []) == EVERY


def test_a_check_of_a_taken_name_is_refused() -> None:
    """Two checks can't have one name."""
    with pytest.raises(ValueError, match="values"):
        check("values")(lambda case, subject: "")


def test_a_case_without_a_weight_says_so() -> None:
    """Asking a core case for its weight is an error that names the case."""
    with pytest.raises(LookupError, match="TC-01/detect"):
        _ = core_cases()[0].weight_recipe


def test_a_subject_that_writes_to_its_weight_does_not_move_its_target() -> None:
    """The oracle judges by the bytes that the weight had when the case made it, in every later case of it too."""
    case = linear_cases(["q4_1"])[0]
    x = torch.ones(2, case.weight_recipe.k)
    expected, untouched = exact_linear(case.weight(), x), case.weight_recipe.build()
    weight = case.weight()
    weight.qdata.fill_(0x77)
    weight.scale.mul_(2)
    for again in (weight, case.weight()):
        assert np.array_equal(exact_linear(again, x).value, expected.value)
        assert np.array_equal(exact_linear(again, x).size, expected.size)
        assert np.array_equal(exact_weight(again), exact_weight(untouched))
        assert np.array_equal(
            exact_input_gradient(again, x[:, :48]).value, x[:, :48].double().numpy() @ exact_weight(untouched)
        )
        assert torch.equal(as_given(again).qdata, untouched.qdata)
    assert not np.array_equal(decode_codes(weight), decode_codes(untouched))


def test_what_takes_long_has_a_longer_limit() -> None:
    """Cases of thousands of calls, of layers by the megabyte, of compilers and other processes are marked as slow."""
    slow = {case.check for case in EVERY if case.is_slow and case.profile == "backend"}
    assert slow == {
        "calls",
        "varied_calls",
        "quantise_calls",
        "train_through",
        "stochastic",
        "compile",
        "dispose",
        "kind",
        "elsewhere",
    }
    assert not [case.id for case in linear_cases() if case.is_slow]


def test_id_has_dtype_and_precision() -> None:
    """Cases that differ in dtype or precision have ids that differ."""
    recipe = weight_recipes(q4.BUILTIN_FORMATS["nf4"])[0]
    ids = {
        Case(
            contract="TC-09", part="values", text="", check="values", recipe=recipe, dtype=dtype, precision=precision
        ).id
        for dtype in (torch.float32, torch.float16)
        for precision in q4.ActivationPrecision
    }
    assert len(ids) == 2 * len(q4.ActivationPrecision)
