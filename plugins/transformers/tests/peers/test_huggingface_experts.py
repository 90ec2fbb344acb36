"""Experts in transformers: packed layers for each one, under every name that checkpoints give them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
import transformers
from huggingface_adapters import OLDER_NAME, adapter_gradients, with_adapters
from huggingface_models import UNTIED, dense_model, error, load
from safetensors.torch import load_file, save_file

import q4_transformers
import q4core as q4
from q4_transformers import HfLinear
from q4_transformers.dense import dense_layer
from q4_transformers.experts import Q4Experts

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers"), OLDER_NAME]

SIZES = {**UNTIED, "num_experts_per_tok": 2}
EXPERTS = 8
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen2Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 96, "head_dim": 16},
    "GptOss": {"num_local_experts": EXPERTS, "head_dim": 16},
    "GraniteMoe": {"num_local_experts": EXPERTS},
}
if not hasattr(transformers.models.granitemoe.modeling_granitemoe, "GraniteMoeExperts"):
    del KINDS["GraniteMoe"]  # older releases call its experts as JetMoE's are called: they stay dense
PARTS = {"Mixtral": 3, "Qwen2Moe": 3, "Qwen3Moe": 3, "GptOss": 2, "GraniteMoe": 2}
IDS = (torch.arange(24).reshape(2, 12) * 5) % 64


def _randomise_biases(model: Any) -> None:
    """Set the biases, which are initially zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()


def _dense(kind: str, folder: Path) -> Any:
    """Return a random model, which is saved, too."""
    model = dense_model(kind, change=_randomise_biases, **SIZES, **KINDS.get(kind, KINDS["Mixtral"]))
    model.save_pretrained(folder)
    return model


def _load(folder: Path, **config: Any) -> Any:
    return load(folder, config=config)


@torch.no_grad()
def _fill(dense: Any, name: str, weight: torch.Tensor) -> None:
    """Put a layer's weight where a dense model has it: in a module, or in a slice of an experts parameter."""
    path, mark, leaf = name.rpartition(".experts.")
    if not mark:
        dense.get_submodule(name).weight.copy_(weight)
        return
    experts = dense.get_submodule(f"{path}.experts")
    one, other = leaf.split(".")
    expert, part = (int(one), other) if one.isdigit() else (int(other), one)
    turned = isinstance(experts, transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts)
    target = (experts.down_proj if part in {"w2", "down_proj"} else experts.gate_up_proj)[expert]
    half = len(weight) if part in {"w3", "up_proj"} else 0
    target = target.T if turned else target
    target[half : half + len(weight)].copy_(weight)


