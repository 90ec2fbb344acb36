"""Certificates of this repository: ``python -m tools.certificates judge NAME`` compares a choice with its page.

``store [NAME …]`` judges by every case, and stores the pages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["JUDGED", "judge", "judged", "store"]

ROOT = Path(__file__).parents[1]
BUILT, STORED = Path("build/certificates"), Path("docs/certificates")
JUDGED = [  # what one process judges comes first: in CI, other sessions run at the same time
    *("simple-nf4", "simple-nvfp4", "bitsandbytes", "comfyui-nvfp4", "compressed-tensors-nvfp4", "modelopt-nvfp4"),
    *("compressed-tensors-int4", "compressed-tensors-int8", "compressed-tensors-mxfp4", "deepseek-mxfp4"),
    *("awq", "awq-gemv", "gptq", "gptq-v2", "gptqmodel-bitsandbytes", "hqq", "mlx", "modelopt-int4", "modelopt-mxfp4"),
    *("gpt-oss-mxfp4", "torchao-int4", "torchao-int4-tile-packed"),
    *("torchao-mxfp4-linear", "torchao-mxfp4-swizzled", "torchao-nvfp4-linear", "torchao-nvfp4-swizzled"),
    *("safetensors", "gguf", "onnx"),
    *("q4core", "um-managed", "nvfp4-native", "nf4-cuda", "cpu-native-programs", "dequant-fallback", "cpu-native"),
]
"""Names with a page in docs/certificates."""
INTERPRETED = {"nf4-cuda", "nvfp4-native"}  # judged by Triton's interpreter, in the few cases that take it minutes
FEW_CASES = ["TC-04", "TC-05", "TC-10", "TC-12", "TC-14", "TC-16", "TC-17"]
_PROGRAMS = "-programs"


def judged(arguments: Sequence[str]) -> list[str]:
    """Return the names behind ``--`` in a command line, or all that have a page."""
    return ([*arguments[arguments.index("--") + 1 :]] if "--" in arguments else []) or JUDGED


def judge(name: str, *further: str, is_compared: bool = True) -> int:
    """Judge a plugin by further options, and compare with its page, if any; return the status of ``q4 conform``."""
    shutil.rmtree(report := ROOT / BUILT / name, ignore_errors=True)
    options, variables = [*further, "--report", str(report.relative_to(ROOT))], {}
    if name in INTERPRETED:
        options += [word for case in FEW_CASES for word in ("--case", case)]
        variables["TRITON_INTERPRET"] = "1"
    if name.endswith(_PROGRAMS):
        options += ["--profile", "program"]
    for page in sorted((ROOT / STORED / name).glob("*.md")) if is_compared else ():
        options += ["--check", page.relative_to(ROOT).as_posix()]
    command = [sys.executable, "-m", "q4_cli", "conform", name.removesuffix(_PROGRAMS), *options]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False).returncode


def store(names: Sequence[str]) -> int:
    """Judge by every case, and store the page of each that does not fail; JSON stays in build."""
    failed = [name for name in names if judge(name, is_compared=False)]
    for page in (page for name in names if name not in failed for page in (ROOT / BUILT / name).glob("*.md")):
        folder = ROOT / STORED / page.parent.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"stored {Path(shutil.copy(page, folder)).relative_to(ROOT)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(judge(sys.argv[2], "--pairwise") if sys.argv[1:2] == ["judge"] else store(sys.argv[2:] or JUDGED))
