"""Events: structured, quiet unless asked for, never on stdout; warnings once, at the user's own line."""

from __future__ import annotations

import ast
import datetime as dt
import json
import logging
import re
import warnings
from pathlib import Path

import pytest
import structlog
import torch

import q4core as q4
from q4core.diagnostics import events
from tests.support.events import forget_warnings, observed_by
from tests.support.fakes import FakeBackend, registry
from tests.support.interpreter import run_interpreter

CODE = """
import torch, q4core as q4
weight = q4.quantize(torch.randn(8, 64), "nf4", name="up")
q4.Session(q4.SessionConfig(compute_path="kernel_or_fallback")).linear(weight)
print("out")
"""


def _run(**environment: str) -> tuple[str, str]:
    variables = {"PATH": "/usr/bin:/bin", "Q4_PLUGINS": "gguf", **environment}
    done = run_interpreter(["-W", "ignore", "-c", CODE], env=variables, check=True)
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


@pytest.mark.parametrize("wish", ["json", "console"])
def test_a_style_alone_shows_what_was_decided(wish: str) -> None:
    """Q4_LOG=json, or console, shows selection and fallback of a healthy run, and no more than what is worth info."""
    _, err = _run(Q4_LOG=wish)
    told = [re.search(r"q4\.\w+", line) for line in err.splitlines()]
    assert [found and found[0] for found in told] == ["q4.quantize", "q4.select", "q4.fallback"]


def test_timestamps_have_zone_and_milliseconds() -> None:
    """A timestamp is ISO 8601 in UTC with milliseconds, whatever the machine's zone."""
    _, err = _run(Q4_LOG="json", TZ="Asia/Tokyo")
    for line in err.splitlines():
        stamp = json.loads(line)["timestamp"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp)
        age = dt.datetime.now(tz=dt.timezone.utc) - dt.datetime.fromisoformat(stamp.replace("Z", "+00:00"))
        assert dt.timedelta() <= age < dt.timedelta(minutes=10)


def test_lines_carry_the_names_of_session_and_layer() -> None:
    """Every line of a layer's preparation names its session and the layer, probes and backend faults included."""
    _, err = _run(Q4_LOG="json,debug")
    records = [json.loads(line) for line in err.splitlines()]
    assert "q4.probe" in {record["event"] for record in records}
    about_layers = [record for record in records if record["event"] not in {"q4.plugin", "q4.quantize"}]
    assert {(record["session"], record["layer"]) for record in about_layers} == {("session-1", "up")}


def test_an_applications_own_names_join(caplog: pytest.LogCaptureFixture) -> None:
    """What the application bound with structlog's contextvars joins our lines, and none of our names stays bound."""
    structlog.contextvars.clear_contextvars()
    with (
        structlog.contextvars.bound_contextvars(request="r1"),
        caplog.at_level(logging.INFO, logger="q4core"),
    ):
        layer = q4.Session(name="mine", registry=registry()).linear(q4.quantize(torch.ones(8, 64), "nf4", name="up"))
        assert structlog.contextvars.get_contextvars() == {"request": "r1"}
    assert layer.is_prepared
    (fields,) = [item.q4_fields for item in caplog.records if item.q4_event == "q4.select"]  # type: ignore[attr-defined]
    assert (fields["request"], fields["session"], fields["layer"]) == ("r1", "mine", "up")


