"""Programs of ``torch.export`` in another process: the plan travels with the file, and is checked and proven there."""

from __future__ import annotations

import json
import os
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4core.ops import imports
from tests.support.fakes import FakeBackend, registry
from tests.support.interpreter import run_interpreter
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

N, K = 24, 128
EXPORT = """
import sys, torch, q4core as q4
torch.manual_seed(0)
reference = q4.SessionConfig(backend="dequant-fallback")
layers = [q4.Q4Linear(q4.quantize(torch.randn(64, 64), "q4_0"), torch.randn(64)),
          q4.Q4Linear(q4.quantize(torch.randn(32, 64), "nf4"), config=reference)]
model, x = torch.nn.Sequential(*layers), torch.randn(50, 64)
program = torch.export.export(model, (x[:3],), dynamic_shapes=({0: torch.export.Dim("rows")},))
torch.export.save(program, sys.argv[1] + "/program.pt2")
torch.save((x, model(x), model(x[:1])), sys.argv[1] + "/numbers.pt")
if "ahead" in sys.argv:
    torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1] + "/ahead.pt2")
"""
LOAD = """
import sys, torch, q4core as q4
x, many, one = torch.load(sys.argv[1] + "/numbers.pt")
if "ahead" in sys.argv:
    run = torch._inductor.aoti_load_package(sys.argv[1] + "/ahead.pt2")
else:
    program = torch.export.load(sys.argv[1] + "/program.pt2")
    run = program.run_decompositions().module()
try:
    print(torch.equal(run(x), many) and torch.equal(run(x[:1]), one))
except q4.Q4Error as error:
    print(type(error).__name__, error)
"""


def _run(program: str, *arguments: object, **environment: str) -> str:
    """Run a program in a process of its own, and return the last line that it prints."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("Q4_")}
    variables = {**kept, "Q4_CACHE": "off", **environment}
    words = ["-W", "ignore", "-c", program, *map(str, arguments)]
    done = run_interpreter(words, env=variables, timeout=scaled(500))
    assert done.returncode == 0, done.stderr[-3000:]
    return (done.stdout.splitlines() or [""])[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program that was exported on AVX2, and what its model computed."""
    if "cpu-native" not in q4.default_registry().backends():
        pytest.skip("cpu-native is not built here")
    path = tmp_path_factory.mktemp("exported")
    _run(EXPORT, path, Q4_CPU_ISA="avx2")
    return path


def test_a_program_gives_the_same_bits_in_another_process(folder: Path) -> None:
    """Exported and saved here, loaded and decomposed there, by two backends, for few rows and for many."""
    assert _run(LOAD, folder, Q4_CPU_ISA="avx2") == "True"


def test_another_instruction_set_is_reported(folder: Path) -> None:
    """Kernels that the program was not exported with don't take their place in silence."""
    native = pytest.importorskip("q4_cpu_native")
    other = next((name for name in ("avx512", "avxvnni") if native.CpuNative(name).isa == name), None)
    if other is None:
        pytest.skip("this machine has AVX2 alone")
    told = _run(LOAD, folder, Q4_CPU_ISA=other)
    assert told.startswith("BackendUnavailableError this exported program runs on")
    assert f"_{other}" in told
    assert "Q4_CPU_ISA" in told


def test_a_missing_plugin_is_reported(folder: Path) -> None:
    """Which backend the program needs, and which there are."""
    told = _run(LOAD, folder, Q4_DISABLE_PLUGINS="cpu-native")
    assert told.startswith("UnknownBackendError exported program: backend must be one of")
    assert told.endswith("got 'cpu-native'. Install the plugin that brings it; see `q4 doctor`.")


@pytest.mark.soak
def test_a_program_compiled_ahead_gives_the_same_bits_in_another_process(tmp_path: Path) -> None:
    """``torch._inductor.aoti_compile_and_package`` keeps the plan, too."""
    _run(EXPORT, tmp_path, "ahead")
    assert _run(LOAD, tmp_path, "ahead") == "True"


