"""The ``q4`` command with bad input, failing systems and failing plugins: one clean message, the right status."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from safetensors.torch import save_file

import q4core as q4
from q4_cli.app import run
from q4_cli.failure import describe
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[3]
NF4 = ROOT / "conformance/src/q4_conformance/golden/bitsandbytes/nf4-b64.safetensors"
ERROR_KEYS = {"code", "message", "what", "name", "rule", "value", "where", "hint", "details"}


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test run in a folder of its own, with files that are wrong in one way each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.safetensors").write_text("this is no checkpoint\n" * 9)
    (tmp_path / "text.txt").write_text("nor is this\n" * 9)
    (tmp_path / "nothing.safetensors").write_bytes(b"")
    whole = NF4.read_bytes()
    (tmp_path / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "packed.safetensors").write_bytes(whole)
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    save_file({"a.weight": torch.randn(8, 64), "b.bias": torch.zeros(8)}, "dense.safetensors")
    save_file({"b.bias": torch.zeros(8)}, "biases.safetensors")
    save_file({"a.weight": torch.full((8, 64), torch.nan), "c.weight": torch.ones(8, 64)}, "nan.safetensors")
    (tmp_path / "taken.safetensors").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    yield
    q4.reset_registry()


BAD = {
    # words → (status, code)
    "inspect missing.safetensors": (2, "checkpoint"),
    "inspect empty": (2, "checkpoint"),
    "inspect text.safetensors": (2, "checkpoint"),
    "inspect text.txt": (2, "checkpoint"),
    "inspect nothing.safetensors": (2, "checkpoint"),
    "inspect truncated.safetensors": (2, "checkpoint"),
    "inspect -": (2, "checkpoint"),
    "inspect loop": (2, "checkpoint"),
    "inspect pipe": (2, "checkpoint"),
    "inspect /dev/null": (2, "checkpoint"),
    "inspect " + "x" * 5000: (2, "checkpoint"),
    "inspect a\0b": (2, "checkpoint"),
    "inspect packed.safetensors --dialect bitsandbites": (2, "dialect"),
    "inspect packed.safetensors --dialect simple-nf4": (2, "schema"),
    "explain missing.safetensors": (2, "checkpoint"),
    "explain packed.safetensors --backend dequant-fallbak": (2, "unknown_backend"),
    "explain packed.safetensors --compute-path fast": (2, "config"),
    "explain packed.safetensors --backend dequant-fallback --compute-path kernel_only": (2, "policy_conflict"),
    "explain packed.safetensors --compute-path kernel_only": (1, "backend_unavailable"),
    "explain packed.safetensors --device tpu": (2, "config"),
    "explain packed.safetensors --device cuda:97": (2, "config"),
    "explain packed.safetensors --precision int7": (2, "config"),
    "explain packed.safetensors --dtype floaty": (2, "config"),
    "explain packed.safetensors --m 0:4": (2, "config"),
    "explain packed.safetensors --m 8:4": (2, "config"),
    "explain packed.safetensors --m many": (2, "config"),
    "quantize missing.safetensors out.safetensors --format nf4": (2, "checkpoint"),
    "quantize dense.safetensors out.safetensors --format nf5": (2, "format"),
    "quantize dense.safetensors out.safetensors --format nf4 --dialect bitsandbite": (2, "dialect"),
    "quantize dense.safetensors out.safetensors --format nf4 --dialect modelopt-nvfp4": (2, "dialect"),
    "quantize dense.safetensors out.safetensors --format q8_0": (2, "dialect"),
    "quantize dense.safetensors out.safetensors --format nf4 --block-size 7": (2, "format"),
    "quantize dense.safetensors out.safetensors --format nf4 --block-size -64": (2, "format"),
    "quantize dense.safetensors out.safetensors --format nf4 --block-size many": (2, "usage"),
    "quantize dense.safetensors out.safetensors --format nf4 --scale-kind e4m4": (2, "config"),
    "quantize dense.safetensors out.safetensors --format nf4 --scale-kind e8m0": (2, "format"),
    "quantize dense.safetensors out.safetensors --format nf4 --shard-size 5XB": (2, "config"),
    "quantize dense.safetensors out.safetensors --format nf4 --shard-size 1KB": (2, "checkpoint"),
    "quantize dense.safetensors out.safetensors": (2, "usage"),
    "quantize dense.safetensors missing/out.safetensors --format nf4": (2, "checkpoint"),
    "quantize dense.safetensors taken.safetensors --format nf4": (2, "checkpoint"),
    "quantize dense.safetensors full --format nf4": (2, "checkpoint"),
    "quantize dense.safetensors out.bin --format nf4": (2, "checkpoint"),
    "quantize dense.safetensors - --format nf4": (2, "checkpoint"),
    "quantize dense.safetensors dense.safetensors --format nf4 --force": (2, "checkpoint"),
    "quantize dense.safetensors pipe --format nf4 --force": (2, "checkpoint"),
    "quantize packed.safetensors out.safetensors --format nf4": (2, "checkpoint"),
    "quantize biases.safetensors out.safetensors --format nf4": (2, "checkpoint"),
    "quantize dense.safetensors out.safetensors --format nf4 --skip *": (2, "checkpoint"),
    "quantize nan.safetensors out.safetensors --format nf4 --strict": (2, "input"),
    "convert dense.safetensors out.safetensors --dialect bitsandbytes": (2, "checkpoint"),
    "convert packed.safetensors out.safetensors --dialect modelopt-nvfp4": (2, "dialect"),
    "convert packed.safetensors out.safetensors --dialect bitsandbytez": (2, "dialect"),
    "convert packed.safetensors taken.safetensors --dialect simple-nf4": (2, "checkpoint"),
    "bench": (2, "config"),
    "bench packed.safetensors --shape 64x64": (2, "config"),
    "bench packed.safetensors --format nf4": (2, "config"),
    "bench packed.safetensors --layer prog": (2, "checkpoint"),
    "bench dense.safetensors": (2, "checkpoint"),
    "bench --shape 64x64": (2, "config"),
    "bench --shape 0x64 --format nf4": (2, "config"),
    "bench --shape wide --format nf4": (2, "config"),
    "bench --shape 9999999x9999999 --format nf4": (2, "config"),
    "bench --shape 64x60 --format q4_0": (2, "format"),
    "bench --shape 64x64 --format nf44": (2, "format"),
    "bench --shape 64x64 --format nf4 --m 0": (2, "config"),
    "bench --shape 64x64 --format nf4 --m 1,,2": (2, "config"),
    "bench --shape 64x64 --format nf4 --seconds 0": (2, "config"),
    "bench --shape 64x64 --format nf4 --seconds nan": (2, "config"),
    "bench --shape 64x64 --format nf4 --backend nobody": (2, "unknown_backend"),
    "bench --shape 64x64 --format nf4 --compute-path kernel_only": (1, "backend_unavailable"),
    "doctor --device cuda:97": (2, "config"),
    "doctor --nonsense": (2, "usage"),
    "nonsense": (2, "usage"),
}


def files(folder: Path) -> dict[str, int]:
    """Return every file below a folder with its size, hidden ones too."""
    return {str(path.relative_to(folder)): path.lstat().st_size for path in folder.rglob("*")}


@pytest.mark.parametrize("words", BAD, ids=lambda words: words[:60].replace("\0", "NUL"))
@pytest.mark.usefixtures("reference_alone")
def test_bad_words_get_one_clean_message(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As text: one message on stderr; as JSON: one object on stdout; the same status; no file is made or changed."""
    status, code = BAD[words]
    before = files(tmp_path)
    assert run(words.split(" ")) == status
    text = capsys.readouterr()
    assert "Traceback" not in text.err
    if (words.split(" ", maxsplit=1)[0], code) == ("explain", "backend_unavailable"):
        assert "→  no backend" in text.out  # each layer with its reasons
    else:
        assert text.err.startswith(f"error [{code}] ")
        assert text.out == "" or code == "schema"  # inspect shows the layers as well as what is wrong with them
    assert run([*words.split(" "), "--json"]) == status
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error.keys() == ERROR_KEYS
    assert error["code"] == code
    assert error["message"]
    assert "Traceback" not in captured.err
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "closest"),
    [
        ("inspect packed.safetensors --dialect bitsandbites", "bitsandbytes"),
        ("explain packed.safetensors --backend dequant-fallbak", "dequant-fallback"),
        ("explain packed.safetensors --dtype bfloat", "bfloat16"),
        ("quantize dense.safetensors out.safetensors --format nvp4", "nvfp4"),
        ("quantize dense.safetensors out.safetensors --format nf4 --scale-kind double_qant", "double_quant"),
        ("bench --shape 64x64 --format mxpf4", "mxfp4"),
        ("explan", "explain"),
    ],
)
def test_slips_get_the_closest_name(words: str, closest: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown name is answered with the one that was probably meant."""
    assert run(words.split(" ")) == 2
    message = capsys.readouterr().err.partition("hint")
    assert repr(closest) in message[0] + message[2]


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "a\0b"],
        ["explain", "a\0b"],
        ["bench", "a\0b"],
        ["quantize", "a\0b", "x", "--format", "nf4"],
        ["quantize", "dense.safetensors", "a\0b", "--format", "nf4"],
        ["convert", "packed.safetensors", "a\0b", "--dialect", "simple-nf4", "--requantize"],
    ],
    ids=lambda words: " ".join(words).replace("\0", "NUL"),
)
def test_nul_in_a_path_is_bad_input(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A path that the system can't take is refused wherever a command takes one."""
    assert run([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "checkpoint"


def test_message_names_file_rule_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    """The fields of the error reach the document: what, where, rule, value."""
    run(["inspect", "truncated.safetensors", "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert "truncated.safetensors" in error["where"]
    assert error["rule"]
    assert error["value"] is not None


def test_nan_stays_dense_and_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor with NaN is not packed; it is copied, and the reason names it."""
    assert run(["quantize", "nan.safetensors", "out.safetensors", "--format", "nf4", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in record["layers"]] == ["c.weight"]
    assert [item["name"] for item in record["dense"]] == ["a.weight"]
    with q4.open("out.safetensors") as checkpoint:
        assert checkpoint.dense["a.weight"].isnan().all()


def test_force_replaces(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--force`` a file that is there gives way, and a folder keeps what is not part of the checkpoint."""
    assert run(["quantize", "dense.safetensors", "taken.safetensors", "--format", "nf4", "--force"]) == 0
    assert run(["quantize", "dense.safetensors", "full", "--format", "nf4", "--force"]) == 0
    capsys.readouterr()
    for out in ("taken.safetensors", "full"):
        with q4.open(out) as checkpoint:
            assert list(checkpoint) == ["a"]
    assert Path("full/file").read_text() == "mine"


def test_names_can_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters in tensor names and in file names are written out, in tables and in errors."""
    save_file({"a\x1b[2J.weight": torch.randn(8, 64), "b\r\nfake": torch.zeros(2)}, "odd\x1b.safetensors")
    assert run(["quantize", "odd\x1b.safetensors", "out.safetensors", "--format", "nf4"]) == 0
    assert run(["inspect", "out.safetensors"]) == 0
    assert run(["inspect", "none\x1b]0;title\x07"]) == 2
    captured = capsys.readouterr()
    assert not set(captured.out + captured.err) & {"\x1b", "\r", "\x07"}
    assert "\\x1b" in captured.out
    assert "\\x1b" in captured.err


def test_plugin_command_that_fails_is_reported_cleanly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault inside a plugin's command is one message and status 70; its typed errors keep theirs."""

    def fault() -> None:
        raise KeyError("oops")

    def typed() -> None:
        raise q4.InputError("typed", name="x", rule="good", value="bad")

    points = {name: EntryPoint(name, f"{__name__}:{name}", "q4core.commands") for name in ("fault", "typed")}
    monkeypatch.setattr("q4_cli.app.announced", lambda _: (points, []))
    monkeypatch.setitem(globals(), "fault", fault)
    monkeypatch.setitem(globals(), "typed", typed)
    assert run(["fault"]) == 70
    captured = capsys.readouterr()
    assert captured.err.startswith("error [internal] KeyError")
    assert "Traceback" not in captured.err
    assert run(["typed"]) == 2
    assert capsys.readouterr().err.startswith("error [input] typed: x must be good, got 'bad'")
    for words in (["--debug", "fault"], ["fault", "--debug"]):
        assert run(words) == 70
        assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("Q4_DEBUG", "1")
    assert run(["fault"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (q4.BackendUnavailableError("x"), "backend_unavailable", 1),
        (q4.UnknownBackendError("x"), "unknown_backend", 2),
        (q4.PolicyConflictError("x"), "policy_conflict", 2),
        (q4.UnifiedMemoryError("x"), "unified_memory", 1),
        (q4.PluginError("x"), "plugin", 1),
        (q4.CheckpointError("x"), "checkpoint", 2),
        (OSError(28, "No space left on device", "file"), "system", 1),
        (MemoryError(), "memory", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (ZeroDivisionError("x"), "internal", 70),
    ],
)
def test_every_error_has_its_status(error: BaseException, code: str, status: int) -> None:
    """1 where nothing here can serve, 2 for bad input, 70 for a fault, 130 after Ctrl-C."""
    found = describe(error)
    assert (found[0], found[1]["code"]) == (status, code)
    assert json.loads(json.dumps(found[1])).keys() == ERROR_KEYS


def test_an_interrupt_names_the_plugin_that_it_came_from() -> None:
    """One that raises ``KeyboardInterrupt`` while it is imported ends the command, and is reported."""
    message = describe(KeyboardInterrupt("in import of plugin 'bad'"))[1]["message"]
    assert message == "interrupted in import of plugin 'bad'; nothing was left half-written"


def test_full_disk_is_no_bad_input() -> None:
    """A checkpoint error that a full disk caused ends with 1."""
    error = q4.CheckpointError("save")
    error.__cause__ = OSError(28, "No space left on device")
    assert describe(error)[0] == 1


WORDS = strategies.sampled_from(
    [
        "doctor",
        "inspect",
        "explain",
        "quantize",
        "convert",
        "bench",
        "dense.safetensors",
        "packed.safetensors",
        "truncated.safetensors",
        "text.txt",
        "empty",
        "new.safetensors",
        "--json",
        "--format",
        "nf4",
        "--dialect",
        "bitsandbytes",
        "--m",
        "1",
        "--backend",
        "--shape",
        "16x64",
        "--seconds",
        "0.001",
        "--",
        "--strict",
        "--all",
        "-",
        "",
        "é\udcff",
    ]
)


@pytest.mark.slow
@hypothesis.settings(max_examples=25, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(words=strategies.lists(WORDS, max_size=7))
def test_any_words_end_well(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the words, the status is 0, 1 or 2, and with ``--json`` stdout is one document, or the help."""
    Path("new.safetensors").unlink(missing_ok=True)
    capsys.readouterr()
    assert run(words) in {0, 1, 2}
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    named = words[: words.index("--")] if "--" in words else words
    if "--json" in named and captured.out:
        json.loads(captured.out)


# -- processes


def start(*arguments: object, before: Callable[[], None] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "q4_cli", *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,  # noqa: PLW1509  # it only limits itself
        **{"stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, **options},
    )


def heed_interrupts() -> None:
    """Let the process to come heed Ctrl-C, which a shell's background jobs ignore, and their children with them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def drop_privileges() -> None:
    """Take root's right to read everything away from the process to come; nothing for other users."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        if os.geteuid() == 0 and libc.prctl(24, capability, 0, 0, 0) != 0:  # PR_CAPBSET_DROP
            raise OSError(ctypes.get_errno(), "prctl")


@pytest.mark.slow
def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    """A file that may not be read is an error that names it; nothing is guessed from its name."""
    path = tmp_path / "packed.safetensors"
    path.chmod(0)
    done = start("inspect", path, before=drop_privileges)
    out, err = done.communicate(timeout=scaled(180))
    assert (done.returncode, out) == (2, "")
    assert err.startswith("error [checkpoint]")
    assert "Permission denied" in err
    assert path.name in err


def limit_files() -> None:
    """Let no file of the process to come grow beyond 100 kB, as a full disk would."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.slow
@pytest.mark.parametrize("out", ["out.safetensors", "folder"])
def test_full_disk_leaves_nothing(out: str, tmp_path: Path) -> None:
    """When the output can't grow further, the command ends with 1, and neither OUT nor a temporary file is left."""
    save_file({f"{index}.weight": torch.randn(256, 512) for index in range(4)}, "large.safetensors")
    before = files(tmp_path)
    done = start("quantize", "large.safetensors", out, "--format", "nf4", before=limit_files)
    text, err = done.communicate(timeout=scaled(180))
    assert (done.returncode, text) == (1, "")
    assert err.startswith("error [checkpoint]")
    assert "File too large" in err
    assert files(tmp_path) == before


INTERRUPTER = """
import signal, sys

signals = [{number}]

def interrupt(event, arguments):
    if signals and event == {event!r} and ".q4core-" in str(arguments[0]):
        signal.raise_signal(signals.pop())

sys.addaudithook(interrupt)
"""
"""What a process runs when it starts: it sends itself a signal when a temporary file is made, or is whole."""


@pytest.mark.slow
@pytest.mark.parametrize("event", ["open", "os.chmod"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_leaves_nothing(number: signal.Signals, status: int, event: str, tmp_path: Path) -> None:
    """Ctrl-C or SIGTERM while the output is written ends the command with its usual status and leaves no file."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTER.format(event=event, number=int(number)))
    before = files(tmp_path)
    done = start(
        "quantize",
        "dense.safetensors",
        "out.safetensors",
        *("--format", "nf4", "--json"),
        before=heed_interrupts,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    out, err = done.communicate(timeout=scaled(180))
    assert done.returncode == status
    assert "Traceback" not in err
    if number is signal.SIGINT:
        assert json.loads(out)["error"]["code"] == "interrupted"
    assert files(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_broken_pipe_is_quiet(flags: list[str]) -> None:
    """When the reader goes away the command ends with 141 and says nothing."""
    reader, writer = os.pipe()
    os.close(reader)
    done = start("doctor", *flags, stdout=writer)
    os.close(writer)
    _, err = done.communicate(timeout=scaled(180))
    assert (done.returncode, err) == (141, "")


@pytest.mark.slow
def test_closed_stdout_is_no_fault() -> None:
    """With stdout closed the command still works and ends with 0."""
    done = start("inspect", NF4, before=lambda: os.close(1))
    _, err = done.communicate(timeout=scaled(180))
    assert (done.returncode, err) == (0, "")


@pytest.mark.slow
def test_plain_terminals_and_no_color(tmp_path: Path) -> None:
    """An ASCII stream gets what it can hold, and ``NO_COLOR`` on a terminal leaves no escape sequence."""
    plain = subprocess.run(
        [sys.executable, "-m", "q4_cli", "inspect", str(NF4)],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
    )
    assert b"\x1b" not in plain.stdout
    assert plain.stdout.isascii()
    assert b"nf4" in plain.stdout
    for variables, styled in (({"NO_COLOR": "1"}, False), ({}, True)):
        master, slave = os.openpty()
        shown = subprocess.Popen(
            [sys.executable, "-m", "q4_cli", "inspect", str(NF4)],
            stdout=slave,
            stderr=slave,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **variables},
        )
        os.close(slave)
        text = b""
        while True:
            try:
                chunk = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            text += chunk
        assert shown.wait(timeout=scaled(180)) == 0
        os.close(master)
        assert b"nf4" in text
        assert (b"\x1b[" in text) is styled
