"""The functions of a libNVFP4 for managed memory: called where one is configured, and CuPy's otherwise."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_driver import CONCURRENT, CUDA, GIB, LEGACY, Pretended, Runtime, TorchSide

import q4core as q4
from q4_um_managed import ManagedProvider
from q4_um_managed.driver import Driver
from q4_um_managed.errors import DriverFaultError
from q4_um_managed.managed_exports import VARIABLE, ManagedExports, find_exports
from q4_um_managed.probe_driver import Prospect, find_driver

HEADERS = Path(__file__).parents[2] / "nvfp4-native" / "src" / "q4_nvfp4_native" / "cuda"
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
COPIES, PREFETCHES, QUESTIONS = range(3)
CUDA_1 = torch.device("cuda", 1)


@pytest.fixture
def build(tmp_path: Path) -> Any:
    """Return a function that compiles the stub with some faults, into a library of its own."""

    def compiled(*faults: str) -> str:
        target = tmp_path / f"libNVFP4-{'-'.join(faults) or 'right'}.so"
        compiler = os.environ.get("CC") or shutil.which("gcc") or "cc"
        source = Path(__file__).with_name("native") / "stub_nvfp4.c"
        command = [
            compiler,
            *FLAGS,
            *(f"-D{fault}" for fault in faults),
            f"-I{HEADERS}",
            str(source),
            "-o",
            str(target),
        ]
        subprocess.run(command, check=True)
        return str(target)

    return compiled


class _Runtime(Runtime):
    """CuPy's runtime, which shares its managed memory with the stub, as both would share the driver's."""

    def __init__(self, stub: ctypes.CDLL, *attributes: dict[str, int]) -> None:
        super().__init__(*attributes)
        self.stub = stub
        stub.stub_note.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        stub.stub_forget.argtypes = stub.stub_free.argtypes = [ctypes.c_void_p]
        stub.stub_last.restype = ctypes.c_int64

    def mallocManaged(self, size: int) -> int:  # noqa: N802  # CuPy's
        """Allocate, and let the stub know it."""
        address = super().mallocManaged(size)
        self.stub.stub_note(address, size)
        return address

    def free(self, ptr: int) -> None:
        """Give back what either allocated."""
        if ptr in self.areas:
            super().free(ptr)
            self.stub.stub_forget(ptr)
            return
        self._called("free", ptr)
        self.stub.stub_free(ptr)


def _pretend(path: str, *attributes: dict[str, int]) -> Pretended:
    """Return a provider over a pretended runtime and a stub."""
    stub = ctypes.CDLL(path)
    case = Pretended(_Runtime(stub, *(attributes or (CONCURRENT,))), lambda: (64 * GIB, 128 * GIB, "MemAvailable"))
    exports, state = find_exports([path])
    case.driver = Driver(case.runtime, case.torch, exports=exports, state=state)
    return case


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def test_a_copy_is_made_by_the_library(build: Any) -> None:
    """A new block is allocated and written by NVFP4_to_managed: by no call of the runtime, and once."""
    case = _pretend(build())
    stub = case.runtime.stub  # type: ignore[attr-defined]  # of this test's runtime
    source = torch.arange(1000, dtype=torch.int16)
    managed = case.provider.to_managed(source, device=CUDA, read_mostly=False, prefetch=False)
    assert _bytes_of(managed) == _bytes_of(source)
    assert managed.data_ptr() != source.data_ptr()
    assert stub.stub_calls(COPIES) == 1
    assert case.runtime.count("mallocManaged") == case.runtime.count("memPrefetchAsync") == 0
    assert case.provider.is_managed(managed)
    assert case.runtime.count("pointerGetAttributes") == 0
    assert not case.provider.is_managed(source), "by both"
    assert (stub.stub_calls(QUESTIONS), case.runtime.count("pointerGetAttributes")) == (2, 1)
    assert case.provider.stats().in_use_bytes == managed.nbytes


def test_a_block_of_the_library_goes_round_and_back(build: Any) -> None:
    """It is handed out again for its very size, filled again, and cudaFree takes it."""
    case = _pretend(build())
    first = case.provider.to_managed(torch.zeros(1000), device=CUDA, read_mostly=False, prefetch=False)
    address = first.data_ptr()
    del first
    case.runtime.run()
    again = case.provider.to_managed(torch.ones(1000), device=CUDA, read_mostly=False, prefetch=False)
    assert again.data_ptr() == address
    assert _bytes_of(again) == _bytes_of(torch.ones(1000))
    assert case.provider.stats().reuses == 1
    del again
    case.runtime.run()
    assert case.provider.trim() == 4000
    assert case.runtime.count("free") == 1
    assert case.provider.stats().in_use_bytes == case.provider.stats().cached_bytes == 0


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.complex(torch.ones(3), torch.ones(3)).conj(),
        torch.empty(0),
    ],
    ids=["transposed", "conjugated", "empty"],
)
def test_what_is_not_plain_bytes_is_copied_by_torch(build: Any, source: torch.Tensor) -> None:
    """The library copies bytes as they lie; torch brings other tensors into order."""
    case = _pretend(build())
    managed = case.provider.to_managed(source, device=CUDA, read_mostly=False, prefetch=False)
    assert managed.as_subclass(torch.Tensor).tolist() == source.tolist()
    assert case.runtime.stub.stub_calls(COPIES) == 0  # type: ignore[attr-defined]  # as above
    assert case.runtime.count("mallocManaged") == 1


def test_a_part_of_a_tensor_is_copied_from_its_first_element(build: Any) -> None:
    """What is contiguous inside a larger storage starts where it starts."""
    case = _pretend(build())
    source = torch.arange(100, dtype=torch.uint8)[10:20]
    managed = case.provider.to_managed(source, device=CUDA, read_mostly=False, prefetch=False)
    assert _bytes_of(managed) == bytes(range(10, 20))


def test_pages_are_moved_by_the_library(build: Any) -> None:
    """NVFP4_managed_prefetch is called on the current stream; the host is -1."""
    case = _pretend(build())
    stub = case.runtime.stub  # type: ignore[attr-defined]  # as above
    managed = case.provider.to_managed(torch.ones(8), device=CUDA, read_mostly=False, prefetch=True)
    assert stub.stub_calls(PREFETCHES) == 1
    assert [stub.stub_last(item) for item in range(4)] == [managed.data_ptr(), 32, 0, case.torch.current]
    case.provider.prefetch(managed, torch.device("cpu"))
    assert stub.stub_last(2) == -1
    assert case.runtime.count("memPrefetchAsync") == 0


def test_a_device_that_the_library_has_not_is_served_by_cupy(build: Any) -> None:
    """NVFP4_can_use_managed says which device: what it refuses is allocated, copied and moved by the runtime."""
    case = _pretend(build(), CONCURRENT, CONCURRENT)
    managed = case.provider.to_managed(torch.ones(8), device=CUDA_1, read_mostly=False, prefetch=True)
    assert _bytes_of(managed) == _bytes_of(torch.ones(8))
    stub = case.runtime.stub  # type: ignore[attr-defined]  # as above
    assert stub.stub_calls(COPIES) == stub.stub_calls(PREFETCHES) == 0
    assert case.runtime.count("mallocManaged") == 1
    assert case.runtime.count("memPrefetchAsync") == 2, "the first backs the new memory"


def test_a_library_without_room_raises_with_its_status(build: Any) -> None:
    """An error of the library is a UnifiedMemoryError that names the call, the library and the status."""
    path = build("STUB_FULL")
    case = _pretend(path)
    with pytest.raises(DriverFaultError, match=f"NVFP4_to_managed of libNVFP4 1.0 from {path}: error 2") as caught:
        case.provider.to_managed(torch.ones(8), device=CUDA, read_mostly=False, prefetch=False)
    assert caught.value.details == {"call": "NVFP4_to_managed", "status": 2}
    assert case.provider.stats().in_use_bytes == 0
    with pytest.raises(DriverFaultError, match="gave no address"):
        _pretend(build("STUB_NO_ADDRESS")).provider.to_managed(
            torch.ones(8), device=CUDA, read_mostly=False, prefetch=False
        )


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("STUB_VERSION=0x00020000", "ABI version must be 1.x, got '2.0'"),
        ("STUB_MISSING", "lacks NVFP4_managed_prefetch, so it is not called"),
    ],
)
def test_a_library_that_is_not_right_is_not_called(build: Any, fault: str, reason: str) -> None:
    """CuPy serves then, and the provider's answer says why."""
    path = build(fault)
    with pytest.raises(q4.UnifiedMemoryError, match=reason):
        ManagedExports(path)
    case = _pretend(path)
    assert reason in case.provider.is_available(CUDA).reason
    case.provider.to_managed(torch.ones(8), device=CUDA, read_mostly=False, prefetch=False)
    assert case.runtime.stub.stub_calls(COPIES) == 0  # type: ignore[attr-defined]  # as above
    assert case.runtime.count("mallocManaged") == 1


