"""The first seconds of the command: what it costs to ask for help, what help looks like, and what Tab completes."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import typer

import q4core as q4
from q4_cli import options
from q4_cli.app import build_app, run
from q4core.plugin_api import FLOATS
from tests.support.commands import NF4, ROOT, process, say
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_directory")
WIDTHS = (50, 80, 200)


def words_of_all() -> list[tuple[str, ...]]:
    """Return the words of every command that is installed here, those within groups too."""

    def walk(group: Any, before: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, item in group.commands.items():
            yield (*before, name)
            if hasattr(item, "commands"):
                yield from walk(item, (*before, name))

    return list(walk(typer.main.get_command(build_app()), ()))


ALL = words_of_all()


# -- what it costs


def processor_seconds(*words: str) -> float:
    """Return the processor time of a Python process, the least of two: it computes and does not wait."""
    found = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], check=True, capture_output=True, cwd=ROOT, timeout=scaled(60))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["--help", "--version", "doctor --help", "generate --help", "conform --help", "cache prune --help"]
)
def test_help_takes_no_second(words: str) -> None:
    """Help and versions take less than 0.4 s of processor time: a quarter of what loading torch takes."""
    assert processor_seconds("-m", "q4_cli", *words.split()) < scaled(0.4)


@pytest.mark.slow
def test_inspecting_takes_little_more_than_torch() -> None:
    """``q4 inspect`` of a small file takes less than 0.4 s of processor time beyond importing torch."""
    took = processor_seconds("-m", "q4_cli", "inspect", str(NF4))
    assert took - processor_seconds("-c", "import torch") < scaled(0.4)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["generate", "--help"], ["bench", "--nothing"]])
def test_what_computes_nothing_loads_nothing(words: list[str]) -> None:
    """Neither torch, nor the core, nor a plugin's library is loaded to show help or a usage error."""
    code = (
        "import sys; from q4_cli.app import run; run(sys.argv[1:]);"
        "print(*sorted({'torch', 'q4core', 'numpy', 'q4_nn', 'q4_gguf'} & {*sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.splitlines()[-1] == ""


def test_what_help_says_without_the_core_is_the_cores() -> None:
    """The choices that help and completion show are those that the library takes, in its order; so are versions."""
    assert tuple(item.value for item in q4.ComputePath) == options.COMPUTE_PATHS
    assert tuple(item.value for item in q4.ActivationPrecision) == options.PRECISIONS
    assert set(options.DTYPES) == {str(item).removeprefix("torch.") for item in FLOATS}
    assert importlib.metadata.version("q4core") == q4.__version__


# -- what it looks like


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_fits_names_no_types_and_has_an_example(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line is wider than the terminal and nothing is cut; arguments are named in one style; an example is there."""
    shown = {}
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERMINAL_WIDTH", str(width))
        shown[width] = say(capsys, *words, "--help")
        assert max(map(len, shown[width].splitlines())) <= width
        bare = shown[width].replace("COMMAND [ARGS]...", "").replace('{"text": …}', "")
        assert not re.search(r"<(?!index>)[a-z ]+>|[{}╭│]|\.\.\.", bare)
        usage, _, rest = shown[width].partition("\n\n")
        for name in re.findall(r"(?<![\w-])\[?([A-Z]{2,})\]?(?![\w-])", usage):
            assert name in {"OPTIONS", "COMMAND", "ARGS"} or re.search(rf"^  \[?{name}\]?  ", rest, re.MULTILINE)
    plain = {" ".join(text.split()) for text in shown.values()}
    assert len(plain) == 1, "the words are the same at every width"
    if "COMMAND" not in shown[80]:
        assert f"For example:\n\n    q4 {' '.join(words)}" in shown[80] or f"\n\n    q4 {' '.join(words)}" in shown[80]


def test_every_option_names_its_value() -> None:
    """An option that takes a value names it in capitals, and a flag names none."""
    group: Any = typer.main.get_command(build_app())
    waiting = list(group.commands.values())
    for command in waiting:
        waiting += getattr(command, "commands", {}).values()
        for item in command.params:
            if item.param_type_name == "option" and not item.is_flag and not item.is_eager:
                assert item.metavar, (command.name, item.name)
                assert item.metavar == item.metavar.upper() or item.metavar == "NxK"


def test_the_list_of_commands_is_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``q4 --help`` says of each command what it does in a whole sentence, at every width."""
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERMINAL_WIDTH", str(width))
        text = " ".join(say(capsys, "--help").split())
        assert "Show which backend and paths would run each layer here, and why each other one would not." in text
        assert "..." not in text.replace("[ARGS]...", "")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("insepct x", "inspect"),
        ("generat x", "generate"),
        ("inspect --jsn x", "--json"),
        ("cache lst", "list"),
        ("explain packd.safetensors", "packed.safetensors"),
        ("explain packed.safetensors --backend dequant-falback", "dequant-fallback"),
        ("explain packed.safetensors --precision exakt", "exact"),
        ("convert packed.safetensors out --dialect bitsandbyte", "bitsandbytes"),
        ("generate packd.safetensors --prompt a", "packed.safetensors"),
        ("generate smolm2 --prompt a", "smollm2"),
    ],
)
def test_a_slip_is_answered_by_what_was_meant(
    words: str, meant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command, an option, a file, a model or a choice that is almost right is answered by the right one."""
    shutil.copyfile(NF4, tmp_path / "packed.safetensors")
    assert run(words.split()) == 2
    shown = capsys.readouterr().err
    assert re.search(rf"(Did you mean|did you mean|Possible options).*{re.escape(meant)}", shown), shown


# -- what Tab completes


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put ``q4`` on the path of a home of its own, and return that."""
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    command = home / "bin" / "q4"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m q4_cli "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    for name in ("XDG_CONFIG_HOME", "ZDOTDIR", "BASH_ENV", "ENV"):
        monkeypatch.delenv(name, raising=False)
    return home


def in_shell(*words: str) -> str:
    """Run a shell and return what it prints."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


ASKED = [
    ("q4 ins", {"inspect"}),
    ("q4 con", {"convert", "conform"}),
    ("q4 cache ", {"list", "prune", "verify"}),
    ("q4 explain --comp", {"--compute-path"}),
    ("q4 generate x --precision int", {"int16", "int8"}),
]
BASH = """
. "$HOME/.bashrc"
read -ra COMP_WORDS <<< "$1"
case "$1" in *\\ ) COMP_WORDS+=("");; esac
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
entry=($(complete -p q4))
${entry[-2]} q4
printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """
compdef() { handler=$1 }
_files() { print files }
_arguments() { for part in "$@"; do print -r -- "$part"; done }
autoload() { : }
compinit() { : }
for file in $HOME/.zfunc/_q4; do
  words=(q4); CURRENT=1
  source $file > /dev/null
done
line=$1
words=(${=line}); [[ $line == *" " ]] && words+=("")
CURRENT=${#words}
$handler
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(shell: Path) -> None:
    """``q4 --install-completion`` in bash makes Tab complete commands, options and their values."""
    in_shell("bash", "--norc", "-c", "q4 --install-completion; true")
    assert (shell / ".bashrc").is_file()
    for line, expected in ASKED:
        found = in_shell("bash", "--norc", "-c", BASH, "bash", line).split()
        assert set(found) == expected, line
    assert in_shell("bash", "--norc", "-c", BASH, "bash", "q4 inspect pack").split() == [], "files are bash's own"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(shell: Path) -> None:
    """``q4 --install-completion`` in zsh does the same, with what each command does."""
    in_shell("zsh", "-f", "-c", "q4 --install-completion; true")
    assert "fpath" in (shell / ".zshrc").read_text()
    for line, expected in ASKED:
        shown = in_shell("zsh", "-f", "-c", ZSH, "zsh", line)
        assert set(re.findall(r'"([\w-]+)"', shown.replace('":"', '" "'))) >= expected, shown
    assert "Show what a checkpoint holds" in in_shell("zsh", "-f", "-c", ZSH, "zsh", "q4 ins")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(shell: Path) -> None:
    """``q4 --install-completion`` in fish does the same."""
    in_shell("fish", "--no-config", "-c", "q4 --install-completion; true")
    script = shell / ".config/fish/completions/q4.fish"
    for line, expected in ASKED:
        shown = in_shell("fish", "--no-config", "-c", f"source {script}; complete -C '{line}'")
        assert {row.partition("\t")[0] for row in shown.splitlines()} == expected, line


@pytest.mark.slow
def test_completion_loads_no_torch(shell: Path) -> None:
    """A Tab takes as little as help: torch is not loaded for it."""
    del shell
    variables = {"_Q4_COMPLETE": "complete_bash", "COMP_WORDS": "q4 generate --dev", "COMP_CWORD": "2"}
    done = process(variables={**variables, "PYTHONPROFILEIMPORTTIME": "1"})
    assert done.stdout.split() == ["--device"]
    assert not re.search(r"\| +(torch|q4core)$", done.stderr, re.MULTILINE)
