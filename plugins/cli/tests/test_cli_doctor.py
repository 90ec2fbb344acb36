"""``q4 doctor``: machine, plugins, variables, and what each backend would serve."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import types
from typing import TYPE_CHECKING

import attrs
import pytest
import torch

import q4core as q4
from q4_cli.doctor_report import VARIABLES, environment_facts, survey_backends, versions
from q4_cli.trial import try_commands, try_plugins
from tests.support.commands import ROOT, answer, process, say
from tests.support.fakes import FakeBackend, plugin, registry
from tests.support.limits import scaled
from tests.support.managed import ATTRIBUTES, Broken, FakeProvider

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.fixture(autouse=True)
def _without_the_tests_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor names variables that nothing reads, and ``Q4_SAMPLES`` is read by tests alone."""
    monkeypatch.delenv("Q4_SAMPLES", raising=False)


@pytest.fixture(autouse=True)
def _without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process knows nothing of what a test put into this one."""
    monkeypatch.setattr("q4_cli.doctor.try_plugins", lambda *_: {})
    monkeypatch.setattr("q4_cli.doctor.try_commands", list)


def test_doctor_shows_machine_plugins_and_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    """``doctor --json`` has versions, machine, plugins, and the reference's verdict on each format."""
    record = answer(capsys, "doctor")
    assert record["versions"]["torch"] == torch.__version__
    assert record["machine"]["cpu_count"] == os.cpu_count()
    assert {"dequant-fallback", "gguf", "nn"} <= {item["name"] for item in record["plugins"]}
    verdicts = {item["format"]: item for item in record["verdicts"] if item["backend"] == "dequant-fallback"}
    assert verdicts.keys() >= q4.BUILTIN_FORMATS.keys()
    assert all(item["serves"] == "all" for item in verdicts.values())
    assert verdicts["nf4"]["paths"][0]["m"] == [1, None]
    assert record["problems"] == []


def test_doctor_text_fits_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At 60 columns no line is longer than the terminal, and no format's name is cut."""
    monkeypatch.setenv("COLUMNS", "60")
    text = say(capsys, "doctor")
    assert max(map(len, text.splitlines())) <= 60
    assert "dequant-fallback" in text
    assert "mxfp4" in text


@pytest.mark.slow
def test_doctor_survives_broken_plugins(tmp_path: Path) -> None:
    """Plugins that raise at import or print are shown; the document stays alone and whole."""
    (tmp_path / "q4_broken.py").write_text("raise RuntimeError('boom at import')")
    (tmp_path / "q4_noisy.py").write_text(
        "print('printed')\n"
        "import q4core\n"
        "@q4core.hookimpl\ndef q4_backends():\n    print('again')\n    raise ValueError('no backends')\n"
    )
    variables = {"Q4_PLUGIN_MODULES": "q4_broken,q4_noisy", "PYTHONPATH": str(tmp_path)}
    done = process("doctor", "--json", variables=variables)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    plugins = {item["name"]: item for item in record["plugins"]}
    assert plugins["q4_broken"]["state"] == "failed"
    assert "boom at import" in plugins["q4_broken"]["errors"][0]
    assert "no backends" in plugins["q4_noisy"]["errors"][0]
    assert any("boom at import" in problem for problem in record["problems"])
    assert "Traceback" not in done.stderr
    strict = process("doctor", "--strict", variables=variables)
    assert strict.returncode == 1
    assert "boom at import" in strict.stdout


