"""What runs the FP4 paths, and every reason why nothing does: facts are faked, the answers are the code's own."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
from nvfp4_emulation import BLACKWELL, emulated_backend, emulated_library, emulated_tools

from q4_conformance.subjects.backend import make_registry
from q4_nvfp4_native import Nvfp4Native
from q4_nvfp4_native.compiler import Compiled
from q4_nvfp4_native.configurations import _data
from q4_nvfp4_native.driver import Driver
from q4_triton_kernels.program import Program
from q4core import (
    ActivationPrecision,
    BackendError,
    BackendUnavailableError,
    ComputePath,
    Precision,
    PrepareContext,
    PrepareError,
    ReasonCode,
    Request,
    Segment,
    Session,
    SessionConfig,
    Tier,
    dequantize,
    quantize,
)

if TYPE_CHECKING:
    from q4_nvfp4_native.driver import Kernel
    from q4_triton_kernels import Facts
    from q4core import PackedWeight

CUDA = torch.device("cuda", 0)


def _weight(format_: str = "nvfp4", rows: int = 24, columns: int = 160) -> PackedWeight:
    return quantize(torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)), format_)


def _request(format_: str = "nvfp4", device: torch.device = CUDA, **facts: Any) -> Request:
    asked: dict[str, Any] = {"precision": ActivationPrecision.FP4, **facts}
    return Request.for_weight(_weight(format_), device=device, **asked)


def _config(path: ComputePath = ComputePath.KERNEL_ONLY) -> SessionConfig:
    return SessionConfig(device="cpu", activation_precision=ActivationPrecision.FP4, compute_path=path)


def _facts(arch: int = 121, **changes: Any) -> Facts:
    return attrs.evolve(BLACKWELL, capability=lambda _: divmod(arch, 10), **changes)


@pytest.mark.parametrize(
    ("facts", "code", "domain"),
    [
        (_facts(torch_cuda=None, driver=None, is_cuda_available=False), ReasonCode.DEVICE, "hardware"),
        (_facts(driver=None, is_cuda_available=False), ReasonCode.DRIVER, "hardware"),
        (_facts(driver=12080), ReasonCode.DRIVER, "hardware"),
        (_facts(is_cuda_available=False), ReasonCode.DEVICE, "hardware"),
        (_facts(90), ReasonCode.ARCH, "hardware"),
        (_facts(75), ReasonCode.ARCH, "hardware"),
        (_facts(110), ReasonCode.ARCH, "hardware"),
    ],
    ids=["no-cuda", "no-driver", "old-driver", "no-device", "sm_90", "sm_75", "sm_110"],
)
def test_hardware_that_does_not_fit_is_the_reason(facts: Facts, code: ReasonCode, domain: str) -> None:
    """Each fact of the machine that forbids FP4 tensor cores has its own code, of the domain hardware."""
    verdict = Nvfp4Native(facts, emulated_tools()).check(_request())
    assert [reason.code for reason in verdict.reasons] == [code]
    assert code.domain == domain


def test_triton_is_not_needed_for_our_kernels() -> None:
    """Without Triton, or with an old one, NVRTC's kernels are offered nevertheless."""
    for triton in (None, "2.1.0"):
        verdict = Nvfp4Native(_facts(triton=triton, has_compiler=False), emulated_tools()).check(_request())
        assert [path.name for path in verdict.paths] == ["native-fp4-m16", "native-fp4-m64", "native-fp4-m128"]


@pytest.mark.parametrize("arch", [120, 121])
def test_paths_cover_every_row_count_once(arch: int) -> None:
    """The tilings' ranges of M follow one another without gap or overlap, and are w4a4 kernels."""
    paths = Nvfp4Native(_facts(arch), emulated_tools()).check(_request()).paths
    assert {path.precision for path in paths} == {Precision.W4A4}
    low = 1
    for path in paths:
        assert path.m[0] == low
        low = 0 if path.m[1] is None else path.m[1] + 1
    assert low == 0


