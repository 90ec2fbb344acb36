"""Every contract case and every speed target of the GPU backends, on one GPU, by one command.

``python benchmarks/gpu/run.py`` needs no installation: it runs from a source tree. ``docs/gpu.md`` holds the results.
"""

from __future__ import annotations

from benchmarks.gpu.command import main

__all__ = ["main"]
