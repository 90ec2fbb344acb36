"""The unified-memory contract: plain answers, notes on memory, and modules that depend on arguments alone."""

from __future__ import annotations

import ast
import gc
import importlib
import pickle
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

import q4core as q4
from q4core import memory
from q4core.memory import Availability, MemoryDecision, MemoryProvider
from tests.support.managed import ATTRIBUTES, PREFER, FakeProvider


def test_answers_are_plain_values() -> None:
    """Answers and decisions compare, hash, print and travel between processes; an answer is as true as it says."""
    yes, no = Availability(True, "can", ATTRIBUTES), Availability(False, "can't")
    assert yes
    assert not no
    decision = MemoryDecision(PREFER, "left", "because", None, ATTRIBUTES, 0)
    for value in (yes, no, decision):
        assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301  # our own bytes
        assert hash(value) == hash(attrs.evolve(value))
    error = q4.UnifiedMemoryError("x", attributes=ATTRIBUTES, decision=decision)
    assert pickle.loads(pickle.dumps(error)).details["decision"] == decision  # noqa: S301  # as above


def test_fakes_are_providers() -> None:
    """The protocol can be checked at run time; what lacks a method is none."""
    assert isinstance(FakeProvider(), MemoryProvider)
    assert not isinstance(SimpleNamespace(name="x", is_available=None), MemoryProvider)


def test_module_knows_no_registry_and_logs_nothing() -> None:
    """Decisions depend on arguments and the environment alone, and are reported by the caller."""
    imported: set[str] = set()
    for file in Path(memory.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
    foreign = {name for name in imported if name not in sys.stdlib_module_names and "q4core.memory" not in name}
    assert foreign == {"attrs", "collections.abc", "q4core.errors", "q4core.moved", "q4core.policy.config", "torch"}
    assert not imported & {"logging", "warnings"}


@pytest.mark.parametrize("name", sorted(memory._MOVED))
def test_what_moved_says_where_it_is(name: str) -> None:
    """A name that was here names the package that has it now."""
    with pytest.raises(AttributeError, match=f"pip install q4-um-managed, then from q4_um_managed import {name}"):
        getattr(memory, name)
    assert hasattr(importlib.import_module(memory._MOVED[name]), name)


def test_a_note_lives_as_long_as_the_memory() -> None:
    """Views and detached aliases have the note, copies do not; the provider goes with the last tensor."""
    provider = FakeProvider()
    tensor = provider.own(torch.ones(2, 3))
    memory.note_provider(tensor, provider)
    view = tensor[1].detach()
    assert memory.provider_of(view) is provider
    assert memory.provider_of(tensor.clone()) is None
    assert memory.keeper_of(view) is None, "it has no record_stream"
    gone = weakref.ref(provider)
    del tensor, provider
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("error", [RuntimeError("cudaErrorUnknown"), SystemExit(3)])
def test_memory_that_its_provider_lost_is_noticed(error: BaseException) -> None:
    """A tensor whose provider knows it no more was taken back; a provider that can't answer is no proof of it."""
    provider = FakeProvider()
    tensor = provider.own(torch.ones(3))
    assert not memory.was_taken_back(tensor), "nobody noted it"
    memory.note_provider(tensor, provider)
    assert not memory.was_taken_back(tensor)
    provider._addresses.clear()
    assert memory.was_taken_back(tensor)

    def fail(_: torch.Tensor) -> bool:
        raise error

    provider.is_managed = fail  # type: ignore[method-assign,assignment]
    assert not memory.was_taken_back(tensor)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (RuntimeError("cudaErrorUnknown"), "is_available raised RuntimeError: cudaErrorUnknown"),
        (q4.LifecycleError("closed", hint="Open it."), "is_available raised LifecycleError: closed"),
        (True, "is_available must return Availability, not bool"),
    ],
)
def test_a_provider_that_does_not_answer_is_a_refusal(answer: object, reason: str) -> None:
    """Whatever is_available does, the answer is an Availability that says it."""

    def ask(_: torch.device) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    provider = FakeProvider()
    provider.is_available = ask  # type: ignore[method-assign,assignment]
    assert memory.availability(provider, torch.device("cpu")) == Availability(False, reason)
