"""The protocol of rings and stamps, searched through in full, and what the search finds in protocols that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
from shared_model import explore
from stamps_model import FAULTS, StampsModel, StampsSetting

MODEL: Any = StampsModel


@pytest.mark.parametrize(
    ("setting", "least"),
    [
        (StampsSetting(steps=3, kills=0), 200),
        (StampsSetting(steps=2, kills=1), 500),
        (StampsSetting(steps=4, chunk=2, slots=3, kills=0), 200),
        pytest.param(StampsSetting(steps=3, kills=2), 2_000, marks=[pytest.mark.slow, pytest.mark.soak]),
        pytest.param(
            StampsSetting(steps=4, chunk=2, slots=3, kills=1), 2_000, marks=[pytest.mark.slow, pytest.mark.soak]
        ),
    ],
    ids=str,
)
def test_protocol_holds(setting: StampsSetting, least: int) -> None:
    """Every row that is read is that of its step, and all can always end, whoever was killed."""
    found = explore(setting, MODEL)  # type: ignore[arg-type]  # a setting of its own
    assert (found.problem, found.steps) == ("", ())
    assert found.states >= least


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    """Each way in which the protocol could be wrong is found, as what it leads to."""
    setting = StampsSetting(steps=3, kills=1, fault=fault)
    if fault == "no wait for the source":  # between two chunks the wait for all is as strict
        setting = StampsSetting(steps=2, chunk=2, slots=3, kills=0, fault=fault)
    assert explore(setting, MODEL).problem == FAULTS[fault]  # type: ignore[arg-type]  # a setting of its own
