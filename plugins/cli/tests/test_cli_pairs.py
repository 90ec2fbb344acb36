"""From every dialect that is written to every other one: the same numbers, and the same bytes back, or refused."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from safetensors.torch import load_file

import q4core as q4
from q4_cli.conversion import Contents, Conversion, find_sink
from tests.support.samples import bits

if TYPE_CHECKING:
    from collections.abc import Iterator

WRITTEN = sorted(item.name for item in q4.dialects() if type(item).write is not q4.Dialect.write)
KINDS = ("plain", "double_quant", "e4m3", "e4m3_mul", "e4m3_div", "e8m0")
SHAPE = (64, 256)
TEXTS = ("compute_dtype",)
"""Tensors of text, which say what dtype the weight had before it was packed."""


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype in {torch.float32, torch.float16} else tensor


def _int8(weight: q4.PackedWeight) -> q4.PackedWeight:
    """Return signed bytes as the integers that they are, 128 above."""
    return attrs.evolve(weight, format=q4.BUILTIN_FORMATS["int8"], qdata=weight.qdata ^ 128)


def _candidates(formats: frozenset[str]) -> Iterator[q4.PackedWeight]:
    """Yield weights of a dialect's formats, with each kind of scales, block and zero points that a rule makes."""
    random = torch.Generator().manual_seed(11)
    dense = torch.randn(SHAPE, generator=random)
    for name in sorted(formats):
        for kind, symmetric, block in itertools.product(KINDS, (False, True), (None, 32)):
            is_int8 = name == "int8"
            try:
                weight = q4.quantize(
                    dense,
                    "q8_0" if is_int8 else name,
                    scale_kind=q4.ScaleKind(kind),
                    symmetric=symmetric,
                    block_size=block,
                    name="proj",
                )
            except q4.Q4Error:
                continue
            weight = _int8(weight) if is_int8 else weight
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                yield weight.map_tensors(functools.partial(_cast, dtype=dtype))


def _converted(
    folder: Path, weight: q4.PackedWeight, target: str
) -> tuple[q4.PackedWeight, dict[str, torch.Tensor]] | None:
    """Write a weight as the command does, and return it as it is read again, with its tensors; None where refused."""
    plan = Conversion(Contents({"proj": weight}, {}, {"proj": "proj"}, {}), find_sink(target))
    try:
        plan.check(lambda _: None, "here")
    except q4.DialectError:
        return None
    weights = plan.weights(lambda _: None)
    if target == "gguf":
        q4.save_checkpoint(folder.with_suffix(".gguf"), weights, dialect=target)
        return q4.open(folder.with_suffix(".gguf"))["proj"], {}
    q4.save_checkpoint(folder, weights, dialect=target, config={"dtype": "bfloat16"})
    with q4.open(folder, dialect=target) as checkpoint:
        assert checkpoint.schema.layers["proj"].dialect == target
        return checkpoint["proj"], load_file(folder / "model.safetensors")


def _judge(folder: Path, weight: q4.PackedWeight, source: str) -> int:
    """Convert a weight to every target that takes it, and back; return how many did."""
    made = _converted(folder / "own", weight, source)
    if made is None:
        return 0
    first, before = made
    values, count = bits(q4.dequantize(first, torch.float32)), 0
    for target in (*WRITTEN, "gguf"):
        there = _converted(folder / target, first, target)
        if there is None:
            continue
        count += 1
        assert torch.equal(
            bits(q4.dequantize(there[0], torch.float32) + 0), bits(q4.dequantize(first, torch.float32) + 0)
        )
        back = _converted(folder / f"{target}-back", there[0], source)
        if back is None and "gguf" in {target, source}:
            continue  # zero points that became offsets
        assert back is not None, target
        assert torch.equal(bits(q4.dequantize(back[0], torch.float32)), values), target
        if target == "gguf":
            continue  # whose blocks are smaller: scales come back once for each of them
        for name in before.keys() & back[1].keys():
            if name.rpartition(".")[2].startswith(TEXTS) or "quant_state" in name:
                continue
            old, new = before[name], back[1][name]
            if old.dtype == new.dtype:
                assert torch.equal(bits(old), bits(new)), (target, name)
            else:
                assert torch.equal(old.double(), new.double()), (target, name)
    return count


@pytest.mark.parametrize("source", [*WRITTEN, "gguf"])
def test_every_pair_is_exact_or_refused(source: str, tmp_path: Path) -> None:
    """What another dialect takes has every number bit for bit, and comes back as it was; so do tensors of one dtype."""
    seen: set[tuple[object, ...]] = set()
    for index, weight in enumerate(_candidates(find_sink(source).formats)):
        kind = (weight.format, weight.scale_kind, weight.block_size, weight.zero is None, weight.scale.dtype)
        if kind not in seen and _judge(tmp_path / f"{index}", weight, source):
            seen.add(kind)
    assert seen


@pytest.mark.slow
@pytest.mark.samples
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_samples_are_exact_or_refused(every: int, tmp_path: Path) -> None:
    """So are layers that the owners of the formats wrote, of each kind one, or of one kind in four."""
    seen: set[tuple[object, ...]] = set()
    written = 0
    for folder in sorted(Path(os.environ["Q4_SAMPLES"]).glob("*/checkpoint")):
        files = list(folder.glob("*.gguf"))
        with (
            contextlib.suppress(q4.CheckpointError, q4.SchemaError),
            q4.open(files[0] if files else folder) as checkpoint,
        ):
            for name, layer in checkpoint.schema.layers.items():
                kind = (folder.parent.name, layer.dialect, layer.format, layer.shape, layer.type)
                if kind not in seen and layer.dialect in {*WRITTEN, "gguf"}:
                    seen.add(kind)
                    if len(seen) % every == 0:
                        written += _judge(tmp_path / f"{len(seen)}", checkpoint[name], layer.dialect)
    assert written > 300 // every
