"""What is missing is reported by its own reason and by its domain: hardware, build, scheme or policy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from q4_triton_kernels import ARCHITECTURES, Facts, Target, WeightOnlyBackend
from q4_triton_kernels import backend as backend_module
from q4_triton_kernels.configs import config_for
from q4_triton_kernels.target import driver_version
from q4core import PathKind, ReasonCode, Request, Tier, find_format

CUDA = torch.device("cuda", 0)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
GOOD: dict[str, Any] = {
    "torch_cuda": "13.0",
    "is_cuda_available": True,
    "driver": 13000,
    "triton": "3.7.1",
    "has_compiler": True,
    "capability": lambda index: (9, 0),
    "processors": lambda index: 132,
}


class Plain(WeightOnlyBackend):
    """A backend of two formats."""

    name = "plain"
    formats = frozenset({"nf4", "int4"})


def _request(**facts: Any) -> Request:
    kind = find_format("nf4")
    values: dict[str, Any] = {
        "format": kind,
        "scale_kind": next(iter(sorted(kind.scale_kinds, key=lambda item: item.value, reverse=True))),
        "packing": kind.packing,
        "block_size": 64,
        "out_features": 64,
        "in_features": 256,
        "device": CUDA,
        "dtype": torch.bfloat16,
    }
    return Request(**values | facts)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_architecture_of_the_list_is_served(arch: int) -> None:
    """A device on the list, with a driver, Triton and a compiler, gets all paths for every number of rows."""
    facts = Facts(**GOOD | {"capability": lambda index: divmod(arch, 10)})
    assert facts.target(CUDA) == Target(arch, 132)
    verdict = Plain(facts).check(_request())
    assert not verdict.reasons
    assert all(any(path.covers(rows) for path in verdict.paths) for rows in (1, 8, 9, 128, 5000))
    assert str(Target(arch)) in verdict.native_state


@pytest.mark.parametrize(
    ("facts", "code", "domain", "words"),
    [
        (
            {"torch_cuda": None, "is_cuda_available": False, "driver": None},
            ReasonCode.DEVICE,
            "hardware",
            "without CUDA",
        ),
        ({"is_cuda_available": False, "driver": None}, ReasonCode.DRIVER, "hardware", "no NVIDIA driver"),
        ({"is_cuda_available": False, "driver": 12020}, ReasonCode.DRIVER, "hardware", "CUDA 12.2 at most"),
        ({"is_cuda_available": False}, ReasonCode.DEVICE, "hardware", "no CUDA device"),
        ({"triton": None}, ReasonCode.TOOLCHAIN, "build", "not installed"),
        ({"triton": "3.4.0"}, ReasonCode.TOOLCHAIN, "build", "3.4.0 is too old"),
        ({"triton": "2"}, ReasonCode.TOOLCHAIN, "build", "too old"),
        ({"has_compiler": False}, ReasonCode.TOOLCHAIN, "build", "C compiler"),
        ({"capability": lambda index: (7, 5)}, ReasonCode.ARCH, "hardware", "sm_75"),
        ({"capability": lambda index: (11, 0)}, ReasonCode.ARCH, "hardware", "sm_110"),
        ({"is_interpreted": True}, ReasonCode.TOOLCHAIN, "build", "TRITON_INTERPRET"),
    ],
)
def test_what_is_missing_is_reported(facts: dict[str, Any], code: ReasonCode, domain: str, words: str) -> None:
    """The reason names what is missing, its code is the fitting one, and the backend refuses instead of raising."""
    verdict = Plain(Facts(**GOOD | facts)).check(_request())
    assert [reason.code for reason in verdict.reasons] == [code]
    assert code.domain == domain
    assert words in verdict.reasons[0].message


def test_all_reasons_are_reported() -> None:
    """Triton too old, no compiler, a GPU off the list and a block size that does not fit are four reasons at once."""
    facts = Facts(**GOOD | {"triton": "3.0.0", "has_compiler": False, "capability": lambda index: (7, 0)})
    verdict = Plain(facts).check(_request(block_size=24))
    codes = [reason.code for reason in verdict.reasons]
    assert codes == [ReasonCode.TOOLCHAIN, ReasonCode.TOOLCHAIN, ReasonCode.ARCH, ReasonCode.SHAPE]


@pytest.mark.parametrize(
    ("block", "k", "is_served"), [(16, 64, True), (96, 192, True), (24, 240, False), (40, 33, True)]
)
def test_block_sizes(block: int, k: int, is_served: bool) -> None:
    """Blocks of a multiple of 16, or of the whole row, are served; others are refused by their shape."""
    verdict = Plain(Facts(**GOOD)).check(_request(block_size=block, in_features=k))
    assert (not verdict.reasons) is is_served
    assert {reason.code for reason in verdict.reasons} <= {ReasonCode.SHAPE}


def test_the_interpreter_serves_the_cpu_and_says_so() -> None:
    """Under TRITON_INTERPRET=1 the CPU is the device, and every path is marked as interpreted."""
    backend = Plain(Facts(**GOOD | {"is_interpreted": True, "is_cuda_available": False, "driver": None}))
    assert backend.capabilities.devices == {"cpu"}
    verdict = backend.check(_request(device="cpu"))
    assert all(path.interpreted for path in verdict.paths)
    assert len(verdict.paths) == 3
    assert Plain(Facts(**GOOD)).capabilities.devices == {"cuda"}


@pytest.mark.parametrize("is_measured", [False, True])
def test_unmeasured_configurations_claim_less(is_measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no configuration was measured, no path claims to be tuned."""
    config = attrs.evolve(config_for(90), measured=is_measured, dequant_above={"blocks": 2048})
    monkeypatch.setattr(backend_module, "config_for", lambda _: config)
    paths = Plain(Facts(**GOOD)).check(_request()).paths
    assert not any(path.interpreted for path in paths)
    assert all((path.tier >= 30) is is_measured for path in paths)


