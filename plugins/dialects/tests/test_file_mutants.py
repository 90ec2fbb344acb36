"""3,000 damaged folders of every dialect: shards, index, config and tensors; each is read, or refused by name."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import struct
import time
import warnings
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import safetensors.torch
import torch
from cases import BUILDERS, FP8

import q4core as q4
from q4core.plugin_api import find_dialect
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Chance = random.Random
    Tensors = dict[str, torch.Tensor]

WRITTEN = {
    "awq": "int4",
    "awq-gemv": "int4",
    "bitsandbytes": "nf4",
    "comfyui-nvfp4": "nvfp4",
    "gpt-oss-mxfp4": "mxfp4",
    "gptq": "int4",
    "gptq-v2": "int4",
    "hqq": "int4",
    "mlx": "q4_1",
    "modelopt-nvfp4": "nvfp4",
    "simple-nf4": "nf4",
    "torchao-int4": "q4_1",
    "torchao-mxfp4-swizzled": "mxfp4",
    "torchao-nvfp4-linear": "nvfp4",
    "torchao-nvfp4-swizzled": "nvfp4",
}
"""Dialect → a format that it writes; the others' layers are the generated ones."""
_DTYPES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float8_e4m3fn)
_METHODS: tuple[Any, ...] = (
    *("gptq", "awq", "auto-round", "compressed-tensors", "modelopt", "quark", "gemma", "hqq", "bitsandbytes"),
    *("mxfp4", "torchao", "marlin", "", 7, None, [], {}),
)
_FACTS = (
    *("bits", "group_size", "checkpoint_format", "format", "packing_format", "version", "pack_dtype", "dynamic"),
    *("extra_config", "config_groups", "quant_algo", "num_bits", "data_type", "mode", "module_quant_configs", "sym"),
)
_VALUES: tuple[Any, ...] = (
    *(None, 0, -1, 3, 8, 7, 10**30, 1.5, float("nan"), "", "gemv", "gptq_v2", "marlin", "pack-quantized", True),
    *([], {}, [[]] * 9, {"(": {"bits": 3}}, {"proj": {"bits": 8}}, {"g": {"weights": {"num_bits": 3}}}, "x" * 100_000),
)


@attrs.define
class Folder:
    """A checkpoint that is about to be written: shards, the index, and the text of ``config.json``."""

    shards: list[Tensors]
    index: dict[str, Any]
    config: str
    metadata: dict[str, str]
    after: list[Callable[[Path], None]] = attrs.field(factory=list)
    """What happens to the files."""
    is_spoilt: bool = False
    """Whether the config is no JSON object any more."""

    def write(self, path: Path) -> None:
        """Write it, and do what happens afterwards."""
        for number, tensors in enumerate(self.shards):
            whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
            safetensors.torch.save_file(whole, path / f"model-{number}.safetensors", self.metadata or None)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": self.index}), encoding="utf-8")
        (path / "config.json").write_text(self.config, encoding="utf-8")
        for change in self.after:
            change(path)


@functools.cache
def _base(name: str) -> tuple[Tensors, dict[str, Any], dict[str, str]]:
    """Return a small layer of a dialect, with what config and header say."""
    if name not in WRITTEN:
        layer = FP8(13) if name == "fp8" else BUILDERS[name](3)
        return layer.tensors, layer.config, {}
    dialect = find_dialect(name, q4.dialects())
    generator = torch.Generator().manual_seed(1)
    weight = q4.quantize(torch.randn(32, 128, generator=generator), WRITTEN[name])
    written = dialect.write("proj", weight)
    entry = dialect.quantization_config({"proj": q4.WeightSpec.of(weight)}, ())
    config = {} if entry is None else dict.fromkeys(dialect.config_names, entry)
    return dict(written.tensors), config, dict(written.metadata)


def _folder(name: str) -> Folder:
    """Return a checkpoint of two shards, with the tensors of the layer in both."""
    tensors, config, metadata = _base(name)
    whole = {**tensors, "norm.weight": torch.ones(4)}
    shards: list[Tensors] = [{}, {}]
    for number, (key, tensor) in enumerate(whole.items()):
        shards[number % 2][key] = tensor
    index = {key: f"model-{number % 2}.safetensors" for number, key in enumerate(whole)}
    return Folder(shards, index, json.dumps(config), metadata)


def _lie(tensor: torch.Tensor, chance: Chance) -> torch.Tensor:
    """Return the same bytes as another dtype."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return flat.view(chance.choice([dtype for dtype in _DTYPES if flat.numel() % dtype.itemsize == 0]))


def _beyond(tensor: torch.Tensor, chance: Chance) -> torch.Tensor:
    """Return codes, zero points or group numbers of the most, the least, or any bytes."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    any_bytes = torch.tensor(list(chance.randbytes(tensor.nbytes)), dtype=torch.uint8)
    filled = torch.full_like(flat, chance.choice((0, 127, 128, 255)))
    return (filled if chance.randrange(2) else any_bytes).view(tensor.dtype).reshape(tensor.shape)


