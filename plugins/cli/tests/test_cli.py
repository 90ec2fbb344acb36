"""The ``q4`` command itself: its options, its help, its plugins' commands and its documentation."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import q4core as q4
from q4_cli.app import build_app, run
from tests.support.commands import NF4, ROOT, answer, process, say
from tests.support.interpreter import run_interpreter
from tests.support.limits import scaled

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_directory")


# -- the command itself


def test_version_names_what_matters() -> None:
    """``--version`` says the versions of q4core, torch and Python on one line."""
    result = CliRunner().invoke(build_app(), ["--version"])
    assert result.exit_code == 0
    assert result.output.count("\n") == 1
    for version in (q4.__version__, torch.__version__, ".".join(map(str, sys.version_info[:3]))):
        assert version in result.output


def test_help_lists_every_command() -> None:
    """``--help`` lists our commands and those that plugins bring."""
    result = CliRunner().invoke(build_app(), ["--help"])
    assert result.exit_code == 0
    for command in ("doctor", "inspect", "explain", "quantize", "convert", "bench", "generate"):
        assert command in result.output


@pytest.mark.parametrize(("command", "distribution"), [("conform", "q4-conformance"), ("generate", "q4-lm")])
def test_a_missing_command_is_reported_with_its_distribution(
    command: str, distribution: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a documented command is missing, the hint says what to install, or where to look why that isn't loaded."""
    monkeypatch.setattr("q4_cli.app.announced", lambda _: ({}, []))
    monkeypatch.setattr("q4_cli.failure.find_spec", lambda name: name != distribution.replace("-", "_"))
    assert run([command, "x"]) == 2
    shown = capsys.readouterr().err
    assert f"No such command '{command}'" in shown
    assert f"pip install {distribution}" in shown
    assert "Did you mean" not in shown
    monkeypatch.setattr("q4_cli.failure.find_spec", lambda _: True)
    assert run([command, "x"]) == 2
    shown = capsys.readouterr().err
    assert f"{distribution} provides it and is not loaded" in shown
    assert "q4 doctor" in shown


