"""The protocol of atomics for ``IN_PLACE``, searched through in full, and what is found in protocols that are wrong."""

from __future__ import annotations

import pytest
from in_place_model import FAULTS, AfterDeathModel, InPlaceModel
from shared_model import Setting, explore


@pytest.mark.parametrize(
    ("setting", "least"),
    [
        (Setting(in_place=True, writers=(1,), readers=(1,), kills=1), 15_000),
        (Setting(in_place=True, writers=(2,), readers=(1,), kills=0), 1_000),
        (Setting(in_place=True, writers=(1, 1), readers=(), kills=1), 8_000),
        (Setting(in_place=True, writers=(1, 1), readers=(1,), kills=0), 7_000),
        (Setting(in_place=True, writers=(1,), readers=(), watchers=1, kills=1), 1_000),
        # A dead writer has left the content unknown.
        (Setting(in_place=True, writers=(), readers=(1,), healers=1, kills=1), 10_000),
        (Setting(in_place=True, writers=(), readers=(), healers=2, kills=1), 6_000),
        (Setting(in_place=True, writers=(), readers=(), watchers=1, healers=1, kills=1), 1_000),
    ],
    ids=str,
)
def test_protocol_holds(setting: Setting, least: int) -> None:
    """No read is torn or stale, versions grow by one, no living writer is called dead, and all can always end."""
    found = explore(setting, InPlaceModel)
    assert (found.problem, found.steps) == ("", ())
    assert found.states >= least


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(
    ("setting", "least"),
    [
        (Setting(in_place=True, writers=(2,), readers=(1,), kills=1), 160_000),
        (Setting(in_place=True, writers=(1, 1), readers=(), watchers=1, kills=1), 180_000),
        (Setting(in_place=True, writers=(), readers=(1,), watchers=1, healers=1, kills=1), 340_000),
    ],
    ids=str,
)
def test_protocol_holds_at_full_size(setting: Setting, least: int) -> None:
    """The same with several processes at each of their steps, any of which may be killed."""
    test_protocol_holds(setting, least)


@pytest.mark.parametrize(
    ("setting", "least"),
    [
        (Setting(in_place=True, writers=(1,), readers=(1,), kills=0), 500),
        (Setting(in_place=True, writers=(1, 1), readers=(), kills=0), 200),
        (Setting(in_place=True, writers=(), readers=(1, 1), kills=1), 1_000),
    ],
    ids=str,
)
def test_protocol_holds_after_a_death(setting: Setting, least: int) -> None:
    """What a killed writer has left is taken away, by whoever finds it, once."""
    found = explore(setting, AfterDeathModel)
    assert (found.problem, found.steps) == ("", ())
    assert found.states >= least


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str) -> None:
    """Each way in which the protocol could be wrong is found, as what it leads to."""
    kind = AfterDeathModel if fault == "bury without the turn" else InPlaceModel
    assert explore(_setting_of(fault), kind).problem == FAULTS[fault]


def _setting_of(fault: str) -> Setting:
    """Return a setting in which the fault shows: two writers if it is about turns, a kill if about the dead."""
    problem = FAULTS[fault]
    if fault == "reset heals at once":
        return Setting(in_place=True, writers=(), readers=(1,), healers=1, kills=1, fault=fault)
    if fault in {"a look without acquire", "living writer is called dead"}:
        return Setting(in_place=True, readers=(), watchers=1, kills=0, fault=fault)
    if problem == "order" or fault == "turn is not let go":
        return Setting(in_place=True, writers=(1, 1), readers=(), kills=int("token" in fault), fault=fault)
    if fault == "bury without the turn":
        return Setting(in_place=True, writers=(1,), readers=(1,), kills=0, fault=fault)
    kills = int(problem in {"stuck", "torn"})
    writers, mortals = ((1,), ("writer",)) if problem == "torn" else ((1,), ("writer", "reader"))
    return Setting(in_place=True, writers=writers if kills else (2,), kills=kills, mortals=mortals, fault=fault)