def test_a_failed_probe_shows_where_errors_show(caplog: pytest.LogCaptureFixture) -> None:
    """A backend whose numbers are wrong is an error in the logs."""
    wrong = FakeBackend("wrong", damage=lambda y: y + 100)
    with caplog.at_level(logging.INFO, logger="q4core"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q4.Session(registry=registry(wrong)).linear(q4.quantize(torch.ones(8, 64), "nf4"))
    levels = {item.q4_event: item.levelname for item in caplog.records}  # type: ignore[attr-defined]  # our extra
    assert levels["q4.probe"] == "ERROR"


def test_a_broken_plugin_shows_where_warnings_show(caplog: pytest.LogCaptureFixture) -> None:
    """A plugin that can't be used is a warning in the logs."""
    with caplog.at_level(logging.INFO, logger="q4core"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q4.Registry([("empty", object())]).records()
    (record,) = caplog.records
    assert (record.q4_event, record.levelname) == ("q4.plugin", "WARNING")  # type: ignore[attr-defined]  # our extra


def test_memory_events_carry_values_of_their_own_types(caplog: pytest.LogCaptureFixture) -> None:
    """A q4.memory event holds numbers, mappings and None as such, shown at info; a policy is the word to ask for it."""
    config = q4.SessionConfig(unified_memory="prefer_unified")
    weight = q4.quantize(torch.ones(8, 64), "nf4", name="up")
    with caplog.at_level(logging.INFO, logger="q4core"):
        q4.Session(config, registry=registry()).linear(weight)
    fields = next(item.q4_fields for item in caplog.records if item.q4_event == "q4.memory")  # type: ignore[attr-defined]
    assert (fields["kind"], fields["policy"], fields["action"]) == ("weight", "prefer_unified", "fallback")
    assert (fields["bytes"], fields["provider"], fields["placement"]) == (0, None, None)
    assert fields["attributes"]["cuda_available"] is torch.cuda.is_available()
    assert json.loads(json.dumps(fields))["layer"] == "up"


def test_events_after_the_making_name_the_session(caplog: pytest.LogCaptureFixture) -> None:
    """An activation's q4.memory event and what a layer sends when it is prepared again name its session."""
    config = q4.SessionConfig(unified_memory="prefer_unified")
    layer = q4.Session(config, name="mine", registry=registry()).linear(
        q4.quantize(torch.ones(8, 64), "nf4", name="up")
    )
    with caplog.at_level(logging.DEBUG, logger="q4core"):
        layer(torch.ones(1, 64))
        layer.to(torch.float16)
    told = {(item.q4_event, item.q4_fields.get("session")) for item in caplog.records}  # type: ignore[attr-defined]
    assert {("q4.memory", "mine"), ("q4.select", "mine")} <= told
    assert {session for _, session in told} == {"mine"}


def test_console_lines_and_levels() -> None:
    """Q4_LOG=warning shows what is that important, as a line for people."""
    _, err = _run(Q4_LOG="warning")
    (line,) = err.splitlines()
    assert "event=q4.fallback" in line
    assert "layer=up" in line


def test_a_bad_option_is_named() -> None:
    """A word that Q4_LOG does not know is an error that names the legal ones."""
    with pytest.raises(q4.ConfigError) as caught:
        events.parse_log("loud")
    assert caught.value.name == "Q4_LOG"
    assert "json" in str(caught.value)


def test_events_reach_the_standard_logging_tree(caplog: pytest.LogCaptureFixture) -> None:
    """An application's own logging set-up sees each event with its fields."""
    with caplog.at_level(logging.DEBUG, logger="q4core"):
        events.emit("q4.select", layer="up", backend="none")
    (record,) = caplog.records
    assert record.q4_event == "q4.select"  # type: ignore[attr-defined]  # our extra
    assert record.q4_fields == {"layer": "up", "backend": "none"}  # type: ignore[attr-defined]  # our extra


def test_an_observer_sees_each_event_once() -> None:
    """An observer sees the events that are sent after it was registered, each once."""
    seen: list[str] = []

    def observer(event: str, _: dict[str, object]) -> None:
        seen.append(event)

    events.emit("q4.one")
    with observed_by(observer):
        events.emit("q4.two")
    assert seen == ["q4.two"]


def test_a_warning_comes_once_per_key_at_the_users_line() -> None:
    """The same warning is not repeated, and it points outside q4core."""
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in ("a", "a", "b"):
            events.warn_once(key, q4.Q4FallbackWarning, "message")
    assert len(caught) == 2
    assert caught[0].filename == __file__


def test_observers_share_nothing() -> None:
    """Each observer has fields of its own: one that empties them takes nothing from the others, or from the log."""
    seen: list[dict[str, object]] = []

    def thief(_: str, fields: dict[str, object]) -> None:
        fields.clear()

    def witness(_: str, fields: dict[str, object]) -> None:
        seen.append(fields)

    with observed_by(thief, witness):
        events.emit("q4.one", layer="up")
    assert seen == [{"layer": "up"}]


@pytest.mark.parametrize("fault", [ValueError, SystemExit])
def test_an_observer_that_raises_is_reported_once_and_called_again(fault: type[BaseException]) -> None:
    """An observer's error stays out of what it observes: the layer is made, later observers hear, one warning comes."""
    calls: list[str] = []
    heard: list[str] = []

    def broken(event: str, _: dict[str, object]) -> None:
        calls.append(event)
        raise fault("broken")

    def witness(event: str, _: dict[str, object]) -> None:
        heard.append(event)

    weight = q4.quantize(torch.ones(8, 64), "nf4")
    with observed_by(broken, witness), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = q4.Session(registry=registry()).linear(weight)
    assert layer.is_prepared
    assert len(calls) > 1
    assert calls == heard
    (warning,) = caught
    assert warning.category is q4.Q4PluginWarning
    assert f"{fault.__name__}: broken" in str(warning.message)
    assert "broken" in str(warning.message)


def test_an_observer_hears_events_where_warnings_are_errors() -> None:
    """Where the application makes warnings errors, the caller of q4core gets the warning about the observer, typed."""

    def broken(_event: str, _: dict[str, object]) -> None:
        raise ValueError("told as an error")

    with observed_by(broken):
        with pytest.raises(q4.Q4PluginWarning, match="told as an error"):
            events.emit("q4.one")
        events.emit("q4.two")


def test_a_method_observes_as_long_as_its_object_lives() -> None:
    """An observer that is a method keeps nothing alive, and is forgotten with its object."""
    heard: list[str] = []

    class Watcher:
        def hear(self, event: str, _: dict[str, object]) -> None:
            heard.append(event)

    watcher = Watcher()
    events.observe(watcher.hear)
    events.emit("q4.test")
    del watcher
    events.emit("q4.test")
    assert heard == ["q4.test"]


def _sent() -> set[tuple[str, str]]:
    """Return each event that the source sends, with a level that it names or ``""`` for one that is passed in."""
    root = Path(__file__).parents[2]
    files = [
        path for folder in ("q4core", "plugins/*/src", "conformance/src") for path in root.glob(f"{folder}/**/*.py")
    ]
    found = set()
    for file in files:
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"\b(emit|_report)\(", text) else ():
            if not isinstance(node, ast.Call) or not node.args or not isinstance(name := node.args[0], ast.Constant):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            prefix = {"emit": "", "_report": "q4.actor." if "q4_actors" in file.parts else None}.get(called)
            if prefix is None or not isinstance(name.value, str) or not f"{prefix}{name.value}".startswith("q4."):
                continue
            given = next((item.value for item in node.keywords if item.arg == "level"), None)
            named = [] if given is None else re.findall(r"logging\.(\w+)", ast.unparse(given))
            levels = ["debug"] if given is None else [level.lower() for level in named] or [""]
            found |= {(f"{prefix}{name.value}", level) for level in levels}
    return found


def test_the_page_lists_every_event_at_its_levels() -> None:
    """docs/cli.md lists the events that the source sends, all of them and no others, each at the levels that it has."""
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(info|warning|error|debug)` \| (.*) \|$", page, re.MULTILINE))
    listed = {(event, level) for level, text in rows.items() for event in re.findall(r"`(q4\.[a-z.]+)`", text)}
    sent = _sent()
    passed_in = {event for event, level in sent if not level}
    assert {(event, level) for event, level in sent if level} - listed == set()
    assert {event for event, _ in listed} == {event for event, _ in sent}
    assert {event for event, _ in listed - sent} <= passed_in
