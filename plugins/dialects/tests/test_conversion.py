"""From each dialect to each other one of the same format: exact, or refused by what can't be expressed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4

if TYPE_CHECKING:
    from pathlib import Path

MULTIPLY = ("torchao-nvfp4-linear", "torchao-nvfp4-swizzled", "modelopt-nvfp4", "comfyui-nvfp4")
DIVIDE = ("compressed-tensors-nvfp4",)
SINGLE = ("simple-nvfp4",)
NVFP4 = (*MULTIPLY, *DIVIDE, *SINGLE)
BNB = ("bitsandbytes", "simple-nf4")


def _saved(folder: Path, weight: q4.PackedWeight, dialect: str, *, lossy: bool = False) -> q4.PackedWeight:
    q4.save_checkpoint(folder / dialect, {"proj": weight}, dialect=dialect, lossy=lossy)
    return q4.open(folder / dialect)["proj"]


def _nvfp4(dialect: str, number: float = 0.37) -> q4.PackedWeight:
    """Return a weight with the scale levels that a dialect stores."""
    weight = q4.quantize(torch.randn(32, 96, generator=torch.Generator().manual_seed(0)), "nvfp4")
    if dialect in SINGLE:
        return attrs.evolve(weight, scale_kind=q4.ScaleKind.E4M3, global_scale=None)
    kind = q4.ScaleKind.E4M3_DIV if dialect in DIVIDE else q4.ScaleKind.E4M3_MUL
    return attrs.evolve(weight, scale_kind=kind, global_scale=torch.tensor(number))


def _is_exact(source: str, target: str) -> bool:
    return source in SINGLE or source == target or (source in MULTIPLY and target in MULTIPLY)


@pytest.mark.parametrize("target", NVFP4)
@pytest.mark.parametrize("source", NVFP4)
def test_nvfp4_keeps_codes_and_scale_bytes_or_is_refused(source: str, target: str, tmp_path: Path) -> None:
    """Where the target has the levels, codes and scale bytes are the same and so is every value; else it is refused."""
    first = _saved(tmp_path / "1", _nvfp4(source), source)
    if not _is_exact(source, target):
        with pytest.raises(q4.DialectError) as caught:
            _saved(tmp_path / "2", first, target)
        assert caught.value.name == "scale levels"
        assert "lossy=True" in str(caught.value)
        assert not (tmp_path / "2" / target).exists()
        return
    second = _saved(tmp_path / "2", first, target)
    assert torch.equal(second.codes(), first.codes())
    assert torch.equal(second.scale.view(torch.uint8), first.scale.view(torch.uint8))
    assert torch.equal(q4.dequantize(second, torch.float32), q4.dequantize(first, torch.float32))
    assert torch.equal(q4.dequantize(second, torch.float32), q4.dequantize(_nvfp4(source), torch.float32))


@pytest.mark.parametrize("target", NVFP4)
@pytest.mark.parametrize("source", NVFP4)
def test_lossy_conversion_is_close(source: str, target: str, tmp_path: Path) -> None:
    """With the caller's leave every pair works; what is exact stays exact, the rest is rounded as the hint says."""
    weight = _nvfp4(source)
    found = q4.dequantize(_saved(tmp_path, weight, target, lossy=True), torch.float32)
    expected = q4.dequantize(weight, torch.float32)
    if _is_exact(source, target):
        assert torch.equal(found, expected)
    else:
        precision = 2**-10 if target in SINGLE else 2**-22
        torch.testing.assert_close(found, expected, rtol=precision, atol=0.0)


@pytest.mark.parametrize("exponent", [-30, -1, 0, 5])
@pytest.mark.parametrize(("source", "target"), [("modelopt-nvfp4", DIVIDE[0]), (DIVIDE[0], "torchao-nvfp4-linear")])
def test_powers_of_two_divide_as_they_multiply(source: str, target: str, exponent: int, tmp_path: Path) -> None:
    """A global scale that is a power of two has an exact reciprocal, so that nothing is lost."""
    weight = _nvfp4(source, 2.0**exponent)
    found = _saved(tmp_path, weight, target)
    assert torch.equal(q4.dequantize(found, torch.float32), q4.dequantize(weight, torch.float32))


@pytest.mark.parametrize("exponent", [-140, 127])
def test_reciprocals_out_of_range_are_refused(exponent: int) -> None:
    """A power of two whose reciprocal float32 can't hold with full precision is not inverted."""
    weight = _nvfp4(DIVIDE[0], 2.0**exponent)
    dialect = next(item for item in q4.dialects() if item.name == "modelopt-nvfp4")
    if exponent == 127:  # its reciprocal is subnormal, but exact
        assert float(dialect.write("proj", weight).tensors["proj.weight_scale_2"]) == 2.0**-127
    else:
        with pytest.raises(q4.DialectError):
            dialect.write("proj", weight)


