"""Nibble orders: golden bytes from public packages, inverses, strides, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

import q4core as q4
from q4core.formats import pack_codes, unpack_codes
from tests.support.samples import PACKINGS, pack

VECTORS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "conformance/src/q4_conformance/golden/packing.json").read_text(encoding="utf-8")
)


def _packing(vector: dict[str, Any]) -> q4.Packing:
    return q4.Packing(q4.NibbleOrder(vector["order"]), vector["group"])


@pytest.mark.parametrize("name", VECTORS)
def test_golden_bytes(name: str) -> None:
    """The bytes that a package packed hold its codes, and unpack to them."""
    vector = VECTORS[name]
    codes = torch.tensor([int(digit, 16) for digit in vector["codes"]], dtype=torch.uint8)
    stored = torch.frombuffer(bytearray.fromhex(vector["bytes"]), dtype=torch.uint8)
    assert torch.equal(unpack_codes(stored, _packing(vector))[: len(codes)], codes)
    if len(codes) % 2 == 0:  # bitsandbytes pads an odd nibble with the code of zero, which is not a packing's matter
        assert torch.equal(pack_codes(codes, _packing(vector)), stored)


def test_every_order_has_golden_bytes() -> None:
    """No nibble order is without a stranger's witness."""
    assert {vector["order"] for vector in VECTORS.values()} == {"low_first", "high_first", "half_split"}


@hypothesis.given(st.sampled_from([*PACKINGS]), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
def test_packing_is_its_definition_and_unpacking_its_inverse(name: str, rows: int, groups: int, seed: int) -> None:
    """Packing follows the definition code by code, and unpacking gives the codes back."""
    packing = PACKINGS[name]
    codes = np.random.default_rng(seed).integers(0, 16, (rows, groups * (packing.group or 2))).astype(np.uint8)
    packed = pack_codes(torch.from_numpy(codes), packing)
    assert torch.equal(packed, pack(codes, packing))
    assert packed.is_contiguous()
    assert torch.equal(unpack_codes(packed, packing), torch.from_numpy(codes))


@pytest.mark.parametrize("packing", [q4.Packing.LOW_FIRST, q4.Packing.HIGH_FIRST], ids=str)
def test_odd_codes_are_padded_with_zero(packing: q4.Packing) -> None:
    """An odd number of codes takes one more nibble, which is zero."""
    codes = torch.full((2, 5), 15, dtype=torch.uint8)
    packed = pack_codes(codes, packing)
    assert packed.shape == (2, 3)
    assert unpack_codes(packed, packing)[:, 5].tolist() == [0, 0]


def test_bytes_hold_one_code_each() -> None:
    """BYTES is the identity on 8-bit codes, in both directions."""
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    assert torch.equal(pack_codes(codes, q4.Packing.BYTES), codes)
    assert torch.equal(unpack_codes(codes, q4.Packing.BYTES), codes)
    assert q4.Packing.BYTES.codes_per_byte == 1


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_views_unpack_like_copies(packing: q4.Packing) -> None:
    """Packed bytes may have any strides, and any leading dimensions."""
    data = torch.randint(0, 256, (3, 4, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    view = data[:, 1:3, ::2]
    assert torch.equal(unpack_codes(view, packing), unpack_codes(view.contiguous(), packing))
    assert unpack_codes(view, packing).shape == (3, 2, 64)


def test_input_is_only_read() -> None:
    """Neither direction changes what it is given."""
    data = torch.arange(64, dtype=torch.uint8)
    for packing in PACKINGS.values():
        pack_codes(unpack_codes(data, packing), packing).zero_()
    assert torch.equal(data, torch.arange(64, dtype=torch.uint8))


def test_cut_groups_are_refused() -> None:
    """HALF_SPLIT works on whole groups; the error says of how many."""
    half = q4.Packing.half_split(32)
    with pytest.raises(q4.FormatError) as caught:
        pack_codes(torch.zeros(2, 40, dtype=torch.uint8), half)
    assert (caught.value.name, caught.value.value) == ("codes", 40)
    with pytest.raises(q4.FormatError) as caught:
        unpack_codes(torch.zeros(2, 20, dtype=torch.uint8), half)
    assert (caught.value.name, caught.value.value) == ("packed bytes", 20)


@pytest.mark.parametrize(
    ("order", "group"),
    [
        (q4.NibbleOrder.HALF_SPLIT, 0),
        (q4.NibbleOrder.HALF_SPLIT, 31),
        (q4.NibbleOrder.HALF_SPLIT, -2),
        (q4.NibbleOrder.LOW_FIRST, 32),
        (q4.NibbleOrder.BYTES, 2),
    ],
)
def test_impossible_groups_are_refused(order: q4.NibbleOrder, group: int) -> None:
    """A group belongs to HALF_SPLIT alone, and is even and positive."""
    with pytest.raises(q4.FormatError) as caught:
        q4.Packing(order, group)
    assert (caught.value.name, caught.value.value) == ("group", group)


def test_packings_are_values() -> None:
    """Packings compare and hash by what they are, and print in one word."""
    assert q4.Packing.half_split(32) == q4.Packing(q4.NibbleOrder.HALF_SPLIT, 32)
    assert len({q4.Packing.LOW_FIRST, q4.Packing(q4.NibbleOrder.LOW_FIRST)}) == 1
    assert [str(item) for item in (q4.Packing.LOW_FIRST, q4.Packing.half_split(16))] == ["low_first", "half_split:16"]
