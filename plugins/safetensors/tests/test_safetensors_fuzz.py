"""Damaged safetensors files: each is refused with a typed error, or read as what its bytes say; nothing in between.

The mutants are the same in every run. One that opens must be consistent: every tensor of the header is accounted for,
each of them is what the safetensors package loads where that opens the file too, and reading twice gives the same.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import safetensors
import safetensors.torch
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TYPED = (q4.CheckpointError, q4.SchemaError, q4.WeightError, q4.DialectError)
DIALECTS = (
    *("simple-nf4", "simple-nvfp4", "bitsandbytes", "torchao-nvfp4-linear", "torchao-nvfp4-swizzled"),
    *("torchao-mxfp4-swizzled", "modelopt-nvfp4", "comfyui-nvfp4", "compressed-tensors-nvfp4"),
)
MOST_BYTES = 64 << 20


@attrs.frozen
class Base:
    """A whole file, taken apart."""

    header: dict[str, Any]
    body: bytes

    def build(self, header: bytes | None = None, body: bytes | None = None, length: int | None = None) -> bytes:
        """Return a file from these parts or others."""
        text = json.dumps(self.header).encode() if header is None else header
        size = len(text) if length is None else length
        return size.to_bytes(8, "little") + text + (self.body if body is None else body)


def _double_quantised(weight: q4.PackedWeight) -> q4.PackedWeight:
    return attrs.evolve(
        weight,
        scale=torch.arange(weight.scale.numel(), dtype=torch.uint8).reshape(weight.scale.shape),
        scale_kind=q4.ScaleKind.DOUBLE_QUANT,
        nested_codebook=torch.linspace(-1, 1, 256),
        nested_scale=torch.ones(-(-weight.scale.numel() // 256)),
        nested_offset=torch.tensor(1.5),
    )


def _weight(dialect: str, n: int, k: int) -> q4.PackedWeight:
    dense = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    if dialect == "bitsandbytes":
        return _double_quantised(q4.quantize(dense, "nf4"))
    if dialect == "simple-nf4":
        return q4.quantize(dense, "fp4")
    if "mxfp4" in dialect:
        return q4.quantize(dense, "mxfp4")
    weight = q4.quantize(dense, "nvfp4")
    if dialect == "simple-nvfp4":
        return attrs.evolve(weight, scale_kind=q4.ScaleKind.E4M3, global_scale=None)
    if dialect == "compressed-tensors-nvfp4":
        return attrs.evolve(weight, scale_kind=q4.ScaleKind.E4M3_DIV, global_scale=torch.tensor(700.0))
    return weight


def _base(dialect: str, folder: Path) -> Base:
    weights = {"a": _weight(dialect, 16, 128), "b.c": _weight(dialect, 32, 64)}
    dense = {"norm.weight": torch.ones(5), "a.bias": torch.ones(16, dtype=torch.bfloat16)}
    path = folder / "base.safetensors"
    q4.save_checkpoint(path, weights, dialect=dialect, dense=dense)
    raw = path.read_bytes()
    path.unlink()
    length = int.from_bytes(raw[:8], "little")
    return Base(json.loads(raw[8 : 8 + length]), raw[8 + length :])


def _flip(data: bytes, place: int, mask: int) -> bytes:
    return data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]


def _flip_header(base: Base, dice: random.Random) -> bytes:
    text = json.dumps(base.header).encode()
    return base.build(_flip(text, dice.randrange(len(text)), 1 << dice.randrange(8)))


def _change_header_byte(base: Base, dice: random.Random) -> bytes:
    text = bytearray(json.dumps(base.header).encode())
    for _ in range(dice.randint(1, 3)):
        text[dice.randrange(len(text))] = dice.choice(b'0123456789{}[]",:.-+eE \x00\xff')
    return base.build(bytes(text))


def _cut(base: Base, dice: random.Random) -> bytes:
    raw = base.build()
    return raw[: dice.choice([0, 1, 7, 8, 9, 10, dice.randrange(len(raw)), len(raw) - 1])]


def _add(base: Base, dice: random.Random) -> bytes:
    return base.build() + bytes(dice.randint(1, 40))


def _change_length(base: Base, dice: random.Random) -> bytes:
    absurd = [0, 1, 2, 2**31, 2**32, 2**63, 2**64 - 1, 100_000_001, dice.randrange(2**20)]
    return base.build(length=dice.choice(absurd))


def _repeat_key(base: Base, dice: random.Random) -> bytes:
    name = dice.choice(sorted(base.header))
    entry = json.dumps({name: base.header[dice.choice([name, *sorted(base.header)])]})
    return base.build(json.dumps(base.header)[:-1].encode() + b"," + entry[1:].encode())


SIZES: tuple[Any, ...] = (
    0,
    1,
    2,
    3,
    15,
    16,
    17,
    64,
    2**31,
    2**40,
    2**62,
    2**63,
    2**64,
    10**30,
    -1,
    1.5,
    "8",
    None,
    True,
    [],
)


def _entry_of(base: Base, dice: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    header = json.loads(json.dumps(base.header))
    name = dice.choice(sorted(set(header) - {"__metadata__"}))
    return header, header[name]


def _change_shape(base: Base, dice: random.Random) -> bytes:
    header, entry = _entry_of(base, dice)
    shape = entry["shape"]
    kind = dice.randrange(4)
    if kind == 0:
        entry["shape"] = dice.choice([None, "x", 7, {}, [2**62, 2**62], [0, 2**70], [1] * 100, [-1, -4]])
    elif kind == 1:
        entry["shape"] = shape[::-1]
    elif kind == 2 or not shape:
        entry["shape"] = [1, *shape]
    else:
        shape[dice.randrange(len(shape))] = dice.choice(SIZES)
    return base.build(json.dumps(header).encode())


def _change_dtype(base: Base, dice: random.Random) -> bytes:
    header, entry = _entry_of(base, dice)
    names = ["U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "BOOL", "F16", "BF16", "F32", "I64", "C64"]
    entry["dtype"] = dice.choice([*names, "", "u8", "U16", 8, None, ["U8"]])
    if dice.random() < 0.5:  # every second one keeps its number of bytes right
        sizes = {"F16": 2, "BF16": 2, "U16": 2, "F32": 4, "I64": 8, "C64": 8}
        width = entry["data_offsets"][1] - entry["data_offsets"][0]
        entry["shape"] = [width // sizes.get(str(entry["dtype"]), 1)]
    return base.build(json.dumps(header).encode())


def _change_offsets(base: Base, dice: random.Random) -> bytes:
    header, entry = _entry_of(base, dice)
    first, last = entry["data_offsets"]
    entry["data_offsets"] = dice.choice(
        [
            *([first, last + 1], [first + 1, last], [first + 4, last + 4], [last, first], [0, last - first]),
            *([first, 2**63], [-1, last], [first], [first, last, last], None, "0", [float(first), last], [first, "x"]),
        ]
    )
    return base.build(json.dumps(header).encode())


def _swap_offsets(base: Base, dice: random.Random) -> bytes:
    """Exchange the places of two tensors: legal where they are of one size, and then the numbers are exchanged too."""
    header = json.loads(json.dumps(base.header))
    one, two = dice.sample(sorted(set(header) - {"__metadata__"}), 2)
    header[one]["data_offsets"], header[two]["data_offsets"] = header[two]["data_offsets"], header[one]["data_offsets"]
    return base.build(json.dumps(header).encode())


def _rename(base: Base, dice: random.Random) -> bytes:
    header = json.loads(json.dumps(base.header))
    name = dice.choice(sorted(set(header) - {"__metadata__"}))
    place = dice.randrange(len(name))
    other = dice.choice(
        [name[:place] + dice.choice("._xq0") + name[place + 1 :], name + "_2", f"x.{name}", name.upper(), "", "\ud800"]
    )
    header[other] = header.pop(name)
    return base.build(json.dumps(header).encode())


def _drop(base: Base, dice: random.Random) -> bytes:
    """Take out a tensor with its bytes: a whole file in which a layer lacks something."""
    names = sorted(set(base.header) - {"__metadata__"}, key=lambda name: base.header[name]["data_offsets"][0])
    gone = dice.choice(names)
    header: dict[str, Any] = {"__metadata__": base.header["__metadata__"]}
    body = b""
    for name in names:
        first, last = base.header[name]["data_offsets"]
        if name != gone:
            header[name] = {**base.header[name], "data_offsets": [len(body), len(body) + last - first]}
            body += base.body[first:last]
    return base.build(json.dumps(header).encode(), body)


def _change_metadata(base: Base, dice: random.Random) -> bytes:
    header = json.loads(json.dumps(base.header))
    metadata = header["__metadata__"]
    key = dice.choice(sorted(metadata))
    text = metadata[key]
    kind = dice.randrange(5)
    if kind == 0:
        metadata[key] = dice.choice([1, None, {}, ["x"], "", "{", "[" * 50_000, '{"_type": "NVFP4Tensor"}'])
    elif kind == 1:
        header["__metadata__"] = dice.choice([None, 1, [], "x", {"a": {"b": "c"}}])
    elif kind == 2:
        del metadata[key]
    else:
        place = dice.randrange(max(1, len(text)))
        metadata[key] = text[:place] + dice.choice('0129{}[]"tfx ') + text[place + 1 :]
    return base.build(json.dumps(header).encode())


def _damage_tensor(base: Base, dice: random.Random) -> bytes:
    """Put NaN, infinity, negative or random bytes into one tensor."""
    name = dice.choice(sorted(set(base.header) - {"__metadata__"}))
    first, last = base.header[name]["data_offsets"]
    width = min(dice.choice([1, 2, 4, 8]), last - first)
    place = first + dice.randrange(last - first - width + 1) // width * width
    bad = dice.choice([b"\xff" * 8, b"\x7f" * 8, b"\x80" * 8, b"\x00\x00\x80\x7f" * 2, b"\x00\x00\xc0\xff" * 2])
    new = dice.choice([bad[:width], bytes(dice.randrange(256) for _ in range(width))])
    return base.build(body=base.body[:place] + new + base.body[place + width :])


MUTATIONS: tuple[Callable[[Base, random.Random], bytes], ...] = (
    *(_flip_header, _change_header_byte, _cut, _add, _change_length, _repeat_key, _change_shape, _change_dtype),
    *(_change_offsets, _swap_offsets, _rename, _drop, _change_metadata, _damage_tensor, _damage_tensor),
)


def _mutants(base: Base, seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    for number in range(count):
        mutation = MUTATIONS[number % len(MUTATIONS)]
        dice = random.Random(seed * 100_000 + number)  # the same mutants in every run
        yield f"{mutation.__name__} {number}", mutation(base, dice)


def _bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.view(torch.uint8).tolist())


def _is_accounted_for(checkpoint: q4.Checkpoint, names: set[str]) -> bool:
    """Return whether every tensor is a layer's or dense, but for those of layers that no dialect reads."""
    used = {key for layer in checkpoint.schema.layers.values() for key in layer.keys.values()}
    left = names - used - set(checkpoint.dense)
    return not used & set(checkpoint.dense) and (not left or bool(checkpoint.schema.unsupported))


