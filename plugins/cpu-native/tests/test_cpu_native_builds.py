"""The kernels through their C ABI alone: random cases against float64, guard pages, sanitizers, threads and forks."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess

import pytest

from tests.support.limits import scaled
from tests.support.native import build, folder_of, tool

pytestmark = pytest.mark.slow

SEED = "1"
"""Fixed, so that a failure is a change's and not the day's; `q4_cpu_tests fuzz 1000000 $RANDOM` searches further."""
ADDRESS, THREAD = (pytest.param(kind, marks=pytest.mark.soak) for kind in ("address", "thread"))
"""Each is a build of its own, of a minute or two."""


@functools.cache
def _fixed_addresses() -> tuple[str, ...]:
    """Return what to put before a command so that its addresses are not random, which thread sanitizers stumble on."""
    setarch = shutil.which("setarch")
    command = (setarch, platform.machine(), "-R") if setarch else ()
    works = command and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    return command if works else ()


def _run(kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    prefix = _fixed_addresses() if kind == "thread" else ()
    command = [*prefix, str(build(kind)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=scaled(300), check=False)


def _passes(kind: str, *arguments: str) -> str:
    done = _run(kind, *arguments)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the baseline is x86's")
def test_the_baseline_is_among_what_is_tested() -> None:
    """Each random case runs on every instruction set that this machine has: AVX2 at least."""
    assert "avx2" in _passes("plain", "isas").split()


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_random_cases(count: int) -> None:
    """Random calls give, on each instruction set, element by element what bounds derived beforehand allow."""
    assert f"{count} cases passed" in _passes("plain", "fuzz", str(count), SEED)


@pytest.mark.parametrize("count", [600, pytest.param(20_000, marks=pytest.mark.soak)])
def test_random_programs(count: int) -> None:
    """Each step is what float64 allows, and a whole program its steps, bit for bit, for 1, 2 and up to 8 threads."""
    assert f"{count} programs" in _passes("plain", "program", str(count), SEED)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("plain", 400), *(pytest.param(kind, 2000, marks=pytest.mark.soak) for kind in ("address", "thread"))],
)
def test_programs_stay_in_their_buffers(kind: str, count: int) -> None:
    """No step touches what lies beyond its views, nor what another thread writes."""
    assert f"{count} programs" in _passes(kind, "program-guard", str(count), "1000000")


@pytest.mark.parametrize(
    ("kind", "command", "count"),
    [
        ("plain", "spiking", 300),
        ("plain", "spiking-guard", 100),
        pytest.param("plain", "spiking", 20_000, marks=pytest.mark.soak),
        *(pytest.param(kind, "spiking", 500, marks=pytest.mark.soak) for kind in ("address", "thread")),
    ],
)
def test_random_circuits(kind: str, command: str, count: int) -> None:
    """Spiking neurons, with bound states or such as each run gives, have the bits of plain loops on any threads."""
    assert f"{count} circuits passed" in _passes(kind, command, str(count), SEED)


@pytest.mark.parametrize("kind", ["plain", ADDRESS, THREAD])
def test_programs_that_make_no_sense_are_refused(kind: str) -> None:
    """The step is reported by its number, nothing is written, and runs of sound programs take no memory."""
    assert "program-bad: passed" in _passes(kind, "program-bad")


def test_planted_faults_are_found() -> None:
    """A spoilt code, scale, second number, bias, global scale, element or neighbouring byte never passes as right."""
    _passes("plain", "plant", "4000", SEED)


def test_a_misspelt_command_fails() -> None:
    """Usage errors end with status 2: a misspelt command can't pass as a test."""
    assert _run("plain", "fuzz").returncode == 2
    assert _run("plain", "fuss", "1", "1").returncode == 2
    assert _run("plain", "fuzz", "1", "1", "mmx").returncode == 2


@pytest.mark.parametrize(("kind", "count"), [("plain", 1500), pytest.param("address", 3000, marks=pytest.mark.soak)])
def test_buffers_may_end_at_forbidden_pages(kind: str, count: int) -> None:
    """No load or store leaves the buffers that a caller passes."""
    assert f"{count} cases passed" in _passes(kind, "guard", str(count), SEED)


