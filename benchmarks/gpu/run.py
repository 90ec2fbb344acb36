"""Entry point ``python benchmarks/gpu/run.py [STAGE …]``, for a source tree with or without installed packages."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGINS = ("q4_dequant_fallback", "q4_nf4_cuda", "q4_nvfp4_native", "q4_quantize", "q4_safetensors", "q4_um_managed")


def _use_source_tree() -> None:
    """Make this tree's packages importable, here and in child processes, and its plugins known by their modules."""
    folders = [ROOT, *sorted(ROOT.glob("plugins/*/src")), *sorted(ROOT.glob("conformance/**/src"))]
    sys.path[:0] = [str(folder) for folder in folders if str(folder) not in sys.path]
    named = [name for name in os.environ.get("Q4_PLUGIN_MODULES", "").split(",") if name.strip()]
    found = [name for name in PLUGINS if name not in named and importlib.util.find_spec(name) is not None]
    os.environ["Q4_PLUGIN_MODULES"] = ",".join([*named, *found])


if __name__ == "__main__":
    _use_source_tree()
    from benchmarks.gpu import main

    raise SystemExit(main(sys.argv[1:]))
