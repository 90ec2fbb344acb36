"""The oracle gives the numbers that public packages give for the bytes that they stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import q4_conformance
import q4core as q4
from q4_conformance.oracle.decoding import decode_codes, decode_scales
from q4_conformance.oracle.exact import exact_linear, exact_weight
from q4_conformance.oracle.weights import WeightRecipe

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(q4_conformance.__file__).parent / "golden"
MANIFEST: dict[str, dict[str, Any]] = json.loads((GOLDEN / "manifest.json").read_text(encoding="utf-8"))
PACKINGS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "packing.json").read_text(encoding="utf-8"))
BITS = {2: torch.int16, 4: torch.int32}
FORMATS = q4.BUILTIN_FORMATS

Tensors = dict[str, torch.Tensor]


def _bitsandbytes(t: Tensors, facts: dict[str, Any]) -> dict[str, Any]:
    state_key = next(key for key in t if ".quant_state." in key)
    state = json.loads(bytes(t[state_key].tolist()))
    aligned = facts["k"] % facts["block"] == 0
    qdata = t["proj.weight"].view(torch.uint8).reshape(-1)
    scale = t["proj.weight.absmax"]
    fields: dict[str, Any] = {
        "qdata": qdata.reshape(facts["n"], -1) if aligned else qdata,
        "scale": scale.reshape(facts["n"], -1) if aligned else scale,
        "packing": q4.Packing.HIGH_FIRST,
        "blocks": q4.BlockOrder.ROW if aligned else q4.BlockOrder.FLAT,
        "codebook": t["proj.weight.quant_map"],
    }
    if "proj.weight.nested_absmax" in t:
        fields |= {
            "scale_kind": q4.ScaleKind.DOUBLE_QUANT,
            "nested_codebook": t["proj.weight.nested_quant_map"],
            "nested_scale": t["proj.weight.nested_absmax"],
            "nested_offset": torch.tensor(state["nested_offset"]),
            "nested_block_size": state["nested_blocksize"],
        }
    return fields


def _simple_nf4(t: Tensors, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "qdata": t["proj.weight"],
        "scale": t["proj.absmax"].reshape(facts["n"], -1),
        "packing": q4.Packing.HIGH_FIRST,
        "codebook": t["proj.quant_map"],
    }


def _simple_nvfp4(t: Tensors, facts: dict[str, Any]) -> dict[str, Any]:
    return {"qdata": t["proj.qdata"], "scale": t["proj.scale"], "scale_kind": q4.ScaleKind.E4M3}


def _unswizzled(stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return [rows, columns] of scales that lie in tiles of 128 × 4, by each one's byte offset."""
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    offset = ((r // 128) * -(-columns // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    flat = stored.view(torch.uint8).reshape(-1).numpy()
    return torch.from_numpy(flat[offset])


def _torchao(t: Tensors, facts: dict[str, Any]) -> dict[str, Any]:
    scale = t["proj._weight_scale"]
    shape = (facts["n"], -(-facts["k"] // facts["block"]))
    if tuple(scale.shape) != shape:
        scale = _unswizzled(scale, *shape)
    fields: dict[str, Any] = {"qdata": t["proj._weight_qdata"], "scale": scale}
    if facts["format"] == "mxfp4":
        return fields | {"scale_kind": q4.ScaleKind.E8M0}
    total = t.get("proj._weight_per_tensor_scale")
    kind = q4.ScaleKind.E4M3 if total is None else q4.ScaleKind.E4M3_MUL
    return fields | {"scale_kind": kind, "global_scale": total}


def _modelopt(t: Tensors, facts: dict[str, Any]) -> dict[str, Any]:
    total = t.get("proj.weight_scale_2")
    kind = q4.ScaleKind.E8M0 if total is None else q4.ScaleKind.E4M3_MUL
    return {"qdata": t["proj.weight"], "scale": t["proj.weight_scale"], "scale_kind": kind, "global_scale": total}


def _unpacked_words(words: torch.Tensor, count: int) -> torch.Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & 15
    return codes.reshape(*words.shape[:-1], -1)[..., :count].to(torch.uint8)


def _compressed_tensors(t: Tensors, facts: dict[str, Any]) -> dict[str, Any]:
    packed, scale = t["proj.weight_packed"], t["proj.weight_scale"]
    if facts["format"] == "int4":
        fields: dict[str, Any] = {"qdata": packed.view(torch.uint8), "scale": scale}
        if "proj.weight_zero_point" in t:
            fields["zero"] = _unpacked_words(t["proj.weight_zero_point"].T.contiguous(), facts["n"]).T
        return fields
    total = t.get("proj.weight_global_scale")
    kind = q4.ScaleKind.E8M0 if total is None else q4.ScaleKind.E4M3_DIV
    return {"qdata": packed, "scale": scale, "scale_kind": kind, "global_scale": total}


def _gpt_oss(t: Tensors, facts: dict[str, Any]) -> dict[str, Any]:
    return {"qdata": t["proj_blocks"].flatten(1), "scale": t["proj_scales"], "scale_kind": q4.ScaleKind.E8M0}


GGML_LAYOUTS: dict[str, tuple[int, int, int]] = {
    # format: bytes of a block, bytes of its header, codes per block
    "q4_0": (18, 2, 32),
    "q4_1": (20, 4, 32),
    "q8_0": (34, 2, 32),
    "mxfp4": (17, 1, 32),
    "nvfp4": (36, 4, 64),
}


def _gguf(t: Tensors, facts: dict[str, Any]) -> dict[str, Any]:
    return _ggml_fields(t["proj.weight"], facts["format"])


def _ggml_fields(stored: torch.Tensor, format_: str) -> dict[str, Any]:
    size, header, _ = GGML_LAYOUTS[format_]
    blocks = stored.reshape(stored.shape[0], -1, size)
    head = blocks[..., :header].contiguous()
    fields: dict[str, Any] = {"qdata": blocks[..., header:], "packing": q4.Packing.half_split(32)}
    if format_ == "mxfp4":
        return fields | {"scale": head[..., 0], "scale_kind": q4.ScaleKind.E8M0}
    if format_ == "nvfp4":
        scale = head.flatten(1)
        return fields | {"scale": scale, "scale_kind": q4.ScaleKind.E4M3, "packing": q4.Packing.half_split(16)}
    halves = head.view(torch.float16)
    fields["scale"] = halves[..., 0]
    if format_ == "q4_1":
        fields["offset"] = halves[..., 1]
    if format_ == "q8_0":
        fields["packing"] = q4.Packing.BYTES
    return fields


READERS: dict[str, Callable[[Tensors, dict[str, Any]], dict[str, Any]]] = {
    "bitsandbytes": _bitsandbytes,
    "simple-nf4": _simple_nf4,
    "simple-nvfp4": _simple_nvfp4,
    "torchao": _torchao,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "gguf": _gguf,
    "gpt-oss": _gpt_oss,
}


def _weight(fields: dict[str, Any], format_: str, shape: tuple[int, int], block: int) -> q4.PackedWeight:
    rows, columns = shape
    return q4.PackedWeight(format=FORMATS[format_], out_features=rows, in_features=columns, block_size=block, **fields)


def _assert_equal(exact: np.ndarray[Any, Any], expected: torch.Tensor, *, ignore_zero_sign: bool) -> None:
    """Compare by bits, after one rounding to the library's dtype (by way of float32, as the libraries go)."""
    got = torch.from_numpy(exact).to(torch.float32).to(expected.dtype)
    if ignore_zero_sign:
        got, expected = got + 0.0, expected + 0.0
    bits = BITS[expected.element_size()]
    differs = got.view(bits) != expected.contiguous().view(bits)
    assert not bool(differs.any()), (int(differs.sum()), got[differs][:4], expected[differs][:4])


@pytest.mark.parametrize("name", sorted(MANIFEST))
def test_oracle_gives_the_librarys_numbers(name: str) -> None:
    """Every stored layer of every library decodes to that library's own result, bit for bit."""
    facts = MANIFEST[name]
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    fields = READERS[facts["dialect"]](tensors, facts)
    weight = _weight(fields, facts["format"], (facts["n"], facts["k"]), facts["block"])
    exact = exact_weight(weight)
    for dtype in facts["expected"]:
        _assert_equal(exact, tensors[f"expected.{dtype}"], ignore_zero_sign=facts["drops_negative_zero"])


@pytest.mark.parametrize("name", sorted(PACKINGS))
def test_oracle_finds_codes_where_packages_put_them(name: str) -> None:
    """Codes packed by a package are found at their places, in each nibble order."""
    vector = PACKINGS[name]
    codes = [int(digit, 16) for digit in vector["codes"]]
    packed = torch.frombuffer(bytearray.fromhex(vector["bytes"]), dtype=torch.uint8).reshape(1, -1)
    packing = q4.Packing(q4.NibbleOrder(vector["order"]), vector["group"])
    scale = torch.ones(1, 1)
    weight = q4.PackedWeight(
        format=FORMATS["int4"], qdata=packed, scale=scale, out_features=1, in_features=len(codes),
        block_size=len(codes), packing=packing,
    )  # fmt: skip
    assert decode_codes(weight)[0].tolist() == codes


@pytest.mark.parametrize("format_", ["q4_0", "q4_1", "q8_0"])
def test_oracle_agrees_with_the_gguf_package(format_: str) -> None:
    """Random blocks, quantised and dequantised by ``gguf`` itself, decode to the same float32 bits."""
    kind = gguf.GGMLQuantizationType[format_.upper()]
    dense = np.random.default_rng(7).standard_normal((37, 320)).astype(np.float32)
    stored = gguf.quants.quantize(dense, kind)
    expected = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(stored, kind)))
    weight = _weight(_ggml_fields(torch.from_numpy(stored), format_), format_, (37, 320), 32)
    _assert_equal(exact_weight(weight), expected, ignore_zero_sign=False)


def test_every_float8_byte_decodes_to_its_value() -> None:
    """All 256 bytes of e4m3 and e8m0 have the values that their specifications give, NaN included."""
    stored = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    for kind, dtype, format_ in (
        (q4.ScaleKind.E4M3, torch.float8_e4m3fn, "nvfp4"),
        (q4.ScaleKind.E8M0, torch.float8_e8m0fnu, "mxfp4"),
    ):
        block = FORMATS[format_].block_size
        weight = q4.PackedWeight(
            format=FORMATS[format_], qdata=torch.zeros(1, 128 * block, dtype=torch.uint8), scale=stored,
            out_features=1, in_features=256 * block, block_size=block, scale_kind=kind,
        )  # fmt: skip
        torch.testing.assert_close(
            torch.from_numpy(decode_scales(weight)),
            stored.view(dtype).to(torch.float32),
            rtol=0,
            atol=0,
            equal_nan=True,
        )


def test_e2m1_codebook_follows_from_its_bits() -> None:
    """The E2M1 levels are sign, two bits of exponent with bias 1, and one of mantissa."""
    values = []
    for code in range(16):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        values.append(-size if sign else size)
    for name in ("nvfp4", "mxfp4"):
        assert [str(value) for value in FORMATS[name].codebook] == [str(value) for value in values]


def test_int4_is_code_minus_zero_times_scale() -> None:
    """A small integer weight, by hand: zero points, permutation, channel scale, a short last block."""
    codes = [[0, 15, 7, 8, 3], [1, 2, 3, 4, 5]]
    packed = torch.tensor([[0xF0, 0x87, 0xE3], [0x21, 0x43, 0xE5]], dtype=torch.uint8)  # the last nibble is padding
    weight = q4.PackedWeight(
        format=FORMATS["int4"],
        qdata=packed,
        scale=torch.tensor([[0.5, 2.0], [1.0, -4.0]]),
        zero=torch.tensor([[8, 3], [0, 15]], dtype=torch.uint8),
        out_features=2,
        in_features=5,
        block_size=4,
        input_permutation=torch.tensor([4, 0, 1, 2, 3]),
        input_channel_scale=torch.tensor([1.0, 10.0, 100.0, 1000.0, 0.5]),
    )
    assert decode_codes(weight).tolist() == codes
    stored = [[-4.0, 3.5, -0.5, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 40.0]]
    expected = [[3.5, -5.0, 0.0, 0.0, -2.0], [2.0, 30.0, 400.0, 40000.0, 0.5]]
    assert [[row[1], 10 * row[2], 100 * row[3], 1000 * row[4], row[0] / 2] for row in stored] == expected
    assert exact_weight(weight).tolist() == expected
    sizes = [[(15 + 8) * 0.5, 10 * (7 + 8) * 0.5, 100 * 8.0, 1000 * 12.0, 0.5 * 4.0]]
    assert exact_linear(weight, torch.eye(5)).size.T[:1].tolist() == sizes


def test_reference_adds_the_bias() -> None:
    """The exact result is x times the exact weight, plus the bias, over any leading dimensions."""
    weight = WeightRecipe(format="q4_1", n=3, k=64).build()
    x = torch.randint(-9, 9, (2, 2, 64), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    bias = torch.tensor([1.0, -2.0, 0.5])
    reference = exact_linear(weight, x, bias)
    by_hand = np.einsum("abk,nk->abn", x.to(torch.float64).numpy(), exact_weight(weight)) + bias.numpy()
    np.testing.assert_allclose(reference.value, by_hand, rtol=1e-14, atol=1e-12)
    assert reference.value.shape == (2, 2, 3)
    assert (reference.size >= np.abs(reference.value)).all()
