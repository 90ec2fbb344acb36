"""From every dialect that is written to every other one: the same numbers, and the same bytes back, or refused."""

from __future__ import annotations

import functools
import itertools
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
    from pathlib import Path

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
    q4.save_checkpoint(folder, plan.weights(lambda _: None), dialect=target, config={"dtype": "bfloat16"})
    with q4.open(folder, dialect=target) as checkpoint:
        assert checkpoint.schema.layers["proj"].dialect == target
        return checkpoint["proj"], load_file(folder / "model.safetensors")


@pytest.mark.parametrize("source", WRITTEN)
def test_every_pair_is_exact_or_refused(source: str, tmp_path: Path) -> None:
    """What another dialect takes has every number bit for bit, and comes back as it was; so do tensors of one dtype."""
    seen: set[tuple[object, ...]] = set()
    for index, weight in enumerate(_candidates(find_sink(source).formats)):
        kind = (weight.format, weight.scale_kind, weight.block_size, weight.zero is None, weight.scale.dtype)
        made = None if kind in seen else _converted(tmp_path / f"{index}", weight, source)
        if made is None:
            continue
        seen.add(kind)
        first, before = made
        values = bits(q4.dequantize(first, torch.float32))
        for target in WRITTEN:
            there = _converted(tmp_path / f"{index}-{target}", first, target)
            if there is None:
                continue
            assert torch.equal(bits(q4.dequantize(there[0], torch.float32)), values), target
            back = _converted(tmp_path / f"{index}-{target}-back", there[0], source)
            assert back is not None, target
            assert torch.equal(bits(q4.dequantize(back[0], torch.float32)), values), target
            for name in before.keys() & back[1].keys():
                if name.rpartition(".")[2].startswith(TEXTS) or "quant_state" in name:
                    continue
                old, new = before[name], back[1][name]
                if old.dtype == new.dtype:
                    assert torch.equal(bits(old), bits(new)), (target, name)
                else:
                    assert torch.equal(old.double(), new.double()), (target, name)
    assert seen