@pytest.mark.slow
def test_the_command_says_nothing_of_numpy(tmp_path: Path) -> None:
    """Without NumPy, which nothing here needs, torch's warning is left out, and other warnings are not."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')")
    (tmp_path / "q4_warning.py").write_text(
        "import warnings\nimport q4core\nwarnings.warn('something else')\n"
        "@q4core.hookimpl\ndef q4_formats():\n    return []\n"
    )
    variables = {"PYTHONPATH": str(tmp_path), "Q4_PLUGINS": "dequant-fallback", "Q4_PLUGIN_MODULES": "q4_warning"}
    done = process("doctor", "--device", "cpu", variables=variables)
    assert done.returncode == 0
    assert "NumPy" not in done.stderr
    assert "something else" in done.stderr


@pytest.mark.parametrize("command", ["doctor", "inspect", "explain", "quantize", "convert", "bench"])
def test_every_command_takes_json_and_has_help(command: str) -> None:
    """Every command has a help text and the option ``--json``."""
    result = CliRunner().invoke(build_app(), [command, "--help"], env={"TERMINAL_WIDTH": "120"})
    assert result.exit_code == 0
    assert "--json" in result.output


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """``q4`` alone is ``q4 --help``."""
    assert "doctor" in say(capsys)


@pytest.mark.slow
def test_what_is_set_before_torch_comes_before_torch() -> None:
    """The command's process starts without torch, so that what must be set before torch is loaded can be."""
    code = "import sys, q4_cli.__main__; print(sorted({'q4core', 'torch', 'typer', 'rich'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_module_is_the_command() -> None:
    """``python -m q4_cli`` is the same command, in a process of its own too."""
    done = process("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "q4")


def announce(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, **commands: str) -> None:
    """Install a distribution whose module ``q4_noisy`` has this code, and which announces these commands."""
    info = folder / "q4_noisy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: q4-noisy\nVersion: 1.0\n")
    lines = [f"{name} = q4_noisy:{target}" for name, target in commands.items()]
    (info / "entry_points.txt").write_text("\n".join(["[q4core.commands]", *lines, ""]))
    (folder / "q4_noisy.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "q4_noisy", raising=False)


NOISY = """
import typer
print("loaded")
def hello(): typer.echo("hello")
def impostor(): typer.echo("an impostor")
def broken(value: "NoSuchType"): pass
several = typer.Typer(help="Two of them.")
@several.command()
def first(*, loud: bool = False): typer.echo("FIRST" if loud else "first")
@several.command()
def second(): typer.echo("second")
"""


def test_plugins_add_commands_and_can_take_none_away(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin's command joins ours; one that takes our name, is not there or can't be built is left out alone."""
    targets = {"hello": "hello", "doctor": "impostor", "broken": "broken", "absent": "absent", "several": "several"}
    announce(tmp_path, monkeypatch, NOISY, **targets)
    shown = say(capsys, "--help")
    for word in ("hello", "several", "Two of them", "generate", "conform"):
        assert word in shown
    assert "loaded" not in shown, "what a plugin prints is no part of the output"
    assert run(["--help"]) == 0
    warned = capsys.readouterr().err
    for words in (r"'doctor' is left out: the name is taken", r"'broken' is left out.*NoSuchType", r"'absent' is left"):
        assert re.search(words, warned), words
    assert say(capsys, "hello") == "hello\n"
    assert say(capsys, "several", "first", "--loud") == "FIRST\n"
    assert "impostor" not in say(capsys, "doctor", "--help")
    assert run(["broken"]) == 2


def test_a_command_of_two_distributions_is_nobodys(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that two distributions announce is left out, with both named: no answer depends on the path's order."""
    announce(tmp_path, monkeypatch, NOISY, generate="hello")
    assert run(["generate"]) == 2
    assert "q4-lm and q4-noisy both announce it" in capsys.readouterr().err


def test_a_command_loads_no_plugin(tmp_path: Path) -> None:
    """A plugin that ends the process while it is loaded takes away no command; one that is shut out adds none."""
    info = tmp_path / "q4_early-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: q4-early\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[q4core.plugins]\nearly = q4_early\na-deadly = q4_deadly\n[q4core.commands]\nearly = q4_early:early\n"
    )
    (tmp_path / "q4_deadly.py").write_text("import os\nos._exit(5)\n")
    (tmp_path / "q4_early.py").write_text("def early():\n    print('good day')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}

    def call(**more: str) -> subprocess.CompletedProcess[str]:
        return run_interpreter(["-m", "q4_cli", "early"], env=environment | more)

    done = call()
    assert (done.returncode, done.stdout) == (0, "good day\n"), done.stderr
    shut_out = call(Q4_DISABLE_PLUGINS="early,a-deadly")
    assert (shut_out.returncode, shut_out.stdout) == (2, "")
    assert "No such command 'early'" in shut_out.stderr


# -- the documentation


COMMANDS: dict[str, list[str]] = {
    "doctor": [],
    "inspect": [str(NF4)],
    "explain": [str(NF4)],
    "quantize": ["dense.safetensors", "packed.safetensors", "--format", "nf4"],
    "convert": [str(NF4), "converted.safetensors", "--dialect", "bitsandbytes"],
    "bench": ["--shape", "16x64", "--format", "nf4", "--m", "1", "--seconds", "0.001"],
}


def section(command: str) -> str:
    """Return what the documentation says of a command."""
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    found: str = text.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_documentation_has_every_option(command: str) -> None:
    """Each option of each command is in its section of ``docs/cli.md``, and no other one does."""
    group: Any = typer.main.get_command(build_app())
    options = {name for item in group.commands[command].params for name in item.opts if name.startswith("--")}
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", section(command)))
    assert options - {"--help"} <= shown
    assert shown - options <= {"--prove"}  # doctor points to it


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("dense_file")
def test_documentation_has_every_key(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The document's keys are those that the command's section lists."""
    record = answer(capsys, command, *COMMANDS[command])
    listed = section(command).partition("\nJSON: ")[2]
    listed = re.sub(r"\([^)]*\)", "", listed)
    assert list(record) == re.findall(r"`(\w+)`", listed)


# -- the process


FAKE_TORCH = (
    "import os, time\nprint(os.environ.get('OMP_WAIT_POLICY'), flush=True)\ntime.sleep(float(os.environ['NAP']))\n"
)
"""Stands for torch while it loads; what is asked of it afterwards fails."""


def start_loading(folder: Path, nap: float, **variables: str) -> subprocess.Popen[str]:
    """Start the command with a torch that says what it sees of the environment, and then loads for ``nap`` seconds."""
    (folder / "torch.py").write_text(FAKE_TORCH)
    environment = {name: text for name, text in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return subprocess.Popen(
        [sys.executable, "-m", "q4_cli", "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # it only heeds Ctrl-C
        env={**environment, "PYTHONPATH": str(folder), "NAP": str(nap), **variables},
    )


def test_ctrl_c_while_torch_loads_is_quiet(tmp_path: Path) -> None:
    """Ctrl-C in the first seconds ends the command with 130, and nothing is said."""
    process = start_loading(tmp_path, 60)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=scaled(60))
    assert (process.returncode, said) == (130, "")


@pytest.mark.parametrize(("variables", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_wait_passively_unless_the_user_says_otherwise(
    variables: dict[str, str], policy: str, tmp_path: Path
) -> None:
    """OpenMP's threads, which torch computes with, don't spin while they wait: a busy machine stays usable."""
    process = start_loading(tmp_path, 0, **variables)
    seen, _ = process.communicate(timeout=scaled(60))
    assert seen.split() == [policy]
