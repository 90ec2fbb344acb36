"""Choice of the instruction set: requested or not, supported or not, built or not, run on hardware before or not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import torch

import q4_cpu_native.isa
import q4core as q4
from q4_cpu_native import CpuNative
from q4_cpu_native.isa import Isa, choose, native

if TYPE_CHECKING:
    from collections.abc import Callable

README = Path(__file__).parents[1] / "README.md"
HERE, NOT_HERE, NOT_BUILT = 1, 0, -1


@attrs.frozen
class FakeModule:
    """A native module on a machine of our making: name -> (state, whether it was run on hardware)."""

    sets: dict[str, tuple[int, bool]]
    ABI_VERSION: int = 14

    def isa_name(self, number: int) -> str | None:
        """Return the name of a set, or None past the last."""
        return dict(enumerate(self.sets, 1)).get(number)

    def has_isa(self, number: int) -> int:
        """Return whether a set is here."""
        return list(self.sets.values())[number - 1][0]

    def isa_was_run(self, number: int) -> bool:
        """Return whether a set was run on hardware."""
        return list(self.sets.values())[number - 1][1]

    def panel_from(self, number: int, family: int) -> int:
        """Return from how many rows of x on there are panels: for all families but the first."""
        return 12 * family if number else 0

    def best_isa(self) -> int:
        """Return the last set that is here and was run."""
        usable = [i for i, (state, was_run) in enumerate(self.sets.values(), 1) if state == HERE and was_run]
        return max(usable, default=0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what puts a machine of those sets in place of this one."""

    def place(sets: dict[str, tuple[int, bool]], abi: int = 14) -> None:
        module = FakeModule(sets, abi)
        monkeypatch.setattr(q4_cpu_native.isa, "native", lambda: module)

    return place


