"""Fixtures of the tests against other libraries: quiet imports, random weights, files on disk, comparison by bits."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

import q4core as q4
from tests.support.events import forget_warnings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import ModuleType

__all__ = [
    "dense",
    "eager",
    "nudged",
    "on_disk",
    "peer",
    "portable",
    "quiet_transformers",
    "rewritten",
    "same_bits",
]

# What is compared here is how files are read and what their numbers are: by the reference, whatever else is installed.
# A conftest of tests that need no other library does not import this module.
os.environ["Q4_PLUGINS"] = "dialects,gguf,lm,nn,onnx,safetensors"

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Run the libraries' compiled helpers eagerly: the same bits, without a compiler for each new shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def quiet_transformers() -> Iterator[None]:
    """Hide progress bars and transformers' own words; a warning may be given again; small layers need one thread."""
    logging, threads = importlib.import_module("transformers").logging, torch.get_num_threads()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    forget_warnings()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logging.enable_progress_bar()


@pytest.fixture(scope="session")
def peer() -> Callable[[str], ModuleType]:
    """Return a function that imports a library's module; a missing library is an error."""

    def load(name: str) -> ModuleType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries' words about each other's versions, at import only
            return importlib.import_module(name)

    return load


@pytest.fixture(scope="session")
def portable(peer: Callable[[str], ModuleType]) -> Callable[..., torch.Tensor]:
    """Return bitsandbytes' portable dequantiser: (packed, state, dtype) → [N, K].

    The kernel behind bitsandbytes 0.50.2's public call depends on the CPU. With AVX-512 and K a multiple of 16 it reads
    block scales row by row, which is wrong where a block straddles rows (K no multiple of the block). With avx512_bf16
    too it narrows to bfloat16 with VCVTNEPS2BF16, for which every subnormal number is 0. Without AVX-512, or for
    another even K, FP4's code 8 is -0, where the stored code book has +0. The portable kernel does none of this.
    """
    kernel = peer("bitsandbytes.backends.default.ops")._dequantize_4bit_compute
    functional = peer("bitsandbytes.functional")

    def dequantize(packed: torch.Tensor, state: Any, dtype: torch.dtype) -> torch.Tensor:
        absmax = state.absmax
        if state.nested:
            absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
        codes = packed.view(torch.uint8).reshape(-1)
        numbers: torch.Tensor = kernel(codes, absmax, state.code, state.blocksize, tuple(state.shape), dtype)
        return numbers

    return dequantize


@pytest.fixture(scope="session")
def dense() -> Callable[..., torch.Tensor]:
    """Return a function that makes a random weight [n, k] with one outlier a row."""

    def make(n: int, k: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 0.05) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(n, k, generator=generator) * scale
        column = torch.randint(k, (n, 1), generator=generator)
        return weight.scatter(1, column, weight.gather(1, column) * 8).to(dtype)

    return make


@pytest.fixture(scope="session")
def nudged() -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Return a function that moves float32 values by -1, 0 or +1 units in the last place, at random."""

    def nudge(values: torch.Tensor, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        steps = torch.randint(-1, 2, values.shape, generator=generator, dtype=torch.int32)
        return torch.where(values == 0, values, (values.view(torch.int32) + steps).view(torch.float32))

    return nudge


@pytest.fixture(scope="session")
def same_bits() -> Callable[..., None]:
    """Return an assertion that two tensors are equal in dtype, shape and every bit."""

    def check(actual: torch.Tensor, expected: torch.Tensor, *, is_zero_signed: bool = True) -> None:
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        if not is_zero_signed:  # x + 0 is x, but for -0, which becomes +0
            actual, expected = actual + 0.0, expected + 0.0
        bits = INTEGERS[actual.element_size()]
        wrong = actual.contiguous().view(bits) != expected.contiguous().view(bits)
        count = int(wrong.sum())
        assert count == 0, f"{count} of {wrong.numel()} differ, such as {actual[wrong][:4]} for {expected[wrong][:4]}"

    return check


@pytest.fixture
def on_disk(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes tensors, header metadata and ``config.json`` to a fresh folder."""

    def write(
        tensors: Mapping[str, torch.Tensor],
        metadata: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Path:
        folder = tmp_path / f"stored-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        path = folder / "model.safetensors"
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, path, dict(metadata or {}) or None)
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return path

    return write


@pytest.fixture
def rewritten(tmp_path: Path, same_bits: Callable[..., None]) -> Callable[..., None]:
    """Return an assertion that q4core reads a file and writes the same layer back, byte for byte."""

    def check(path: Path, dialect: str, modules: tuple[str, ...] = ("proj",)) -> None:
        checkpoint = q4.open(path)
        again = tmp_path / "again.safetensors"
        q4.save_checkpoint(again, {name: checkpoint[name] for name in modules}, dialect=dialect)
        stored, written = safetensors.torch.load_file(path), safetensors.torch.load_file(again)
        own = {key for key in stored if key.startswith(tuple(f"{name}." for name in modules)) and "bias" not in key}
        assert set(written) == own
        for key in own:
            same_bits(written[key], stored[key])

    return check