@pytest.mark.parametrize(("arch", "tool"), [(121, "nvrtc_problem"), (100, "nvrtc_problem"), (100, "dot_problem")])
def test_tools_that_are_missing_are_the_reason(arch: int, tool: str) -> None:
    """No NVRTC, or a Triton that makes no native product, is a `toolchain` reason with the tool's own words."""
    changes: dict[str, Any] = {tool: lambda *_: "the tool's words"}
    backend = Nvfp4Native(_facts(arch), attrs.evolve(emulated_tools(), **changes))
    reasons = backend.check(_request()).reasons
    assert [(reason.code, reason.message) for reason in reasons] == [(ReasonCode.TOOLCHAIN, "the tool's words")]


def _measure(monkeypatch: pytest.MonkeyPatch, *architectures: int) -> None:
    """Let a record say of these architectures alone that their tilings were measured."""
    data = {**_data(), "measured": {f"sm_{arch}": arch in architectures for arch in (120, 121)}}
    monkeypatch.setattr("q4_nvfp4_native.configurations._data", lambda: data)


@pytest.mark.parametrize("arch", [120, 121])
def test_what_was_measured_of_one_architecture_is_claimed_of_no_other(
    arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of sm_120 says nothing about sm_121, and the other way round; there is none of either yet."""
    before = Nvfp4Native(_facts(arch), emulated_tools()).check(_request()).paths
    assert {path.tier for path in before} == {Tier.GENERIC}
    _measure(monkeypatch, 120)
    wanted = Tier.TUNED if arch == 120 else Tier.GENERIC
    paths = Nvfp4Native(_facts(arch), emulated_tools()).check(_request()).paths
    assert {path.tier for path in paths} == {wanted}


def test_nobody_else_s_code_is_measured_by_our_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of our kernels gives an external library and ``dot_scaled`` no tier; the library is still used first."""
    _measure(monkeypatch, 120, 121)
    paths = emulated_backend(emulated_library()).check(_request(device=torch.device("cpu"))).paths
    told = {path.name.removeprefix("native-fp4-"): path.tier for path in paths}
    own = dict.fromkeys(("m16", "m64", "m128"), Tier.GENERIC)
    assert told == {"external-fp4": Tier.GENERIC, **own}
    layer = Session(_config(), registry=make_registry(emulated_backend(emulated_library()))).linear(_weight())
    assert [segment.path.name for segment in layer.diagnostics().segments] == ["external-fp4"]
    dot = Nvfp4Native(_facts(100), attrs.evolve(emulated_tools(), dot_problem=lambda *_: None)).check(_request())
    assert {path.tier for path in dot.paths} == {Tier.GENERIC}


def test_unusable_paths_are_in_the_state_with_the_usable_ones() -> None:
    """With a complete library and no NVRTC, and the other way round, the state says what the other engine lacks."""
    library = emulated_library()
    verdict = emulated_backend(library, driver=False).check(_request(device=torch.device("cpu")))
    assert [path.name for path in verdict.paths] == ["external-fp4"]
    assert "toolchain: no NVRTC in this test" in verdict.native_state
    verdict = Nvfp4Native(_facts(), emulated_tools(Path("/nowhere/a.so"), Path("/nowhere/b.so"))).check(_request())
    assert {path.name for path in verdict.paths}.isdisjoint({"external-fp4"})
    assert verdict.native_state.count("library: ") == 2


@pytest.mark.parametrize("precision", [ActivationPrecision.AUTO, ActivationPrecision.EXACT])
def test_the_weight_only_paths_say_why_there_are_no_fp4_ones(precision: ActivationPrecision) -> None:
    """Also without a request for FP4 the state says why a device without such cores, or without NVRTC, has no path."""
    state = Nvfp4Native(_facts(90), emulated_tools()).check(_request(precision=precision)).native_state
    assert "no FP4 paths: arch: the device is sm_90" in state
    without = Nvfp4Native(_facts(), emulated_tools(driver=False)).check(_request(precision=precision))
    assert "no FP4 paths: toolchain: " in without.native_state
    complete = Nvfp4Native(_facts(), emulated_tools()).check(_request(precision=precision))
    assert "no FP4 paths" not in complete.native_state


def test_dot_scaled_serves_where_it_is_native() -> None:
    """On sm_100 and sm_103 the path by Triton is offered where its text is native."""
    for arch in (100, 103):
        tools = attrs.evolve(emulated_tools(), dot_problem=lambda *_: None)
        verdict = Nvfp4Native(_facts(arch), tools).check(_request("mxfp4"))
        assert [path.name for path in verdict.paths] == ["native-fp4-dot"]


def test_scales_and_machine_are_reported_together() -> None:
    """All reasons are given at once: float scales and a GPU without FP4."""
    request = Request.for_weight(_weight().with_plain_scale(), device=CUDA, precision=ActivationPrecision.FP4)
    reasons = Nvfp4Native(_facts(90), emulated_tools()).check(request).reasons
    assert [reason.code for reason in reasons] == [ReasonCode.FORMAT, ReasonCode.ARCH]


def test_float_scales_are_refused_for_fp4_alone() -> None:
    """The manifest takes float scales for the weight-only kernels, and none for FP4 tensor cores."""
    manifest = Nvfp4Native(_facts(), emulated_tools()).capabilities
    request = Request.for_weight(_weight().with_plain_scale(), device=CUDA)
    assert manifest.refusals(request) == ()
    fp4 = attrs.evolve(request, precision=ActivationPrecision.FP4)
    assert [reason.code for reason in manifest.refusals(fp4)] == [ReasonCode.FORMAT]


@pytest.mark.parametrize(
    ("compile_", "code"),
    [(lambda *_: Compiled("sm_121a", "", b"not a cubin"), ReasonCode.DRIVER), (None, ReasonCode.TOOLCHAIN)],
    ids=["cubin-that-does-not-load", "source-that-does-not-compile"],
)
def test_code_that_does_not_load_is_refused_and_remembered(compile_: object, code: ReasonCode) -> None:
    """The layer is refused, as the policy says; from then on the backend gives the reason before it is tried again."""

    def refuse(*_: object) -> Compiled:
        raise BackendError("the compiler's words")

    backend = emulated_backend(compile=compile_ or refuse)
    with pytest.raises(BackendUnavailableError):
        Session(_config(), registry=make_registry(backend)).linear(_weight())
    verdict = backend.check(_request(device=torch.device("cpu")))
    assert [reason.code for reason in verdict.reasons] == [code]
    assert code.domain in {"build", "hardware"}
    layer = Session(_config(ComputePath.KERNEL_OR_FALLBACK), registry=make_registry(backend))
    with pytest.warns(UserWarning, match="nvfp4"):
        assert layer.linear(_weight()).diagnostics().backend == "dequant-fallback"


class _Image:
    """What Triton compiled, for a driver that refuses it."""

    class handle:  # noqa: N801  # an attribute's name
        """Triton's own."""

        @staticmethod
        def _init_handles() -> None:
            raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")


def _refused(*_: object, **__: object) -> Any:
    raise ValueError("unsupported instruction")


@pytest.mark.parametrize(
    ("compiler", "code"),
    [(lambda *_, **__: _Image(), ReasonCode.DRIVER), (_refused, ReasonCode.TOOLCHAIN)],
    ids=["image-that-does-not-load", "source-that-does-not-compile"],
)
def test_a_product_by_triton_fails_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, compiler: object, code: ReasonCode
) -> None:
    """An image of ``dot_scaled`` that the driver rejects is a matter of the driver, one that Triton refuses its own."""
    monkeypatch.setattr("q4_triton_kernels.program.compile_for", compiler)
    monkeypatch.setattr(Program, "_current_device", lambda _: contextlib.nullcontext(0))
    tools = attrs.evolve(emulated_tools(), dot_problem=lambda *_: None)
    backend = Nvfp4Native(_facts(100), tools, devices=("cpu",))
    request = _request(device=torch.device("cpu"))
    with pytest.raises(PrepareError) as caught:
        backend.prepare(_weight(), request, PrepareContext("cpu"))
    assert [reason.code for reason in caught.value.reasons] == [code]
    assert [reason.code for reason in backend.check(request).reasons] == [code]