class Describing(FakeBackend):
    """A right backend that describes its layout."""

    def describe(self, meta: q4.WeightSpec) -> Any:
        """Return the spec."""
        return json.loads(meta.to_json())

    def meta_from(self, facts: Any) -> q4.WeightSpec:
        """Return the spec again."""
        return q4.WeightSpec.from_json(json.dumps(facts))


class Later(Describing):
    """A later version of it, of other code."""


Call = tuple[Any, ...]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Call]:
    """Return the call that an exported program makes, in a process with other backends that knows no plan."""

    def move(*backends: Any, key: Callable[[str], str] = str) -> Call:
        layer = q4.Session(registry=registry(Describing())).linear(q4.quantize(torch.randn(N, K), "nf4"))
        plans: dict[str, Any] = {}
        for module in ("q4core.selection.plan", "q4core.ops.registration"):
            monkeypatch.setattr(f"{module}.PLANS", plans)
        there = registry(*backends)
        monkeypatch.setattr(imports, "default_registry", lambda: there)
        x = torch.randn(5, K)  # no number of rows that is probed
        assert torch.equal(layer(x), layer(x))
        return x, [buffer.clone() for buffer in layer._own_buffers()], None, key(layer._plan_key), layer(x)

    return move


def test_a_plan_is_imported_once_and_proven(elsewhere: Callable[..., Call]) -> None:
    """The backend of the other process runs its self-probe, then the program; of one kind only the first time."""
    backend = Describing()
    *call, y = elsewhere(backend)
    for _ in range(2):
        assert torch.equal(torch.ops.q4core.linear(*call), y)
    probed = [rows for _, rows in backend.calls]
    assert probed[-2:] == [5, 5]
    assert 17 in probed[:-2]
    assert probed.count(17) == 1


def test_a_number_of_another_registry_means_nothing_elsewhere(elsewhere: Callable[..., Call]) -> None:
    """A process with two registries distinguishes their backends by a number, which is no part of the plan."""
    *call, y = elsewhere(Describing(), key=lambda key: key.replace(" {", "#2 {", 1))
    assert torch.equal(torch.ops.q4core.linear(*call), y)


def test_shapes_are_known_before_the_plan_is(elsewhere: Callable[..., Call]) -> None:
    """Fake tensors, by which programs are decomposed and compiled, need neither the backend nor the buffers' bytes."""
    *call, y = elsewhere()
    call[0], call[1] = call[0].to("meta"), [buffer.to("meta") for buffer in call[1]]
    assert torch.ops.q4core.linear(*call).shape == y.shape


def _elsewhere_refused(call: Call, kind: type[q4.Q4Error], pattern: str) -> None:
    for _ in range(2):  # what is refused is not remembered as made
        with pytest.raises(kind, match=pattern):
            torch.ops.q4core.linear(*call[:-1])


@pytest.mark.parametrize(
    ("backends", "kind", "pattern"),
    [
        ((), q4.UnknownBackendError, "got 'fake'"),
        ((FakeBackend(),), q4.BackendError, "meta_from of backend 'fake' raised"),
        ((Later(),), q4.BackendUnavailableError, "another version of backend 'fake': code differs"),
        ((Describing(paths=(q4.KernelPath("new", (1, None), q4.PathKind.KERNEL, q4.Precision.W4A32, 20),)),),
         q4.BackendUnavailableError, r"runs on fake_gemm \(M 1…∞\) of backend 'fake', which offers new"),
        ((Describing(reasons=(q4.Reason(q4.ReasonCode.ARCH, "no such unit"),)),), q4.BackendUnavailableError,
         "no such unit"),
    ],
    ids=["no plugin", "describes nothing", "other code", "other paths", "refuses"],
)  # fmt: skip
def test_a_backend_that_is_another_one_is_refused(
    elsewhere: Callable[..., Call], backends: tuple[Any, ...], kind: type[q4.Q4Error], pattern: str
) -> None:
    """What can't be had as it was exported ends in an error that says what differs."""
    _elsewhere_refused(elsewhere(*backends), kind, pattern)


