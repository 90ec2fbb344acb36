"""Hugging Face folders as GGUF files: every family gives the same logits and tokens, or is refused by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer as Engine

import q4core as q4
from q4_lm import LanguageModel, Metadata, config_from_gguf, load_model
from q4_lm.exchange.vocabulary_to_gguf import vocabulary_keys
from q4_lm.exchange.vocabulary_to_hf import tokenizer_files
from tests.support.commands import answer
from tests.support.hf_folders import FAMILIES, write_folder

if TYPE_CHECKING:
    from pathlib import Path

EXACT = q4.SessionConfig(device="cpu", activation_precision="exact", compute_dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_folders(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers are written exactly, rows of q and k in llama.cpp's order; the file is read as the same model."""
    folder = write_folder(tmp_path / "model", FAMILIES[family])
    out = tmp_path / "out.gguf"
    record = answer(capsys, "convert", folder, out, "--dialect", "gguf")
    assert {item["how"] for item in record["layers"]} == {"exact"}
    ids = torch.arange(40)[None] * 7 % 64
    with q4.Session(EXACT) as session, torch.no_grad():
        before, after = load_model(folder, session)(ids), load_model(out, session)(ids)
    assert torch.allclose(before, after, atol=2e-5, rtol=1e-4)
    names = {item.name for item in gguf.GGUFReader(out).tensors}
    assert "blk.0.attn_norm.weight" in names or family == "olmo2"
    assert config_from_gguf(out).num_hidden_layers == 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dynamic": ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
    "other windows": (
        {"model_type": "gemma2", "sliding_window": 8, "layer_types": ["full_attention"] + ["sliding_attention"] * 3},
        "sliding_",
    ),
    "a scale of Gemma": ({"model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 64}, "attention_scale"),
    "experts that are not normed": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
         "norm_topk_prob": False}, "norm_topk_prob",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_can_not_say_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fact is named before anything is written."""
    given, name = REFUSED[case]
    folder = write_folder(tmp_path / "model", given)
    error = answer(capsys, "convert", folder, tmp_path / "out.gguf", "--dialect", "gguf", status=2)["error"]
    assert error["name"].startswith(name)
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("change", ["extra", "missing", "kind"])
def test_another_models_tensors_are_refused(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor that the model lacks, or has and the folder lacks, is named; and so is a kind that nobody knows."""
    folder = write_folder(tmp_path / "model", FAMILIES["qwen3"])
    with q4.open(folder) as opened:
        weights, dense = {name: opened[name] for name in opened}, dict(opened.dense)
    config = json.loads((folder / "config.json").read_text())
    if change == "extra":
        dense["model.layers.0.extra.weight"] = torch.ones(3)
    elif change == "missing":
        del dense["model.norm.weight"]
    q4.save_checkpoint(folder, weights, dialect="compressed-tensors-int4", dense=dense, config=config)
    if change == "kind":
        (folder / "config.json").write_text(
            json.dumps({**json.loads((folder / "config.json").read_text()), "model_type": "gpt_oss"})
        )
    error = answer(capsys, "convert", folder, tmp_path / "out.gguf", "--dialect", "gguf", status=2)["error"]
    assert error["name"] == {"kind": "model_type"}.get(change, "tensor")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "gpt-2", "tekken", "gpt-4o", "deepseek-v3"])
