"""Folders of every dialect in transformers: the logits of dequantised weights, saved again, trained, dense in part."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from huggingface_adapters import OLDER_NAME, adapter_gradients, with_adapters
from huggingface_models import EXACT, dense_model, error, load, logits, packed, save_by_q4

import q4_transformers
import q4core as q4
from q4_transformers import Q4Config

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers")]

SAMPLES = Path(os.environ.get("Q4_SAMPLES", "samples"))
REFUSED = "autoround-mxint4"
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


def models() -> Iterator[str]:
    """Yield the names of the samples that are whole models."""
    for file in sorted(SAMPLES.glob("*/checkpoint/config.json")):
        if json.loads(file.read_text(encoding="utf-8")).get("hidden_size") and file.parts[-3] != REFUSED:
            yield file.parts[-3]


def dequantised(folder: Path) -> Any:
    """Return transformers' model of a folder, with every weight as q4core dequantises it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for name in ("quantization_config", "quantization"):
        vars(config).pop(name, None)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with q4.open(folder) as checkpoint:
        state = {f"{name}.weight": q4.dequantize(checkpoint[name], torch.float32) for name in checkpoint}
        state |= {name: checkpoint.dense[name].float() for name in checkpoint.dense}
    own = model.state_dict()
    assert own.keys() <= {*state, *model.all_tied_weights_keys}
    model.load_state_dict({name: value for name, value in state.items() if name in own}, strict=False)
    return model


@OLDER_NAME
@pytest.mark.samples
@pytest.mark.parametrize("name", [*models()])
def test_samples(name: str, tmp_path: Path) -> None:
    """A small model that a library wrote has the dequantised weights' logits, as saved again, too; adapters train."""
    folder = SAMPLES / name / "checkpoint"
    ours = load(folder)
    assert len(packed(ours)) + sum(row.kind == "Linear" for row in q4_transformers.explain(ours).dense) >= 8
    assert error(ours, dequantised(folder)) < 1e-5
    expected = logits(ours)
    ours.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert packed(again) == packed(ours)
    assert torch.equal(logits(again), expected)
    gradients = adapter_gradients(with_adapters(q4_transformers.prepare_for_training(again)), torch.arange(12)[None])
    assert gradients
    assert all(bool(value.isfinite().all()) for value in gradients.values())


@pytest.mark.samples
def test_a_sample_that_is_refused() -> None:
    """What is recognised and not read is an error that names it."""
    with pytest.raises(q4.SchemaError, match="mxint4"):
        load(SAMPLES / REFUSED / "checkpoint")


@pytest.mark.parametrize(
    ("dialect", "kind"),
    [
        *((name, "int4") for name in ("awq", "awq-gemv", "gptq", "gptq-v2", "hqq", "compressed-tensors-int4")),
        *((name, "mxfp4") for name in ("compressed-tensors-mxfp4", "deepseek-mxfp4", "modelopt-mxfp4", "mlx")),
        *((name, "nvfp4") for name in ("comfyui-nvfp4", "torchao-nvfp4-swizzled")),
        ("mlx", "q4_1"),
        ("gptqmodel-bitsandbytes", "nf4"),
    ],
)
def test_written_dialects(dialect: str, kind: str, tmp_path: Path) -> None:
    """What q4core writes in a dialect loads packed, and is written in the same one again."""
    dense = save_by_q4(tmp_path / "one", dialect, kind, **WIDE)
    ours = load(tmp_path / "one")
    assert len(packed(ours)) == 7
    assert error(ours, dense) < 1e-5
    ours.save_pretrained(tmp_path / "two")
    with q4.open(tmp_path / "two") as checkpoint:
        assert checkpoint.schema.dialects == (dialect,)
    assert torch.equal(logits(load(tmp_path / "two")), logits(ours))


@pytest.mark.samples
def test_mixes_are_saved_in_another_dialect(tmp_path: Path) -> None:
    """MLX's second entry of config.json is not left behind when a model is saved for somebody else."""
    folder = SAMPLES / "mlx-mxfp4" / "checkpoint"
    ours = load(folder, config={"dialect": "compressed-tensors-mxfp4"})
    ours.save_pretrained(tmp_path)
    found = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert "quantization" not in found
    assert found["quantization_config"]["quant_method"] == "compressed-tensors"
    assert torch.equal(logits(load(tmp_path)), logits(ours))


# -- layers that are left dense


def write_packed(folder: Path, *names: str, kind: str = "Llama", **options: Any) -> Any:
    """Save a random model in bitsandbytes' dialect, in which further modules than linear layers are packed."""
    dense = dense_model(kind, **options)
    dense.config.architectures = [type(dense).__name__]
    dense.config.save_pretrained(folder)
    state = {key: value.contiguous() for key, value in dense.state_dict().items()}
    for tied in dense.all_tied_weights_keys:
        del state[tied]
    weights = {}
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", *names):
        weights[name] = q4.quantize(state.pop(f"{name}.weight"), "nf4", name=name)
        dense.get_submodule(name).weight.data = q4.dequantize(weights[name], torch.float32)
    q4.save_checkpoint(folder, weights, dialect="bitsandbytes", dense=state)
    return dense


