"""A GGUF file is served through a folder: what vLLM's loader reads of it, and the packed layers that the file has."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
import vllm_stubs as stubs
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

import q4core as q4
from q4_vllm.config import Q4Config
from q4_vllm.experts import parts_of_experts
from q4_vllm.gguf import make_folder
from tests.support.hf_folders import FAMILIES, write_folder
from tests.support.tiny_llama import write_tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = SimpleNamespace(architectures=["LlamaForCausalLM"])
HEADS, KV_HEADS, HEAD, HIDDEN, INNER, VOCABULARY = 4, 2, 16, 64, 96, 268


@pytest.fixture(autouse=True)
def tried_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the installed release be one that was tried: there is none here."""
    monkeypatch.setattr("q4_vllm.checks._installed", lambda: "0.32.0")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose matrices are all packed."""
    return write_tiny_llama(tmp_path_factory.mktemp("file") / "tiny.gguf", up=Type.Q5_0)


def _values(file: Path) -> dict[str, torch.Tensor]:
    """Return the file's tensors, as the package ``gguf`` decodes them."""
    found = {}
    for tensor in gguf.GGUFReader(file).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = torch.from_numpy(values.copy()).double()
    return found


def _turned(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows of queries or keys in transformers' order: the file has a pair's members side by side."""
    return values.view(heads, HEAD // 2, 2, HIDDEN).transpose(1, 2).reshape(values.shape)


def test_layers_are_the_files(file: Path, tmp_path: Path) -> None:
    """A worker's fused layers compute the products of the matrices that the file means, its head among them."""
    folder, values = make_folder(file, tmp_path / "folder"), _values(file)
    config = Q4Config()
    config.maybe_update_config(str(folder), LLAMA)
    config.packed_modules_mapping = stubs.Llama.packed_modules_mapping
    attention = "model.layers.0.self_attn"
    qkv = stubs.QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, prefix=f"{attention}.qkv_proj")
    head = stubs.ParallelLMHead(VOCABULARY, HIDDEN, prefix="lm_head")
    parts = [_turned(values["blk.0.attn_q.weight"], HEADS), _turned(values["blk.0.attn_k.weight"], KV_HEADS)]
    expected: dict[Any, torch.Tensor] = {
        qkv: torch.cat((*parts, values["blk.0.attn_v.weight"])),
        head: values["token_embd.weight"],
    }
    config._placed.update(config._stored.values())  # the other layers have their places in the whole model
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    for layer, weight in expected.items():
        method = config.get_quant_method(layer, layer.prefix)
        columns, sizes = layer.sizes()
        method.create_weights(layer, columns, sizes, columns, sum(sizes), torch.float32, weight_loader=None)
        method.process_weights_after_loading(layer)
        y = method.apply(layer, x)[:, : len(weight)]
        torch.testing.assert_close(y.double(), x.double() @ weight.mT, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("family", "block", "parts"),
    [
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
    ],
)
def test_experts_of_a_file(family: str, block: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    """Each expert is layers of its own, under the names that vLLM asks for, with the numbers that it was made of."""
    source, file = write_folder(tmp_path / "source", FAMILIES[family]), tmp_path / "experts.gguf"
    command = [sys.executable, "-m", "q4_cli", "convert", str(source), str(file), "--dialect", "gguf"]
    subprocess.run(command, check=True, capture_output=True)
    folder = make_folder(file, tmp_path / "folder")
    config = Q4Config()
    config.maybe_update_config(str(folder), SimpleNamespace(architectures=[]))
    layer = SimpleNamespace(moe_config=stubs.moe_config(4))
    for name, part in zip(("gate", "up", "down"), parts, strict=True):
        setattr(layer, f"ckpt_{name}_proj_name", part)
    found = parts_of_experts(layer, f"model.layers.1.{block}.experts", config._stored)
    assert found is not None
    with q4.open(source) as checkpoint:
        for number, names in enumerate(found):
            for name, part in zip(names, ("gate", "up", "down"), strict=True):
                expected = q4.dequantize(checkpoint[f"model.layers.1.mlp.experts.{number}.{part}_proj"], torch.float32)
                assert torch.equal(q4.dequantize(config.checkpoint[name], torch.float32), expected)
    assert f"model.layers.1.{block}.gate.weight" in load_file(folder / "model.safetensors")


def test_what_vllm_reads(file: Path, tmp_path: Path) -> None:
    """The folder has a config whose head is not tied, the tokenizer, and every dense tensor, exactly."""
    folder, values = make_folder(file, tmp_path / "folder"), _values(file)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["tie_word_embeddings"]) == (["LlamaForCausalLM"], False)
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    dense = load_file(folder / "model.safetensors")
    norms = {f"model.layers.{n}.{name}_layernorm.weight" for n in range(2) for name in ("input", "post_attention")}
    assert dense.keys() == {*norms, "model.embed_tokens.weight", "model.norm.weight"}
    assert torch.equal(dense["model.embed_tokens.weight"].double(), values["token_embd.weight"])
    assert (folder / "model.gguf").samefile(file)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_command(file: Path, tmp_path: Path) -> None:
    """The command says how its folder is served; a folder that is there already stays as it is."""
    command = [sys.executable, "-m", "q4_vllm", str(file), str(tmp_path / "folder")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"--model {tmp_path / 'folder'} --quantization q4" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "not there yet" in again.stderr


def test_file_as_model(file: Path) -> None:
    """Whoever names the file itself is told the command."""
    with pytest.raises(q4.CheckpointError) as caught:
        Q4Config().maybe_update_config(str(file), LLAMA)
    assert f"python -m q4_vllm {file} FOLDER" in str(caught.value.hint)


def test_dense_layer_inside_a_fusion(tmp_path: Path) -> None:
    """A matrix that the file has in float16 next to a packed one is named by transformers' name."""
    folder = make_folder(write_tiny_llama(tmp_path / "tiny.gguf"), tmp_path / "folder")
    with pytest.raises(q4.SchemaError) as caught:
        Q4Config().maybe_update_config(str(folder), LLAMA)
    assert {problem.key for problem in caught.value.problems} == {f"model.layers.{n}.mlp.up_proj" for n in range(2)}


def test_file_is_gone(file: Path, tmp_path: Path) -> None:
    """A link whose file was moved away is an error that names it, and makes no dense model."""
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(file.read_bytes())
    folder = make_folder(moved, tmp_path / "folder")
    moved.unlink()
    with pytest.raises(q4.CheckpointError, match=r"model\.gguf"):
        Q4Config().maybe_update_config(str(folder), LLAMA)