def test_a_set_never_run_on_hardware_waits_to_be_asked_for(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the plugin loads and rejects by policy, with a hint; requested by name, the set is used."""
    machine({"neon-dotprod": (HERE, False), "neon-i8mm": (HERE, False)})
    monkeypatch.delenv("Q4_CPU_ISA", raising=False)
    request = q4.Request.for_weight(q4.quantize(torch.rand(16, 64), "q4_0"))
    (reason,) = CpuNative().check(request).reasons
    assert reason.code is q4.ReasonCode.POLICY
    assert "neon-dotprod and neon-i8mm have not been run on hardware" in reason.message
    assert "set Q4_CPU_ISA=neon-i8mm" in reason.message
    monkeypatch.setenv("Q4_CPU_ISA", "neon-dotprod")
    assert CpuNative().isa == "neon-dotprod"
    assert {path.name: path.m for path in CpuNative().check(request).paths} == {
        "exact_neon_dotprod": (1, None),
        "w4a8_neon_dotprod": (1, 11),
        "w4a8_neon_dotprod_panel": (12, None),
        "w4i16_neon_dotprod": (1, 23),
        "w4i16_neon_dotprod_panel": (24, None),
    }


@pytest.mark.parametrize("was_run", [True, False])
def test_the_state_says_what_never_ran_on_such_hardware(was_run: bool, machine: Callable[..., None]) -> None:
    """A set that was only compiled is loaded on request, and the state says so."""
    machine({"avx2": (HERE, was_run)})
    request = q4.Request.for_weight(q4.quantize(torch.rand(16, 64), "q4_0"))
    state = CpuNative("avx2").check(request).native_state
    assert state == ("loaded (avx2)" if was_run else "loaded (avx2, never run on such hardware)")


def test_a_set_run_on_hardware_comes_first(machine: Callable[..., None]) -> None:
    """Next to a set that was run on hardware, a later one that was not is not the default."""
    machine({"old": (HERE, True), "new": (HERE, False)})
    assert choose("") == Isa(1, "old", panels_from=(0, 12, 24), was_run=True)
    assert choose("new") == Isa(2, "new", panels_from=(0, 12, 24), was_run=False)


def test_sets_are_no_chain(machine: Callable[..., None]) -> None:
    """A machine may have a later set without an earlier one: asking for that one is refused, as its own lack."""
    machine({"avx2": (HERE, True), "avxvnni": (NOT_HERE, True), "avx512": (HERE, True)})
    assert choose("") == Isa(3, "avx512", panels_from=(0, 12, 24), was_run=True)
    refused = choose("avxvnni")
    assert refused.number == 0
    assert refused.code is q4.ReasonCode.ARCH
    assert refused.text == "Q4_CPU_ISA requests avxvnni, which this machine does not support"


def test_what_was_not_compiled_is_not_blamed_on_the_machine(machine: Callable[..., None]) -> None:
    """A set that the compiler did not know is rejected as not built, requested or not."""
    machine({"avx2": (NOT_HERE, True), "avxvnni": (NOT_BUILT, True), "neon-i8mm": (NOT_BUILT, False)})
    assert choose("avxvnni").code is q4.ReasonCode.NOT_BUILT
    assert choose("").code is q4.ReasonCode.NOT_BUILT
    assert "that have kernels: avx2; not compiled: avxvnni; install q4-cpu-native again" in choose("").text
    machine({"avx2": (NOT_HERE, True), "neon-i8mm": (NOT_BUILT, False)})
    assert choose("").code is q4.ReasonCode.ARCH
    assert choose("").text.endswith("that have kernels: avx2")
    machine({"avx2": (NOT_BUILT, True)})
    assert choose("").code is q4.ReasonCode.NOT_BUILT
    assert choose("").text.endswith("without kernels for this kind of processor")


def test_a_build_for_one_set_says_what_it_left_out(machine: Callable[..., None]) -> None:
    """The state names what was not compiled; a request for that is refused with the way out, one for Arm's without."""
    names = ("avx2", "avxvnni", "avx512", "neon-dotprod")
    machine({name: (HERE if name == "avx512" else NOT_BUILT, not name.startswith("neon")) for name in names})
    request = q4.Request.for_weight(q4.quantize(torch.rand(16, 64), "q4_0"))
    assert CpuNative("").check(request).native_state == "loaded (avx512; not compiled: avx2, avxvnni)"
    (reason,) = CpuNative("avx2").check(request).reasons
    assert reason.code is q4.ReasonCode.NOT_BUILT
    assert reason.message == (
        "Q4_CPU_ISA requests avx2, for which the native module was built without kernels; "
        "install q4-cpu-native again with every set (in a clone: nox -s env), by a compiler that knows avx2"
    )
    (reason,) = CpuNative("neon-dotprod").check(request).reasons
    assert reason.message.endswith("was built without kernels")
    machine({name: (NOT_BUILT if name.startswith("neon") else HERE, True) for name in names})
    assert CpuNative("").check(request).native_state == "loaded (avx512)"


def test_a_module_of_another_abi_is_not_called(machine: Callable[..., None]) -> None:
    """A native module that was built from other sources is refused before anything is asked of it."""
    machine({"avx2": (HERE, True)}, abi=1)
    refused = choose("avx2")
    assert refused.number == 0
    assert refused.code is q4.ReasonCode.NOT_BUILT
    assert "has ABI 1, but ABI 14 is required" in refused.text


def test_the_built_module_and_the_readme_name_the_same_sets() -> None:
    """Each set has its row and what its kernels were run on; sets of x86 and of Arm are never built together."""
    module = native()
    names: list[str] = []
    while (name := module.isa_name(len(names) + 1)) is not None:
        names.append(name)
    assert module.isa_name(0) is None
    assert module.has_isa(0) == module.has_isa(len(names) + 1) == NOT_BUILT
    listed = re.findall(
        r"^\| `([^`]+)` \|.*\| run (on hardware|in an emulator) ?.*\|$", README.read_text(), re.MULTILINE
    )
    states = ("in an emulator", "on hardware")
    assert listed == [(name, states[module.isa_was_run(number)]) for number, name in enumerate(names, 1)]
    built = {name for number, name in enumerate(names, 1) if module.has_isa(number) != NOT_BUILT}
    assert {name.startswith("neon") for name in built} in ({True}, {False})
    best = module.best_isa()
    assert best == 0 or (module.has_isa(best) == HERE and module.isa_was_run(best))