def test_an_unmeasured_crossover_wins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense weights are preferred above an M that a record names, and without a record never."""
    monkeypatch.setattr("q4_triton_kernels.backend.config_for", lambda arch: config_for(120))
    (path,) = [path for path in Plain(Facts(**GOOD)).check(_request()).paths if path.kind is PathKind.DEQUANT]
    assert (path.m, path.tier) == ((9, None), Tier.DEQUANT_GEMM)
    measured = attrs.evolve(config_for(90), measured=True, dequant_above={"blocks": 2048})
    monkeypatch.setattr("q4_triton_kernels.backend.config_for", lambda arch: measured)
    paths = {path.kind: path for path in Plain(Facts(**GOOD)).check(_request()).paths}
    assert paths[PathKind.DEQUANT].m == (2049, None)
    assert paths[PathKind.DEQUANT].tier > paths[PathKind.KERNEL].tier == Tier.TUNED


def test_no_configuration_claims_what_it_has_not_measured() -> None:
    """A crossover is a stored result: a kernel was the fastest path at each M up to it, dense weights above it."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in RESULTS.glob("gpu-*.json")]
    families = {"nf4": "blocks", "nvfp4": "weights"}
    for arch in (*ARCHITECTURES, None):
        above = config_for(arch).dequant_above
        shown = dict.fromkeys(above, 0)
        for result in (result for result in results if result["device"]["architecture"] == f"sm_{arch}"):
            for one in (one for one in result["crossovers"] if families[one["format"]] in above):
                family = families[one["format"]]
                for rows, path in one["fastest_by_rows"].items():
                    assert path.startswith("dequant") is (int(rows) > above[family]), (arch, one["format"], rows)
                    shown[family] += 1
        assert all(shown.values()), (arch, shown)


@pytest.mark.parametrize(("answer", "version"), [("*version = 13020; return 0;", 13020), ("return 3;", None)])
def test_the_driver_itself_gives_its_version(answer: str, version: int | None, tmp_path: Path) -> None:
    """No name of torch's own is needed, which comes and goes with its releases."""
    (tmp_path / "driver.c").write_text(f"int cuDriverGetVersion(int *version) {{ {answer} }}\n", encoding="utf-8")
    library = tmp_path / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)  # noqa: S607
    assert driver_version(str(library)) == version
    assert driver_version("libm.so.6") is None
    assert driver_version(str(tmp_path / "missing.so")) is None
