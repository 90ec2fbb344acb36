"""TC-06 judges compiled code by the module and the distribution that it belongs to, wherever either lies."""

from __future__ import annotations

import _ctypes
import shutil
from typing import TYPE_CHECKING

from q4_conformance import Outcome, core_cases, run_case

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_folder_named_like_us_is_no_code_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's library below a folder whose name begins with q4 is nobody's fault."""
    folder = tmp_path / "q4work"
    folder.mkdir()
    shutil.copyfile(_ctypes.__file__, folder / "libother.so")
    program = f"import ctypes\nctypes.CDLL({str(folder / 'libother.so')!r})\n"
    (folder / "sitecustomize.py").write_text(program, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    (case,) = [case for case in core_cases() if case.contract == "TC-06"]
    result = run_case(case, None)
    assert result.outcome is Outcome.PASS, result