def test_bytes_and_merges_there_and_back(pre: str, vocabulary: dict[str, Any], tmp_path: Path) -> None:
    """A vocabulary that became ``tokenizer.json`` becomes metadata again, with its tokens, types and merges."""
    before = {**vocabulary, "tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    for name, text in tokenizer_files(Metadata(before, "here")).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    count = len(before["tokenizer.ggml.tokens"])
    after = vocabulary_keys(tmp_path, count + 2)
    for key in ("model", "pre", "merges", "bos_token_id", "add_bos_token"):
        assert after[f"tokenizer.ggml.{key}"] == before[f"tokenizer.ggml.{key}"], key
    assert after["tokenizer.ggml.tokens"][:count] == before["tokenizer.ggml.tokens"]
    assert after["tokenizer.ggml.token_type"] == [*before["tokenizer.ggml.token_type"], 5, 5]
    assert after["tokenizer.chat_template"] == before["tokenizer.chat_template"]


def test_a_llama_goes_to_a_folder_and_back(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GGUF to folder to GGUF: tokens, template, ends and logits are the first file's."""
    folder, out = tmp_path / "folder", tmp_path / "again.gguf"
    answer(capsys, "convert", tiny_llama, folder, "--dialect", "mlx", "--skip", "v_proj")
    answer(capsys, "convert", folder, out, "--dialect", "gguf")
    ids = torch.arange(24)[None] * 11 % 260
    with (
        LanguageModel.open(tiny_llama, EXACT, cache="off") as before,
        LanguageModel.open(out, EXACT, cache="off") as after,
        torch.no_grad(),
    ):
        assert torch.allclose(before.decoder(ids), after.decoder(ids), atol=1e-5, rtol=1e-5)
        assert before.chat_template == after.chat_template
        assert before.tokenizer.stops == after.tokenizer.stops
        for text in ("the thing in 12", "  a\n\n b ü€", "<added> the<added>", ""):
            assert before.tokenizer.encode(text) == after.tokenizer.encode(text)


def test_vocabularies_without_an_equal_are_refused(
    vocabulary: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another model, normaliser or pre-tokeniser, and more tokens than rows, are named."""
    files = tokenizer_files(Metadata(vocabulary, "here"))
    (tmp_path / "tokenizer_config.json").write_text(files["tokenizer_config.json"])
    facts = json.loads(files["tokenizer.json"])
    cases: dict[str, dict[str, Any]] = {
        "normalizer": {"normalizer": {"type": "Lowercase"}},
        "pre_tokenizer": {
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True, "trim_offsets": True}
        },
        "model.type": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "added_tokens": []},
    }
    for name, change in cases.items():
        (tmp_path / "tokenizer.json").write_text(json.dumps({**facts, **change}))
        with pytest.raises(q4.CheckpointError) as caught:
            vocabulary_keys(tmp_path, 400)
        assert caught.value.name == name
    (tmp_path / "tokenizer.json").write_text(files["tokenizer.json"])
    with pytest.raises(q4.CheckpointError, match="rows of the embedding"):
        vocabulary_keys(tmp_path, 100)
    (tmp_path / "tokenizer.json").unlink()
    with caplog.at_level("DEBUG", logger="q4core"):
        assert vocabulary_keys(tmp_path, 100) == {}
    assert "q4.vocabulary" in caplog.text
    for name in ("tokenizer.model", "vocab.json"):
        (tmp_path / name).write_bytes(b"{}")
        with pytest.raises(q4.CheckpointError, match=r"tokenizer\.json.*save_pretrained"):
            vocabulary_keys(tmp_path, 100)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("prefix", [True, False])
def test_scored_pieces_there_and_back(prefix: bool, tmp_path: Path) -> None:
    """SentencePiece's vocabulary, as the package tokenizers has it, becomes scores that cut the same."""
    from test_lm_exchange import scored  # noqa: PLC0415  # the vocabulary of the other direction

    before = scored(**{"tokenizer.ggml.add_space_prefix": prefix})
    for name, text in tokenizer_files(Metadata(before, "here")).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    after = vocabulary_keys(tmp_path, len(before["tokenizer.ggml.tokens"]))
    assert after["tokenizer.ggml.token_type"] == before["tokenizer.ggml.token_type"]
    assert after["tokenizer.ggml.add_space_prefix"] is prefix
    assert Engine.from_file(str(tmp_path / "tokenizer.json")).get_vocab_size() == len(after["tokenizer.ggml.scores"])