def _assert_says(error: q4.Q4Error, path: str) -> None:
    """Check that an error names the file, and what is wrong with which part of it."""
    assert error.where == path
    if isinstance(error, q4.SchemaError):
        assert error.problems
        assert all(problem.code and problem.key and problem.rule for problem in error.problems)
    elif error.rule is None:  # a plain sentence about the whole file
        assert error.hint
    else:
        assert error.name


def _read_all(path: Path) -> dict[str, Any]:
    """Return everything that a checkpoint gives, layers whose numbers are refused as the error's type."""
    found: dict[str, Any] = {}
    with q4.open(path) as checkpoint:
        for name, tensor in checkpoint.dense.items():
            found[name] = _bits(tensor)
        for module in checkpoint:
            try:
                weight = checkpoint[module]
            except TYPED as error:
                _assert_says(error, str(checkpoint.path))
                found[f"layer {module}"] = type(error)
                continue
            assert bool(torch.isfinite(weight.scale.to(torch.float32)).all())
            assert weight.codes().shape[-1] in {weight.in_features, weight.in_features * weight.out_features}
            found[f"layer {module}"] = {field: _bits(tensor) for field, tensor in weight.tensors()}
        names = {*found} | {key for layer in checkpoint.schema.layers.values() for key in layer.keys.values()}
        theirs = _load_theirs(path)
        if theirs is not None:
            assert _is_accounted_for(checkpoint, set(theirs))
            assert all(found[name] == _bits(theirs[name]) for name in checkpoint.dense)
            assert names >= set(checkpoint.dense)
    return found