def test_doctor_knows_every_variable() -> None:
    """Names that a package of the repository reads are known, and are those of the page of commands.

    ``Q4_NO_…`` are macros of CUDA sources.
    """
    places = [ROOT / "q4core", *(ROOT / "plugins").glob("*/src")]
    sources = (path.read_text(encoding="utf-8") for place in places for path in place.rglob("*.py"))
    read = {name for source in sources for name in re.findall(r'"(Q4_(?!NO_)[A-Z]{2}[A-Z0-9_]+)"', source)}
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    table = page.partition("## Environment variables\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert read == set(VARIABLES) == set(re.findall(r"`(Q4_\w+)`", " ".join(rows)))


def test_doctor_shows_variables_and_what_is_wrong_with_them() -> None:
    """Illegal values are reported by name and rule, and names that nothing reads with the closest one that is read."""
    variables, problems = environment_facts({"Q4_COMPUTE_PATH": "fastest", "Q4_BACKND": "x", "HOME": "/"})
    assert variables == {"Q4_BACKND": "x", "Q4_COMPUTE_PATH": "fastest"}
    assert any("Q4_BACKND" in problem and "Q4_BACKEND" in problem for problem in problems)
    assert any("Q4_COMPUTE_PATH" in problem and "kernel_only" in problem for problem in problems)
    assert environment_facts({"Q4_DISABLE_UM": "1"}) == ({"Q4_DISABLE_UM": "1"}, [])
    assert environment_facts({"Q4_UNIFIED_MEMORY": "prefer_unified"})[1] == []
    assert "Q4_UNIFIED_MEMORY" in environment_facts({"Q4_UNIFIED_MEMORY": "yes"})[1][0]
    (problem,) = environment_facts({"Q4_DISABLE_UM": "yes"})[1]
    assert "Q4_DISABLE_UM must be '0' or '1', got 'yes'" in problem
    assert environment_facts({"Q4_COMPUTE_PATH": "kernel-only"}) == ({"Q4_COMPUTE_PATH": "kernel-only"}, [])


def test_versions_show_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not there is shown as not installed."""
    monkeypatch.setattr("q4_cli.doctor_report._LIBRARIES", ("q4-no-such-library",))
    assert versions(q4.Registry([]))["q4-no-such-library"] == "not installed"


def test_versions_have_every_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that are no plugins are listed, too, and libraries that some need; nothing is imported for it."""
    for name, version in (("q4_some_library", "1.2"), ("transformers", "5.99"), ("quatsch", "3")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), "no folder", *sys.path])
    monkeypatch.setattr("q4_cli.doctor_report._OPTIONAL", ("transformers", "no-such-library"))
    found = versions(q4.Registry([]))
    assert (found["q4-some-library"], found["transformers"]) == ("1.2", "5.99")
    assert found["q4-cli"] == importlib.metadata.version("q4-cli")
    assert {"quatsch", "no-such-library"}.isdisjoint(found)


def test_survey_gives_paths_or_every_reason() -> None:
    """A backend serves all M, some M with the reason, or none with all the reasons."""
    short = attrs.evolve(
        q4.KernelPath("short", (1, None), q4.PathKind.KERNEL, q4.Precision.W4A32, q4.Tier.GENERIC), m=(1, 8)
    )
    refusing = [q4.Reason(q4.ReasonCode.ARCH, "too old"), q4.Reason(q4.ReasonCode.NOT_BUILT, "no code")]
    found = survey_backends(
        registry(
            FakeBackend("all"),
            FakeBackend("some", paths=(short,)),
            FakeBackend("none", reasons=tuple(refusing)),
            FakeBackend("nf4-only", formats={"nf4"}),
            reference=False,
        ),
        [torch.device("cpu")],
        None,
    )
    verdicts = {(item["backend"], item["format"]): item for item in found}
    assert verdicts["all", "int4"]["serves"] == "all"
    some = verdicts["some", "q4_1"]
    assert (some["serves"], some["paths"][0]["m"], some["reasons"][0]["code"]) == ("some", [1, 8], "shape")
    none = verdicts["none", "nvfp4"]
    assert (none["serves"], [reason["code"] for reason in none["reasons"]]) == ("none", ["arch", "not_built"])
    assert verdicts["nf4-only", "nf4"]["serves"] == "all"
    assert [reason["code"] for reason in verdicts["nf4-only", "fp4"]["reasons"]] == ["format"]


