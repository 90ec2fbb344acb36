"""What the driver's own library reports is enough to reject, at once and with every value, before CuPy is loaded."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pretended_driver import CONCURRENT, CUDA, GB10, LEGACY, Runtime, RuntimeFaultError
from pretended_driver import TorchSide as PretendedTorch

import q4core as q4
from q4_um_managed import ManagedProvider, apply_policy, library
from q4_um_managed.device_attributes import ATTRIBUTES
from q4_um_managed.driver import Driver, TorchSide
from q4_um_managed.probe_driver import Missing, Prospect, find_driver
from tests.support.limits import scaled

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
CUDA_1 = torch.device("cuda", 1)
NO_MANAGED = CONCURRENT | {"managedMemory": 0, "concurrentManagedAccess": 0}
BOUND_S = 0.010


class Library:
    """The driver's own library, pretended: its version, and each device's attributes; None for one it doesn't know."""

    def __init__(self, *devices: dict[str, Any], version: int = 99000) -> None:
        self.devices, self.version = devices, version

    def cuInit(self, flags: int) -> int:  # noqa: N802  # the driver's names
        """As the driver's, like all that follow."""
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802, D102
        version._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802, D102
        count._obj.value = len(self.devices)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:  # noqa: N802, D102
        names = {number: name for name, number in ATTRIBUTES.items()}
        told = self.devices[device][names[attribute]]
        value._obj.value = told or 0
        return 1 if told is None else 0


class OldLibrary(Library):
    """One from before drivers reported their version."""

    cuDriverGetVersion = property()  # noqa: N815  # raises AttributeError, as ctypes does


def _refused(
    library: Library, device: torch.device, monkeypatch: pytest.MonkeyPatch, *, has_cuda: bool = True
) -> q4.UnifiedMemoryError:
    """Return the refusal, which must come at once, and without CuPy."""
    monkeypatch.setattr(TorchSide, "has_cuda", lambda _: has_cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)  # importing it would be reported as the reason
    times = []
    for _ in range(5):
        provider = ManagedProvider(lambda: find_driver(lambda: library))
        start = time.perf_counter()
        with pytest.raises(q4.UnifiedMemoryError) as caught:
            apply_policy(
                torch.ones(4),
                q4.UnifiedMemoryPolicy.REQUIRE_UNIFIED,
                device=device,
                providers=[provider],
                environment={},
            )
        times.append(time.perf_counter() - start)
    assert min(times) < scaled(BOUND_S)
    assert "imported" not in str(caught.value)
    return caught.value


def _tells(error: q4.UnifiedMemoryError, values: dict[str, Any]) -> None:
    for key, value in values.items():
        assert f"{key}={value}" in str(error)