def _load_theirs(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        return safetensors.torch.load_file(path)
    except Exception:  # noqa: BLE001  # their judgement of a damaged file is not ours to classify
        return None


@pytest.mark.parametrize("mutants", [200, pytest.param(2_800, marks=[pytest.mark.slow, pytest.mark.soak])])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_damaged_file_is_refused_or_read_as_it_says(dialect: str, mutants: int, tmp_path: Path) -> None:
    """Every mutant of a small file is refused with a typed error, or read consistently, within little memory."""
    base = _base(dialect, tmp_path)
    path = tmp_path / "x.safetensors"
    outcomes: dict[str, int] = {}
    path.write_bytes(base.build())
    whole = _read_all(path)
    assert sum(isinstance(item, dict) for item in whole.values()) == 2
    tracemalloc.start()
    try:
        for label, raw in _mutants(base, DIALECTS.index(dialect), mutants):
            path.unlink()
            path.write_bytes(raw)
            tracemalloc.reset_peak()
            try:
                found = _read_all(path)
            except TYPED as error:
                _assert_says(error, str(path))
                outcomes["refused"] = outcomes.get("refused", 0) + 1
                continue
            finally:
                assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, label
            assert _read_all(path) == found, label
            outcomes["read"] = outcomes.get("read", 0) + 1
    finally:
        tracemalloc.stop()
    assert outcomes["refused"] > mutants // 2
    assert outcomes["read"] > mutants // 20


def _index_mutants(homes: dict[str, str]) -> Iterator[tuple[str, str]]:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": homes})
    dice = random.Random(7)  # the same mutants in every run
    for number in range(150):
        place = dice.randrange(len(text))
        kind = number % 3
        if kind == 0:
            yield f"cut at {place}", text[:place]
        elif kind == 1:
            yield f"byte {place}", text[:place] + dice.choice('{}[]",:x/.0') + text[place + 1 :]
        else:
            name = dice.choice(sorted(homes))
            home = dice.choice(["../1.safetensors", "/1.safetensors", "3.safetensors", "", "1.safetensors", 1, None])
            yield f"{name} at {home}", json.dumps({"weight_map": {**homes, name: home}})


def test_damaged_index_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    """Every mutant of an index is refused with a typed error, or opens to the very numbers of the whole one."""
    base = _base("bitsandbytes", tmp_path)
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "x.safetensors").write_bytes(base.build())
    tensors = safetensors.torch.load_file(whole / "x.safetensors")
    homes = {name: f"{index % 2}.safetensors" for index, name in enumerate(sorted(tensors))}
    folder = tmp_path / "sharded"
    folder.mkdir()
    for shard in ("0.safetensors", "1.safetensors"):
        safetensors.torch.save_file({name: tensors[name] for name in tensors if homes[name] == shard}, folder / shard)
    index = folder / "model.safetensors.index.json"
    expected = None
    for label, text in [("whole", json.dumps({"weight_map": homes})), *_index_mutants(homes)]:
        index.write_text(text, encoding="utf-8")
        try:
            with q4.open(index) as checkpoint:
                found = {module: _bits(q4.dequantize(checkpoint[module])) for module in checkpoint}
                found |= {name: _bits(tensor) for name, tensor in checkpoint.dense.items()}
        except TYPED:
            assert expected is not None, label
            continue
        expected = found if expected is None else expected
        assert found == expected, label


def test_damaged_config_is_refused_or_harmless(tmp_path: Path) -> None:
    """Every mutant of config.json is refused with a typed error, or leaves the numbers of a layer as they are."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(_base("modelopt-nvfp4", tmp_path).build())
    text = json.dumps({"dtype": "bfloat16", "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    expected = {module: _bits(weight.qdata) for module, weight in q4.open(path).items()}
    dice = random.Random(11)  # the same mutants in every run
    for _ in range(100):
        place = dice.randrange(len(text))
        (tmp_path / "config.json").write_text(text[:place] + dice.choice('{}[]",:x10') + text[place + 1 :], "utf-8")
        try:
            found = {module: _bits(weight.qdata) for module, weight in q4.open(path).items()}
        except TYPED:
            continue
        assert found == expected
