"""What ``quantize`` refuses: each fault is named with its field, its rule, its value and a hint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import q4core as q4
from tests.support.samples import QUANTISED

NAN, INF = float("nan"), float("inf")


def _refused(kind: type[q4.Q4Error], dense: Any, format: Any = "nf4", **options: Any) -> q4.Q4Error:  # noqa: A002
    with pytest.raises(kind) as caught:
        q4.quantize(dense, format, name="proj", **options)
    assert caught.value.where == "proj"
    return caught.value


@pytest.mark.parametrize(
    ("dense", "name", "value"),
    [
        ([[1.0]], "dense", "list"),
        (torch.zeros(64), "dense", [64]),
        (torch.zeros(()), "dense", []),
        (torch.zeros(2, 3, 64), "dense", [2, 3, 64]),
        (torch.zeros(2, 64, dtype=torch.int32), "dense", torch.int32),
        (torch.zeros(2, 64, dtype=torch.uint8), "dense", torch.uint8),
        (torch.zeros(2, 64, dtype=torch.bool), "dense", torch.bool),
        (torch.zeros(2, 64, dtype=torch.float64), "dense", torch.float64),
        (torch.zeros(2, 64, dtype=torch.complex64), "dense", torch.complex64),
        (torch.zeros(2, 64, dtype=torch.float8_e4m3fn), "dense", torch.float8_e4m3fn),
        (torch.zeros(2, 64, device="meta"), "dense", "meta"),
        (torch.eye(64).to_sparse(), "dense", torch.sparse_coo),
        (torch.zeros(0, 64), "N", 0),
        (torch.zeros(4, 0), "K", 0),
        (torch.zeros(1).expand(2**31, 64), "N", 2**31),
        (torch.zeros(1).expand(2**30, 2**20), "N * K", 2**50),
    ],
    ids=lambda value: None if isinstance(value, torch.Tensor) else str(value),
)
@pytest.mark.parametrize("format", ["nf4", "nvfp4", "int4"])
def test_what_is_no_weight(format: str, dense: Any, name: str, value: object) -> None:  # noqa: A002
    """Wrong types, ranks, dtypes, sizes and absurd sizes are refused before anything is computed."""
    error = _refused(q4.InputError, dense, format)
    assert (error.name, error.value) == (name, value)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("format", QUANTISED)
def test_not_finite(format: str, bad: float) -> None:  # noqa: A002
    """NaN and infinities are refused; the error says how many there are, and where the first is."""
    dense = torch.ones(300, 256)
    dense[7, 100] = dense[7, 5] = dense[299, 0] = bad
    error = _refused(q4.InputError, dense, format)
    assert (error.name, error.details["count"], error.details["index"]) == ("dense[7, 5]", 3, (7, 5))
    assert "3 of 76800" in str(error)


def test_not_finite_far_down() -> None:
    """A single NaN is found whatever row it is in."""
    dense = torch.ones(20_000, 256, dtype=torch.bfloat16)
    dense[19_999, 255] = NAN
    assert _refused(q4.InputError, dense).details["index"] == (19_999, 255)


@pytest.mark.parametrize(("format", "block"), [("nvfp4", 16), ("mxfp4", 32), ("q4_0", 32), ("q4_1", 32), ("q8_0", 32)])
def test_k_that_cuts_a_block(format: str, block: int) -> None:  # noqa: A002
    """Formats whose rows hold whole blocks say what K must be, and what to do about it."""
    error = _refused(q4.FormatError, torch.ones(2, 2 * block + 8), format)
    assert (error.name, error.rule, error.value) == ("K", f"a multiple of the block size {block}", 2 * block + 8)
    assert error.hint is not None
    assert f"{3 * block}" in error.hint
    assert "nf4" in error.hint


@pytest.mark.parametrize(
    ("format", "block"),
    [
        ("nf4", 48),
        ("nf4", 0),
        ("nf4", -64),
        ("nf4", 64.0),
        ("nf4", True),
        ("nvfp4", 32),
        ("int4", 0),
        ("int4", "128"),
    ],
)
def test_block_size(format: str, block: Any) -> None:  # noqa: A002
    """A block size that the format does not have is refused."""
    error = _refused(q4.FormatError, torch.ones(2, 256), format, block_size=block)
    assert (error.name, error.value) == ("block_size", block)


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("kind", [*q4.ScaleKind, "plain"])
def test_scale_kind(format: str, kind: Any) -> None:  # noqa: A002
    """A scale kind that the format is not stored with is refused, and the error lists those that it is."""
    read_alone = set() if format in {"q4_1", "q8_0"} else {q4.ScaleKind.SUPER_BLOCK}
    legal = q4.BUILTIN_FORMATS[format].scale_kinds - read_alone
    if kind in legal:
        assert q4.quantize(torch.ones(2, 256), format, scale_kind=kind).scale_kind is kind
        return
    error = _refused(q4.FormatError, torch.ones(2, 256), format, scale_kind=kind)
    assert (error.name, error.value) == ("scale_kind", kind)
    assert error.rule is not None
    assert all(str(item) in error.rule for item in legal - {q4.ScaleKind.SUPER_BLOCK})


@pytest.mark.parametrize(
    ("format", "packing", "k"),
    [
        ("nf4", q4.Packing.BYTES, 256),
        ("q8_0", q4.Packing.LOW_FIRST, 256),
        ("nf4", q4.Packing.half_split(32), 100),
        ("nf4", "low_first", 256),
    ],
)
def test_packing(format: str, packing: Any, k: int) -> None:  # noqa: A002
    """A packing for other codes, or one that flat blocks can't have, is refused."""
    error = _refused(q4.FormatError, torch.ones(2, k), format, packing=packing)
    assert (error.name, error.value) == ("packing", str(packing))


def test_k_that_cuts_a_packed_group() -> None:
    """HALF_SPLIT needs K to be a multiple of its group."""
    error = _refused(q4.FormatError, torch.ones(2, 200), "int4", packing=q4.Packing.half_split(32))
    assert (error.name, error.value) == ("K", 200)


def test_symmetric_is_for_integers() -> None:
    """Only INT4 has zero points that can be left out."""
    assert _refused(q4.FormatError, torch.ones(2, 256), "nf4", symmetric=True).name == "symmetric"


def test_unknown_formats() -> None:
    """An unknown name lists the known ones and the closest; a third party's format has no rule here."""
    with pytest.raises(q4.FormatError) as caught:
        q4.quantize(torch.ones(2, 64), "nvf4")
    assert caught.value.hint == "Did you mean 'nvfp4'?"
    own = q4.Format("own", q4.Form.INTEGER, 4, 32)
    error = _refused(q4.FormatError, torch.ones(2, 64), own)
    assert (error.name, error.value) == ("format", "own")


@pytest.mark.parametrize(
    ("format", "value"), [("q4_0", 1e6), ("q8_0", 1e7), ("q4_1", 1e7), ("q4_1", -7e4), ("int4", 3e38)]
)
def test_values_beyond_the_scales(format: str, value: float) -> None:  # noqa: A002
    """Weights whose scale overflows what it is stored in are refused, never written as infinity."""
    dense = torch.ones(3, 256)
    dense[1, 200] = value
    if format == "int4":
        dense[1, 201] = -value
    error = _refused(q4.InputError, dense, format)
    assert error.name is not None
    assert "block [1, " in error.name
