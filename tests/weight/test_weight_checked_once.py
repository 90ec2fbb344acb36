"""A weight is checked once on the way from its file to its layer, and again when it was written to."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4core.weight import invariants
from tests.support.fakes import registry

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often structures are checked, and tensors read through for illegal numbers."""
    counted: Counter[str] = Counter()

    def count(name: str) -> None:
        check: Any = getattr(invariants, name)

        def counting(*arguments: Any) -> Any:
            counted[name] += 1
            return check(*arguments)

        monkeypatch.setattr(invariants, name, counting)

    count("check_structure")
    count("first_illegal")
    return counted


def test_a_weight_of_a_file_is_checked_once(looks: Counter[str], tmp_path: Path) -> None:
    """Opening, reading and preparing a layer under a name of its own looks at its numbers once."""
    path = tmp_path / "a.safetensors"
    q4.save_checkpoint(path, {"m": q4.quantize(torch.ones(8, 64), "nf4")}, dialect="simple-nf4")
    session = q4.Session(registry=registry())
    session.linear(q4.quantize(torch.ones(8, 64), "nf4"))  # the self-probe, which has weights of its own
    with q4.open(path) as checkpoint:
        looks.clear()
        layer = session.linear(checkpoint["m"], name="other")
    assert looks == {"check_structure": 1, "first_illegal": 1}
    assert layer.name == "other"
    looks.clear()
    assert layer.packed_weight().name == "m"
    assert looks == {"check_structure": 1}


@pytest.mark.parametrize("named", [False, True])
def test_a_weight_that_was_written_to_is_checked_again(named: bool) -> None:
    """What a user writes to a scale after a check is found when the next layer is made."""
    weight = q4.quantize(torch.ones(8, 64), "nf4")
    session = q4.Session(registry=registry())
    session.linear(weight)
    weight.scale[0, 0] = float("nan")
    with pytest.raises(q4.WeightError, match="scale"):
        session.linear(weight, name="other" if named else None)


def test_layers_of_one_weight_check_it_once(looks: Counter[str]) -> None:
    """A second layer over the same weight, under whatever name, looks at no number again."""
    weight = q4.quantize(torch.ones(8, 64), "nf4")
    session = q4.Session(registry=registry())
    session.linear(weight, name="first")
    looks.clear()
    session.linear(weight, name="second")
    assert not looks
