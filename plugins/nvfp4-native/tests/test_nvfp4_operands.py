"""The prepared layout: exact both ways, and activations under the checkpoint's own scale."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch
from nvfp4_emulation import emulated_backend

from q4_conformance.contract.cases import weight_recipes
from q4_conformance.subjects.backend import make_registry
from q4_nvfp4_native.operands import OperandMeta, export_operand, prepare_operand
from q4core import (
    ActivationPrecision,
    ComputePath,
    Feature,
    PackedWeight,
    PrepareContext,
    Prepared,
    PrepareError,
    Q4FallbackWarning,
    ReasonCode,
    ScaleKind,
    Session,
    SessionConfig,
    dequantize,
    find_format,
    quantize,
)

if TYPE_CHECKING:
    from q4_conformance import WeightRecipe

RECIPES = [
    attrs.evolve(recipe, n=n, k=k)
    for name in ("nvfp4", "mxfp4")
    for recipe in weight_recipes(find_format(name))
    for n, k in ((5, 96), (17, 256))
    if recipe.scale_kind is not ScaleKind.PLAIN and Feature.CUSTOM_CODEBOOK not in recipe.features
]


def _prepared(weight: PackedWeight) -> Prepared:
    return Prepared(*prepare_operand(weight, PrepareContext("cpu")))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.label)
def test_export_is_the_inverse_of_prepare(recipe: WeightRecipe) -> None:
    """Codes, scale bytes, global scale and all other fields come back bit for bit, whole and by rows."""
    weight = attrs.evolve(recipe.build(), activation_scale=torch.tensor(0.01))
    prepared = _prepared(weight)
    rows = torch.tensor([weight.out_features - 1, 0, 2])
    for exported, wanted in (
        (export_operand(prepared), weight),
        (export_operand(prepared, rows), weight.take_rows(rows)),
    ):
        assert exported.scale_kind is wanted.scale_kind
        assert exported.packing == wanted.packing
        assert torch.equal(exported.codes(), wanted.codes())
        assert torch.equal(exported.scale.view(torch.uint8), wanted.scale.view(torch.uint8))
        assert exported.scale.dtype is wanted.scale.dtype
        assert exported.activation_scale is not None
        assert torch.equal(exported.activation_scale, torch.tensor(0.01))
        assert (exported.global_scale is None) == (wanted.global_scale is None)
        if wanted.global_scale is not None and exported.global_scale is not None:
            assert torch.equal(exported.global_scale.reshape(-1), wanted.global_scale.reshape(-1))


def test_layers_of_one_shape_share_their_meta() -> None:
    """Two weights of one shape have equal layouts, so that they share one compiled graph; the repr is stable."""
    metas = [_prepared(quantize(torch.randn(8, 64), "nvfp4")).meta for _ in range(2)]
    assert metas[0] == metas[1]
    assert isinstance(metas[0], OperandMeta)
    assert "0x" not in repr(metas[0])


def _session(**wishes: Any) -> Session:
    config = SessionConfig(device="cpu", activation_precision=ActivationPrecision.FP4, **wishes)
    return Session(config, registry=make_registry(emulated_backend()))


def _with_scale_byte(byte: int) -> PackedWeight:
    weight = quantize(torch.randn(4, 32), "nvfp4")
    stored = weight.scale.view(torch.uint8).clone()
    stored[1, 1] = byte
    return attrs.evolve(weight, scale=stored.view(weight.scale.dtype))


@pytest.mark.parametrize("byte", [0x80, 0x90, 0x7F, 0xFF])
def test_scales_with_a_sign_or_nan_are_refused(byte: int) -> None:
    """FP4 tensor cores read e4m3 scales without sign, so such a byte is a `format` reason, not another number."""
    with pytest.raises(PrepareError) as caught:
        prepare_operand(_with_scale_byte(byte), PrepareContext("cpu"))
    assert [reason.code for reason in caught.value.reasons] == [ReasonCode.FORMAT]
    assert "e4m3 scales" in caught.value.reasons[0].message
    assert caught.value.is_for_this_weight


def test_the_next_backend_serves_a_negative_zero_scale_and_ours_the_next_weight() -> None:
    """A negative zero is a legal scale: the reference serves that weight, and FP4 the others of its kind."""
    session = _session(compute_path=ComputePath.KERNEL_OR_FALLBACK)
    with pytest.warns(Q4FallbackWarning, match="e4m3 scales"):
        odd = session.linear(_with_scale_byte(0x80)).diagnostics()
    assert odd.backend == "dequant-fallback"
    assert session.linear(quantize(torch.randn(4, 32), "nvfp4")).diagnostics().backend == "nvfp4-native"


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-20, 2.0**-15, 0.003, 0.0173, 8.1, 37.5, 2.0**100])
def test_static_scale_is_used_whatever_its_size(scale: float) -> None:
    """Activations are rounded under the checkpoint's scale: above 2688 of its next power of two they saturate."""
    plain = quantize(torch.eye(16), "nvfp4")
    weight = attrs.evolve(plain, activation_scale=torch.tensor(scale))
    assert _prepared(weight).meta.has_static_scale
    layer = _session(compute_path=ComputePath.KERNEL_ONLY).linear(weight)
    assert layer.diagnostics().backend == "nvfp4-native"
    power = 2.0 ** math.ceil(math.log2(scale))
    unit = dequantize(plain)[0, 0]
    for size, kept in ((2688.0, 2688.0), (5376.0, 2688.0), (6.0, 6.0), (96.0, 96.0)):
        x = torch.full((1, 16), size * power)
        assert torch.equal(layer(x), torch.full((1, 16), kept * power) * unit), size
    x = torch.full((1, 16), 21.0)
    assert torch.equal(_session().linear(plain)(x), x * unit)  # a row's own scale reaches it


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_static_scale_that_is_none_is_refused(scale: float) -> None:
    """Zero, negative and non-finite scales are a `format` reason; MXFP4, whose block scales need none, ignores them."""
    for name in ("nvfp4", "mxfp4"):
        weight = attrs.evolve(quantize(torch.randn(4, 32), name), activation_scale=torch.tensor(scale))
        if name == "mxfp4":
            assert not _prepared(weight).meta.has_static_scale
            continue
        with pytest.raises(PrepareError) as caught:
            prepare_operand(weight, PrepareContext("cpu"))
        assert [reason.code for reason in caught.value.reasons] == [ReasonCode.FORMAT]
        assert "activation scale" in caught.value.reasons[0].message


def test_saved_and_copied_layers_give_the_same_bits() -> None:
    """A layer's state, loaded into one made of another weight, and a deep copy, compute what it computes."""
    config = SessionConfig(device="cpu", activation_precision=ActivationPrecision.FP4)
    session = Session(config, registry=make_registry(emulated_backend()))
    layer, other = (session.linear(quantize(torch.randn(24, 160), "nvfp4")) for _ in range(2))
    x = torch.randn(17, 160)
    wanted = layer(x)
    assert not torch.equal(other(x), wanted)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), wanted)
    assert torch.equal(copy.deepcopy(layer)(x), wanted)
