"""The kernels for Arm: cross-compiled, run in an emulator against float64, and read as machine code."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.limits import scaled
from tests.support.native import build, folder_of, tool

pytestmark = [pytest.mark.arm, pytest.mark.slow]

LIBRARIES = "/usr/aarch64-linux-gnu"
SEED = "1"
"""Fixed, so that a failure is a change's and not the day's."""


def _run(processor: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program on an emulated processor."""
    command = [tool("qemu-aarch64-static"), "-L", LIBRARIES, "-cpu", processor, str(build("aarch64")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=scaled(300), check=False)


def _answer(*command: str) -> str:
    return subprocess.run([tool(command[0]), *command[1:]], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("processor", "here", "absent"),
    [
        ("max", ["neon-dotprod", "neon-i8mm"], []),
        ("neoverse-n1", ["neon-dotprod"], ["neon-i8mm"]),
        ("cortex-a53", [], ["neon-dotprod", "neon-i8mm"]),
    ],
)
def test_a_processor_is_asked_what_it_has(processor: str, here: list[str], absent: list[str]) -> None:
    """Each has its own instruction sets, says which it has not, and runs none of them by default."""
    done = _run(processor, "isas")
    assert done.stdout.split() == here
    assert done.stderr.splitlines() == [*(f"{name}: not on this machine" for name in absent), "unasked: none"]
    assert done.returncode == (0 if here else 1)
    for name in absent:
        assert _run(processor, "fuzz", "1", SEED, name).returncode == 2


@pytest.mark.parametrize(
    ("processor", "count"),
    [("max", "600"), ("neoverse-n1", "300"), pytest.param("max", "5000", marks=pytest.mark.soak)],
)
def test_random_cases(processor: str, count: str) -> None:
    """Random calls give, on each instruction set, element by element what bounds derived beforehand allow."""
    done = _run(processor, "fuzz", count, SEED, "--small")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"{count} cases passed" in done.stdout


@pytest.mark.parametrize("count", ["20", pytest.param("500", marks=pytest.mark.soak)])
def test_random_programs(count: str) -> None:
    """Each step is what float64 allows, and a whole program its steps, bit for bit, for any number of threads."""
    assert f"{count} programs" in _run("max", "program", count, SEED).stdout
    assert "program-bad: passed" in _run("neoverse-n1", "program-bad").stdout


def test_large_cases() -> None:
    """The same for a few calls with rows enough for decoded panels, and with threads."""
    done = _run("max", "fuzz", "60", "1000000")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "60 cases passed" in done.stdout


@pytest.mark.parametrize("count", ["300", pytest.param("3000", marks=pytest.mark.soak)])
def test_buffers_may_end_at_forbidden_pages(count: str) -> None:
    """No load or store leaves the buffers that a caller passes."""
    done = _run("max", "guard", count, SEED, "--small")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"{count} cases passed" in done.stdout


def test_planted_faults_are_found() -> None:
    """What is spoilt never passes as right here either."""
    done = _run("max", "plant", "800", SEED, "--small")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    ("isa", "used", "unused"),
    [
        ("neon_dotprod", {"sdot", "smlal", "fmla", "tbl"}, {"smmla"}),
        ("neon_i8mm", {"sdot", "smmla", "smlal", "fmla", "tbl"}, set()),
    ],
)
def test_the_instructions_are_those_of_the_set(isa: str, used: set[str], unused: set[str]) -> None:
    """Kernels multiply by the instructions that their set is named after, and by none that it lacks."""
    build("aarch64")
    code = folder_of("aarch64") / "CMakeFiles" / f"q4_kernels_{isa}.dir" / "native" / "src" / f"kernels_{isa}.cpp.o"
    listing = _answer("aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", str(code))
    found = {line.split("\t")[1].strip() for line in listing.splitlines() if "\t" in line}
    assert used <= found
    assert not unused & found
    # Compiled for more than every processor has, a function must not be taken by the linker for its namesakes.
    offered = _answer("aarch64-linux-gnu-nm", "-C", "--defined-only", "--extern-only", str(code))
    assert [line.split(" ", 2)[2] for line in offered.splitlines()] == [f"q4::kernels_{isa}()"]
