"""What the kernels become: instructions in PTX and in machine code, registers, shared memory; no GPU is needed."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
import triton
from compiling import compiled_aside, selected

from q4_nvfp4_native import scaled_dot
from q4_nvfp4_native.compiler import compile_kernels, nvrtc_problem, source
from q4_nvfp4_native.configurations import configurations
from q4_nvfp4_native.kernels import quantize as quantize_kernels
from q4_nvfp4_native.quantizer import KINDS
from q4_triton_kernels import ARCHITECTURES, compile_for
from q4core import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compiling import Compiling

    from q4_nvfp4_native.compiler import Compiled
    from q4_triton_kernels import Compiled as Program

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PTX_PRODUCT = {
    name: f"mma.sync.aligned.kind::{kind}.block_scale.scale_vec::{scale}.m16n8k64.row.col.f32.e2m1.e2m1.f32.{stype}"
    for name, kind, scale, stype in (("nvfp4", "mxf4nvf4", "4X", "ue4m3"), ("mxfp4", "mxf4", "2X", "ue8m0"))
}
SASS_PRODUCT = {"nvfp4": "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", "mxfp4": "OMMA.SF.16864.F32.E2M1.E2M1.E8"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this test's own, so that what is looked at was compiled here."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module", params=[(name, arch) for name in PTX_PRODUCT for arch in (120, 121)], ids=str)
def native(request: pytest.FixtureRequest, cache: Path) -> tuple[str, Compiled]:
    """The kernels of a format for an architecture, by NVRTC."""
    name, arch = request.param
    return name, compile_kernels(name, arch)


def _tool(name: str, *arguments: str, code: bytes, folder: Path) -> str:
    file = folder / "kernels.cubin"
    file.write_bytes(code)
    return subprocess.run([TOOLS / name, *arguments, file], check=True, capture_output=True, text=True).stdout


def _functions(text: str) -> dict[str, str]:
    """Return name → listing of each function of a disassembly."""
    parts = re.split(r"\n\s*Function : (\w+)\n", text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_ptx_holds_the_native_product(native: tuple[str, Compiled]) -> None:
    """Every product kernel multiplies by the block-scaled instruction of its format, and by no other."""
    name, compiled = native
    assert compiled.arch in {"sm_120a", "sm_121a"}
    for tile in configurations():
        body = compiled.ptx.split(f".entry q4_gemm_{name}_{tile}(")[1].split(".entry ")[0]
        products = set(re.findall(r"\b(?:mma|wgmma|tcgen05)\.[\w.:]*", body))
        assert products == {PTX_PRODUCT[name]}
        assert "cp.async.cg.shared.global" in body
        assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in body


def test_machine_code_holds_the_native_product(native: tuple[str, Compiled], tmp_path: Path) -> None:
    """The same holds of the machine code: only the FP4 unit multiplies, and no function touches local memory."""
    name, compiled = native
    if compiled.arch == "sm_121a" and triton.__version__.startswith("3.6."):
        pytest.skip("cuobjdump comes with Triton, and 3.6's, of CUDA 12.8, disassembles nothing for sm_121")
    functions = _functions(_tool("cuobjdump", "-sass", code=compiled.cubin, folder=tmp_path))
    assert {f"q4_gemm_{name}_{tile}" for tile in configurations()} | {f"q4_quantize_{name}"} == set(functions)
    for function, text in functions.items():
        found = set(re.findall(r"\b(?:[A-Z]?MMA|OMMA|QMMA|HMMA)\.[\w.]+", text))
        assert found == (set() if "quantize" in function else {SASS_PRODUCT[name]})
        assert not re.search(r"\b(?:STL|LDL)\b", text)


def test_nothing_spills_and_shared_memory_fits(native: tuple[str, Compiled], tmp_path: Path) -> None:
    """No stack, no local memory, registers for every thread of a block, and at most 101,376 bytes of shared memory."""
    name, compiled = native
    text = _tool("cuobjdump", "-res-usage", code=compiled.cubin, folder=tmp_path)
    usage = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert len(usage) == len(configurations()) + 1
    for function, registers, stack, local in usage:
        assert (int(stack), int(local)) == (0, 0)
        tile = configurations().get(function.rsplit("_", 1)[1])
        assert int(registers) * (256 if tile is None else tile.threads) <= 65536
    for tile in configurations().values():
        assert tile.shared_bytes(16 if name == "nvfp4" else 32) <= 101376


@pytest.mark.parametrize("arch", [100, 103])
@pytest.mark.parametrize("name", PTX_PRODUCT)
def test_the_quantiser_of_activations_compiles_elsewhere(name: str, arch: int, cache: Path) -> None:
    """On sm_100 and sm_103 NVRTC makes the quantiser alone; Triton makes the product."""
    compiled = compile_kernels(name, arch)
    assert re.findall(r"\.entry (\w+)\(", compiled.ptx) == [f"q4_quantize_{name}"]


def test_stored_code_is_read_back_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cache keeps is used again; a file that was cut or changed is compiled again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compile_kernels("nvfp4", 100)
    (file,) = (tmp_path / "q4core" / "nvfp4-native").iterdir()
    assert compile_kernels("nvfp4", 100).cubin == first.cubin
    whole = file.read_bytes()
    for damaged in (whole[:-8], whole[:1000] + b"x" + whole[1001:], b"", b"\0" * 40):
        file.write_bytes(damaged)
        assert compile_kernels("nvfp4", 100).cubin == first.cubin
        assert file.read_bytes() == whole


def test_compiling_for_an_unknown_architecture_is_a_typed_error(cache: Path) -> None:
    """NVRTC's refusal is a BackendError, and the architecture is known not to be served."""
    assert nvrtc_problem(121) is None
    assert "sm_61" in (nvrtc_problem(61) or "")
    with pytest.raises(BackendError):
        compile_kernels("nvfp4", 61)