def _no_triton(*_: object) -> Any:
    raise ModuleNotFoundError("No module named 'triton'")


@pytest.mark.parametrize("has_nvrtc", [True, False])
def test_a_library_on_sm_100_needs_no_triton(has_nvrtc: bool) -> None:
    """Where a complete library is all that is offered, it serves, and nothing of Triton or NVRTC is asked for."""
    tools = attrs.evolve(
        emulated_tools(emulated_library(), driver=has_nvrtc),
        dot_problem=lambda *_: "no Triton",
        product=_no_triton,
        driver=_no_triton,
    )
    backend = Nvfp4Native(_facts(100, triton=None, has_compiler=False), tools, devices=("cpu",))
    layer = Session(_config(), registry=make_registry(backend)).linear(_weight())
    layer(torch.randn(3, 160))
    assert [segment.path.name for segment in layer.diagnostics().segments] == ["external-fp4"]


class _NotingDriver(Driver):
    """The emulated driver, which notes the kernels that it is asked for."""

    def __init__(self) -> None:
        super().__init__(ctypes.CDLL(str(emulated_library())))
        self.asked: list[str] = []

    def kernel(self, module: Any, name: str, *, threads: int, shared_bytes: int) -> Kernel:
        """Return a kernel."""
        self.asked.append(name)
        return super().kernel(module, name, threads=threads, shared_bytes=shared_bytes)


