"""Libraries that we are compared with: installed versions, builds, and candidates."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.cpu import dense, ggml, onnx_runtime, quantized_torch
from benchmarks.weights import TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.candidate import Candidate
    from benchmarks.problem import Problem

__all__ = ["PEERS", "facts", "load"]

PEERS: dict[str, tuple[str, Callable[[Problem], list[Candidate]]]] = {
    "torch": ("torch", dense.candidates),
    "onnxruntime": ("onnxruntime", onnx_runtime.candidates),
    "ggml": ("llama-cpp-python", ggml.candidates),
    "bitsandbytes": ("bitsandbytes", quantized_torch.bitsandbytes_candidates),
    "torchao": ("torchao", quantized_torch.torchao_candidates),
}


def facts() -> dict[str, dict[str, Any]]:
    """Return version of each peer, or that it is not installed, and what is known of its build."""
    found: dict[str, dict[str, Any]] = {}
    for name, (distribution, _) in PEERS.items():
        try:
            found[name] = {
                "installed": True,
                "distribution": distribution,
                "version": importlib.metadata.version(distribution),
            }
        except importlib.metadata.PackageNotFoundError:
            found[name] = {"installed": False, "distribution": distribution, "why": "not installed"}
    found["torch"]["built_for"] = torch.backends.cpu.get_cpu_capability()
    if found["onnxruntime"]["installed"]:
        found["onnxruntime"]["built_for"] = "chosen when it runs"
    if found["ggml"]["installed"]:
        try:
            found["ggml"]["built_for"] = ggml.library().features()
        except OSError as error:
            found["ggml"] |= {"installed": False, "why": f"can't be loaded: {error}"}
    return found


def load(problem: Problem, found: dict[str, dict[str, Any]], group: str | None = None) -> list[Candidate]:
    """Return what the installed peers offer for a shape, or for a group of ``TYPES``.

    One that breaks is marked in ``found``, and left out.
    """
    candidates = []
    makers = {name: make for name, (_, make) in PEERS.items()}
    if group is not None:
        types = tuple(TYPES[group])
        makers = {
            ggml.LIBRARY: functools.partial(ggml.candidates, types=types),
            onnx_runtime.LIBRARY: functools.partial(onnx_runtime.candidates, types=types),
        }
    for name, make in makers.items():
        if not found[name]["installed"]:
            continue
        try:
            candidates += make(problem)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            found[name] |= {"installed": False, "why": f"{type(error).__name__}: {error}"}
    return candidates
