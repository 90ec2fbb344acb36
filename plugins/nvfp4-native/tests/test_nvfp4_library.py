"""An external libNVFP4.so: used first where it is complete and right, else refused with its reason."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import pytest
import torch
from nvfp4_emulation import emulated_backend, emulated_library, fake_library

from q4_conformance.measurement.recording import recorded
from q4_conformance.subjects.backend import make_registry
from q4_nvfp4_native import find_library
from q4_nvfp4_native.configurations import CUDA_FOLDER
from q4_nvfp4_native.library import EXPORTS, VARIABLE
from q4core import ActivationPrecision, BackendError, ReasonCode, Session, SessionConfig, quantize

if TYPE_CHECKING:
    from pathlib import Path

    from q4_nvfp4_native import Nvfp4Native
    from q4_nvfp4_native.compiler import Compiled
    from q4core import Q4Linear

WISHES = SessionConfig(device="cpu", activation_precision=ActivationPrecision.FP4, backend="nvfp4-native")


def _layer(backend: Nvfp4Native) -> Q4Linear:
    weight = quantize(torch.randn(40, 128, generator=torch.Generator().manual_seed(0)), "nvfp4")
    return Session(WISHES, registry=make_registry(backend)).linear(weight)


def test_complete_library_is_used_first() -> None:
    """The external path is chosen before ours, and its functions are what ran."""
    path = fake_library()
    layer = _layer(emulated_backend(path))
    before = ctypes.CDLL(str(path)).fake_calls()
    layer(torch.randn(3, 128))
    assert ctypes.CDLL(str(path)).fake_calls() == before + 2
    diagnostics = layer.diagnostics()
    assert diagnostics.path_name == "external-fp4"
    assert str(path) in diagnostics.native_load_state


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("FAKE_VERSION=0x00020000", "ABI version must be 1.x, got '2.0'"),
        ("FAKE_NO_VERSION", "has no NVFP4_abi_version"),
        ("FAKE_MISSING", "lacks NVFP4_scaled_mm"),
    ],
)
def test_incomplete_library_is_refused_and_ours_serves(fault: str, told: str) -> None:
    """A library of another version, or without an export, is never called; the record says why, and our kernels run."""
    path = fake_library(fault)
    search = find_library([str(path)])
    assert search.library is None
    assert told in search.problems[0]
    backend = emulated_backend(path)
    layer = _layer(backend)
    layer(torch.randn(3, 128))
    assert layer.diagnostics().path_name == "native-fp4-m16"
    assert ctypes.CDLL(str(path)).fake_calls() == 0


def test_reason_is_library_where_nothing_else_serves() -> None:
    """Without NVRTC, a refused library's reason is of the code `library`."""
    backend = emulated_backend(fake_library("FAKE_MISSING"), driver=False)
    with pytest.raises(Exception, match="lacks NVFP4_scaled_mm") as caught:
        _layer(backend)
    codes = {reason.code for item in caught.value.rejections for reason in item.reasons}  # type: ignore[attr-defined]
    assert {ReasonCode.LIBRARY, ReasonCode.TOOLCHAIN} <= codes


@pytest.mark.parametrize("fault", ["FAKE_WRONG", "FAKE_FAILS"])
def test_wrong_library_is_disqualified_and_ours_serves(fault: str) -> None:
    """A library that answers wrongly in one element, or with an error, fails the self-probe, loudly; ours serves."""
    with recorded() as record:
        layer = _layer(emulated_backend(fake_library(fault)))
    told = [fields["passed"] for fields in record.named("q4.probe") if fields["path"] == "external-fp4"]
    assert told == [False]
    layer(torch.randn(3, 128))
    assert layer.diagnostics().path_name == "native-fp4-m16"


def test_library_serves_where_our_kernels_can_not_be_loaded() -> None:
    """A compiler that fails takes nothing from a library that is complete."""

    def refuse(*_: object) -> Compiled:
        raise BackendError("the compiler's words")

    backend = emulated_backend(fake_library(), compile=refuse)
    layer = _layer(backend)
    layer(torch.randn(3, 128))
    assert layer.diagnostics().path_name == "external-fp4"


def test_candidates_are_tried_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment variable holds several paths: what is no library is passed over, with the reason recorded."""
    text = tmp_path / "no-library.so"
    text.write_text("text")
    candidates = [str(tmp_path / "absent.so"), str(text), str(emulated_library())]
    monkeypatch.setenv(VARIABLE, os.pathsep.join(candidates))
    search = find_library()
    assert search.library is not None
    assert search.library.path == candidates[2]
    assert len(search.problems) == 2
    monkeypatch.delenv(VARIABLE)
    assert find_library().library is None
    assert VARIABLE in find_library().state


def test_managed_memory_functions() -> None:
    """What the library says of managed memory is handed on; its errors are typed."""
    library = find_library([str(fake_library())]).library
    assert library is not None
    source = torch.arange(16, dtype=torch.uint8)
    managed = library.to_managed(source.data_ptr(), 16, 0, 0)
    assert library.is_managed(managed)
    assert not library.is_managed(source.data_ptr())
    assert library.can_use_managed(0)
    assert not library.can_use_managed(1)
    library.prefetch(managed, 16, -1, 0)
    with pytest.raises(BackendError) as caught:
        library.prefetch(managed, 0, 0, 0)
    assert caught.value.details["status"] == -1


def test_bad_arguments_are_refused_by_the_library() -> None:
    """Our library checks what it is given before it launches anything."""
    library = ctypes.CDLL(str(emulated_library()))
    for name, types in EXPORTS.items():
        getattr(library, name).argtypes = types
    kept = torch.zeros(4096, dtype=torch.uint8)
    room = kept.data_ptr()
    good = [room, 0, 1, 16, 16, None, room, room, room, None]
    assert library.NVFP4_quantize(*good) == 0
    for place, value in ((0, None), (1, 3), (2, 0), (3, 0), (6, None), (7, None), (8, None)):
        bad = list(good)
        bad[place] = value
        assert library.NVFP4_quantize(*bad) == -1, place
    bad = list(good)
    bad[2], bad[4] = 2, 15
    assert library.NVFP4_quantize(*bad) == -1
    good = [room, room, room, room, room, None, 0, 0, None, room, 0, 1, 1, 128, None]
    assert library.NVFP4_scaled_mm(*good) == 0
    for place, value in (
        (0, None),
        (4, None),
        (6, 1),
        (6, 2),
        (9, None),
        (10, -1),
        (11, 0),
        (12, 0),
        (13, 64),
        (13, 0),
    ):
        bad = list(good)
        bad[place] = value
        assert library.NVFP4_scaled_mm(*bad) == -1, place


def test_header_names_every_export() -> None:
    """The header that is shipped declares what the loader looks for, and nothing else."""
    text = (CUDA_FOLDER / "NVFP4.h").read_text(encoding="utf-8")
    declared = [line.split("(")[0].split()[-1] for line in text.splitlines() if line.startswith("NVFP4_EXPORT int32_t")]
    assert sorted(declared) == sorted(EXPORTS)
