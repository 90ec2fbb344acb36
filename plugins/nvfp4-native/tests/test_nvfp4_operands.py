"""The prepared layout: exact both ways, and activations under the checkpoint's own scale."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import attrs
import pytest
import torch
from nvfp4_emulation import emulated_backend

from q4_conformance.cases import weight_recipes
from q4_conformance.subject import make_registry
from q4_nvfp4_native.operands import OperandMeta, export_operand, prepare_operand
from q4core import (
    ActivationPrecision,
    ComputePath,
    Feature,
    PackedWeight,
    PrepareContext,
    Prepared,
    ScaleKind,
    Session,
    SessionConfig,
    WeightError,
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


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_export_is_the_inverse_of_prepare(recipe: WeightRecipe) -> None:
    """Codes, scale bytes, global scale and everything beside them come back bit for bit, whole and by rows."""
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


def test_negative_zero_scales_are_refused() -> None:
    """FP4 tensor cores read e4m3 scales without sign, so a scale byte with one is an error, not another number."""
    weight = quantize(torch.randn(4, 32), "nvfp4")
    stored = weight.scale.view(torch.uint8).clone()
    stored[1, 1] = 0x80
    with pytest.raises(WeightError) as caught:
        prepare_operand(attrs.evolve(weight, scale=stored.view(weight.scale.dtype)), PrepareContext("cpu"))
    assert caught.value.name == "e4m3 scales"


@pytest.mark.parametrize(
    ("scale", "is_static"),
    [(0.003, True), (2.0**-14, True), (8.0, True), (8.1, False), (2.0**-15.5, False), (2.0**-15, False)],
)
def test_static_scale_is_used_where_the_probe_can_prove_it(scale: float, is_static: bool) -> None:
    """The checkpoint's scale is used in a range that holds the self-probe's activations; elsewhere each row's."""
    weight = attrs.evolve(quantize(torch.randn(4, 32), "nvfp4"), activation_scale=torch.tensor(scale))
    assert _prepared(weight).meta.has_static_scale is is_static
    config = SessionConfig(
        device="cpu", activation_precision=ActivationPrecision.FP4, compute_path=ComputePath.KERNEL_ONLY
    )
    layer = Session(config, registry=make_registry(emulated_backend())).linear(weight)
    assert layer.diagnostics().backend == "nvfp4-native"


def test_static_scale_saturates_what_lies_above_it() -> None:
    """Under a static scale g nothing above 2688 g (the next power of two) is reached; a row's own scale reaches it."""
    plain = quantize(torch.eye(16), "nvfp4")
    weight = attrs.evolve(plain, activation_scale=torch.tensor(2.0**-8))
    config = SessionConfig(device="cpu", activation_precision=ActivationPrecision.FP4)
    session = Session(config, registry=make_registry(emulated_backend()))
    x = torch.full((1, 16), 21.0)  # 2688 / 128
    unit = dequantize(plain)[0, 0]
    assert torch.equal(session.linear(weight)(x), torch.full((1, 16), 10.5) * unit)
    assert torch.equal(session.linear(plain)(x), x * unit)


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
