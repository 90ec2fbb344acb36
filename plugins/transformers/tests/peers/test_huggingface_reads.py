"""Layers whose weight a model's own code reads: left dense and listed, or answered by a dequantised weight."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import q4_transformers
import q4core as q4
from q4_nn.convert import reach
from q4_nn.convert.reads import weight_reads
from q4_transformers import HfLinear, Q4Config

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers")]

TEXT = {"input_ids": torch.arange(3, 12)[None]}
WAVE = {"input_values": torch.randn(1, 1200, generator=torch.Generator().manual_seed(0))}
TINY = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2}
FEATURES = {"conv_dim": (32, 32, 32), "conv_stride": (5, 4, 2), "conv_kernel": (10, 5, 3)}
WAVLM = {"num_attention_heads": 4, "intermediate_size": 128, "num_conv_pos_embeddings": 16} | FEATURES
BLOOM = {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4}
EXACT = {"activation_precision": "exact"}


def _model(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    kind, config = name, name.removesuffix("ForCTC").removesuffix("ForCausalLM")
    return getattr(transformers, kind)(getattr(transformers, f"{config}Config")(**options)).eval()


CASES: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor], str, str]] = {
    "WavLM": ("WavLMForCTC", TINY | WAVLM | {"num_conv_pos_embedding_groups": 4}, WAVE, "out_proj", "read by WavLM"),
    "Mamba": ("MambaForCausalLM", TINY | {"state_size": 8}, TEXT, "dt_proj", "read by MambaMixer"),
    "RWKV": (
        "RwkvForCausalLM",
        TINY | {"attention_hidden_size": 64, "intermediate_size": 128, "rescale_every": 1},
        TEXT,
        "attention.output",
        "changed by RwkvModel._rescale_layers",
    ),
    "BLOOM": (
        "BloomForCausalLM",
        BLOOM | {"slow_but_exact": True, "pretraining_tp": 2},
        TEXT,
        "dense_4h_to_h",
        "read by BloomMLP.forward",
    ),
}

IS_READ_BY_KERNELS = hasattr(transformers.models.mamba.modeling_mamba.MambaMixer, "cuda_kernels_forward")
"""Older releases of transformers read Mamba's dt_proj for CUDA kernels alone: it is packed, and answers there."""


