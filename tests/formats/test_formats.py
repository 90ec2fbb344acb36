"""The table of formats, and what each scale kind resolves to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

import q4core as q4
from q4core.formats import find_format, resolve_levels
from tests.support.samples import bits

GOLDEN = Path(__file__).parents[2] / "conformance/src/q4_conformance/golden"


def _stored(name: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(GOLDEN / f"{name}.safetensors")


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_codebooks_are_bitsandbytes_own(name: str) -> None:
    """The NF4 and FP4 tables are, to the bit, the ones that bitsandbytes stores in its files."""
    stored = _stored(f"bitsandbytes/{name}-b64")["proj.weight.quant_map"]
    assert torch.equal(bits(q4.BUILTIN_FORMATS[name].codebook_tensor()), bits(stored))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_e2m1_is_the_formula(name: str) -> None:
    """E2M1: a sign, two exponent bits with bias 1, one mantissa bit."""
    for code, value in enumerate(q4.BUILTIN_FORMATS[name].codebook):
        exponent, mantissa = code >> 1 & 3, code & 1
        magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        assert math.copysign(1, value) == (-1 if code & 8 else 1)
        assert abs(value) == magnitude


def test_whole_number_codebooks() -> None:
    """ggml's codes are whole numbers: centred, unsigned, or two's complement."""
    assert q4.BUILTIN_FORMATS["q4_0"].codebook == tuple(range(-8, 8))
    assert q4.BUILTIN_FORMATS["q4_1"].codebook == tuple(range(16))
    assert q4.BUILTIN_FORMATS["q8_0"].codebook == (*range(128), *range(-128, 0))
    assert q4.BUILTIN_FORMATS["q8_affine"].codebook == tuple(range(256))
    assert q4.BUILTIN_FORMATS["iq4_nl"].codebook == tuple(gguf.quants.IQ4_NL.kvalues)


def test_the_table() -> None:
    """The formats, their bits, blocks and forms."""
    table = {
        name: (form.bits, form.block_size, form.form.value, form.has_offset)
        for name, form in q4.BUILTIN_FORMATS.items()
    }
    assert table == {
        "nf4": (4, 64, "codebook", False),
        "fp4": (4, 64, "codebook", False),
        "nvfp4": (4, 16, "codebook", False),
        "mxfp4": (4, 32, "codebook", False),
        "q4_0": (4, 32, "codebook", False),
        "q4_1": (4, 32, "codebook", True),
        "iq4_nl": (4, 32, "codebook", False),
        "int4": (4, 128, "integer", False),
        "int8": (8, 128, "integer", False),
        "q8_0": (8, 32, "codebook", False),
        "q8_affine": (8, 32, "codebook", True),
    }
    assert all(name == form.name == str(form) for name, form in q4.BUILTIN_FORMATS.items())
    assert all(form.block_size in form.block_sizes or not form.block_sizes for form in q4.BUILTIN_FORMATS.values())


def test_codebook_tensors_are_fresh() -> None:
    """Changing a codebook that was handed out changes nothing for anybody else."""
    form = q4.BUILTIN_FORMATS["nf4"]
    form.codebook_tensor().zero_()
    assert float(form.codebook_tensor()[0]) == -1.0
    assert form.codebook_tensor(dtype=torch.float64).dtype is torch.float64


def test_formats_are_found_by_name() -> None:
    """A name finds its format in any case, a format finds itself, and further formats can be given."""
    own = q4.Format("own", q4.Form.INTEGER, 4, 32)
    assert find_format("NF4") is q4.BUILTIN_FORMATS["nf4"]
    assert find_format(own) is own
    assert find_format("own", [own]) is own
    shadow = q4.Format("nf4", q4.Form.INTEGER, 4, 32)
    assert find_format("nf4", [shadow]) is q4.BUILTIN_FORMATS["nf4"]


@pytest.mark.parametrize(("name", "hint"), [("nf5", "Did you mean 'nf4'?"), ("zzz", None), (4, None), (None, None)])
def test_unknown_formats_are_refused(name: Any, hint: str | None) -> None:
    """An unknown format is refused with the list of those there are, and the closest if one is close."""
    with pytest.raises(q4.FormatError) as caught:
        find_format(name)
    assert (caught.value.name, caught.value.value, caught.value.hint) == ("format", name, hint)
    assert caught.value.rule is not None
    assert all(known in caught.value.rule for known in q4.BUILTIN_FORMATS)


@pytest.mark.parametrize(
    ("form", "width", "codebook"),
    [(q4.Form.CODEBOOK, 4, (0.0,) * 15), (q4.Form.CODEBOOK, 8, (0.0,) * 16), (q4.Form.INTEGER, 4, (0.0,) * 16)],
)
def test_a_codebook_has_a_value_for_each_code(form: q4.Form, width: int, codebook: tuple[float, ...]) -> None:
    """A codebook of the wrong length is refused, and so is one for an INTEGER format."""
    with pytest.raises(q4.FormatError) as caught:
        q4.Format("own", form, width, 32, codebook)
    assert (caught.value.name, caught.value.value) == ("codebook", len(codebook))


def test_every_e4m3_byte() -> None:
    """All 256 e4m3 bytes have the value of the OFP8 formula; 0x7F and 0xFF are NaN."""
    values = resolve_levels(q4.ScaleKind.E4M3, torch.arange(256).to(torch.uint8)).tolist()
    for byte, value in enumerate(values):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        if byte & 127 == 127:
            assert math.isnan(value)
            continue
        magnitude = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        assert abs(value) == magnitude
        assert math.copysign(1, value) == (-1 if byte & 128 else 1)


def test_every_e8m0_byte() -> None:
    """All 256 e8m0 bytes are powers of two, down to the subnormal 2^-127; 255 is NaN."""
    values = resolve_levels(q4.ScaleKind.E8M0, torch.arange(256).to(torch.uint8)).tolist()
    assert values[:255] == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(values[255])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_float8_may_be_stored_as_bytes(dtype: torch.dtype) -> None:
    """The same scales as uint8 and as float8 resolve to the same numbers."""
    scale = torch.arange(1, 127).to(torch.uint8).view(dtype)
    expected = scale.view(torch.float8_e4m3fn).to(torch.float32).tolist()
    assert resolve_levels(q4.ScaleKind.E4M3, scale).tolist() == expected


@pytest.mark.parametrize("kind", [q4.ScaleKind.E4M3_MUL, q4.ScaleKind.E4M3_DIV])
@pytest.mark.parametrize("total", [0.0123456, 1337.7314, 3e-36])
def test_the_global_multiplies_or_divides(kind: q4.ScaleKind, total: float) -> None:
    """Each scale is rounded to float32 once; dividing by g is not multiplying by 1 / g."""
    scale = torch.arange(1, 127).to(torch.uint8)
    g = torch.tensor(total)
    resolved = resolve_levels(kind, scale, global_scale=g).numpy()
    values = scale.view(torch.float8_e4m3fn).to(torch.float32).numpy()
    expected = values * g.numpy() if kind is q4.ScaleKind.E4M3_MUL else values / g.numpy()
    assert resolved.tobytes() == expected.astype(np.float32).tobytes()


def test_a_global_for_each_row() -> None:
    """A vector of globals belongs to the rows, of one axis of blocks or of more."""
    scale = torch.full((3, 2), 0x38, dtype=torch.uint8)  # e4m3's 1.0
    total = torch.tensor([1.0, 2.0, 4.0])
    assert resolve_levels(q4.ScaleKind.E4M3_MUL, scale, global_scale=total).tolist() == [[1, 1], [2, 2], [4, 4]]
    assert resolve_levels(q4.ScaleKind.E4M3_DIV, scale, global_scale=total).tolist() == [
        [1, 1],
        [0.5, 0.5],
        [0.25, 0.25],
    ]


def test_double_quantisation_multiplies_then_adds() -> None:
    """Each absmax is table × second + mean, rounded after the product and after the sum."""
    generator = torch.Generator().manual_seed(3)
    table, second = torch.randn(256, generator=generator), torch.rand(3, generator=generator)
    mean = torch.tensor(0.7310585975646973)
    codes = torch.randint(0, 256, (30, 20), generator=generator).to(torch.uint8)
    resolved = resolve_levels(
        q4.ScaleKind.DOUBLE_QUANT, codes, nested_codebook=table, nested_scale=second, nested_offset=mean
    )
    for place, code in enumerate(codes.reshape(-1).tolist()):
        product = np.float32(table[code].item()) * np.float32(second[place // 256].item())
        assert float(resolved.reshape(-1)[place]) == float(product + np.float32(mean.item()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_scales_are_widened(dtype: torch.dtype) -> None:
    """Plain scales of any float dtype become float32 without change."""
    scale = torch.tensor([0.1, -2.5, 3e-5]).to(dtype)
    resolved = resolve_levels(q4.ScaleKind.PLAIN, scale)
    assert resolved.dtype is torch.float32
    assert torch.equal(resolved, scale.float())


@pytest.mark.parametrize("kind", [q4.ScaleKind.E4M3_MUL, q4.ScaleKind.E4M3_DIV, q4.ScaleKind.DOUBLE_QUANT])
def test_a_missing_level_is_an_error(kind: q4.ScaleKind) -> None:
    """A level that is not there is never taken for 1."""
    with pytest.raises(q4.FormatError) as caught:
        resolve_levels(kind, torch.ones(2, 2, dtype=torch.uint8))
    assert caught.value.rule == "present"


def test_a_format_reads_the_same_in_every_process() -> None:
    """Sets are listed in a fixed order: names of plans, which layers share between processes, are made of the text."""
    text = repr(q4.find_format("nvfp4"))
    kinds = sorted(map(str, q4.find_format("nvfp4").scale_kinds))
    assert f"scale_kinds={{{', '.join(kinds)}}}" in text


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"packing": q4.Packing.BYTES}, "packing"),
        ({"scale_kind": q4.ScaleKind.E8M0}, "scale_kind"),
        ({"has_flat_blocks": True}, "has_flat_blocks"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(facts: dict[str, Any], name: str) -> None:
    """Packing and scale kind fit the other facts of the row."""
    with pytest.raises(q4.FormatError) as caught:
        q4.Format("odd", q4.Form.INTEGER, 4, 32, **facts)
    assert caught.value.name == name


def test_a_row_has_defaults_that_fit_it() -> None:
    """Codes of 8 bits fill bytes, and the only scale kind is the default one."""
    wide = q4.Format("wide", q4.Form.CODEBOOK, 8, 32, tuple(map(float, range(256))))
    assert (wide.packing, wide.scale_kind, wide.rule) == (q4.Packing.BYTES, q4.ScaleKind.PLAIN, "")
    assert q4.find_format("mxfp4").scale_kind is q4.ScaleKind.E8M0