def _check(model: Any, twin: Any) -> None:
    """Check that no expert is dense, and that the logits are those of the dense twin with our weights in it."""
    experts = [module for module in model.modules() if isinstance(module, Q4Experts)]
    assert len(experts) == SIZES["num_hidden_layers"]
    assert all(parameter.dim() < 3 for parameter in model.parameters())
    for module in experts:
        leaves = [leaf for leaf in module.modules() if isinstance(leaf, torch.nn.Linear)]
        assert len(leaves) == EXPERTS * len(module.parts)
        assert all(isinstance(leaf, HfLinear) and leaf.is_prepared for leaf in leaves)
    for name, module in model.named_modules():
        if isinstance(module, HfLinear):
            _fill(twin, name, q4.dequantize(module.packed_weight(), torch.float32))
    assert error(model, twin, IDS) <= 1e-4


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("format_", "dialect"),
    [
        ("nf4", "bitsandbytes"),
        ("int4", "compressed-tensors-int4"),
        ("nvfp4", "modelopt-nvfp4"),
    ],
    ids=lambda value: value,
)
def test_experts_of_every_dialect(format_: str, dialect: str, kind: str, tmp_path: Path) -> None:
    """Dense experts are quantised while they are loaded, saved in a dialect, and loaded with the same logits."""
    twin = _dense(kind, tmp_path / "dense")
    model = _load(tmp_path / "dense", format=format_, dialect=dialect)
    _check(model, twin)
    model.save_pretrained(tmp_path / "packed")
    again = _load(tmp_path / "packed")
    _check(again, twin)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    again.save_pretrained(tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("packed", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(_bits(first[key]), _bits(second[key])) for key in first)


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    """Return the folder of a model in gpt-oss's own layout: experts in MXFP4, everything else dense."""
    folder = tmp_path / "gpt-oss"
    model = _dense("GptOss", folder)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        weights = [q4.quantize(weight.T, "mxfp4") for weight in state.pop(name)]
        blocks = [weight.qdata.reshape(weight.out_features, -1, 16) for weight in weights]
        state[f"{name}_blocks"] = torch.stack(blocks)
        state[f"{name}_scales"] = torch.stack([weight.scale.view(torch.uint8) for weight in weights])
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    model.config.save_pretrained(folder)
    return folder


def test_gpt_oss_has_the_logits_of_transformers(gpt_oss: Path, tmp_path: Path) -> None:
    """Experts in MXFP4 stay packed, have the logits of those that transformers dequantises, and are saved as read."""
    config = transformers.Mxfp4Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(gpt_oss, quantization_config=config, dtype=torch.float32)
    ours = _load(gpt_oss)
    assert error(ours, theirs.float(), IDS) <= 1e-3
    assert sum(row.kind == "mxfp4" for row in q4_transformers.explain(ours).packed) == 2 * 2 * EXPERTS
    ours.save_pretrained(tmp_path / "again")
    first, second = (load_file(folder / "model.safetensors") for folder in (gpt_oss, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", quantization_config=config)
    assert error(again.float(), theirs.float(), IDS) <= 1e-3


def test_gpt_oss_has_packed_experts_alone(tmp_path: Path) -> None:
    """What transformers would not find in gpt-oss's layout is not written; it reads experts that are alone in it."""
    _dense("GptOss", tmp_path / "dense")
    options = {"format": "mxfp4", "dialect": "gpt-oss-mxfp4"}
    with pytest.raises(q4.DialectError, match="self_attn") as caught:
        _load(tmp_path / "dense", **options).save_pretrained(tmp_path / "out")
    assert caught.value.name == "layer"
    ours = _load(tmp_path / "dense", **options, modules_to_not_convert=["self_attn", "lm_head"])
    ours.save_pretrained(tmp_path / "out")
    config = transformers.Mxfp4Config(dequantize=True)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=config)
    assert error(again.float(), ours, IDS) <= 1e-3


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """One expert less than the others' layer has is said before anything is loaded."""
    _dense("Qwen3Moe", tmp_path / "dense")
    _load(tmp_path / "dense", format="nf4").save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed/model.safetensors"
    name = "model.layers.1.mlp.experts.5.up_proj"
    save_file({key: value for key, value in load_file(file).items() if not key.startswith(name)}, file)
    with pytest.raises(q4.SchemaError) as caught:
        _load(tmp_path / "packed")
    assert [(problem.code, problem.key) for problem in caught.value.problems] == [("missing_key", name)]


def test_merged_weights_of_experts_are_a_typed_error(tmp_path: Path) -> None:
    """Code that asks for the parameter that transformers would have gets an error that says what leaves it there."""
    _dense("Mixtral", tmp_path)
    experts = next(item for item in _load(tmp_path, format="nf4").modules() if isinstance(item, Q4Experts))
    with pytest.raises(q4_transformers.PackedWeightError, match=r"gate_up_proj.*modules_to_not_convert=\['experts'\]"):
        experts.gate_up_proj.sum()
    assert not hasattr(copy.deepcopy(experts), "up_proj")


def test_experts_may_stay_dense_and_are_listed(tmp_path: Path) -> None:
    """Experts that the caller leaves out keep transformers' own module, and are listed with the reason."""
    _dense("Mixtral", tmp_path / "dense")
    model = _load(tmp_path / "dense", format="nf4", modules_to_not_convert=["experts", "lm_head"])
    assert not any(isinstance(module, Q4Experts) for module in model.modules())
    dense = {row.name: row.reason for row in q4_transformers.explain(model).dense}
    assert "modules_to_not_convert" in dense["model.layers.0.mlp.experts"]


def test_experts_that_a_format_has_no_blocks_for_stay_dense(tmp_path: Path) -> None:
    """Experts with a K that is no multiple of the block stay transformers' own, and are listed with the reason."""
    torch.manual_seed(0)
    sizes = {**SIZES, **KINDS["Mixtral"], "intermediate_size": 40}
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).save_pretrained(tmp_path)
    model = _load(tmp_path, format="nvfp4")
    dense = {row.name: row.reason for row in q4_transformers.explain(model).dense}
    assert "got 40" in dense["model.layers.0.mlp.experts"]
    assert len(q4_transformers.explain(model).packed) == 2 * 4
    assert torch.isfinite(model(IDS).logits).all()


def test_experts_that_are_called_otherwise_stay_dense_and_are_listed(tmp_path: Path) -> None:
    """JetMoE's experts get the number of tokens of each, not each token's choice: they stay dense, and are listed."""
    torch.manual_seed(0)
    config = transformers.JetMoeConfig(**SIZES, num_local_experts=4, kv_channels=16, pad_token_id=0)
    transformers.JetMoeForCausalLM(config).save_pretrained(tmp_path)
    model = _load(tmp_path, format="nf4")
    dense = {row.name: row.reason for row in q4_transformers.explain(model).dense}
    assert "in one tensor" in dense["model.layers.0.mlp.input_linear"]
    assert torch.isfinite(model(IDS).logits).all()


@pytest.mark.xfail(
    transformers.__version__.startswith("5.4."),
    strict=True,
    reason="transformers 5.4 refuses Phimoe's own tie_word_embeddings, as a bool",
)
def test_routers_with_a_forward_pass_of_their_own_stay_dense(tmp_path: Path) -> None:
    """Phimoe's router is an ``nn.Linear`` that returns more than a product: it is left dense, and listed."""
    twin = _dense("Phimoe", tmp_path)
    model = _load(tmp_path, format="nf4")
    _check(model, twin)
    dense = {row.name: row.reason for row in q4_transformers.explain(model).dense}
    assert "no plain linear layer" in dense["model.layers.0.mlp.router"]


def test_experts_compile_into_one_graph(tmp_path: Path) -> None:
    """In a graph every expert runs on every token, with the weight zero where it was not chosen: the same logits."""
    _dense("Mixtral", tmp_path / "dense")
    experts = next(
        module for module in _load(tmp_path / "dense", format="nf4").modules() if isinstance(module, Q4Experts)
    )
    x, index = torch.randn(5, 64), torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7], [0, 8]])
    shares = torch.rand(5, 2)
    with torch.no_grad():
        compiled = torch.compile(experts, fullgraph=True, backend="eager")(x, index, shares)
        assert torch.allclose(compiled, experts(x, index, shares), atol=1e-5)


