"""Events: structured, quiet unless asked for, never on stdout; warnings once, at the user's own line."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings

import pytest

import q4core as q4
from q4core import events

CODE = """
import torch, q4core as q4
weight = q4.quantize(torch.randn(8, 64), "nf4", name="up")
q4.Session(q4.SessionConfig(compute_path="kernel_or_fallback")).linear(weight)
print("out")
"""


def _run(**environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, done.stderr


def test_quiet_by_default() -> None:
    """Without Q4_LOG nothing is printed, although a fallback happened."""
    assert _run() == ("out\n", "")


def test_json_lines_on_stderr() -> None:
    """Q4_LOG=json,debug gives one JSON object per event on stderr, with the decision's fields."""
    out, err = _run(Q4_LOG="json,debug")
    assert out == "out\n"
    records = [json.loads(line) for line in err.splitlines()]
    by_event = {record["event"]: record for record in records}
    assert {"q4.prepare", "q4.probe", "q4.select", "q4.fallback"} <= set(by_event)
    assert by_event["q4.select"]["layer"] == "up"
    assert by_event["q4.select"]["backend"] == "dequant-fallback"
    assert by_event["q4.fallback"]["level"] == "warning"


def test_console_lines_and_levels() -> None:
    """Q4_LOG=warning shows what is that important, as a line for people."""
    _, err = _run(Q4_LOG="warning")
    (line,) = err.splitlines()
    assert "event=q4.fallback" in line
    assert "layer=up" in line


def test_a_bad_wish_is_named() -> None:
    """A word that Q4_LOG does not know is an error that names the legal ones."""
    with pytest.raises(q4.ConfigError) as caught:
        events.set_up_logging("loud")
    assert caught.value.name == "Q4_LOG"
    assert "json" in str(caught.value)


def test_events_reach_the_standard_logging_tree(caplog: pytest.LogCaptureFixture) -> None:
    """An application's own logging set-up sees each event with its fields."""
    with caplog.at_level(logging.DEBUG, logger="q4core"):
        events.emit("q4.select", layer="up", backend="none")
    (record,) = caplog.records
    assert record.q4_event == "q4.select"  # type: ignore[attr-defined]  # our extra
    assert record.q4_fields == {"layer": "up", "backend": "none"}  # type: ignore[attr-defined]  # our extra


def test_observers_come_and_go() -> None:
    """An observer sees events until it is taken off."""
    seen: list[str] = []

    def observer(event: str, _: dict[str, object]) -> None:
        seen.append(event)

    events.observe(observer)
    events.emit("q4.one")
    events.unobserve(observer)
    events.emit("q4.two")
    assert seen == ["q4.one"]


def test_a_warning_comes_once_per_key_at_the_users_line() -> None:
    """The same warning is not repeated, and it points outside q4core."""
    events.forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in ("a", "a", "b"):
            events.warn_once(key, q4.Q4FallbackWarning, "message")
    assert len(caught) == 2
    assert caught[0].filename == __file__