def test_prepare_loads_what_its_paths_launch() -> None:
    """An external library's path loads nothing of ours, a tile's its own two kernels, and nothing is loaded twice."""
    driver = _NotingDriver()
    tools = attrs.evolve(emulated_tools(emulated_library()), driver=lambda: driver)
    backend = Nvfp4Native(BLACKWELL, tools, devices=("cpu",))
    request = _request(device=torch.device("cpu"))
    paths = {path.name: path for path in backend.check(request).paths}

    def loaded(*names: str) -> list[str]:
        del driver.asked[:]
        segments = tuple(Segment(1, 1, paths[name]) for name in names)
        backend.prepare(_weight(), request, PrepareContext("cpu", paths=segments))
        return sorted(driver.asked)

    assert loaded("external-fp4") == []
    assert loaded("external-fp4", "native-fp4-m16") == ["q4_gemm_nvfp4_m16", "q4_quantize_nvfp4"]
    assert loaded("native-fp4-m16", "native-fp4-m64") == ["q4_gemm_nvfp4_m64"]
    assert loaded("native-fp4-m64") == []


def test_fp4_is_given_to_nobody_who_did_not_ask() -> None:
    """Under the default precision on a GPU no w4a4 path serves."""
    backend = emulated_backend()
    for precision in (ActivationPrecision.AUTO, ActivationPrecision.EXACT, ActivationPrecision.INT8):
        verdict = backend.check(_request(precision=precision))
        assert not [path for path in verdict.paths if path.precision is Precision.W4A4]


def test_kernels_are_compiled_once() -> None:
    """Layers and formats share what is loaded: one compilation for each format."""
    compiled = []

    def compile_(format_name: str, arch: int) -> Compiled:
        compiled.append((format_name, arch))
        return Compiled("sm_121a", "", b"emulated")

    session = Session(_config(), registry=make_registry(emulated_backend(compile=compile_)))
    for format_ in ("nvfp4", "mxfp4", "nvfp4"):
        session.linear(_weight(format_))
    assert sorted(compiled) == [("mxfp4", 121), ("nvfp4", 121)]


def test_a_thread_without_context_enters_that_of_the_device() -> None:
    """A launch from a thread that has used no CUDA yet gives the same bits."""
    layer = Session(_config(), registry=make_registry(emulated_backend())).linear(_weight())
    x = torch.randn(3, 160)
    wanted, got = layer(x), []
    ctypes.CDLL(str(emulated_library())).emulator_lose_context()
    thread = threading.Thread(target=lambda: got.append(layer(x)))
    thread.start()
    thread.join()
    assert torch.equal(got[0], wanted)


def test_forward_neither_compiles_nor_loads() -> None:
    """Everything slow has happened when a layer is made."""
    allowed = [True]

    def compile_(*_: object) -> Compiled:
        assert allowed[0]
        return Compiled("sm_121a", "", b"emulated")

    layer = Session(_config(), registry=make_registry(emulated_backend(compile=compile_))).linear(_weight())
    allowed[0] = False
    for rows in (1, 17, 130):
        layer(torch.randn(rows, 160))