@pytest.mark.parametrize("kind", [ADDRESS, THREAD])
def test_random_cases_under_sanitizers(kind: str) -> None:
    """Addresses, undefined behaviour and data races: none is found, also in the kernels' own scratch."""
    assert "5000 cases passed" in _passes(kind, "fuzz", "5000", "1000000")


@pytest.mark.parametrize("kind", ["plain", ADDRESS, THREAD])
def test_arguments_that_make_no_sense_are_refused(kind: str) -> None:
    """Every such argument gives -1, lack of memory -2, and nothing is written."""
    assert "bad: passed" in _passes(kind, "bad")


@pytest.mark.parametrize("kind", ["plain", ADDRESS, THREAD])
def test_callers_on_several_threads(kind: str) -> None:
    """Calls at once from three threads all end, with the bits of calls made alone."""
    assert "threads: passed" in _passes(kind, "threads")


def test_calls_step_aside_for_other_processes() -> None:
    """After a wait for a core that another process has, calls run alone for a while, longer where it recurs."""
    assert "patience: passed" in _passes("plain", "patience")


@pytest.mark.parametrize("kind", ["plain", ADDRESS])  # a thread sanitizer allows no new threads after a fork
def test_children_compute(kind: str) -> None:
    """Children forked before, after and during threaded calls compute, and end."""
    assert "fork: passed" in _passes(kind, "fork")


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "flaw"), [("address", "heap"), ("address", "sign"), ("thread", "race")])
def test_the_sanitizers_are_at_work(kind: str, flaw: str) -> None:
    """A flaw of the kind that each watches for ends the program, and the kernels are compiled in the same way."""
    assert _run("plain", "flaw", flaw).returncode == 0
    done = _run(kind, "flaw", flaw)
    assert done.returncode not in {0, 2}, done.stdout
    told = {"heap": "heap-buffer-overflow", "sign": "signed integer overflow", "race": "data race"}
    assert told[flaw] in done.stderr
    commands = subprocess.run(
        [tool("ninja"), "-C", str(folder_of(kind)), "-t", "commands"], capture_output=True, text=True, check=True
    )
    compiled = [line for line in commands.stdout.splitlines() if " -c " in line]
    assert any("kernels_" in line for line in compiled)
    assert all(f"-fsanitize={kind}" in line for line in compiled)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Arm's kernels are read in test_cpu_native_arm.py")
@pytest.mark.parametrize(
    ("isa", "used", "unused"),
    [
        ("avx2", {"vpmaddubsw", "vpmaddwd"}, {"vpdpbusd", "vpdpwssd", "{vex}"}),
        ("avxvnni", {"{vex} vpdpbusd", "{vex} vpdpwssd"}, {"vpmaddubsw", "zmm", "{%k"}),
        ("avx512", {"vpdpbusd", "vpdpwssd", "zmm"}, {"vpmaddubsw"}),
    ],
)
def test_the_instructions_are_those_of_the_set(isa: str, used: set[str], unused: set[str]) -> None:
    """Kernels multiply by the instructions that their set is named after, and by none that it lacks."""
    build("plain")
    code = folder_of("plain") / "CMakeFiles" / f"q4_kernels_{isa}.dir" / "native" / "src" / f"kernels_{isa}.cpp.o"
    listing = _answer("objdump", "-d", "--no-show-raw-insn", str(code))
    assert all(word in listing for word in used)
    assert not any(word in listing for word in unused)
    # Compiled for more than every processor has, a function must not be taken by the linker for its namesakes.
    offered = _answer("nm", "-C", "--defined-only", "--extern-only", str(code))
    assert [line.split(" ", 2)[2] for line in offered.splitlines()] == [f"q4::kernels_{isa}()"]


def _answer(*command: str) -> str:
    return subprocess.run([tool(command[0]), *command[1:]], capture_output=True, text=True, check=True).stdout
