"""The protocol between processes, searched through in full, and what the search finds in protocols that are wrong."""

from __future__ import annotations

import pytest
from shared_model import FAULTS_IN_PLACE, FAULTS_VERSIONED, Setting, explore


@pytest.mark.parametrize(
    ("setting", "least"),
    [
        (Setting(writers=(2,), readers=(1,), kills=1), 10_000),
        (Setting(writers=(3,), readers=(2,), kills=0), 5_000),
        (Setting(writers=(1, 1), readers=(1,), kills=1), 30_000),
        (Setting(writers=(2,), readers=(1, 1), kills=0), 10_000),
        (Setting(in_place=True, writers=(2,), readers=(1,), watchers=1, healers=1, kills=1), 5_000),
        (Setting(in_place=True, writers=(1, 1), readers=(1,), healers=1, kills=1), 5_000),
        (Setting(in_place=True, writers=(1,), readers=(1, 1), kills=1), 1_000),
    ],
    ids=str,
)
def test_protocol_holds(setting: Setting, least: int) -> None:
    """No read is torn or stale, versions grow by one, no living writer is called dead, and all can always end."""
    found = explore(setting)
    assert (found.problem, found.steps) == ("", ())
    assert found.states >= least


@pytest.mark.parametrize("fault", FAULTS_VERSIONED)
def test_fault_of_versioned_is_found(fault: str) -> None:
    """Each way in which the protocol could be wrong is found, as what it leads to."""
    assert explore(Setting(writers=(2, 1), readers=(1,), kills=1, fault=fault)).problem == FAULTS_VERSIONED[fault]


@pytest.mark.parametrize("fault", FAULTS_IN_PLACE)
def test_fault_of_in_place_is_found(fault: str) -> None:
    """As above; only who watches can be alarmed."""
    problem = FAULTS_IN_PLACE[fault]
    watchers = int(problem == "false alarm")
    kills = 2 if fault == "reset heals at once" else 1  # a writer, and who would heal
    setting = Setting(in_place=True, readers=(1,), writers=(2,), watchers=watchers, healers=1, kills=kills, fault=fault)
    assert explore(setting).problem == problem


def test_steps_are_told() -> None:
    """Of a fault the search tells one way in which it comes about, with as few steps as can be."""
    found = explore(Setting(in_place=True, writers=(1,), readers=(1,), kills=1, fault="no mark"))
    assert found.problem == "torn"
    assert "writer 0: killed at second half" in found.steps
    assert found.steps[-1] == "reader 1: first half"
