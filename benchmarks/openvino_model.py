"""OpenVINO GenAI on a GGUF file: greedy text by its own pipeline, and the seconds that it measures itself.

The pipeline is the one for a single sequence: the other keeps prompts, and does not compute one again.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["OpenVinoModel"]


class OpenVinoModel:
    """One model, compiled once for each number of threads.

    Args:
        path: The GGUF file.
        context: Tokens of room; its cache grows, so that this is not asked of it.

    Raises:
        ModuleNotFoundError: openvino-genai is not installed.
        ValueError: It does not read the file: its architecture or a type of its tensors.
    """

    def __init__(self, path: Path, context: int) -> None:
        del context
        self._library: Any = importlib.import_module("openvino_genai")
        self._path = path
        self._pipelines: dict[int, Any] = {}
        try:
            self._pipeline(1)
        except RuntimeError as error:
            raise ValueError(
                f"OpenVINO GenAI does not read {path.name}: {str(error).strip().splitlines()[-1]}"
            ) from None

    def _pipeline(self, threads: int) -> Any:
        if threads not in self._pipelines:
            options = {"ATTENTION_BACKEND": "SDPA", "INFERENCE_NUM_THREADS": threads}
            self._pipelines[threads] = self._library.LLMPipeline(str(self._path), "CPU", **options)
        return self._pipelines[threads]

    def _run(self, prompt: Sequence[int], count: int, threads: int) -> Any:
        config = self._library.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        ids = importlib.import_module("openvino").Tensor(np.array([prompt], dtype=np.int64))
        return self._pipeline(threads).generate(ids, config)

    def first_token(self, prompt: Sequence[int]) -> int:
        """Return the most likely token after a prompt."""
        return int(self._run(prompt, 1, 1).tokens[0][0])

    def generate(self, prompt: Sequence[int], steps: int, threads: int) -> tuple[float, float]:
        """Return the seconds of the prompt, and those of some greedy steps after the first token."""
        measured = self._run(prompt, steps + 1, threads).perf_metrics
        return measured.get_ttft().mean / 1e3, steps * measured.get_tpot().mean / 1e3
