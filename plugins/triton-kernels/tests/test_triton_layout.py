"""The prepared layout: where each code lies, and that ``export`` gives back every bit."""

from __future__ import annotations

import json

import attrs
import pytest
import torch
from triton_programs import RECIPES

from q4_conformance import WeightRecipe
from q4_triton_kernels import WeightMeta, export_weight, prepare_weight
from q4_triton_kernels.tables import code_base, codes_kind, entries_of, pair_factor, values_of
from q4core import ConfigError, PackedWeight, Packing, PrepareContext, Prepared, WeightSpec, unpack_codes


def _prepare(weight: PackedWeight) -> Prepared:
    return Prepared(*prepare_weight(weight, PrepareContext("cpu")))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _assert_same(found: PackedWeight, weight: PackedWeight) -> None:
    """Assert equal facts, codes and numbers; bits that pad a row may differ."""
    assert WeightSpec.of(found) == WeightSpec.of(weight)
    k = weight.in_features
    mine, theirs = (
        unpack_codes(item.qdata, item.packing).reshape(item.out_features, -1)[:, :k] for item in (found, weight)
    )
    assert torch.equal(mine, theirs)
    for name, tensor in weight.tensors():
        if name != "qdata":
            other = getattr(found, name)
            assert other.dtype == tensor.dtype
            assert torch.equal(_bytes(other), _bytes(tensor))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(48, 256), (7, 128), (1, 640)], ids=str)
def test_export_is_the_inverse(name: str, shape: tuple[int, int]) -> None:
    """Whole and by rows, the exported weight has the source's codes and numbers, bit for bit."""
    n, k = shape
    weight = attrs.evolve(RECIPES[name], n=n, k=k).build()
    prepared = _prepare(weight)
    _assert_same(export_weight(prepared), weight)
    rows = torch.tensor([n - 1, 0, n // 2])
    _assert_same(export_weight(prepared, rows), weight.take_rows(rows))


@pytest.mark.parametrize("packing", [Packing.LOW_FIRST, Packing.HIGH_FIRST, Packing.half_split(32)], ids=str)
@pytest.mark.parametrize("k", [33, 200, 257])
def test_rows_of_any_length(packing: Packing, k: int) -> None:
    """Rows that fill no step are padded with zeros, whatever the source's nibble order."""
    weight = WeightRecipe(format="int4", n=5, k=k, packing=packing).build()
    prepared = _prepare(weight)
    meta: WeightMeta = prepared.meta
    codes = unpack_codes(prepared.tensors[0], Packing.half_split(2 * meta.half))
    assert codes.shape == (5, -(-k // 128) * 128)
    assert not codes[:, k:].any()
    _assert_same(export_weight(prepared), weight)


@pytest.mark.parametrize(("block", "half"), [(16, 16), (32, 32), (64, 64), (96, 32), (128, 64), (80, 16), (256, 64)])
def test_halves_lie_in_one_block(block: int, half: int) -> None:
    """Byte p of a group holds code p low and code p + H high, where H divides the block."""
    weight = WeightRecipe(format="int4", n=3, k=480, block_size=block).build()
    prepared = _prepare(weight)
    assert prepared.meta.half == half
    codes = unpack_codes(weight.qdata, weight.packing)[:, :480]
    first = prepared.tensors[0][:, :half]
    assert torch.equal(first & 15, codes[:, :half])
    assert torch.equal(first >> 4, codes[:, half : 2 * half])
    assert prepared.tensors[0].shape[1] % 64 == 0


def test_equal_layouts_have_equal_meta() -> None:
    """Two weights of one shape share a meta, so that they share programs and compiled graphs."""
    one, other = (_prepare(attrs.evolve(RECIPES["nf4"], seed=seed).build()).meta for seed in (0, 1))
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)


@pytest.mark.parametrize("name", RECIPES)
def test_tables_hold_the_values(name: str) -> None:
    """Float32 entries are the values; two 16-bit numbers hold them to 2^-20.5, one (where it is enough) to 2^-24."""
    spec = WeightSpec.of(RECIPES[name].build())
    values = values_of(spec)
    exact = torch.tensor(values, dtype=torch.float64)
    bits = torch.tensor(entries_of(values, torch.float32), dtype=torch.int32)
    assert torch.equal(bits.view(torch.float32).to(torch.float64), exact)
    for dtype in (torch.bfloat16, torch.float16):
        words = torch.tensor(entries_of(values, dtype), dtype=torch.int32)
        high = (words >> 16).to(torch.int16).view(dtype).to(torch.float64)
        low = words.to(torch.int16).view(dtype).to(torch.float64)
        factor = pair_factor(values, dtype)
        assert ((high + low) / factor - exact).abs().le(2.0**-20.5 * exact.abs()).all()
        if codes_kind(spec) != 0:
            assert (high / factor - exact).abs().le(2.0**-24 * exact.abs()).all()


def test_kinds_of_codes() -> None:
    """Integers and E2M1 numbers are known as such; what is neither is looked up."""
    specs = {name: WeightSpec.of(recipe.build()) for name, recipe in RECIPES.items()}
    assert {name for name, spec in specs.items() if codes_kind(spec) == 1} == {"nvfp4", "nvfp4_plain", "mxfp4"}
    assert (codes_kind(specs["nf4"]), codes_kind(specs["fp4"]), codes_kind(specs["iq4_nl"])) == (0, 3, 3)
    bases = {name: code_base(spec) for name, spec in specs.items() if codes_kind(spec) == 2}
    assert bases == {"q4_0": 8, "q4_1": 0, "int4": 8, "int4_zero": 0, "int4_float_zero": 0}


@pytest.mark.parametrize("name", RECIPES)
def test_a_layout_comes_back_from_json(name: str) -> None:
    """What JSON holds of a layout gives an equal one; of another version, or of other facts, it is refused."""
    _, meta = prepare_weight(RECIPES[name].build(), PrepareContext("cpu"))
    facts = json.loads(json.dumps(meta.to_dict()))
    assert WeightMeta.from_dict(facts) == meta
    for wrong in ({**facts, "layout": 2}, {**facts, "row_bytes": 64 * meta.row_bytes}, {"spec": facts["spec"]}):
        with pytest.raises(ConfigError, match="facts"):
            WeightMeta.from_dict(wrong)
