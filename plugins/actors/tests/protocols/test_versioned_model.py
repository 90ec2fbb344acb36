"""The protocol of atomics, searched through in full, and what the search finds in protocols that are wrong."""

from __future__ import annotations

import pytest
from shared_model import Setting, explore
from versioned_model import FAULTS, VersionedModel


@pytest.mark.parametrize(
    ("setting", "least"),
    [
        (Setting(writers=(2,), readers=(1,), kills=1, mortals=("reader",)), 4_000),
        (Setting(writers=(2,), readers=(1,), kills=1, mortals=("writer",)), 15_000),
        (Setting(writers=(3,), readers=(2,), kills=0), 4_000),
        (Setting(writers=(1, 1), readers=(1,), kills=0), 5_000),
        (Setting(writers=(2, 1), readers=(), kills=1), 15_000),
    ],
    ids=str,
)
def test_protocol_holds(setting: Setting, least: int) -> None:
    """No read is torn or stale, versions grow by one, and all can always end, whoever was killed."""
    found = explore(setting, VersionedModel)
    assert (found.problem, found.steps) == ("", ())
    assert found.states >= least


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(
    ("setting", "least"),
    [
        (Setting(writers=(3,), readers=(1,), kills=1), 130_000),
        (Setting(writers=(2, 1), readers=(1,), kills=0), 40_000),
        (Setting(writers=(1, 1), readers=(1,), kills=1), 770_000),
    ],
    ids=str,
)
def test_protocol_holds_at_full_size(setting: Setting, least: int) -> None:
    """The same with any process killed next to readers, and with a reader next to writers that take turns."""
    test_protocol_holds(setting, least)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    """Each way in which the protocol could be wrong is found, as what it leads to."""
    problem = FAULTS[fault]
    is_about_turns = "turn" in fault or "token" in fault
    writers, readers = ((1, 1), ()) if is_about_turns else ((2,), (1,))
    mortals = ("writer",) if is_about_turns else ("reader",)
    kills = int(problem in {"order", "stuck"})
    setting = Setting(writers=writers, readers=readers, kills=kills, mortals=mortals, fault=fault)
    assert explore(setting, VersionedModel).problem == problem


def test_steps_are_reported() -> None:
    """For a fault the search reports one sequence of steps that leads to it, as short as possible."""
    found = explore(Setting(writers=(2,), readers=(1,), kills=0, fault="no second look"), VersionedModel)
    assert found.problem == "torn"
    assert {"writer 0: publish", "reader 1: bit"} < set(found.steps)
    assert found.steps[-1] == "reader 1: first half"
