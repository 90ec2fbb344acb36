"""The judge of histories finds every planted fault, and passes what is right."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Literal

import pytest
from history import Operation, violations

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["read", "write"]


def _op(kind: Kind, version: int, value: str, start: int, end: int) -> Operation:
    return Operation(kind, version, value, start, end)


def test_sequential_history_passes() -> None:
    """Reads that see the last version written before them are right."""
    history = [
        _op("read", 0, "a", 0, 1),
        _op("write", 1, "b", 2, 3),
        _op("read", 1, "b", 4, 5),
        _op("write", 2, "c", 6, 7),
        _op("read", 2, "c", 8, 9),
    ]
    assert violations(history, "a") == ()


def test_empty_history_passes() -> None:
    """Nothing done is nothing wrong."""
    assert violations([], "a") == ()


@pytest.mark.parametrize("seen", [0, 1])
def test_read_during_a_write_may_see_either_version(seen: int) -> None:
    """Operations that overlap may come in either order."""
    history = [_op("write", 1, "b", 0, 10), _op("read", seen, "ab"[seen], 4, 5)]
    assert violations(history, "a") == ()


FAULTS = {
    "torn read": ([_op("write", 1, "b", 0, 1), _op("read", 1, "ab", 2, 3)], "torn read of version 1"),
    "half of an update that never took effect": ([_op("read", 0, "x", 2, 3)], "torn read of version 0"),
    "version out of thin air": ([_op("read", 7, "a", 2, 3)], "version 7, which nobody wrote"),
    "version going back for one reader": (
        [_op("write", 1, "b", 0, 9), _op("read", 1, "b", 2, 3), _op("read", 0, "a", 4, 5)],
        "read of version 0 began after the read of version 1",
    ),
    "stale read after the write had ended": (
        [_op("write", 1, "b", 0, 1), _op("read", 0, "a", 2, 3)],
        "read of version 0 began after the write of version 1",
    ),
    "read of the future": (
        [_op("read", 1, "b", 0, 1), _op("write", 1, "b", 2, 3)],
        "write of version 1 began after the read of version 1",
    ),
    "lost update": ([_op("write", 1, "b", 0, 5), _op("write", 1, "c", 1, 6)], "2 writes must make versions 1 … 2"),
    "skipped version": ([_op("write", 2, "b", 0, 1)], "1 writes must make versions 1 … 1"),
    "version going back for writers": (
        [_op("write", 2, "c", 0, 1), _op("write", 1, "b", 2, 3)],
        "write of version 1 began after the write of version 2",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(fault: str) -> None:
    """Each kind of wrong history is found, and the message says which operation is wrong."""
    history, message = FAULTS[fault]
    for order in itertools.permutations(history):
        assert any(message in found for found in violations(order, "a"))


def _is_explained(history: Sequence[Operation], initial: str) -> bool:
    """Try every order of all operations, by the definition of linearizability."""
    for order in itertools.permutations(history):
        if any(later.end < earlier.start for earlier, later in itertools.combinations(order, 2)):
            continue
        version, value = 0, initial
        for operation in order:
            if operation.kind == "write":
                if operation.version != version + 1:
                    break
                version, value = operation.version, str(operation.value)
            elif (operation.version, operation.value) != (version, value):
                break
        else:
            return True
    return False


def test_judge_agrees_with_the_definition() -> None:
    """On random small histories the judge says what a search through all orders says."""
    generator = random.Random(20)
    verdicts = []
    for _ in range(2000):
        history = []
        for index in range(generator.randint(1, 5)):
            start = generator.randint(0, 8)
            kind: Kind = generator.choice(["read", "write"])
            version = generator.randint(kind == "write", 2)
            value = generator.choice([f"v{version}"] * 5 + ["torn"])
            history.append(_op(kind, version, value, 10 * start + index, 10 * start + 10 * generator.randint(1, 6)))
        expected = _is_explained(history, "v0")
        assert (violations(history, "v0") == ()) == expected, history
        verdicts.append(expected)
    assert 100 < sum(verdicts) < 1900