@torch.no_grad()
def _logits(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = model(**given).logits
    return found


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_layers_whose_weight_is_read_stay_dense_and_are_listed(case: str, tmp_path: Path) -> None:
    """A model that reads weights runs with every other layer packed, and ``explain`` says who reads which."""
    kind, options, given, layer, reason = CASES[case]
    dense = _model(kind, **options)
    dense.save_pretrained(tmp_path)
    ours = type(dense).from_pretrained(tmp_path, quantization_config=Q4Config(format="nf4", **EXACT)).eval()
    twin = copy.deepcopy(ours).dequantize()
    assert _error(_logits(ours, given), _logits(twin, given)) <= 1e-4
    explained = q4_transformers.explain(ours)
    reasons = [row.reason for row in explained.dense if row.name.endswith(f".{layer}")]
    assert len(reasons) == (0 if case == "Mamba" and IS_READ_BY_KERNELS else 2)
    assert all(reason in text for text in reasons)
    assert len(explained.packed) >= 2


def test_what_the_config_never_reads_is_packed(tmp_path: Path) -> None:
    """BLOOM reads weights with ``slow_but_exact`` alone: without it every layer is packed."""
    dense = _model("BloomForCausalLM", **BLOOM)
    dense.save_pretrained(tmp_path)
    ours = type(dense).from_pretrained(tmp_path, quantization_config=Q4Config(format="nf4", **EXACT))
    assert len(q4_transformers.explain(ours).packed) == 2 * 4


def _save_packed(model: Any, folder: Path) -> None:
    """Save a model with every linear layer but the head packed, as another library may have left it."""
    state = {name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys}
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "head" not in name:
            weights[name] = q4.quantize(state.pop(f"{name}.weight"), "nf4", name=name)
            module.weight.data = q4.dequantize(weights[name], torch.float32)
    model.config.save_pretrained(folder)
    q4.save_checkpoint(folder, weights, dialect="bitsandbytes", dense=state)


def test_a_packed_weight_that_is_read_answers(tmp_path: Path) -> None:
    """In a checkpoint that has Mamba's dt_proj packed, its weight is dequantised for the product that reads it."""
    kind, options, given, *_ = CASES["Mamba"]
    dense = _model(kind, **options)
    _save_packed(dense, tmp_path)
    ours = type(dense).from_pretrained(tmp_path, quantization_config=Q4Config(**EXACT), dtype=torch.float32).eval()
    layer = ours.backbone.layers[0].mixer.dt_proj
    assert isinstance(layer, HfLinear)
    assert _error(_logits(ours, given), _logits(dense, given)) <= 1e-4
    with pytest.raises(q4.Q4Error, match=r"mixer.dt_proj.*div_"):  # what is read may still not be changed
        layer.weight.div_(2)
    with pytest.raises(q4.Q4Error, match="data"):
        layer.weight.data = torch.zeros(1)


def test_a_packed_weight_that_is_changed_is_refused(tmp_path: Path) -> None:
    """A checkpoint that has packed what RWKV divides in place is an error that names layer and method."""
    kind, options, *_ = CASES["RWKV"]
    dense = _model(kind, **options)
    _save_packed(dense, tmp_path)
    with pytest.raises(q4.SchemaError, match=r"RwkvModel\._rescale_layers") as caught:
        type(dense).from_pretrained(tmp_path, quantization_config=Q4Config(**EXACT))
    assert "rwkv.blocks.0.attention.output" in {problem.key for problem in caught.value.problems}


def test_what_transformers_has_for_every_model_is_not_searched() -> None:
    """Saving, tying and generation read no layer's weight in a pass, and would take most of the search's time."""
    methods = reach._methods(transformers.LlamaForCausalLM)
    assert {"__init__", "forward"} <= methods.keys()
    assert not {"generate", "save_pretrained", "tie_weights"} & methods.keys()


class _Clipped(transformers.LlamaForCausalLM):
    """A model with a method for its training alone."""

    def clip(self) -> None:
        """Limit a weight, between two steps of an optimizer."""
        self.model.layers[0].mlp.up_proj.weight.clamp_(-1, 1)


def test_a_change_that_no_pass_makes_refuses_nothing(tmp_path: Path) -> None:
    """A packed checkpoint loads though a method changes a weight in training; to call that is a typed error."""
    config = transformers.LlamaConfig(**TINY, num_attention_heads=4, intermediate_size=128)
    torch.manual_seed(0)
    dense = _Clipped(config).eval()
    _save_packed(dense, tmp_path)
    ours = _Clipped.from_pretrained(tmp_path, quantization_config=Q4Config(**EXACT), dtype=torch.float32).eval()
    assert isinstance(ours.model.layers[0].mlp.up_proj, HfLinear)
    assert _error(_logits(ours, TEXT), _logits(dense, TEXT)) <= 1e-4
    with pytest.raises(q4.Q4Error, match=r"mlp\.up_proj.*clamp_"):
        ours.clip()


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: weight[:, 1:],
        lambda weight: -weight,
        lambda weight: weight @ torch.zeros(64, 1),
        lambda weight: 2 * weight,
        lambda weight: functional.linear(torch.zeros(1, 64), weight),
        lambda weight: weight.data[0],
        lambda weight: weight.data.norm(),
        list,
    ],
)
def test_a_read_that_was_not_found_names_the_layer(read: Any) -> None:
    """Code whose source shows no read ends in a typed error with the layer's name and what leaves it dense."""
    layer = HfLinear(q4.quantize(torch.randn(32, 64), "nf4", name="blocks.3.mixer"))
    with pytest.raises(q4_transformers.PackedWeightError, match=r"blocks\.3\.mixer.*modules_to_not_convert=\['mixer'"):
        read(layer.weight)