def test_source_is_whole() -> None:
    """The text for NVRTC holds every header once and needs no other file on a GPU."""
    text = source()
    assert re.findall(r'#include "([\w.]+)"', text) == ["emulator.hpp"]  # behind #ifdef Q4_EMULATED
    assert text.count("struct Q4Gemm {") == text.count("struct Q4Quantize {") == 1


@pytest.mark.parametrize("arch", [100, 103])
@pytest.mark.parametrize("name", PTX_PRODUCT)
def test_dot_scaled_is_native_on_sm_100(name: str, arch: int) -> None:
    """There this Triton makes a native product of tl.dot_scaled, without spills."""
    assert scaled_dot.problem(arch, name) is None
    kind = 1 if name == "nvfp4" else 0
    compiled = scaled_dot.product(arch, name, kind, torch.bfloat16).program.compile()
    scale = {"nvfp4": "mxf4nvf4", "mxfp4": "mxf4"}[name]
    assert re.search(rf"tcgen05\.mma\.cta_group::\d\.kind::{scale}\.block_scale", compiled.ptx)
    assert compiled.usage().spill_bytes == 0


def test_dot_scaled_that_is_not_native_is_a_problem() -> None:
    """On sm_90 Triton's product is not native, or is none: the path is not offered."""
    assert scaled_dot.problem(90, "nvfp4")
    assert scaled_dot.problem(90, "mxfp4")


_NUMBERS = {"row_step": "i32", "blocks": "i32", "total": "i32", "seed": "i32", "programs": "i32"}
_POINTERS = {"codes_ptr": "*u8", "scales_ptr": "*u8", "parts_ptr": "*i32", "global_ptr": "*fp32", "bad_ptr": "*i32"}
_KERNELS: dict[str, tuple[Any, dict[str, int]]] = {
    "largest": (quantize_kernels.largest_bits, {"BLOCK": 16, "TILE": 256}),
    "nvfp4": (quantize_kernels.quantize_nvfp4, {"PARTS": 1024, "TILE": 256}),
    "mxfp4": (quantize_kernels.quantize_mxfp4, {"TILE": 128}),
}
_IN_FULL = frozenset({80, 90, 100, 103, 120, 121})
"""Architectures of which each quantiser is compiled; of the others, which are like sm_80, a few are."""
_OFTEN = frozenset({80, 120})
"""Of these, the ones for which each run compiles all; for the others it compiles one in five, in every kind."""