def test_candidates_are_tried_in_order(build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variable holds several paths; the first that is complete is taken, and none where it is not set."""
    text = tmp_path / "no-library.so"
    text.write_text("text")
    right = build()
    monkeypatch.setenv(VARIABLE, os.pathsep.join(["", str(tmp_path / "absent.so"), str(text), right]))
    exports, state = find_exports()
    assert exports is not None
    assert state == f"through libNVFP4 1.0 from {right}"
    monkeypatch.setenv(VARIABLE, str(text))
    exports, state = find_exports()
    assert exports is None
    assert "no-library.so' can't be loaded" in state
    monkeypatch.delenv(VARIABLE)
    assert find_exports() == (None, "")


def test_the_configured_library_is_found_with_the_runtime(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading CUDA's runtime looks at the variable, once; the provider's answer names the library."""
    path = build()
    monkeypatch.setenv(VARIABLE, path)
    runtime = _Runtime(ctypes.CDLL(path), LEGACY)
    for name, content in (("cupy", {}), ("cupy.cuda", {"runtime": runtime})):
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("q4_um_managed.probe_driver.TorchSide", TorchSide)
    monkeypatch.setattr("q4_um_managed.driver.TorchSide", TorchSide)
    library = SimpleNamespace(
        devices_of=lambda _: (dict(LEGACY),),
        version_of=lambda _: 13000,
        has_cupy=lambda: True,
        cupy_cuda=lambda: None,
        LibraryRefusesError=ValueError,
    )
    monkeypatch.setattr("q4_um_managed.probe_driver.library", library)
    found = find_driver(object)
    assert isinstance(found, Prospect)
    answer = ManagedProvider(lambda: found).is_available(CUDA)
    assert answer
    assert answer.reason.endswith(f"through libNVFP4 1.0 from {path}")