@pytest.mark.filterwarnings("ignore::q4core.Q4ProbeWarning")
def test_wrong_numbers_are_found_before_the_program_runs(elsewhere: Callable[..., Call]) -> None:
    """The self-probe holds for exported programs, each time that they are called."""
    call = elsewhere(Describing(damage=lambda y: y + 1))
    with pytest.raises(q4.BackendError, match="wrong numbers"):
        torch.ops.q4core.linear(*call[:-1])
    _elsewhere_refused(call, q4.BackendUnavailableError, "probe_failed")


def _cut(key: str) -> str:
    return key[: len(key) // 2]


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        lambda key: key.replace('"out_features":24', '"out_features":25'),
        lambda key: key.replace('"in_features":128', '"in_features":1e400'),
        lambda key: key.replace('"format":"nf4"', '"format":"fp4"'),
        lambda key: key.replace('"m":[1,null]', '"m":[2,null]'),
        lambda key: key.replace('"m":[1,null]', '"m":7'),
        lambda key: key.replace('"dtypes":["uint8"', '"dtypes":["int64"'),
        lambda key: key.replace('"dtypes":["uint8"', '"dtypes":["nothing"'),
        lambda key: key.replace('"precision":"auto"', '"precision":"best"'),
        lambda key: key.replace('"compute_path":"auto"', '"compute_path":null'),
        lambda key: key.replace('"paths":[[1,null,"fake_gemm"]]', '"paths":[[1]]'),
        lambda key: key.replace('"gradient_paths":[],', ""),
        lambda key: key.replace('"backend":"fake"', '"backend":["fake"]'),
        lambda key: key.replace('"dtype":"float32","dtypes"', '"dtype":"load","dtypes"'),
        lambda key: key.replace("/", "/0", 1),
        lambda key: key.partition("{")[0] + "{}",
        lambda key: key.partition("{")[0] + '{"a":' + "[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_plan_is_a_typed_error(elsewhere: Callable[..., Call], damage: Callable[[str], str]) -> None:
    """Whatever is written where the plan was, no backend runs on it."""
    backend = Describing()
    call = elsewhere(backend, key=damage)
    _elsewhere_refused(call, q4.Q4Error, ".")
    assert [rows for _, rows in backend.calls if rows == len(call[0])] == []


def test_a_backend_without_a_description_stays_in_its_process() -> None:
    """Its plan's name is short, and another process says that it has no such layer."""
    layer = q4.Session(registry=registry(FakeBackend())).linear(q4.quantize(torch.randn(N, K), "nf4"))
    assert "{" not in layer._plan_key


def test_a_description_that_is_no_json_is_the_backends_fault() -> None:
    """It is found when the layer is made, not when a program is loaded elsewhere."""
    backend = Describing()
    backend.describe = types.MethodType(lambda _, meta: {"spec": meta}, backend)  # type: ignore[method-assign]
    with pytest.raises(q4.BackendError, match="describe of backend 'fake' raised TypeError"):
        q4.Session(registry=registry(backend)).linear(q4.quantize(torch.randn(N, K), "nf4"))


def test_tiles_of_another_size_are_refused_before_they_are_read() -> None:
    """A description that states more than the buffers hold can't make cpu-native read beyond them."""
    backend: Any = q4.default_registry().backends().get("cpu-native")
    if backend is None:
        pytest.skip("cpu-native is not built here")
    weight = q4.quantize(torch.randn(N, K), "nf4")
    prepared = backend.prepare(weight, q4.Request.for_weight(weight), q4.PrepareContext("cpu"))
    with pytest.raises(q4.ConfigError, match="tiles must be"):
        backend.export(q4.Prepared((prepared.tensors[0][:-64],), prepared.meta))
