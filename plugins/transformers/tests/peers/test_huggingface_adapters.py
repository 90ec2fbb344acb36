"""PEFT on packed layers: the gradients and losses of dequantised weights, merging that says what is lost."""

from __future__ import annotations

import copy
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import tokenizers
import torch
import transformers
from huggingface_adapters import OLDER_NAME, adapter_gradients, with_adapters
from huggingface_models import UNTIED, dense_model, load

import q4_transformers
import q4core as q4
from q4_transformers import HfLinear

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers"), OLDER_NAME]

ROOT = Path(__file__).parents[4]
FORMATS = ("nf4", "fp4", "nvfp4", "mxfp4", "int4", "q4_0", "q4_1", "q8_0")
IDS = (torch.arange(48).reshape(4, 12) * 7) % 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small dense Llama."""
    path = tmp_path_factory.mktemp("dense")
    # With initial weights the frozen head would give all tokens nearly the same logits.
    dense_model(change=lambda model: model.lm_head.weight.mul_(4), **UNTIED).save_pretrained(path)
    return path


def _packed(folder: Path, format_: str = "nvfp4", **options: Any) -> Any:
    return load(folder, config={"format": format_}, **options)


def _twin(packed: Any, folder: Path) -> Any:
    """Return the dense model whose linear layers have the packed ones' dequantised weights."""
    twin = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in packed.named_modules():
        if isinstance(module, HfLinear):
            twin.get_submodule(name).weight.data = q4.dequantize(module.packed_weight(), torch.float32)
    return twin


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_gradients_are_those_of_dequantised_weights(format_: str, dora: bool, folder: Path) -> None:
    """Every linear layer has an adapter, whose gradients are autograd's through the dequantised weights."""
    packed = _packed(folder, format_)
    twin = with_adapters(_twin(packed, folder), use_dora=dora)
    ours = adapter_gradients(with_adapters(packed, use_dora=dora), IDS)
    theirs = adapter_gradients(twin, IDS)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 * 7 * (3 if dora else 2)
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).abs().max() / gradient.abs().max()) <= 1e-4, name


