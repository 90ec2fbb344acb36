"""Build of libNVFP4.so by nvcc into build/nvfp4, with a check of its exports: ``python -m tools.nvfp4_library``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).parents[1]
CUDA = ROOT / "plugins/nvfp4-native/src/q4_nvfp4_native/cuda"
TARGET = ROOT / "build/nvfp4/libNVFP4.so"


def main() -> int:
    """Build the library; 1 where it does not export just what its header declares."""
    if not shutil.which("nvcc"):
        print("nvcc is missing: install NVIDIA's CUDA toolkit (13 or newer)", file=sys.stderr)
        return 1
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ("120a", "121a")]
    flags = ["-shared", "-Xcompiler=-fPIC,-fvisibility=hidden", "-std=c++17", "-O3", "-fmad=false", *targets]
    subprocess.run(["nvcc", *flags, "-o", str(TARGET), str(CUDA / "library.cu")], check=True)
    symbols = ["nm", "--dynamic", "--defined-only", str(TARGET)]
    listing = subprocess.run(symbols, check=True, capture_output=True, text=True).stdout
    exported = {line.split()[-1] for line in listing.splitlines() if line.split()[-2] == "T"} - {"_init", "_fini"}
    header = (CUDA / "NVFP4.h").read_text(encoding="utf-8")
    declared = {line.split("(")[0].split()[-1] for line in header.splitlines() if line.startswith("NVFP4_EXPORT ")}
    if exported != declared:
        print(f"{TARGET.name} exports {sorted(exported)}, its header declares {sorted(declared)}", file=sys.stderr)
        return 1
    print(f"{TARGET}: {', '.join(sorted(exported))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