def _reshape(tensor: torch.Tensor, chance: Chance) -> torch.Tensor:
    return chance.choice(
        (
            tensor.reshape(-1),
            tensor[None],
            tensor[..., : chance.randrange(3)] if tensor.dim() else tensor.expand(3),
            torch.cat([tensor, tensor]) if tensor.dim() else tensor.reshape(1),
            tensor.transpose(0, -1) if tensor.dim() else tensor[None, None],
            torch.zeros([chance.randrange(3) for _ in range(chance.randrange(5))], dtype=tensor.dtype),
        )
    )


def _retype(tensor: torch.Tensor, chance: Chance) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=chance.choice(_DTYPES))


def _tensor_fault(folder: Folder, chance: Chance) -> None:
    """Damage, drop, rename or double one tensor."""
    shard = chance.choice([shard for shard in folder.shards if shard])
    key = chance.choice(sorted(shard))
    kind = chance.randrange(7)
    if kind < 4:
        shard[key] = (_lie, _beyond, _reshape, _retype)[kind](shard[key], chance)
        return
    other = key + chance.choice(("x", "_scale", ".y"))
    if kind == 4:  # tied keys: the same tensor under a second name
        other = chance.choice(("tied.weight", f"other.{key}", f"{key}.alias", "proj"))
    if kind > 4:
        tensor, home = shard.pop(key), folder.index.pop(key, "model-0.safetensors")
    else:
        tensor, home = shard[key], folder.index.get(key, "model-0.safetensors")
    if kind < 6 and other not in folder.index:
        shard[other], folder.index[other] = tensor, home


def _order_fault(folder: Folder, chance: Chance) -> None:
    """Give the layer a group for each in-feature that is out of range, of a wrong length, or not there."""
    order = torch.arange(128, dtype=torch.int32) // 128
    order[chance.randrange(128)] = chance.choice((-1, 1, 4, 2**31 - 1, -(2**31)))
    name = chance.choice(("proj.g_idx", "proj.weight_g_idx"))
    order = chance.choice((order, order[:5], order[None], order.to(torch.int64), order[:0]))
    for shard in folder.shards:
        shard.pop(name, None)
    folder.shards[0][name], folder.index[name] = order, "model-0.safetensors"


def _config_fault(folder: Folder, chance: Chance) -> None:
    """Let the config contradict, or be no config."""
    if folder.is_spoilt:
        return
    config = json.loads(folder.config)
    kind = chance.randrange(8)
    if kind < 4:
        holder = chance.choice(("quantization_config", "quantization"))
        entry = config.get(holder)
        entry = dict(entry) if isinstance(entry, dict) else {"quant_method": chance.choice(_METHODS)}
        for _ in range(chance.randrange(1, 3)):
            entry[chance.choice(_FACTS)] = chance.choice(_VALUES)
        config[holder] = entry
    elif kind == 4:
        config["quantization_config"] = chance.choice(_VALUES)
    elif kind == 5:
        folder.is_spoilt = True
        config = chance.choice(([], 3, None, "x", {"text_config": []}, {"quantization_config": None}))
    folder.config = json.dumps(config)
    if kind == 6:
        texts = ("{", "", "[" * 100_000, '{"a":' * 50_000, "\0", "{'a': 1}", '{"a": 1}{"a": 2}', '{"a": 1, "a": 2}')
        folder.config, folder.is_spoilt = chance.choice(texts), True
    elif kind == 7:
        many = {f"m{number}.*": {"bits": 8} for number in range(1000)}
        config = {"quantization_config": {"quant_method": chance.choice(_METHODS), chance.choice(_FACTS): many}}
        folder.config = json.dumps(config)


