"""Each part of the contract catches a planted fault, so that no case can pass whatever happens."""

from __future__ import annotations

from tests.support.parts import UNCAUGHT, catchers, parts


def test_every_part_catches_a_fault() -> None:
    """A part that catches none has its reason in the table of those, and no other part is there."""
    caught = {part for _, found in catchers() for part in found}
    assert parts().keys() - caught == UNCAUGHT.keys()


def test_every_fault_has_one_part_that_catches_it() -> None:
    """What a fault is caught by is a case of one part, as the tables have it now."""
    assert {name: len(found) for name, found in catchers() if len(found) != 1} == {}
    names = [name for name, _ in catchers()]
    assert len(set(names)) == len(names)