# -- what the source shows


def _helper(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.T


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


class _Reader(nn.Module):
    """Reads weights in every way that the search knows, and asks for facts besides."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("plain", "alias", "helped", "facts", "tested", "trained", "off", "changed", "assigned", "called"):
            self.add_module(name, nn.Linear(4, 4))
        self.many = nn.ModuleList(_Block() for _ in range(2))
        self.chosen = nn.ModuleList([nn.Linear(4, 4)])
        self.slow = False
        self._init_weights()

    def _init_weights(self) -> None:
        self.called.weight.data.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.linear(x.to(self.facts.weight.dtype), self.plain.weight)
        layer = self.alias
        x = _helper(self.helped, x @ layer.weight[:, :4])
        for index, block in enumerate(self.many):
            x = x @ block.inner.weight + index
        if self.tested.weight is not None and isinstance(self.tested.weight, torch.Tensor):
            x = x + self.facts.weight.shape[0]
        if self.training:
            x = x @ self.trained.weight
        if self.slow and self.training:
            x = x @ self.off.weight
        self.changed.weight.mul_(2)
        self.assigned.weight.data[0] = 1
        return self.called(x) + sum(x @ item.weight for item in self.chosen)


def test_reads_are_found_in_the_source() -> None:
    """Loops, aliases, helpers and conditions are followed; facts, initialisation and identity tests are no reads."""
    model = nn.Sequential(_Reader())
    found = {name.removeprefix("0."): read for name, read in weight_reads(model).items()}
    certain = {"plain", "alias", "helped", "many.0.inner", "many.1.inner", "chosen.0"}
    changed = {"changed", "assigned"}
    assert found.keys() == {*certain, *changed, "trained"}
    assert {name for name, read in found.items() if read.is_change} == changed
    assert {name for name, read in found.items() if read.reason is None} == {"trained"}
    assert found["plain"].where == "_Reader.forward"


# -- what transformers asks of a whole model


def _llama(folder: Path, **options: Any) -> Any:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    dense = _model("LlamaForCausalLM", **sizes, num_attention_heads=4)
    dense.save_pretrained(folder)
    config = Q4Config(format="nf4", **EXACT, **options)
    return type(dense).from_pretrained(folder, quantization_config=config, dtype=torch.float32).eval()


def test_a_packed_head_is_resized(tmp_path: Path) -> None:
    """New tokens get rows in a head that is dense from then on, with the numbers that the packed one had."""
    model = _llama(tmp_path, modules_to_not_convert=[])
    before = _logits(model, TEXT)
    assert isinstance(model.lm_head, HfLinear)
    model.resize_token_embeddings(100)
    assert type(model.lm_head) is nn.Linear
    assert _error(_logits(model, TEXT)[..., :96], before) <= 1e-5
    model.save_pretrained(tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again", quantization_config=Q4Config(**EXACT)).eval()
    assert torch.equal(_logits(again, TEXT), _logits(model, TEXT))


def test_a_resized_head_is_named_in_what_is_saved(tmp_path: Path) -> None:
    """The entry of config.json that was read would say that the head is packed: another one is written."""
    _llama(tmp_path, modules_to_not_convert=[]).save_pretrained(tmp_path / "packed")
    kind, config = transformers.LlamaForCausalLM, Q4Config(**EXACT)
    model = kind.from_pretrained(tmp_path / "packed", quantization_config=config, dtype=torch.float32).eval()
    assert isinstance(model.lm_head, HfLinear)
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "again")
    theirs = kind.from_pretrained(tmp_path / "again", dtype=torch.float32).eval()  # by bitsandbytes
    assert type(theirs.lm_head) is nn.Linear
    assert _error(_logits(theirs, TEXT), _logits(model, TEXT)) <= 2e-2  # it multiplies in bfloat16 on some CPUs


def test_a_model_is_dequantised(tmp_path: Path) -> None:
    """``model.dequantize()`` makes every layer dense, with its numbers, and the model one that was never packed."""
    model = _llama(tmp_path)
    before = _logits(model, TEXT)
    dense = model.dequantize()
    assert not any(isinstance(module, HfLinear) for module in dense.modules())
    assert _error(_logits(dense, TEXT), before) <= 1e-5
    dense.save_pretrained(tmp_path / "dense")
    again = type(dense).from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    assert torch.equal(_logits(again, TEXT), _logits(dense, TEXT))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT goes by the older name
def test_a_model_with_adapters_is_merged_not_dequantised(tmp_path: Path) -> None:
    """``dequantize`` of a model with adapters is an error that says how they are merged, and changes nothing."""
    model = _llama(tmp_path)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    before = _logits(model, TEXT)
    with pytest.raises(q4.ConfigError, match="merge"):
        model.dequantize()
    assert torch.equal(_logits(model, TEXT), before)


# -- what a format has no blocks for


@pytest.mark.parametrize(("format_", "columns"), [("nvfp4", 40), ("mxfp4", 80)])
def test_a_layer_that_a_format_has_no_blocks_for_stays_dense(format_: str, columns: int, tmp_path: Path) -> None:
    """One K that is no multiple of the block leaves that layer dense and listed, not the whole model refused."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": columns, "num_hidden_layers": 2}
    dense = _model("LlamaForCausalLM", **sizes, num_attention_heads=4)
    dense.save_pretrained(tmp_path)
    ours = type(dense).from_pretrained(tmp_path, quantization_config=Q4Config(format=format_, **EXACT)).eval()
    reasons = {row.name: row.reason for row in q4_transformers.explain(ours).dense}
    assert f"got {columns}" in reasons["model.layers.0.mlp.down_proj"]
    assert len(q4_transformers.explain(ours).packed) == 2 * 6
    assert _error(_logits(ours, TEXT), _logits(copy.deepcopy(ours).dequantize(), TEXT)) <= 1e-4
    ours.save_pretrained(tmp_path / "again")
    again = type(dense).from_pretrained(tmp_path / "again", quantization_config=Q4Config(**EXACT)).eval()
    assert torch.equal(_logits(again, TEXT), _logits(ours, TEXT))


