"""Memory of a prepared weight, compared with the packed one."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import q4core as q4
from q4_cpu_native import CpuNative
from tests.support.cpu_layers import layer_on, quantised
from tests.support.samples import random_weight

FORMATS = sorted(CpuNative.capabilities.formats)


def _ratio(weight: q4.PackedWeight) -> float:
    """Return the bytes of what the backend prepares over those of the weight's tensors."""
    layer = layer_on(CpuNative(), weight)
    return layer.diagnostics().prepared_bytes / sum(tensor.nbytes for _, tensor in weight.tensors())


@pytest.mark.parametrize("format_", FORMATS)
def test_a_prepared_weight_is_hardly_larger_than_a_packed_one(format_: str) -> None:
    """Nothing but rows beyond the last tile is added: at most 5 percent."""
    weight = quantised(torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1)), format_)
    assert _ratio(weight) <= 1.05


@pytest.mark.parametrize(("format_", "block"), [("q4_0", 32), ("iq4_nl", 32), ("q4_1", 32), ("q4_1", 16), ("q8_0", 16)])
def test_super_blocks_stay_as_they_are(format_: str, block: int) -> None:
    """A byte for each block stays one; the float16 of a super-block is there twice: for kernels and as read."""
    weight = random_weight(format_, 1024, 1024, q4.ScaleKind.SUPER_BLOCK, block=block)
    assert _ratio(weight) <= 1.05


@pytest.mark.parametrize(
    ("format_", "bits", "held"),
    [("q4_0", 3, 3.5), ("q4_1", 2, 3), ("q8_0", 5, 5.5), ("q8_0", 6, 6.5), ("q8_affine", 5, 6)],
)
def test_codes_of_fewer_bits_take_these(format_: str, bits: int, held: float) -> None:
    """Tiles hold codes of 2, 3, 5 and 6 bits in as many, next to float16 scales and offsets of blocks of 32."""
    weight = random_weight(format_, 1024, 1024, block=32)
    numbers: dict[str, Any] = {"scale": weight.scale.half()}
    if weight.offset is not None:
        numbers["offset"] = weight.offset.half()
    codes = torch.randint(0, 1 << bits, (1024, 1024), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    codes += {"q4_0": 8 - (1 << bits - 1), "q8_0": 256 - (1 << bits - 1)}.get(format_, 0)
    weight = attrs.evolve(weight, qdata=q4.pack_codes(codes, weight.packing), **numbers)
    assert layer_on(CpuNative(), weight).diagnostics().prepared_bytes * 8 / 2**20 == held


@pytest.mark.parametrize("group", [32, 64, 128])
def test_zeros_of_integer_groups_stay_as_they_are(group: int) -> None:
    """INT4 with groups of 32, 64 and 128 keeps its scales and zeros in their own types."""
    weight = q4.quantize(torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1)), "int4", block_size=group)
    assert _ratio(weight) <= 1.05


def test_double_quantised_scales_cost_an_eighth() -> None:
    """Besides a block's byte, from which it is saved as read, there are the four that kernels read: 37 for 33."""
    dense = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))
    weight = q4.quantize(dense, "nf4", scale_kind=q4.ScaleKind.DOUBLE_QUANT)
    assert weight.scale_kind is q4.ScaleKind.DOUBLE_QUANT
    assert _ratio(weight) <= 1.125


def test_large_tiles_start_where_a_huge_page_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2 MiB on they do, and what is counted is their own size."""
    made: list[q4.Prepared] = []
    prepare = CpuNative.prepare

    def spied(self: CpuNative, *arguments: Any) -> q4.Prepared:
        made.append(prepare(self, *arguments))
        return made[-1]

    monkeypatch.setattr(CpuNative, "prepare", spied)
    for rows in (1024, 2048):
        weight = random_weight("nf4", rows, 2048)
        layer = layer_on(CpuNative(), weight)
        tiles = made[-1].tensors[0]
        assert tiles.nbytes <= layer.diagnostics().prepared_bytes < tiles.nbytes + (1 << 20)
        assert tiles.data_ptr() % (2 << 20) == 0 or rows == 1024
        assert torch.equal(CpuNative().export(made[-1]).qdata, weight.qdata)
