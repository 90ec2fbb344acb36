"""llama.cpp through the low-level functions of llama-cpp-python: what its own command-line tool calls."""

from __future__ import annotations

import ctypes
import importlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["LlamaModel"]


class LlamaModel:
    """One model with one context.

    Args:
        path: The GGUF file.
        context: Tokens of room.

    Raises:
        ModuleNotFoundError: llama-cpp-python is not installed.
    """

    def __init__(self, path: Path, context: int) -> None:
        self._library: Any = importlib.import_module("llama_cpp")
        library = self._library
        self._log = library.llama_log_callback(lambda *_: None)
        library.llama_log_set(self._log, ctypes.c_void_p(0))
        library.llama_backend_init()
        self._model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        parameters = library.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = context
        self._context = library.llama_init_from_model(self._model, parameters)
        self._words = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def _step(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Run the model over tokens and return the logits of the last one."""
        given = (self._library.llama_token * len(tokens))(*tokens)
        if self._library.llama_decode(self._context, self._library.llama_batch_get_one(given, len(tokens))):
            raise SystemExit("llama.cpp could not decode")
        logits = self._library.llama_get_logits_ith(self._context, -1)
        row: np.ndarray[Any, Any] = np.ctypeslib.as_array(logits, shape=(self._words,))
        return row

    def logits(self, prompt: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the logits that follow a prompt."""
        self._clear()
        return np.array(self._step(prompt))

    def all_logits(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the logits after each of some tokens, [tokens, words]."""
        self._clear()
        return np.stack([np.array(self._step([token])) for token in tokens])

    def _clear(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)  # noqa: FBT003  # a C function

    def generate(self, prompt: Sequence[int], steps: int, threads: int) -> tuple[float, float]:
        """Return the seconds of the prompt, and those of some greedy steps after the first token."""
        self._library.llama_set_n_threads(self._context, threads, threads)
        self._clear()
        started = time.perf_counter()
        token = int(self._step(prompt).argmax())
        prefilled = time.perf_counter()
        for _ in range(steps):
            token = int(self._step([token]).argmax())
        return prefilled - started, time.perf_counter() - prefilled