@pytest.mark.parametrize(("columns", "block"), [(192, 64), (300, 100), (262, 262), (80, 128)])
def test_int4_gets_blocks_that_divide_the_row(columns: int, block: int, tmp_path: Path) -> None:
    """Where 128 does not divide K, INT4 takes a block that does, so that the model can be saved and loaded again."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": columns, "num_hidden_layers": 1}
    dense = _model("LlamaForCausalLM", **sizes, num_attention_heads=4)
    dense.save_pretrained(tmp_path)
    ours = type(dense).from_pretrained(tmp_path, quantization_config=Q4Config(format="int4", **EXACT)).eval()
    assert ours.model.layers[0].mlp.down_proj.packed_weight().block_size == block
    ours.save_pretrained(tmp_path / "again")
    again = type(dense).from_pretrained(tmp_path / "again", quantization_config=Q4Config(**EXACT)).eval()
    assert torch.equal(_logits(again, TEXT), _logits(ours, TEXT))
    theirs = type(dense).from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    assert _error(_logits(theirs, TEXT), _logits(ours, TEXT)) <= 1e-3


def test_a_block_size_that_is_asked_for_leaves_other_rows_dense(tmp_path: Path) -> None:
    """A requested block size stays: a layer that it does not divide stays dense, and is listed."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1}
    dense = _model("LlamaForCausalLM", **sizes, num_attention_heads=4)
    dense.save_pretrained(tmp_path)
    config = Q4Config(format="int4", block_size=128, **EXACT)
    ours = type(dense).from_pretrained(tmp_path, quantization_config=config).eval()
    reasons = {row.name: row.reason for row in q4_transformers.explain(ours).dense}
    assert "block_size=128" in reasons["model.layers.0.mlp.down_proj"]
    ours.save_pretrained(tmp_path / "again")
