"""TC-06 judges compiled code by the module and the distribution that it belongs to, wherever either lies."""

from __future__ import annotations

import _ctypes
import shutil
from pathlib import Path

import pytest

from q4_conformance import Outcome, core_cases, run_case

LIBRARY = Path(_ctypes.__file__)
(CASE,) = [case for case in core_cases() if case.contract == "TC-06"]


def _load_in_children(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let each Python that is started from now on load copies of a shared library that lie in a folder."""
    lines = ["import ctypes"]
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(LIBRARY, path)
        lines.append(f"ctypes.CDLL({str(path)!r})")
    (folder / "sitecustomize.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


def test_a_folder_named_like_us_is_no_code_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's library below a folder whose name begins with q4 is nobody's fault."""
    _load_in_children(tmp_path / "q4work", monkeypatch, "torchlike/lib/libother.so")
    result = run_case(CASE, None)
    assert result.outcome is Outcome.PASS, result


def test_compiled_code_of_ours_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library is ours by its own name, or because one of our distributions installed it; both are told."""
    _load_in_children(tmp_path, monkeypatch, "kernels/libq4_fast.so.1", "q4_hidden_libs/product.so")
    record = tmp_path / "q4_hidden-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: q4-hidden\nVersion: 1.0\n", encoding="utf-8")
    (record / "RECORD").write_text("q4_hidden_libs/product.so,,\n", encoding="utf-8")
    result = run_case(CASE, None)
    assert result.outcome is Outcome.FAIL, result
    assert result.message.startswith("compiled code: ")
    assert "libq4_fast.so.1" in result.message
    assert "product.so" in result.message