def test_each_tiling_serves_its_rows() -> None:
    """The record names the tiling that ran for each number of rows."""
    layer = Session(_config(), registry=make_registry(emulated_backend())).linear(_weight())
    for rows in (1, 16, 17, 127, 128, 129):
        layer(torch.randn(rows, 160))
    diagnostics = layer.diagnostics()
    ran = dict(zip([segment.path.name for segment in diagnostics.segments], diagnostics.calls, strict=True))
    assert ran == {"native-fp4-m16": 2, "native-fp4-m64": 3, "native-fp4-m128": 1}


def test_input_gradients_of_the_fp4_layout_are_the_cores() -> None:
    """The FP4 layout refuses input gradients as a matter of scheme, and the core's are exact."""
    layer = Session(attrs.evolve(_config(), gradients=True), registry=make_registry(emulated_backend())).linear(
        _weight()
    )
    record = layer.diagnostics()
    assert (record.backend, record.gradients) == ("nvfp4-native", ())
    assert [reason.code for reason in record.gradients_refused] == [ReasonCode.FEATURE]
    x = torch.randn(3, 160, requires_grad=True)
    layer(x).backward(torch.ones(3, layer.out_features))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, dequantize(_weight()).sum(0).expand(3, 160))


@pytest.mark.parametrize("scale_kind", ["plain"])
def test_quantiser_says_what_it_does_not_write(scale_kind: str) -> None:
    """A scale kind that the quantiser does not write, and a K that cuts a block, are refused together."""
    request = attrs.evolve(
        Request.for_weight(_weight().with_plain_scale(), device=CUDA), op="quantize", in_features=161
    )
    reasons = Nvfp4Native(_facts(), emulated_tools()).check(request).reasons
    assert [reason.code for reason in reasons] == [ReasonCode.FORMAT, ReasonCode.SHAPE]


@pytest.mark.parametrize(("rows", "codes"), [(1 << 19, []), ((1 << 19) + 1, [ReasonCode.SHAPE])])
def test_quantiser_refuses_what_is_too_large_before_it_is_asked(rows: int, codes: list[ReasonCode]) -> None:
    """More than 2^33 elements are a shape error, reported by ``check``, so that the reference runs; 2^33 are not."""
    large = attrs.evolve(
        _request(precision=ActivationPrecision.AUTO), op="quantize", out_features=rows, in_features=1 << 14
    )
    assert [reason.code for reason in Nvfp4Native(_facts(), emulated_tools()).check(large).reasons] == codes


def test_quantiser_is_offered_on_every_listed_architecture() -> None:
    """The native quantiser needs no FP4 tensor cores; no Triton is its reason."""
    request = attrs.evolve(_request(precision=ActivationPrecision.AUTO), op="quantize")
    for arch in (80, 86, 89, 90, 100, 103, 120, 121):
        assert [path.name for path in Nvfp4Native(_facts(arch), emulated_tools()).check(request).paths] == ["quantize"]
    reasons = Nvfp4Native(_facts(triton=None), emulated_tools()).check(request).reasons
    assert [reason.code for reason in reasons] == [ReasonCode.TOOLCHAIN]


def test_it_loads_without_triton_and_cupy() -> None:
    """The plugin stays loaded where neither is installed, and says so when it is asked."""
    code = """
import sys
sys.modules["triton"] = sys.modules["cupy"] = None
import attrs, torch
import q4_nvfp4_native as plugin
from q4_triton_kernels import Facts
from q4core import ActivationPrecision, Request, quantize

facts = Facts(
    torch_cuda="13.0", is_cuda_available=True, driver=13000, triton=None,
    capability=lambda _: (12, 1), processors=lambda _: 48,
)
backend = plugin.Nvfp4Native(facts)
request = Request.for_weight(quantize(torch.randn(8, 64), "nvfp4"), device="cuda:0")
fp4 = attrs.evolve(request, precision=ActivationPrecision.FP4)
for asked in (request, fp4, attrs.evolve(request, op="quantize")):
    print(sorted({reason.code.value for reason in backend.check(asked).reasons}))
print(backend.check(fp4).reasons[0].message)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["['toolchain']"] * 3
    assert "CuPy" in lines[3]