@pytest.mark.parametrize("tied", [False, True])
def test_packed_embeddings_become_dense(tied: bool, tmp_path: Path) -> None:
    """An embedding that is stored packed is dequantised, a head that is tied to it with it, and both are listed."""
    dense = write_packed(tmp_path / "one", "model.embed_tokens", tie_word_embeddings=tied)
    ours = load(tmp_path / "one")
    assert error(ours, dense) < 1e-5
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) is tied
    assert set(ours.all_tied_weights_keys) == ({"lm_head.weight"} if tied else set())
    reasons = {row.name: row.reason for row in q4_transformers.explain(ours).dense}
    assert reasons["model.embed_tokens"] == "Embedding is no plain linear layer: dequantised"
    ours.save_pretrained(tmp_path / "two")
    assert torch.equal(logits(load(tmp_path / "two")), logits(ours))


ROUTED: dict[str, Any] = {"kind": "Mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}
ROUTER = "model.layers.1.mlp.gate"


@pytest.mark.parametrize("asked", [{"modules_to_not_convert": [ROUTER]}, {"skip": "unsupported"}])
def test_a_layer_that_runs_in_no_packed_one(asked: dict[str, Any], tmp_path: Path) -> None:
    """A packed router is an error that names two ways out; each makes it dense, and lists it."""
    dense = write_packed(tmp_path, ROUTER, **ROUTED)
    with pytest.raises(q4.SchemaError) as caught:
        load(tmp_path)
    assert f"modules_to_not_convert=['{ROUTER}']" in str(caught.value)
    assert "skip='unsupported'" in str(caught.value)
    ours = load(tmp_path, config=asked)
    assert error(ours, dense) < 1e-5
    reasons = {row.name: row.reason for row in q4_transformers.explain(ours).dense}
    assert reasons[ROUTER].endswith(": dequantised")


def test_packed_layers_are_dense_where_asked(tmp_path: Path) -> None:
    """Layers that ``modules_to_not_convert`` names are dequantised; one that fits nothing is an error."""
    dense = save_by_q4(tmp_path, "bitsandbytes", "nf4")
    ours = load(tmp_path, config={"modules_to_not_convert": ["q_proj"]})
    assert len(packed(ours)) == 12
    assert error(ours, dense) < 1e-5
    with pytest.raises(q4.ConfigError, match=r"'q_prj'.*Did you mean 'q_proj'"):
        load(tmp_path, config={"modules_to_not_convert": ["q_prj"]})


def test_experts_are_dense_where_asked(tmp_path: Path) -> None:
    """Packed experts that ``modules_to_not_convert`` names are dequantised, each in a linear layer of its own."""
    dense_model(**ROUTED).save_pretrained(tmp_path / "dense")
    load(tmp_path / "dense", config={"format": "nf4"}).save_pretrained(tmp_path / "packed")
    whole = load(tmp_path / "packed")
    ours = load(tmp_path / "packed", config={"modules_to_not_convert": ["experts"]})
    assert not [name for name in packed(ours) if "experts" in name]
    assert [name for name in packed(whole) if "experts" in name]
    assert error(ours, whole) < 1e-5


def test_a_transposed_layer_is_dense_where_asked(tmp_path: Path) -> None:
    """GPT-2's dense weights are [K, N]."""
    dense_model("GPT2", n_embd=64, n_head=4, n_layer=2).save_pretrained(tmp_path / "dense")
    load(tmp_path / "dense", config={"format": "nf4"}).save_pretrained(tmp_path / "packed")
    whole = load(tmp_path / "packed")
    ours = load(tmp_path / "packed", config={"modules_to_not_convert": ["c_proj", "c_fc"]})
    assert len(packed(whole)) - len(packed(ours)) == 6
    assert error(ours, whole) < 1e-5


def test_unread_layers_stay_an_error(tmp_path: Path) -> None:
    """No option makes a layer of what has no numbers: its form is not read."""
    save_by_q4(tmp_path, "bitsandbytes", "nf4")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(q4.SchemaError, match="must be a module of"):
        load(tmp_path, config={"skip": "unsupported"})


def test_a_layer_that_cannot_be_quantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A weight that is not finite is an error that names two ways out; ``skip`` leaves it dense, logged and listed."""
    name = "model.layers.1.mlp.up_proj"
    dense = dense_model()
    dense.get_submodule(name).weight.data[3, 5] = torch.inf
    dense.save_pretrained(tmp_path)
    with pytest.raises(q4.InputError) as caught:
        load(tmp_path, config={"format": "nf4"})
    for part in (name, "must be finite", "modules_to_not_convert=['up_proj']", "skip='unsupported'"):
        assert part in str(caught.value)
    logging.getLogger("q4_transformers").addHandler(caplog.handler)
    config = Q4Config(format="nf4", skip="unsupported", cache=tmp_path / "cache", **EXACT)
    for _ in range(2):
        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
        assert len(packed(ours)) == 13
        assert torch.equal(ours.get_submodule(name).weight, dense.get_submodule(name).weight)
        reasons = {row.name: row.reason for row in q4_transformers.explain(ours).dense}
        assert "must be finite" in reasons[name]
        assert f"{name} stays dense" in caplog.text