@attrs.frozen
class Quantiser:
    """One program of the quantiser of weights.

    Args:
        arch: Compute capability × 10.
        name: ``"nvfp4"``, ``"mxfp4"``, or ``"largest"``, which looks for the largest magnitude first.
        kind: The kernel's KIND, of ``KINDS``.
        stochastic: Whether it rounds by chance.
        swizzled: Whether it writes scales in tiles.
        x: dtype of the weight.
    """

    arch: int
    name: str
    kind: int = 0
    stochastic: bool = False
    swizzled: bool = False
    x: str = "bf16"

    def __str__(self) -> str:
        """Return an id for pytest."""
        words = [f"sm{self.arch}", self.name, str(self.kind), self.x]
        return "-".join([*words, *["chance"] * self.stochastic, *["swizzled"] * self.swizzled])

    def compile(self) -> Program:
        """Return what it becomes, launched as the quantiser launches it."""
        kernel, constants = _KERNELS[self.name]
        choices = {"KIND": self.kind, "STOCHASTIC": self.stochastic, "SWIZZLED": self.swizzled}
        constants = constants | {key: value for key, value in choices.items() if key in kernel.arg_names}
        types = {"x_ptr": f"*{self.x}", **_POINTERS, **_NUMBERS}
        signature = {key: value for key, value in types.items() if key in kernel.arg_names}
        aligned = tuple(key for key in ("x_ptr", "codes_ptr", "scales_ptr", "row_step") if key in kernel.arg_names)
        return compile_for(
            kernel, signature, constants, self.arch, aligned=aligned, num_warps=4, enable_fp_fusion=False
        )


def _quantisers() -> Iterator[Quantiser]:
    for turn, arch in enumerate(ARCHITECTURES):
        yield Quantiser(arch, "largest")
        formats = [(name, kind) for name, kinds in KINDS.items() for kind in kinds.values()]
        for place, ((name, kind), stochastic) in enumerate(itertools.product(formats, (False, True)), turn):
            x = ("bf16", "fp16", "fp32")[place % 3]
            if arch in _IN_FULL:
                yield from (Quantiser(arch, name, kind, stochastic, swizzled, x) for swizzled in (False, True))
            elif kind == max(KINDS[name].values()):
                yield Quantiser(arch, name, kind, stochastic, bool(place % 2), x)


QUANTISERS = [*_quantisers()]


def _marked() -> list[pytest.ParameterSet]:
    """Return the quantisers as parameters, with the mark ``soak`` those that each run leaves out."""
    rare = [item for item in QUANTISERS if item.arch in _IN_FULL - _OFTEN and item.name != "largest"]
    left_out = {item for number, item in enumerate(rare) if number % 5}
    return [
        pytest.param(item, id=str(item), marks=[pytest.mark.soak] if item in left_out else []) for item in QUANTISERS
    ]


@pytest.fixture(scope="module")
def compiling(request: pytest.FixtureRequest) -> Iterator[Compiling]:
    """What the quantisers of the selected tests become, compiled on every core."""
    with compiled_aside(selected(request, "quantiser")) as found:
        yield found


def test_each_quantiser_is_compiled() -> None:
    """Each format and kind of scales, order of scales and rounding is there for each architecture, each dtype of x too.

    Of sm_86 and sm_89, each format and rounding is.
    """
    kinds = {(name, kind) for name, kinds in KINDS.items() for kind in kinds.values()}
    choices = {(*one, chance, order) for one in kinds for chance in (False, True) for order in (False, True)}
    for arch in (80, 90, 100, 103, 120, 121):
        own = [item for item in QUANTISERS if item.arch == arch]
        assert {(item.name, item.kind, item.stochastic, item.swizzled) for item in own} == {
            *choices,
            ("largest", 0, False, False),
        }
        assert {item.x for item in own} == {"bf16", "fp16", "fp32"}
    for arch in (86, 89):
        found = {(item.name, item.stochastic) for item in QUANTISERS if item.arch == arch}
        assert found == {("largest", False), *((name, chance) for name in KINDS for chance in (False, True))}


@pytest.mark.parametrize("quantiser", _marked())
def test_quantiser_compiles_everywhere_and_rounds_once(quantiser: Quantiser, compiling: Compiling) -> None:
    """Loads are of 16 bytes, division is correctly rounded, nothing is fused or flushed to zero, and nothing spills."""
    became = compiling[quantiser]
    assert "ld.global.v4.b32" in became.ptx
    assert ".ftz" not in became.ptx
    assert not re.search(r"\bfma\.\w+\.f32|\bdiv\.(?:full|approx)", became.ptx)
    if quantiser.name != "largest":
        assert "div.rn.f32" in became.ptx
    assert became.usage.spill_bytes == 0
