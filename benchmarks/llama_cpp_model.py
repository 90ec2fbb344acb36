"""llama.cpp and ik_llama.cpp through the low-level functions of their bindings: what their own tools call."""

from __future__ import annotations

import ctypes
import importlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["IkLlamaModel", "LlamaBatch", "LlamaModel"]


class LlamaModel:
    """One model with one context.

    Args:
        path: The GGUF file.
        context: Tokens of room.
        batch: Tokens of a prompt that it takes at once. Defaults to all.
        has_flash_attention: Whether it must attend by blocks of keys. Defaults to its own choice.

    Raises:
        ModuleNotFoundError: llama-cpp-python is not installed.
    """

    _module = "llama_cpp"

    def __init__(
        self, path: Path, context: int, *, batch: int | None = None, has_flash_attention: bool = False
    ) -> None:
        self._library: Any = importlib.import_module(self._module)
        library = self._library
        self._log = self._silence()
        library.llama_backend_init()
        self._model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        parameters = library.llama_context_default_params()
        parameters.n_ctx = context
        parameters.n_batch = parameters.n_ubatch = self._most = batch or context
        if has_flash_attention:
            parameters.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._ask(parameters)
        self._context = library.llama_init_from_model(self._model, parameters)
        self._place = 0
        self._words = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))

    def _ask(self, parameters: Any) -> None:
        """Set further parameters of the context."""

    def _silence(self) -> object:
        """Discard the library's log; returns what must live as long as the library."""
        log = self._library.llama_log_callback(lambda *_: None)
        self._library.llama_log_set(log, ctypes.c_void_p(0))
        return log

    def _batch(self, tokens: Sequence[int]) -> Any:
        self._given = (self._library.llama_token * len(tokens))(*tokens)  # the batch points to it
        return self._library.llama_batch_get_one(self._given, len(tokens))

    def _set_threads(self, threads: int) -> None:
        self._library.llama_set_n_threads(self._context, threads, threads)

    def _step(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Run the model over tokens and return the logits of the last one."""
        for first in range(0, len(tokens), self._most):
            if self._library.llama_decode(self._context, self._batch(tokens[first : first + self._most])):
                raise SystemExit(f"{self._module} could not decode")
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
        self._set_threads(threads)
        self._clear()
        started = time.perf_counter()
        token = int(self._step(prompt).argmax())
        prefilled = time.perf_counter()
        for _ in range(steps):
            token = int(self._step([token]).argmax())
        return prefilled - started, time.perf_counter() - prefilled


class LlamaBatch(LlamaModel):
    """One model with one context for several sequences, each of which has a part of its own.

    Args:
        path: The GGUF file.
        context: Tokens of room of each sequence.
        batch: Sequences.
    """

    def __init__(self, path: Path, context: int, batch: int) -> None:
        self.batch = batch
        super().__init__(path, context * batch)
        self._tokens = self._library.llama_batch_init(context * batch, 0, 1)

    def _ask(self, parameters: Any) -> None:
        parameters.n_seq_max, parameters.kv_unified = self.batch, False
        parameters.n_ubatch = min(parameters.n_ubatch, 512)  # its own default

    def rows(self, rows: Sequence[Sequence[int]], start: int) -> np.ndarray[Any, Any]:
        """Run the model over tokens of each sequence from a position on; return the logits of the last ones."""
        given, at = self._tokens, 0
        ends = []
        for sequence, tokens in enumerate(rows):
            for position, token in enumerate(tokens, start):
                given.token[at], given.pos[at], given.n_seq_id[at] = token, position, 1
                given.seq_id[at][0], given.logits[at] = sequence, position == start + len(tokens) - 1
                at += 1
            ends.append(at - 1)
        given.n_tokens = at
        if self._library.llama_decode(self._context, given):
            raise SystemExit(f"{self._module} could not decode")
        found = (self._library.llama_get_logits_ith(self._context, end) for end in ends)
        return np.stack([np.ctypeslib.as_array(one, shape=(self._words,)) for one in found])

    def run(self, prompts: Sequence[Sequence[int]], steps: int, threads: int) -> tuple[float, float]:
        """Return the seconds of prompts of one length, and those of some greedy steps of all after the first tokens."""
        self._set_threads(threads)
        self._clear()
        started = time.perf_counter()
        tokens = self.rows(prompts, 0).argmax(1).tolist()
        prefilled = time.perf_counter()
        for step in range(steps):
            tokens = self.rows([[token] for token in tokens], len(prompts[0]) + step).argmax(1).tolist()
        return prefilled - started, time.perf_counter() - prefilled

    def close(self) -> None:
        """Release the model and its context."""
        library = self._library
        library.llama_batch_free(self._tokens)
        library.llama_free(self._context)
        library.llama_model_free(self._model)


class IkLlamaModel(LlamaModel):
    """The same of ik_llama.cpp, whose functions are those that llama.cpp had in 2024.

    Raises:
        ModuleNotFoundError: ik-llama-cpp-python is not installed.
    """

    _module = "ik_llama_cpp._ctypes_api"

    def _silence(self) -> object:
        log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self._library._lib.llama_log_set(log, None)  # noqa: SLF001  # its only name
        return log

    def _batch(self, tokens: Sequence[int]) -> Any:
        call = self._library._lib.llama_batch_get_one  # noqa: SLF001  # its only name
        call.restype = self._library.llama_batch
        call.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]
        self._given = (self._library.llama_token * len(tokens))(*tokens)  # the batch points to it
        batch = call(self._given, len(tokens), self._place, 0)
        self._place += len(tokens)
        return batch

    def _set_threads(self, threads: int) -> None:
        call = self._library._lib.llama_set_n_threads  # noqa: SLF001  # its only name
        call.restype, call.argtypes = None, [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32]
        call(self._context, threads, threads)

    def _clear(self) -> None:
        self._place = 0
        self._library.llama_kv_cache_clear(self._context)