@pytest.mark.parametrize(
    ("devices", "device", "has_cuda", "reason"),
    [
        ([LEGACY], CPU, True, "concurrentManagedAccess=0"),
        ([LEGACY, LEGACY], CPU, True, "concurrentManagedAccess=0"),
        ([CONCURRENT], CUDA, False, "makes no CUDA tensors"),
        ([GB10], torch.device("cuda"), False, "makes no CUDA tensors"),
        ([NO_MANAGED, CONCURRENT], CUDA, True, "managedMemory=0"),
        ([CONCURRENT], CUDA_1, True, "no device cuda:1: there are 1"),
    ],
)
def test_facts_of_the_library_refuse(
    devices: list[dict[str, int]],
    device: torch.device,
    has_cuda: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the attributes, or torch, stand against it, CuPy is not asked: in 10 ms, with the value of each."""
    error = _refused(Library(*devices), device, monkeypatch, has_cuda=has_cuda)
    assert reason in str(error)
    if device != CUDA_1:
        _tells(error, devices[0])


@pytest.mark.parametrize("kind", [Library, OldLibrary])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_an_old_driver_is_refused_by_its_version(
    kind: type[Library], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is older than the CUDA of CuPy's build would fail at CuPy's first call: reported at once."""
    monkeypatch.setattr(library, "cupy_cuda", lambda: 13)
    error = _refused(kind(CONCURRENT, version=12080), device, monkeypatch)
    _tells(error, CONCURRENT)
    _tells(error, {"cuda_driver_version": 12080 if kind is Library else None, "cupy_cuda": 13})
    assert "CuPy was built for CUDA 13" in str(error)


@pytest.mark.parametrize(("version", "built_for"), [(13000, 13), (13020, 12), (12080, 12), (12080, None)])
def test_a_driver_that_is_new_enough_goes_on(
    version: int, built_for: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same major version or a later one is enough, and where CuPy states none nothing is refused by it."""
    monkeypatch.setattr(library, "cupy_cuda", lambda: built_for)
    found = find_driver(lambda: Library(CONCURRENT, version=version))
    assert isinstance(found, Prospect)
    assert found.devices == (CONCURRENT,)


def test_without_cupy_the_values_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy that is not installed is the reason, and the attributes are reported nevertheless."""
    monkeypatch.setattr(library, "has_cupy", lambda: False)
    error = _refused(Library(CONCURRENT), CPU, monkeypatch)
    assert "CuPy is not installed" in str(error)
    _tells(error, CONCURRENT | {"cupy": False, "cuda_driver": True})


def test_cupys_wheel_states_its_cuda(tmp_path: Path) -> None:
    """The CUDA that CuPy was built for is in the name of its wheel; two of them, or none, reject nothing."""
    origin = tmp_path / "cupy" / "__init__.py"
    assert library.wheel_cuda(origin) is None
    for name, expected in (("cupy_cuda13x-14.2.0", 13), ("cupy_rocm_5_0-13.0", 13), ("cupy_cuda12x-13.6.0", 12)):
        (tmp_path / f"{name}.dist-info").mkdir()
        assert library.wheel_cuda(origin) == expected


def test_a_runtime_that_fails_leaves_the_librarys_values() -> None:
    """Where CuPy's runtime fails after all, the error has what the library reported, and not that nothing was asked."""
    runtime = Runtime(CONCURRENT)
    for call in ("getDevice", "getDeviceCount"):
        runtime.fails[call] = RuntimeFaultError(35, "cudaErrorInsufficientDriver")
    for loaded in (Driver(runtime), Missing("CuPy can't be imported: ImportError: x", {"cupy": True})):
        prospect = Prospect((dict(CONCURRENT),), {}, lambda loaded=loaded: loaded, lambda: True)  # type: ignore[misc]
        answer = ManagedProvider(lambda prospect=prospect: prospect).is_available(CPU)  # type: ignore[misc]
        assert not answer
        assert answer.attributes.items() >= CONCURRENT.items()
        assert ("cudaErrorInsufficientDriver" in answer.reason) == isinstance(loaded, Driver)


def test_a_prospect_becomes_a_driver_once() -> None:
    """Where nothing prevents it, the runtime is loaded at the first question, once, and answers from then on."""
    runtime = Runtime(LEGACY, CONCURRENT)
    loads = []

    def load() -> Driver:
        loads.append(1)
        return Driver(runtime, PretendedTorch())

    provider = ManagedProvider(lambda: Prospect((dict(LEGACY), dict(CONCURRENT)), {}, load, lambda: True))
    assert not provider.is_available(torch.device("cuda", 2))
    assert not loads
    assert not provider.is_available(CPU)  # device 0 is current, device 1 might have been
    assert provider.is_available(CUDA_1)
    runtime.device = 1
    assert provider.is_available(CPU)
    assert len(loads) == 1


def test_an_attribute_that_is_not_reported_does_not_reject() -> None:
    """What the library doesn't know is left to the runtime."""
    found = find_driver(lambda: Library(CONCURRENT | {"concurrentManagedAccess": None, "managedMemory": None}))
    assert isinstance(found, Prospect)
    prospect = Prospect(found.devices, {}, lambda: Driver(Runtime(CONCURRENT)), lambda: True)
    assert ManagedProvider(lambda: prospect).is_available(CPU)


def test_a_fork_of_who_asked_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has begun CUDA in the process that asked it, so a fork of that one is rejected, and loads nothing."""

    def load() -> Driver:
        raise AssertionError("loaded")

    provider = ManagedProvider(lambda: Prospect((dict(CONCURRENT),), {}, load, lambda: True))
    assert not provider.is_available(CUDA_1)
    monkeypatch.setattr("os.getpid", lambda: 1)
    answer = provider.is_available(CPU)
    assert (answer.is_available, answer.attributes["is_fork"]) == (False, True)
    assert answer.attributes.items() >= CONCURRENT.items()
