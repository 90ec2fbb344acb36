"""What ``from_pretrained`` by q4core refuses, before a tensor is loaded, and how it names it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from huggingface_models import dense_model, load, save_by_q4
from safetensors.torch import load_file, save_file

import q4_transformers
import q4core as q4
from q4_transformers import Q4Config
from q4_transformers.registration import check_version, register

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers")]


def test_refusals(tmp_path: Path) -> None:
    """What does not fit is a typed error that names it, before a tensor is loaded."""
    dense = save_by_q4(tmp_path / "model", "bitsandbytes", "nf4")
    dense.save_pretrained(tmp_path / "dense")
    with pytest.raises(q4.ConfigError, match="format must be given"):
        load(tmp_path / "dense")
    with pytest.raises(q4.ConfigError, match="format must be None"):
        load(tmp_path / "model", config={"format": "nf4"})
    with pytest.raises(q4.ConfigError, match=r"'lm_haed'.*Did you mean 'lm_head'"):
        load(tmp_path / "dense", config={"format": "nf4", "modules_to_not_convert": ["lm_haed"]})
    with pytest.raises(q4.ConfigError, match="device_map"):
        load(tmp_path / "model", device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path / "off")
    dense.save_pretrained(tmp_path / "pickle")
    (tmp_path / "pickle" / "model.safetensors").unlink()
    torch.save(dense.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    with pytest.raises(q4.CheckpointError, match="safetensors files"):
        load(tmp_path / "pickle", config={"format": "nf4"})
    with pytest.raises(q4.CheckpointError, match="a model's folder or a GGUF file"):
        q4_transformers.load(tmp_path / "nothing")
    with pytest.raises(q4.InputError, match=r"an nn\.Module"):
        q4_transformers.explain(tmp_path)  # type: ignore[arg-type]  # on purpose


def test_nothing_to_pack(tmp_path: Path) -> None:
    """A format that packs no layer is an error with the reasons, as for float64 weights and for names that fit all."""
    dense = dense_model()
    dense.save_pretrained(tmp_path / "dense")
    dense.double().save_pretrained(tmp_path / "double")
    with pytest.raises(
        q4.ConfigError, match=r"format must be one that packs.*14 of float64.*the output head"
    ) as caught:
        load(tmp_path / "double", config={"format": "nf4"})
    assert caught.value.value == "nf4"
    with pytest.raises(
        q4.ConfigError, match=r"14 in modules_to_not_convert as 'model'; 1 in modules_to_not_convert as 'lm_head'"
    ):
        load(tmp_path / "dense", config={"format": "nf4", "modules_to_not_convert": ["model", "lm_head"]})


@pytest.mark.parametrize("config", [{}, {"format": "nf4"}])
def test_eight_bits(config: dict[str, Any], tmp_path: Path) -> None:
    """Codes of 8 bits, whose scales transformers would pass over, are refused next to packed layers and alone."""
    if config:
        dense_model().save_pretrained(tmp_path)
    else:
        save_by_q4(tmp_path, "bitsandbytes", "nf4")
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = state["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(q4.SchemaError, match=r"lm_head\.weight must be of 16 bits or more.*float8_e4m3fn"):
        load(tmp_path, config=config)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"intermediate_size": 192}, ["model.layers.0.mlp.up_proj must be [192, 64]", "got [128, 64]"]),
        ({"num_hidden_layers": 1}, ["model.layers.1.mlp.up_proj must be a module of LlamaForCausalLM"]),
        ({"attention_bias": True}, ["model.layers.0.self_attn.q_proj.bias must be there"]),
    ],
)
def test_config_that_disagrees(change: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    """A config of another model names every layer that does not fit."""
    save_by_q4(tmp_path, "bitsandbytes", "nf4")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(q4.SchemaError) as caught:
        load(tmp_path)
    for name in names:
        assert name in str(caught.value)


def test_layers_that_the_checkpoint_lacks_are_listed(tmp_path: Path) -> None:
    """transformers fills what a checkpoint lacks at random, with a report; ``explain`` does not call it stored."""
    save_by_q4(tmp_path, "bitsandbytes", "nf4")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    dense = {row.name: row.reason for row in q4_transformers.explain(load(tmp_path)).dense}
    missing = {name for name, reason in dense.items() if "the checkpoint has no such weight" in reason}
    assert len(missing) == 7
    assert all(name.startswith("model.layers.2.") for name in missing)
    assert dense["lm_head"] == "stored so"


@pytest.mark.usefixtures("natively")
def test_layers_of_the_reference_have_its_reason(tmp_path: Path) -> None:
    """``explain`` says why no kernel runs a layer, in q4core's own words; of one that a kernel runs it says nothing."""
    save_by_q4(tmp_path, "bitsandbytes", "nf4", hidden_size=80, num_attention_heads=5, num_key_value_heads=5)
    model = load(tmp_path)  # K = 80 is no multiple of 64
    found = {row.name: row for row in q4_transformers.explain(model).packed}
    odd, even = (found[f"model.layers.0.mlp.{name}_proj"] for name in ("up", "down"))
    assert (odd.backend, even.backend, even.reason) == ("dequant-fallback", "cpu-native", "")
    rejections = model.model.layers[0].mlp.up_proj.diagnostics().rejections
    assert odd.reason == "; ".join(f"not {rejection}" for rejection in rejections)
    assert "not cpu-native: feature: feature 'blocks that run across rows' is not declared" in odd.reason
    lines = str(q4_transformers.explain(model)).splitlines()
    assert next(line for line in lines if odd.name in line).endswith(f"dequant-fallback: {odd.reason}")
    assert next(line for line in lines if even.name in line).endswith("cpu-native")