HANGS = "import time\nimport q4core\n@q4core.hookimpl\ndef q4_dialects():\n    time.sleep(600)\n"
CHECK = """
import time, torch
import q4core as q4

class Waits:
    name, api_version = "waits", (1, 0)
    capabilities = q4.Capabilities(
        formats={"nf4"}, scale_kinds=set(q4.ScaleKind), devices={"cpu"}, dtypes={torch.float32},
        precisions=set(q4.Precision),
    )
    prepare = linear = lambda *_: None
    def check(self, request):
        ACT

@q4.hookimpl
def q4_backends():
    return [Waits()]
"""


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import time\ntime.sleep(600)\n", "import did not end within LIMIT s (in q4_bad.py:2, <module>)"),
        (HANGS, "hook q4_dialects did not end within LIMIT s (in q4_bad.py:5, q4_dialects)"),
        (
            CHECK.replace("ACT", "time.sleep(600)"),
            "check of backend 'waits' did not end within LIMIT s (in q4_bad.py:13, check)",
        ),
        ("import os\nos._exit(3)\n", "import ended its process, with status 3"),
        (
            CHECK.replace("ACT", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
            "check of backend 'waits' ended its process, with status -11 (SIGSEGV)",
        ),
    ],
    ids=["import", "hook", "check", "exit", "crash"],
)
@pytest.mark.filterwarnings("ignore::q4core.Q4PluginWarning")
def test_doctor_names_a_plugin_that_hangs_or_crashes(
    text: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plugin is tried in a child process: one that hangs or ends it is named, and the others are shown."""
    (tmp_path / "q4_bad.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("Q4_PLUGIN_MODULES", "q4_bad")
    monkeypatch.setenv("Q4_PLUGINS", "dequant-fallback,gguf")
    monkeypatch.setattr("q4_cli.doctor.try_plugins", try_plugins)
    limit = scaled(3)  # importing the sound plugins takes a part of a second each
    what = what.replace("LIMIT", f"{limit:g}")
    monkeypatch.setattr("q4_cli.trial.LIMIT_S", limit)
    record = answer(capsys, "doctor", "--device", "cpu")
    assert record["plugin_errors"] == [f"plugin 'q4_bad': {what}; Q4_DISABLE_PLUGINS=q4_bad shuts it out"]
    states = {item["name"]: item["state"] for item in record["plugins"]}
    assert (states["q4_bad"], states["gguf"]) == ("failed", "loaded")
    assert {item["name"]: item["state"] for item in record["backends"]} == {
        "dequant-fallback": "serves",
        "q4_bad": "refused",
    }
    assert {item["backend"] for item in record["verdicts"]} == {"dequant-fallback"}


def test_sound_plugins_pass_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin whose check ends itself is no fault of the process; modules of the current folder are not taken."""
    (tmp_path / "q4_quits.py").write_text(CHECK.replace("ACT", "raise SystemExit(3)"))
    (tmp_path / "typer.py").write_text("raise RuntimeError('of the folder')")
    (place := tmp_path / "elsewhere").mkdir()
    (tmp_path / "q4_quits.py").rename(place / "q4_quits.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("Q4_PLUGIN_MODULES", "q4_quits")
    monkeypatch.setenv("Q4_PLUGINS", "dequant-fallback")
    assert try_plugins([torch.device("cpu")], None) == {}


def test_the_trial_asks_for_the_dtype_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that ends the process for one dtype is found where that dtype is asked for."""
    act = "request.dtype is torch.float16 and __import__('os')._exit(4)"
    text = CHECK.replace("ACT", act).replace("{torch.float32}", "{torch.float16, torch.float32}")
    (tmp_path / "q4_picky.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("Q4_PLUGIN_MODULES", "q4_picky")
    monkeypatch.setenv("Q4_PLUGINS", "dequant-fallback")
    assert [*try_plugins([torch.device("cpu")], torch.float16)] == ["q4_picky"]
    assert try_plugins([torch.device("cpu")], torch.float32) == {}


def test_a_trial_that_does_not_begin_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plugins that were not tried are not called sound in silence."""
    monkeypatch.setattr("q4_cli.trial.names_of_plugins", lambda _: ("gguf",))
    monkeypatch.setattr("sys.path", [])
    assert try_plugins([torch.device("cpu")], None) == {}
    assert (
        "plugins could not be tried in a child process, which ended its process, with status 1"
        in capsys.readouterr().err
    )


@pytest.mark.filterwarnings("ignore::q4core.Q4PluginWarning")
def test_doctor_shows_hooks_that_are_not_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin whose author forgot @q4core.hookimpl is a problem, under --strict one that counts."""
    module = types.ModuleType("forgetful")
    module.q4_backends = lambda: [FakeBackend("never")]  # type: ignore[attr-defined]
    monkeypatch.setattr("q4core.default_registry", lambda: q4.Registry([("forgetful", module)]))
    text = say(capsys, "doctor", "--device", "cpu", "--strict", status=1)
    assert "not marked with @q4core.hookimpl, and so never called: q4_backends" in text
    assert "No problems" not in text


def test_doctor_warns_of_unknown_formats(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that no plugin brings is reported with the known ones; it may be added later, so it breaks nothing."""
    module = plugin(FakeBackend("hopeful", formats={"nf4", "nf5"}), FakeBackend("any", formats={q4.EVERY_FORMAT}))
    monkeypatch.setattr("q4core.default_registry", lambda: q4.Registry([("hopeful", module)]))
    record = answer(capsys, "doctor", "--device", "cpu")
    (problem,) = record["problems"]
    known = ", ".join(sorted(q4.BUILTIN_FORMATS))
    shown = "backend 'hopeful' declares format 'nf5', and none of that name is known; did you mean 'nf4'?"
    assert problem == f"{shown} there are: {known}"
    assert record["plugin_errors"] == []
    text = say(capsys, "doctor", "--device", "cpu", "--strict")
    assert "'nf5'" in text
    assert "No problems" not in text


@pytest.mark.slow
def test_doctor_shows_plugin_names_that_fit_nothing() -> None:
    """A typo in Q4_PLUGINS, which leaves plugins out, is a problem that the doctor shows with the closest name."""
    record = json.loads(process("doctor", "--json", variables={"Q4_PLUGINS": "dialectz"}).stdout)
    assert any("dialectz" in problem and "'dialects'" in problem for problem in record["problems"])
    shown = process("doctor", "--strict", variables={"Q4_PLUGINS": "dialectz"})
    assert shown.returncode == 1
    assert "unknown" in shown.stdout
    assert "No problems" not in shown.stdout
    assert "Traceback" not in shown.stderr


def test_doctor_shows_what_each_memory_provider_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each provider's answer for each device is shown, with why and by which attributes; one that raises too."""
    able, unable, broken = FakeProvider("able"), FakeProvider("unable", is_available=False), Broken("is_available")
    module = plugin(q4_memory_providers=lambda: [able, unable, broken])
    monkeypatch.setattr("q4core.default_registry", lambda: q4.Registry([("memory", module)]))
    shown = {item["provider"]: item for item in answer(capsys, "doctor", "--device", "cpu")["memory"]}
    assert [(item["is_available"], item["device"]) for item in shown.values()] == [
        (True, "cpu"),
        (False, "cpu"),
        (False, "cpu"),
    ]
    assert shown["able"]["attributes"] == shown["unable"]["attributes"] == ATTRIBUTES
    assert "RuntimeError: cudaErrorUnknown" in shown["broken"]["reason"]
    text = say(capsys, "doctor", "--device", "cpu")
    assert "unified memory for cpu: managed memory" in text
    assert "no unified memory for cpu: no managed memory" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import no_such_module\n", "the command 'noisy' is left out: ModuleNotFoundError: No module named 'no_such_"),
        ("import os\nos._exit(5)\n", "a plugin's command ends `q4 --help`, with status 5"),
        ("def noisy():\n    pass\n", None),
    ],
)
def test_doctor_names_a_command_that_is_broken(
    code: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command whose module can't be imported, or ends the process, is among the problems, and the doctor goes on."""
    info = tmp_path / "q4_noisy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: q4-noisy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[q4core.commands]\nnoisy = q4_noisy:noisy\n")
    (tmp_path / "q4_noisy.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("q4_cli.doctor.try_commands", try_commands)
    found = answer(capsys, "doctor", "--device", "cpu")["problems"]
    assert [item[: len(problem or "")] for item in found] == ([problem] if problem else [])