def test_loading_experts_takes_two_besides_the_packed_ones(tmp_path: Path) -> None:
    """While dense experts are quantised, no float tensor as large as two of them is made."""
    from test_huggingface import _Watch  # noqa: PLC0415  # a watch of every allocation

    _dense("Mixtral", tmp_path / "dense")
    with _Watch() as watch:
        model = _load(tmp_path / "dense", format="nf4")
    assert isinstance(model, torch.nn.Module)
    assert watch.largest[0] <= 2 * 64 * 96 * 4, watch.largest


@pytest.mark.xfail(
    transformers.__version__.startswith("5.0."),
    raises=TypeError,
    strict=True,
    reason="PEFT 0.21 converts names of experts by an argument that transformers 5.0 doesn't have",
)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_reach_every_expert(kind: str, tmp_path: Path) -> None:
    """``all-linear`` adapts every expert, with the gradients of dequantised weights; what is saved is loaded again."""
    _dense(kind, tmp_path / "dense")
    packed = _load(tmp_path / "dense", format="nvfp4")
    twin = copy.deepcopy(packed)
    for name, module in list(twin.named_modules()):
        if isinstance(module, HfLinear):
            twin.set_submodule(name, dense_layer(module, torch.float32))
    adapted, dense = (with_adapters(model, r=2, task_type="CAUSAL_LM") for model in (packed, twin))
    leaves = {name for name, module in packed.named_modules() if isinstance(module, HfLinear)}
    assert sum(".experts." in name for name in leaves) == 2 * EXPERTS * PARTS[kind]
    assert all(name.endswith(".base_layer") for name in leaves)
    ours, theirs = (adapter_gradients(model, IDS) for model in (adapted, dense))
    assert ours.keys() == theirs.keys()
    assert sum(".experts." in name for name in ours) > len(ours) / 2
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).abs().max()) <= 1e-4 * float(gradient.abs().max()), name
    adapted.eval().save_pretrained(tmp_path / "adapter")
    by_peft = peft.PeftModel.from_pretrained(_load(tmp_path / "dense", format="nvfp4"), tmp_path / "adapter")
    itself = _load(tmp_path / "dense", format="nvfp4")
    itself.load_adapter(tmp_path / "adapter")
    with torch.no_grad():
        for model in (by_peft, itself):
            assert torch.allclose(model(IDS).logits, adapted(IDS).logits, atol=1e-6)
        merged, _ = q4_transformers.merge(adapted, exact=True)
        assert not any(isinstance(module, Q4Experts) for module in merged.modules())
        merged.save_pretrained(tmp_path / "merged")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert error(merged, by_peft, IDS) <= 1e-4
        assert error(again, by_peft, IDS) <= 1e-4


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")  # which PEFT made
def test_adapters_of_merged_experts_are_refused(tmp_path: Path) -> None:
    """An adapter that was trained on transformers' merged experts has no place here, which is said, not passed over."""
    _dense("Mixtral", tmp_path / "dense")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    with_adapters(theirs, r=2, task_type="CAUSAL_LM").save_pretrained(tmp_path / "adapter")
    model = _load(tmp_path / "dense", format="nf4")
    with pytest.raises(q4.ConfigError, match="target_modules") as caught:
        peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    assert (caught.value.name, caught.value.value) == ("target_parameters", "down_proj")
