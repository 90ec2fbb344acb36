"""The walk of a weight through ``Session.linear``: as docs/architecture.md describes it, and no longer than that."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from tests.support.fakes import FakeBackend, registry

if TYPE_CHECKING:
    from types import FrameType

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
MOST = 10
ROOM_OF_ITS_OWN = "q4core.weight"
"""Its invariants and facts are the weight's own, not stations."""


def stations() -> list[str]:
    """Return the functions that the page names, in order, without their classes."""
    part = PAGE.read_text(encoding="utf-8").partition("**Once for each layer**")[2].partition("**At each call**")[0]
    return [name.rpartition(".")[2] for name in re.findall(r"^\d+\. `([\w.]+)`", part, re.MULTILINE)]


def walked() -> tuple[list[str], list[str]]:
    """Return the core's functions in the order in which a weight's layer enters them, and those that get the weight."""
    session, weight = q4.Session(registry=registry(FakeBackend())), q4.quantize(torch.randn(48, 128), "nf4")
    session.linear(q4.quantize(torch.randn(48, 128), "nf4"))  # of the same kind: the probes' own walk is another one
    entered: list[str] = []
    given: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        module, code = str(frame.f_globals.get("__name__")), frame.f_code
        if event != "call" or not module.startswith("q4core"):
            return
        entered.append(code.co_name)
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        gets_weight = any(isinstance(frame.f_locals.get(name), q4.PackedWeight) for name in arguments)
        if gets_weight and not module.startswith(ROOM_OF_ITS_OWN):
            given.append(f"{module}.{code.co_name}")

    sys.setprofile(note)
    try:
        session.linear(weight)
    finally:
        sys.setprofile(None)
    return list(dict.fromkeys(entered)), list(dict.fromkeys(given))


def test_the_walk_is_the_pages() -> None:
    """Each station of the page is entered, in the page's order; ten at most."""
    named, entered = stations(), walked()[0]
    assert len(named) == MOST
    places = [entered.index(name) for name in named if name != "__init__"]  # many classes have one of that name
    assert places == sorted(places)


def test_no_more_functions_get_the_weight() -> None:
    """Outside its own room, no more functions than the page has stations are given the weight."""
    given = walked()[1]
    assert "q4core.layers.preparation.prepare_weight" in given
    assert len(given) <= MOST


def test_one_function_of_the_core_is_named_prepare() -> None:
    """The backend's own method aside, one function on the walk prepares."""
    assert [name for name in walked()[0] if re.match(r"_*prepare(_|$)", name)] == ["prepare_weight"]
