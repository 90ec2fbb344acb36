"""Files of which a part can't be read, ``Q4_LOG`` that is misspelt, and the events of what commands decide."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

from q4_cli.app import run
from q4_cli.doctor_report import environment_facts
from tests.support.commands import NF4, answer, say
from tests.support.interpreter import run_interpreter
from tests.support.unread import UNREAD, add_tensors, layers

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.fixture
def partly(tmp_path: Path) -> Path:
    """Return a file with one layer that is read, and three that are not: two of EXL3, one of AQLM."""
    return add_tensors(tmp_path / "partly.safetensors", layers(UNREAD["exl3"], "a", "b") | layers(UNREAD["aqlm"], "c"))


@pytest.mark.parametrize(("command", "status"), [("inspect", 0), ("explain", 1)])
def test_unread_layers_are_counted_by_type(
    command: str, status: int, partly: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sum counts them by type, a line says what to do instead, and ``explain`` ends with 1."""
    text = say(capsys, command, partly, status=status)
    assert "3 can't be read: exl3 (2), aqlm (1)" in text
    assert "1 packed layer" in text
    assert "`q4 quantize`" in text
    record = answer(capsys, command, partly, status=status)
    unread = record["totals"]["unread"] if command == "inspect" else record["unread"]
    assert unread == {"exl3": 2, "aqlm": 1}
    assert [item["key"] for item in record["unsupported"]] == ["a", "b", "c"]


@pytest.mark.parametrize("words", ["inspect packed.safetensors", "explain packed.safetensors", "cache list"])
def test_a_misspelt_log_is_refused(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command that runs refuses ``Q4_LOG=jsn``, and says which words there are."""
    monkeypatch.setenv("Q4_LOG", "jsn")
    assert run([*words.split(), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["name"], error["value"]) == ("config", "Q4_LOG", "jsn")
    assert error["hint"]


def test_doctor_lists_a_misspelt_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``q4 doctor`` runs all the same, and has it among the problems; no plugin is broken by it."""
    assert "Q4_LOG" in environment_facts({"Q4_LOG": "jsn"})[1][0]
    assert environment_facts({"Q4_LOG": "json,debug"})[1] == []
    monkeypatch.setenv("Q4_LOG", "jsn")
    record = answer(capsys, "doctor", "--device", "cpu")
    assert any("Q4_LOG" in problem for problem in record["problems"])
    assert record["plugin_errors"] == []


def events(*words: str) -> list[dict[str, Any]]:
    """Return the events of a command in a process of its own, as JSON lines on stderr."""
    done = run_interpreter(["-m", "q4_cli", *words], env={**os.environ, "Q4_LOG": "json"}, check=True)
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]


def test_commands_send_what_they_decide() -> None:
    """``inspect`` and ``convert`` say what is read as what, ``convert`` what was written and rounded."""
    (opened,) = events("inspect", str(NF4))
    assert (opened["event"], opened["layers"], opened["unread"]) == ("q4.open", {"nf4 as bitsandbytes": 1}, {})
    found = events("convert", str(NF4), "out.safetensors", "--dialect", "simple-nf4", "--requantize")
    assert [item["event"] for item in found] == ["q4.open", "q4.approximate", "q4.save"]
    assert found[1]["layer"] == "proj"
    assert (found[2]["dialect"], found[2]["layers"]) == ("simple-nf4", 1)


@pytest.mark.usefixtures("reference_alone")
def test_explain_sends_its_selections(caplog: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Each layer's backend, a fallback's reason, and a refusal are events, as those of a session are."""
    with caplog.at_level(logging.INFO, logger="q4core"):
        answer(capsys, "explain", NF4, "--compute-path", "kernel_or_fallback")
        answer(capsys, "explain", NF4, "--compute-path", "kernel_only", status=1)
    events = [(record.q4_event, record.q4_fields) for record in caplog.records]
    chosen = [fields for event, fields in events if event == "q4.select"]
    assert [(item["layer"], item["backend"]) for item in chosen] == [("proj", "dequant-fallback"), ("proj", None)]
    assert chosen[1]["rejections"]
    assert [fields["layer"] for event, fields in events if event == "q4.fallback"] == ["proj"]
