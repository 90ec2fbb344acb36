"""Every packed type: bit-equal to the package ``gguf`` on random bytes, and to the samples' owners."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

import q4core as q4
from q4_gguf import GgufSource
from q4_gguf.ggml import DENSE_TYPES, PACKED_TYPES, UNPACKED_TYPES, find_type, name_of
from q4_gguf.header import TensorEntry
from q4_gguf.reader import refusal
from q4_gguf.views import packed_weight, unpacked_tensor
from tests.support.ggml_blocks import entry_of, owners_values, random_blocks

SAMPLES = Path(os.environ.get("Q4_SAMPLES", "samples"))
KINDS = ("random", "ones", "zeros", "negative", "zero scales")
SHAPES = ((1, 1, None), (3, 2, None), (7, 3, None), (2, 5, 3))
"""Rows, blocks per row, experts."""


def same_bits(ours: torch.Tensor, theirs: np.ndarray[Any, Any]) -> bool:
    """Compare bit by bit, but for the sign of a zero."""
    return bool((ours.numpy() + np.float32(0)).tobytes() == (np.ascontiguousarray(theirs) + np.float32(0)).tobytes())


def mapped(data: Any) -> Any:
    """Return bytes as what a mapped file is read by."""
    return memoryview(data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "count", "experts"), SHAPES)
@pytest.mark.parametrize("name", PACKED_TYPES)
def test_random_blocks_are_ggufs_own_values(name: str, rows: int, count: int, experts: int | None, kind: str) -> None:
    """Random bits, all ones, all zeros, negative and zero scales decode to the owner's bits, in experts too."""
    layout = find_type(int(Type[name]))
    assert layout is not None
    shape = (rows, count * layout.block_size)
    whole = shape if experts is None else (experts, *shape)
    blocks = random_blocks(name, rows * count * (experts or 1), kind)
    expected = owners_values(name, blocks).reshape(-1, *shape)
    data = mapped(bytearray(blocks.tobytes()))
    for index in range(experts or 1):
        weight = packed_weight(data, entry_of(name, whole), name="proj", expert=None if experts is None else index)
        weight.check_values()
        assert same_bits(q4.dequantize(weight, torch.float32), expected[index])
        assert weight.shape == shape


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_what_is_stored_singly_is_a_view(name: str) -> None:
    """Codes that are used as stored, and single numbers, are views of the file; nothing else is larger than it."""
    layout = find_type(int(Type[name]))
    assert layout is not None
    blocks = random_blocks(name, 12, "random")
    data = bytearray(blocks.tobytes())
    weight = packed_weight(mapped(data), entry_of(name, (4, 3 * layout.block_size)), name="proj")
    before = q4.dequantize(weight, torch.float32)
    is_stored = isinstance(PACKED_TYPES[name].codes, tuple)
    first = torch.frombuffer(data, dtype=torch.uint8).untyped_storage().data_ptr()
    assert (weight.qdata.untyped_storage().data_ptr() == first) == is_stored
    assert torch.equal(q4.dequantize(weight.contiguous(), torch.float32), before)
    if is_stored:
        assert weight.nbytes <= blocks.nbytes * 1.03


def test_a_peek_has_the_facts_of_the_layer(every_type_gguf: Path) -> None:
    """What reports ask of a layer has its facts and its first row, and makes no codes for the others."""
    with q4.open(every_type_gguf) as checkpoint:
        assert isinstance(checkpoint.source, GgufSource)
        for name, weight in checkpoint.items():
            seen = checkpoint.source.peek(name)
            assert q4.WeightSpec.of(seen) == q4.WeightSpec.of(weight)
            assert seen.qdata.stride(0) == 0
            if not name.startswith("blk.0.up_exps"):
                assert torch.equal(q4.dequantize(seen)[3], q4.dequantize(weight)[0])
            assert dict(checkpoint.schema.layers[name].extras)["type"] in PACKED_TYPES


@pytest.mark.parametrize("name", sorted(PACKED_TYPES))
def test_backends_serve_every_type(name: str) -> None:
    """A layer of each type runs on the backend that is chosen, right by its float64 values, and is saved as read."""
    layout = find_type(int(Type[name]))
    assert layout is not None
    blocks = random_blocks(name, 24, "random")
    if name == "MXFP4":
        blocks[:, 0] = 120 + blocks[:, 0] % 8
    weight = packed_weight(mapped(bytearray(blocks.tobytes())), entry_of(name, (8, 3 * layout.block_size)), name="proj")
    x = torch.randn(5, weight.in_features, generator=torch.Generator().manual_seed(1))
    wanted = x.double() @ q4.dequantize(weight, torch.float64).T
    size = x.double().abs() @ q4.dequantize(weight, torch.float64).abs().T
    with q4.Session(q4.SessionConfig(activation_precision="exact")) as session:
        layer = session.linear(weight)
        assert bool(((layer(x).double() - wanted).abs() <= 1e-5 * size + 1e-12).all())
        assert torch.equal(layer.rows(torch.tensor([7, 0])), q4.dequantize(weight, torch.float32)[[7, 0]])
        again = q4.Q4Linear.empty(8, weight.in_features)
        again.load_state_dict(layer.state_dict())
        assert torch.equal(q4.dequantize(again.packed_weight()), q4.dequantize(weight))


