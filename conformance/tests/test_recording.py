"""Events and warnings of a block are recorded, and nothing of the recorder stays behind."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

import q4core as q4
from q4_conformance.measurement.recording import muted, recorded, unique
from q4_conformance.oracle.weights import WeightRecipe
from q4_conformance.subjects.backend import make_registry


def test_events_of_a_session_are_recorded() -> None:
    """Making a layer reports what was selected and prepared."""
    with recorded() as record:
        q4.Session(q4.SessionConfig(device="cpu"), registry=make_registry()).linear(WeightRecipe(format="nf4").build())
    assert {"q4.select", "q4.prepare"} <= {name for name, _ in record.events}
    assert record.named("q4.select")[0]["backend"] == "dequant-fallback"


def test_own_warnings_are_recorded_and_others_are_given_again() -> None:
    """Fallback warnings are recorded; any other warning reaches the filters outside, which make it an error here."""
    with recorded() as record:
        warnings.warn("because", q4.Q4FallbackWarning, stacklevel=1)
    assert record.of(q4.Q4FallbackWarning) == ["because"]
    assert record.of(q4.Q4ProbeWarning) == []
    with pytest.raises(RuntimeWarning), recorded():
        warnings.warn("other", RuntimeWarning, stacklevel=1)


def test_logger_is_left_as_it_was() -> None:
    """Handlers, level and propagation of the logger are those from before, also after an error."""
    logger = logging.getLogger("q4core")
    before = (list(logger.handlers), logger.level, logger.propagate)
    with pytest.raises(ZeroDivisionError), recorded():
        _ = torch.zeros(1) + 1 // 0
    assert (list(logger.handlers), logger.level, logger.propagate) == before


def test_unique_texts_differ() -> None:
    """Each text comes once."""
    assert unique("a") != unique("a")


def test_muted_keeps_nothing_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Inside, neither events nor warnings of fallbacks reach anybody, and a recording within still works."""
    logger = logging.getLogger("q4core")
    before = (logger.level, logger.propagate)
    with muted(), warnings.catch_warnings(record=True) as warned:
        q4.quantize(torch.ones(1, 64), "nf4")
        with recorded() as inner:
            q4.quantize(torch.ones(1, 64), "nf4")
    assert not caplog.records
    assert not warned
    assert inner.named("q4.quantize")
    assert (logger.level, logger.propagate) == before