@pytest.mark.parametrize("target", BNB)
@pytest.mark.parametrize("source", BNB)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("k", [128, 96])
def test_nf4_and_fp4_keep_codes_and_absmax(source: str, target: str, kind: str, k: int, tmp_path: Path) -> None:
    """One-level layers pass between bitsandbytes and the trio without a changed bit, straddling blocks too."""
    dense = torch.randn(6, k, generator=torch.Generator().manual_seed(0))
    weight = _saved(tmp_path / "0", q4.quantize(dense, kind, block_size=64), "bitsandbytes")
    first = _saved(tmp_path / "1", weight, source)
    second = _saved(tmp_path / "2", first, target)
    assert torch.equal(second.codes(), first.codes())
    assert torch.equal(second.scale, first.scale)
    assert torch.equal(q4.dequantize(second, torch.float32), q4.dequantize(weight, torch.float32))


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
def test_mxfp4_passes_between_layouts(layout: str, tmp_path: Path) -> None:
    """MXFP4 changes its layout without a changed scale."""
    weight = q4.quantize(torch.randn(130, 96, generator=torch.Generator().manual_seed(0)), "mxfp4")
    first = _saved(tmp_path / "1", weight, f"torchao-mxfp4-{layout}")
    other = "swizzled" if layout == "linear" else "linear"
    second = _saved(tmp_path / "2", first, f"torchao-mxfp4-{other}")
    assert torch.equal(second.scale.view(torch.uint8), weight.scale.view(torch.uint8))
    assert torch.equal(q4.dequantize(second), q4.dequantize(weight))


READ_ONLY = ("gemma", "quark-mxfp4")
WRITTEN = [item.name for item in q4.dialects() if item.formats and item.name not in READ_ONLY]
"""Dialects that are written."""


@pytest.mark.parametrize("dialect", [*WRITTEN, *READ_ONLY])
def test_other_formats_are_refused(dialect: str, tmp_path: Path) -> None:
    """No dialect takes a format that it does not hold, and nothing is written."""
    target = next(item for item in q4.dialects() if item.name == dialect)
    for name in sorted({"nf4", "nvfp4", "mxfp4", "q4_0"} - target.formats):
        weight = q4.quantize(torch.ones(32, 64), name)
        with pytest.raises(q4.DialectError) as caught:
            q4.save_checkpoint(tmp_path / "x", {"proj": weight}, dialect=dialect, lossy=True)
        assert caught.value.name == ("format" if dialect in WRITTEN else "dialect")
    assert list(tmp_path.iterdir()) == []


def test_row_global_scales_of_joined_weights_are_refused() -> None:
    """A global scale for each row, as joined projections have, has no place in any file."""
    one, two = _nvfp4("modelopt-nvfp4", 0.5), _nvfp4("modelopt-nvfp4", 0.25)
    joined = q4.cat([one, two])
    for dialect in q4.dialects():
        if dialect.formats == {"nvfp4"}:
            with pytest.raises(q4.DialectError):
                dialect.write("proj", joined)


def test_what_a_dialect_lacks_is_said_in_words(tmp_path: Path) -> None:
    """Blocks that run across rows, which bitsandbytes has, are no ``flat_blocks`` to who reads the error."""
    rows = q4.quantize(torch.ones(4, 128), "nf4")
    flat: dict[str, Any] = {
        "qdata": rows.qdata.reshape(-1),
        "scale": rows.scale.reshape(-1),
        "blocks": q4.BlockOrder.FLAT,
    }
    (dialect,) = (item for item in q4.dialects() if item.name == "bitsandbytes")
    with pytest.raises(q4.DialectError, match="blocks that run across rows") as caught:
        dialect.check_writable("proj", attrs.evolve(rows, **flat))
    assert "flat_blocks" not in str(caught.value)


@pytest.mark.parametrize("dialect", ["gptq", "gptq-v2", "compressed-tensors-int8"])
def test_bytes_in_one_group_are_written(dialect: str, tmp_path: Path) -> None:
    """Zero points of a single group are a row, or a column, of any stride, which a view as words must not mind."""
    signed = q4.quantize(torch.randn(64, 256, generator=torch.Generator().manual_seed(4)), "q8_0", block_size=256)
    weight = attrs.evolve(
        signed, format=q4.BUILTIN_FORMATS["int8"], qdata=signed.qdata ^ 128, scale=signed.scale.half()
    )
    for zero in (None, torch.full((64, 1), 127, dtype=torch.uint8)):
        given = attrs.evolve(weight, zero=zero)
        q4.save_checkpoint(tmp_path / f"{zero is None}", {"proj": given}, dialect=dialect, config={})
        found = q4.open(tmp_path / f"{zero is None}")["proj"]
        assert torch.equal(q4.dequantize(found, torch.float32), q4.dequantize(given, torch.float32))
