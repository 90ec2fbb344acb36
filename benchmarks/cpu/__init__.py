"""Decode and prefill on this CPU compared with every peer, in interleaved rounds of one run.

``Q4_CPU_ISA`` chooses our instruction set, after which the result is named.
"""

from __future__ import annotations

from benchmarks.cpu.command import main

__all__ = ["main"]