def _losses(model: Any, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=2e-2)
    losses = []
    for _ in range(steps):
        loss = model(IDS[:1], labels=IDS[:1]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_training_goes_as_on_dequantised_weights(folder: Path) -> None:
    """After 100 steps the loss is within 1 % of the same run on dequantised weights, and well below where it began."""
    packed = _packed(folder)
    theirs = _losses(with_adapters(_twin(packed, folder), init_lora_weights=True, r=16), 100)
    ours = _losses(with_adapters(packed, init_lora_weights=True, r=16), 100)
    assert ours[-1] < ours[0] / 2
    assert abs(ours[-1] - theirs[-1]) <= 0.01 * theirs[-1]


def test_prepared_model_trains_in_half_precision(folder: Path, tmp_path: Path) -> None:
    """Norms in float32 meet layers in bfloat16; activations are checkpointed; PEFT saves and loads the adapter."""
    model = q4_transformers.prepare_for_training(_packed(folder, dtype=torch.bfloat16))
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    adapted = with_adapters(model)
    losses = _losses(adapted.train(), 20)
    assert losses[-1] < losses[0]
    adapted.save_pretrained(tmp_path)
    assert {item.name for item in tmp_path.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    again = peft.PeftModel.from_pretrained(
        peft.prepare_model_for_kbit_training(_packed(folder, dtype=torch.bfloat16)), tmp_path
    )
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, adapted.eval()(IDS).logits)


def test_trainers_train_it(folder: Path, tmp_path: Path) -> None:
    """transformers' ``Trainer`` and TRL's ``SFTTrainer`` run as they are, with gradient checkpointing."""
    import datasets  # noqa: PLC0415  # it takes seconds, as TRL does
    import trl  # noqa: PLC0415

    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in IDS]
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "report_to": "none", "seed": 0}
    options |= {"logging_steps": 1, "save_strategy": "no", "gradient_checkpointing": True, "use_cpu": True}
    plain = transformers.Trainer(
        model=with_adapters(_packed(folder), init_lora_weights=True),
        args=transformers.TrainingArguments(str(tmp_path), **options),
        train_dataset=rows,
    )
    lora = peft.LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM")
    sft = trl.SFTTrainer(
        model=_packed(folder),
        args=trl.SFTConfig(str(tmp_path), bf16=False, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=_tokenizer(),
        peft_config=lora,
    )
    for trainer in (plain, sft):
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[-1] < losses[0]


def _tokenizer() -> Any:
    """Return a tokenizer of 64 words, which a trainer asks for its special tokens alone."""
    special = {"unk_token": "<0>", "eos_token": "<1>", "pad_token": "<2>"}
    model = tokenizers.models.WordLevel({f"<{index}>": index for index in range(64)}, special["unk_token"])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_pefts_own_merge_is_refused(folder: Path) -> None:
    """What would have to be rounded is not merged silently; the error names the way out, and nothing is changed."""
    adapted = with_adapters(_packed(folder)).eval()
    with torch.no_grad():
        before = adapted(IDS).logits
        for merge in (adapted.merge_and_unload, adapted.merge_adapter):
            with pytest.raises(q4_transformers.PackedWeightError, match=r"q4_transformers\.merge"):
                merge()
        assert torch.equal(adapted(IDS).logits, before)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_exact_merge_is_dense_and_right(dora: bool, folder: Path, tmp_path: Path) -> None:
    """The merged model is an ordinary dense one with the adapted model's logits, and is saved as such."""
    adapted = with_adapters(_packed(folder), use_dora=dora).eval()
    with torch.no_grad():
        before = adapted(IDS).logits
        merged, report = q4_transformers.merge(adapted, exact=True)
        assert report.layers == ()
        assert not any(isinstance(module, HfLinear) for module in merged.modules())
        assert torch.allclose(merged(IDS).logits, before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
        merged.save_pretrained(tmp_path)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert not hasattr(again.config, "quantization_config")
        assert torch.equal(again(IDS).logits, merged(IDS).logits)


def test_exact_merge_of_transposed_layers(tmp_path: Path) -> None:
    """GPT-2's layers are transposed again in the dense model, which is saved as transformers keeps it."""
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=4, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "dense")
    adapted = with_adapters(_packed(tmp_path / "dense")).eval()
    with torch.no_grad():
        before = adapted(IDS).logits
        merged, _ = q4_transformers.merge(adapted, exact=True)
        assert torch.allclose(merged(IDS).logits, before, atol=1e-4 * float(before.abs().max()))
        merged.save_pretrained(tmp_path / "merged")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert torch.allclose(again(IDS).logits, before, atol=1e-4 * float(before.abs().max()))


@pytest.mark.parametrize("format_", FORMATS)
def test_requantised_merge_reports_what_is_lost(format_: str, folder: Path) -> None:
    """Every layer stays packed in its format; the report has the true errors, and each is that of one quantisation."""
    packed = _packed(folder, format_)
    adapted = with_adapters(packed)
    exact, _ = q4_transformers.merge(copy.deepcopy(adapted), exact=True)
    merged, report = q4_transformers.merge(adapted, requantize=True)
    assert len(report.layers) == 14
    for row in report.layers:
        layer = merged.get_submodule(row.name)
        assert isinstance(layer, HfLinear)
        assert (row.format, layer.packed_weight().format.name) == (format_, format_)
        wanted = exact.get_submodule(row.name).weight
        lost = float((layer.dequantize() - wanted).norm() / wanted.norm())
        assert row.error == pytest.approx(lost, rel=1e-3)
        assert 0 < row.error < 0.2
        assert row.change_error > row.error
    assert f"{report}".endswith("14 layers quantised again")


def test_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What docs/huggingface.md shows of adapters runs, and prints the report."""
    page = (ROOT / "docs/huggingface.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", page.split("## Train adapters")[1], re.DOTALL | re.MULTILINE)
    assert len(snippets) == 2
    exec("\n".join(snippets), {"model": _packed(folder), "q4_transformers": q4_transformers})  # noqa: S102  # our page
    assert "14 layers quantised again" in capsys.readouterr().out


def test_example(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``finetune_lora.py`` trains another folder's model, draws its losses, and keeps the adapter."""
    place = tmp_path / "model"
    shutil.copytree(folder, place)
    _tokenizer().save_pretrained(place)
    words = ["finetune_lora.py", str(place), "--steps", "2", "--picture", str(tmp_path / "losses.png")]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(tmp_path / "adapter")])
    monkeypatch.syspath_prepend(ROOT / "examples")
    runpy.run_path(str(ROOT / "examples/finetune_lora.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"held-back loss: \d\.\d+ before, \d\.\d+ after 2 steps", printed)
    assert re.search(r"merged and quantised again, model\.layers\.\S+ keeps least: \d+% of its change", printed)
    assert (tmp_path / "losses.png").stat().st_size > 5000
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()


def test_merge_requires_a_choice(folder: Path) -> None:
    """Neither both nor none is asked for, and a model without adapters has nothing to merge."""
    adapted = with_adapters(_packed(folder))
    for options in ({}, {"exact": True, "requantize": True}):
        with pytest.raises(q4.ConfigError) as caught:
            q4_transformers.merge(adapted, **options)
        assert caught.value.name == "exact, requantize"
    with pytest.raises(q4.ConfigError) as caught:
        q4_transformers.merge(_packed(folder), exact=True)
    assert caught.value.name == "model"


def test_other_adapters_are_not_dropped(folder: Path) -> None:
    """What merging does not know is refused, also where it lies on dense layers alone, and the model is unchanged."""
    loha = peft.LoHaConfig(target_modules=["lm_head"], r=2, init_weights=False)
    adapted = peft.get_peft_model(_packed(folder), loha).eval()
    with torch.no_grad():
        before = adapted(IDS).logits
        with pytest.raises(q4.ConfigError) as caught:
            q4_transformers.merge(adapted, exact=True)
        assert (caught.value.name, caught.value.value) == ("model", "LOHA")
        assert torch.equal(adapted(IDS).logits, before)


def test_starting_values_that_change_the_weight_are_refused(folder: Path) -> None:
    """PiSSA takes a part of the base weight into the adapter, which a packed one can't give; the error says so."""
    with pytest.raises(q4_transformers.PackedWeightError, match="init_lora_weights"):
        with_adapters(_packed(folder), init_lora_weights="pissa")


@pytest.mark.parametrize(
    ("chosen", "name"), [("up_proj", "model.layers.0.mlp.up_proj"), ("mlp", "model.layers.0.mlp.gate_proj")]
)
def test_modules_to_save_name_the_packed_layer(chosen: str, name: str, folder: Path) -> None:
    """A packed layer among modules that PEFT shall train whole is an error; a dense one trains."""
    options: dict[str, Any] = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    with pytest.raises(q4_transformers.PackedWeightError, match=rf"modules_to_save.*{name}"):
        peft.get_peft_model(_packed(folder), peft.LoraConfig(modules_to_save=[chosen], **options))
    model = peft.get_peft_model(_packed(folder), peft.LoraConfig(modules_to_save=["lm_head"], **options))
    assert any(item.requires_grad for key, item in model.named_parameters() if "lm_head.modules_to_save" in key)
    assert isinstance(copy.deepcopy(model.model.model.layers[0].mlp.up_proj), HfLinear)


def test_adalora_trains(folder: Path) -> None:
    """AdaLoRA freezes a weight that is packed, and trains with the gradients of the dequantised one."""
    packed = _packed(folder)
    config = peft.AdaLoraConfig(target_modules="all-linear", init_r=4, total_step=10, task_type="CAUSAL_LM")
    gradients = []
    for model in (_twin(packed, folder), packed):
        torch.manual_seed(1)
        gradients.append(adapter_gradients(peft.get_peft_model(model, config), IDS))
    theirs, ours = gradients
    assert ours.keys() == theirs.keys()
    assert len(ours) == 14 * 3
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).abs().max()) <= 1e-4 * float(gradient.abs().max()), name


@pytest.mark.parametrize(
    ("kind", "options"), [("Hra", {}), ("Hira", {}), ("Shira", {"r": 2}), ("Peanut", {}), ("Frod", {}), ("DeLora", {})]
)
def test_adapters_that_need_a_dense_weight_are_named(kind: str, options: dict[str, Any], folder: Path) -> None:
    """A kind of PEFT that reads or changes the weight is an error that names it, and the kinds that run."""
    names = {name.lower(): name for name in dir(peft)}
    config = getattr(peft, names[f"{kind}Config".lower()])(target_modules=["q_proj"], **options)
    with pytest.raises(q4_transformers.PackedWeightError, match=rf"(?i)kind {kind} .*LoRA and DoRA run"):
        peft.get_peft_model(_packed(folder), config)(IDS)