def test_each_type_is_packed_dense_or_refused() -> None:
    """All of the owner's types have this package's sizes, but for Q8_1, whose block ggml made smaller."""
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        known = find_type(int(kind))
        assert known is not None
        assert (known.name, known.block_size) == (kind.name, sizes[0])
        assert known.block_bytes == (36 if kind.name == "Q8_1" else sizes[1])
    unread = {kind.name for kind in gguf.GGML_QUANT_SIZES} - {*PACKED_TYPES, *DENSE_TYPES, *UNPACKED_TYPES}
    assert unread == {"Q8_K", "Q1_0"}


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (133, "Q6_0 of ik_llama.cpp"),
        (139, "IQ4_K of ik_llama.cpp"),
        (214, "type 214 of ik_llama.cpp"),
        (31, "Q4_0_4_4, which ggml removed"),
        (1000, "type 1000"),
        (15, "Q8_K"),
    ],
)
def test_other_types_are_named(number: int, name: str) -> None:
    """Types of ik_llama.cpp, removed ones and unknown ones are refused under a name that tells which they are."""
    assert name_of(number) == name
    problem = refusal(TensorEntry("a.weight", (4, 256), number, find_type(number), 0, None))
    assert problem is not None
    assert problem.value == name


@pytest.mark.parametrize("name", sorted(UNPACKED_TYPES))
def test_unpacked_types_are_dense_on_request(name: str) -> None:
    """Types that no format expresses are refused with the option that reads them, and then have the owner's bits."""
    layout = find_type(int(Type[name]))
    assert layout is not None
    entry = entry_of(name, (4, 2 * layout.block_size))
    problem = refusal(entry)
    assert problem is not None
    assert "options={'dequantize': True}" in problem.rule
    assert refusal(entry, dequantize=True) is None
    blocks = random_blocks(name, 8, "ones")
    values = unpacked_tensor(mapped(bytearray(blocks.tobytes())), entry)
    expected = gguf.quants.dequantize(blocks, Type[name]).reshape(4, -1)
    assert values.numpy().tobytes() == np.ascontiguousarray(expected).tobytes()


def write_nvfp4(path: Path, *, scale: np.ndarray[Any, Any], shape: tuple[int, ...] = (3, 4, 64)) -> Path:
    """Write a file with an NVFP4 tensor and a tensor of the name that its global scale has."""
    writer = gguf.GGUFWriter(path, "llama")
    blocks = random_blocks("NVFP4", int(np.prod(shape)) // 64, "random").reshape(*shape[:-1], -1)
    writer.add_tensor("blk.0.up.weight", blocks, raw_dtype=Type.NVFP4)
    writer.add_tensor("blk.0.up.scale", scale)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sidecar_scales_of_nvfp4(tmp_path: Path) -> None:
    """A tensor NAME.scale is the global scale of each expert, and no dense one; other shapes and dtypes are refused."""
    path = write_nvfp4(tmp_path / "a.gguf", scale=np.array([0.5, 2.0, -0.0], np.float32))
    with q4.open(path) as checkpoint:
        assert list(checkpoint) == ["blk.0.up.0", "blk.0.up.1", "blk.0.up.2"]
        assert not checkpoint.dense
        plain = [q4.dequantize(_without_global(checkpoint[name])) for name in checkpoint]
        for index, factor in enumerate((0.5, 2.0, 0.0)):
            assert torch.equal(q4.dequantize(checkpoint[f"blk.0.up.{index}"]), plain[index] * factor)
    for scale in (np.ones(2, np.float32), np.ones(3, np.float16), np.ones((3, 1), np.float32)):
        with pytest.raises(q4.SchemaError, match=r"with its global scale blk\.0\.up\.scale of F32 \[3\]"):
            q4.open(write_nvfp4(tmp_path / "b.gguf", scale=scale))
    path = write_nvfp4(tmp_path / "c.gguf", scale=np.array([np.nan], np.float32), shape=(4, 64))
    with q4.open(path) as checkpoint, pytest.raises(q4.CheckpointError) as caught:
        checkpoint["blk.0.up"]
    assert caught.value.name == "blk.0.up.scale[]"


def _without_global(weight: q4.PackedWeight) -> q4.PackedWeight:
    return q4.PackedWeight(
        format=weight.format, qdata=weight.qdata, scale=weight.scale, out_features=weight.out_features,
        in_features=weight.in_features, block_size=16, scale_kind=q4.ScaleKind.E4M3, packing=weight.packing,
        dtype=torch.float32,
    )  # fmt: skip


def _samples() -> list[Path]:
    return sorted(SAMPLES.glob("gguf-*")) if SAMPLES.is_dir() else []


@pytest.mark.samples
@pytest.mark.parametrize("folder", _samples(), ids=lambda folder: folder.name)
def test_samples_are_their_owners_values(folder: Path) -> None:
    """Each module of each sample file dequantises to the bits that the owner's library computed."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    expected = np.load(folder / "expected.npz")
    with q4.open(folder / meta["open"]) as checkpoint:
        for module, facts in meta["modules"].items():
            names = [module] if module in checkpoint else [f"{module}.{index}" for index in range(facts["shape"][0])]
            values = np.stack([q4.dequantize(checkpoint[name], torch.float32).numpy() for name in names])
            values = values.reshape(facts["shape"])
            if meta.get("tolerance_ulp"):
                np.testing.assert_array_max_ulp(values, expected[module], meta["tolerance_ulp"])
                continue
            unsigned = values + np.float32(0)  # the owner's code for -0 is +0
            if module in expected:
                assert unsigned.tobytes() == (expected[module] + np.float32(0)).tobytes()
                continue
            assert facts["sha256"] in {hashlib.sha256(item.tobytes()).hexdigest() for item in (values, unsigned)}


@pytest.mark.samples
def test_samples_were_found() -> None:
    """The folder has the sample files of all types."""
    assert len(_samples()) == 21