def _index_fault(folder: Folder, chance: Chance) -> None:
    """Let the index be wrong: other shards, tensors that are not there, paths, or no index."""
    key = chance.choice(sorted(folder.index))
    kind = chance.randrange(7)
    if kind == 0:
        folder.index[key] = "model-1.safetensors" if folder.index[key].startswith("model-0") else "model-0.safetensors"
    elif kind == 1:
        del folder.index[key]
    elif kind == 2:
        folder.index[chance.choice(("ghost.weight", "proj.ghost", ""))] = "model-0.safetensors"
    elif kind == 3:
        folder.index[key] = chance.choice(
            ("../model-0.safetensors", "/etc/passwd", "model-9.safetensors", "", 7, None, [], "a\0.safetensors")
        )
    else:
        text = chance.choice(("{", "[]", "", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map":' * 50_000))
        folder.after.append(lambda path: _replace(path / "model.safetensors.index.json", text.encode()))


def _shard_fault(folder: Folder, chance: Chance) -> None:
    """Let shards be missing, cut, doubled, foreign, or something else."""
    kind, number = chance.randrange(8), chance.randrange(2)
    name = f"model-{number}.safetensors"
    if kind == 0:
        folder.after.append(lambda path: (path / name).unlink())
    elif kind == 1:
        at = chance.random()
        folder.after.append(lambda path: os.truncate(path / name, int(at * (path / name).stat().st_size)))
    elif kind == 2:
        more = chance.randbytes(chance.randrange(1, 20))
        folder.after.append(lambda path: _replace(path / name, (path / name).read_bytes() + more))
    elif kind == 3:  # a tensor in both shards, in the index or not
        key = chance.choice(sorted(folder.shards[number]))
        folder.shards[1 - number][key] = folder.shards[number][key].clone()
        if chance.randrange(2):
            folder.index.pop(key)
    elif kind == 4:  # a shard of another model
        folder.shards[number] = chance.choice(
            ({"other.weight": torch.ones(3)}, {key: torch.ones(3) for key in folder.shards[number]})
        )
    elif kind == 5:
        folder.shards.append({chance.choice(("new.weight", *folder.index)): torch.ones(2)})
    elif kind == 6:
        text = json.dumps({"proj.x": {"dtype": "F4", "shape": [3, 3], "data_offsets": [0, 2**60]}}).encode()
        folder.after.append(lambda path: _replace(path / name, struct.pack("<Q", len(text)) + text))
    else:
        position, byte = chance.randrange(400), chance.randrange(256)

        def spoil(path: Path) -> None:
            data = bytearray((path / name).read_bytes())
            data[position % len(data)] = byte
            _replace(path / name, bytes(data))

        folder.after.append(spoil)


def _replace(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # a new file: the last one may still be mapped
    path.write_bytes(data)


_FAULTS = (_tensor_fault, _tensor_fault, _tensor_fault, _order_fault, _config_fault, _index_fault, _shard_fault)
NAMES = sorted({*WRITTEN, *BUILDERS, "fp8"})


def _read(path: Path) -> int:
    """Read every layer and dense tensor; return how many there were."""
    with q4.open(path) as checkpoint:
        for module in checkpoint:
            q4.dequantize(checkpoint[module], torch.float32)
        for tensor in checkpoint.dense.values():
            tensor.clone()
        return len(checkpoint) + len(checkpoint.dense)


@pytest.mark.parametrize("name", NAMES)
def test_layers_in_several_shards_are_read(name: str, tmp_path: Path) -> None:
    """Undamaged, codes in one shard and scales in another, each is its own dialect's layer."""
    folder = _folder(name)
    folder.write(tmp_path)
    with q4.open(tmp_path) as checkpoint:
        found = {layer.dialect for layer in (*checkpoint.schema.layers.values(), *checkpoint.schema.decoded.values())}
    assert found == {name}
    assert _read(tmp_path) > 1


@pytest.mark.slow
@pytest.mark.parametrize("each", [42, pytest.param(126, marks=pytest.mark.soak)])
def test_damaged_folders_are_read_or_refused_by_name(each: int, tmp_path: Path) -> None:
    """Of 1,000 none ends in an untyped error, a warning or a hang; errors name the file, and the key where one is."""
    assert len(NAMES) * each >= 1000
    refused, slowest, nameless = 0, 0.0, []
    for number in range(len(NAMES) * each):
        name = NAMES[number % len(NAMES)]
        chance = random.Random(number)
        folder = _folder(name)
        faults = [chance.choice(_FAULTS) for _ in range(chance.choice((1, 1, 1, 2)))]
        for fault in faults:
            if all(folder.shards) and folder.index:
                fault(folder, chance)
        path = tmp_path / str(number % 8)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        folder.write(path)
        start = time.thread_time()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a dialect that raises is left out with a warning
            try:
                _read(path)
            except q4.Q4Error as error:
                refused += 1
                text = str(error)
                names_key = any(name in text for name in ("proj", *(key.partition(".")[0] for key in folder.index)))
                is_of_a_tensor = {*faults} <= {_tensor_fault, _order_fault}
                if str(path) not in text or (is_of_a_tensor and not names_key):
                    nameless.append(f"{number} {name} {faults[0].__name__}: {text[:300]}")
            except Exception as error:  # noqa: BLE001  # which mutant it was
                pytest.fail(f"{number} {name} {[fault.__name__ for fault in faults]}: {type(error).__name__} {error}")
        slowest = max(slowest, time.thread_time() - start)
    assert nameless == []
    assert len(NAMES) * each // 3 < refused < len(NAMES) * each
    assert slowest < scaled(2.0)
