"""Mutated files: nothing crashes, hangs or allocates absurdly, and every error is a typed one."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import torch

import q4core as q4
from q4_gguf.header import read_header
from q4_gguf.values import ArrayValue
from tests.support.ggml_blocks import write_parts
from tests.support.limits import scaled

if TYPE_CHECKING:
    from pathlib import Path

_EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def mutate(data: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """Return a file with one to three faults, most of them in the header."""
    mutant = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        limit = header_bytes if rng.random() < 0.9 else len(mutant)
        at = rng.randrange(min(limit, len(mutant)))
        fault = rng.randrange(7)
        if fault == 0:
            mutant[at] ^= 1 << rng.randrange(8)
        elif fault == 1:
            mutant[at] = rng.randrange(256)
        elif fault == 2:
            del mutant[rng.randrange(24, len(mutant)) :]
        elif fault == 3:
            mutant[at : at + 8] = struct.pack("<Q", rng.choice(_EXTREMES))
        elif fault == 4:
            mutant[at : at + 4] = struct.pack("<I", rng.choice(_EXTREMES) & 0xFFFFFFFF)
        elif fault == 5:
            del mutant[at : at + rng.randrange(1, 9)]
        else:
            mutant[at:at] = rng.randbytes(rng.randrange(1, 9))
        if len(mutant) < 24:
            break
    return bytes(mutant)


def read_everything(path: Path) -> int:
    """Read every metadata value and every tensor of a file; return how many there were."""
    with q4.open(path) as checkpoint:
        for value in checkpoint.metadata.values():
            if isinstance(value, ArrayValue):
                value.tolist()
        for weight in checkpoint.values():
            q4.dequantize(weight, torch.float32)
        for tensor in checkpoint.dense.values():
            tensor.clone()
        return len(checkpoint.metadata) + len(checkpoint) + len(checkpoint.dense)


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["small_gguf", "every_type_gguf"])
@pytest.mark.parametrize("mutants", [500, pytest.param(25_000, marks=pytest.mark.soak)])
def test_mutated_files(mutants: int, fixture: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Mutants of small files: each is read in full or refused by a Q4Error that names the file."""
    good = request.getfixturevalue(fixture).read_bytes()
    header_bytes = read_header(good, "good").data_start
    rng = random.Random(20261121)  # reproducible faults, no secrets
    path = tmp_path / "mutant.gguf"
    refused = nameless = 0
    slowest = 0.0
    tracemalloc.start()
    try:
        for _ in range(mutants):
            path.unlink(missing_ok=True)  # a new file: the last one may still be mapped
            path.write_bytes(mutate(good, header_bytes, rng))
            start = time.thread_time()
            try:
                read_everything(path)
            except q4.Q4Error as error:
                refused += 1
                nameless += not error.rule or (error.where != str(path) and error.name is None)
            slowest = max(slowest, time.thread_time() - start)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused > mutants // 2, "the faults are too mild to test anything"
    assert refused < mutants, "not one mutant could be read: the reader refuses everything"
    assert nameless == 0
    assert slowest < scaled(2.0)
    assert peak < 64 * 2**20


@pytest.mark.parametrize("length", range(0, 400, 7))
def test_truncated_anywhere(length: int, small_gguf: Path, tmp_path: Path) -> None:
    """A file cut inside its header is always refused, by name, and called cut."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(small_gguf.read_bytes()[:length])
    with pytest.raises(q4.CheckpointError) as caught:
        read_everything(path)
    assert caught.value.where == str(path)
    assert "truncated" in str(caught.value) or "download it again" in str(caught.value)


def test_mutated_parts(tmp_path: Path) -> None:
    """Mutants of a part of a split model: the model is read in full, or refused by an error that names a file."""
    parts = write_parts(tmp_path)
    rng, refused, nameless = random.Random(20261126), 0, 0
    for turn in range(400):
        path = parts[turn % len(parts)]
        good = path.read_bytes()
        path.unlink()
        path.write_bytes(mutate(good, read_header(good, "good").data_start, rng))
        try:
            read_everything(parts[0])
        except q4.Q4Error as error:
            refused += 1
            nameless += error.where is None
        path.unlink()
        path.write_bytes(good)
    assert 200 < refused < 400
    assert nameless == 0