def test_damaged_files(tmp_path: Path) -> None:
    """A layer without its scales, a packed layer left over, a missing shard and an unread dialect are named."""
    save_by_q4(tmp_path, "bitsandbytes", "nf4")
    state, file = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    key = "model.layers.0.mlp.up_proj.weight"
    parts = {name: value for name, value in state.items() if name.startswith(key)}
    less = {name: value for name, value in state.items() if name != f"{key}.absmax"}
    more = state | {name.replace("up_proj", "side_proj"): value.clone() for name, value in parts.items()}
    for changed, message in ((less, "absmax must be there"), (more, "side_proj must be a module")):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(q4.SchemaError, match=message):
            load(tmp_path)
    save_file(state, file, metadata={"format": "pt"})
    load(tmp_path).save_pretrained(tmp_path / "many", max_shard_size="20KB")
    next((tmp_path / "many").glob("*-00002-of-*")).unlink()
    with pytest.raises((q4.CheckpointError, OSError), match="00002"):
        load(tmp_path / "many")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "nf5"}, "nf5"),
        ({"fromat": "nf4"}, "fromat"),
        ({"format": "nf4", "block_size": 48}, "block_size must be one of 32, 64"),
        ({"format": "int4", "block_size": "64"}, "block_size must be"),
        ({"format": "nf4", "modules_to_not_convert": "lm_head"}, "a list of names"),
        ({"block_size": 64}, "None without format="),
        ({"skip": "all"}, "skip must be None or 'unsupported'"),
        ({"dialect": "bitsandbyte"}, "Did you mean 'bitsandbytes'"),
        ({"activation_precision": "int3"}, "activation_precision"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    """An option that is not legal is an error when the configuration is made."""
    with pytest.raises(q4.Q4Error, match=message):
        Q4Config(**options)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment says what is taken over when the package is imported."""
    mapping = transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    before = dict(mapping)
    monkeypatch.setenv("Q4_TRANSFORMERS", "torchao, mxfp4")
    try:
        register()
        assert {name for name in mapping if mapping[name] is not before[name]} == {"torchao", "mxfp4"}
    finally:
        q4_transformers.give_back()
    assert mapping == before


def test_versions() -> None:
    """Another major version of transformers is refused by name."""
    for version in ("4.57.1", "6.0.0"):
        with pytest.raises(q4.ConfigError, match=version):
            check_version(version)
    check_version("5.0.0")
