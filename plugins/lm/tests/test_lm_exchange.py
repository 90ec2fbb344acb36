"""GGUF files as Hugging Face folders: the same numbers, the same tokens, or a refusal by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer as Engine

import q4core as q4
from q4_cli.app import run
from q4_lm import LanguageModel, Metadata, build_tokenizer
from q4_lm.exchange.gguf_to_hf import to_hf_folder
from q4_lm.exchange.vocabulary_to_hf import tokenizer_files
from q4_nn.blocks.rotary import RopeScaling
from tests.support.commands import answer

if TYPE_CHECKING:
    from pathlib import Path

EXACT = q4.SessionConfig(device="cpu", activation_precision="exact", compute_dtype=torch.float32)
TEXTS = ("the thing in 12", "<|im_start|>user\nthe<|im_end|>", "  a\n\n b ü€", "<added> the<added>", "")


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_llama_becomes_a_folder(
    is_tied: bool, tiny_llama: Path, untied_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of q and k are put in order as they are packed; logits, tokens, ends and template are the file's."""
    source = tiny_llama if is_tied else untied_llama
    out = tmp_path / "folder"
    skipped = [word for glob in ("v_proj", *([] if is_tied else ["lm_head"])) for word in ("--skip", glob)]
    record = answer(capsys, "convert", source, out, "--dialect", "mlx", *skipped)
    assert {item["how"] for item in record["layers"]} == {"exact", "dense"}
    assert "model.layers.1.self_attn.q_proj" in {item["name"] for item in record["layers"] if item["how"] == "exact"}
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["tie_word_embeddings"]) == (["LlamaForCausalLM"], is_tied)
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}
    with (
        LanguageModel.open(source, EXACT, cache="off") as before,
        LanguageModel.open(out, EXACT, cache="off") as after,
        torch.no_grad(),
    ):
        ids = torch.arange(24)[None] * 11 % 260
        assert torch.allclose(before.decoder(ids), after.decoder(ids), atol=1e-5, rtol=1e-5)
        assert before.chat_template == after.chat_template
        assert before.tokenizer.stops >= after.tokenizer.stops >= {2}
        for text in TEXTS:
            assert before.tokenizer.encode(text) == after.tokenizer.encode(text)


def test_packed_rows_are_not_changed(tiny_llama: Path) -> None:
    """Each row of q keeps its codes and scales; the two members of a pair are half a head apart then."""
    with q4.open(tiny_llama) as checkpoint:
        found = to_hf_folder(checkpoint).weights["model.layers.0.self_attn.q_proj"]
        stored = checkpoint["blk.0.attn_q"]
        old, new = (q4.dequantize(weight, torch.float32) for weight in (stored, found))
    head = old[:16]
    assert torch.equal(new[:8], head[0::2])
    assert torch.equal(new[8:16], head[1::2])
    assert found.scale.dtype == stored.scale.dtype


def test_a_kind_that_has_no_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An architecture that nobody knows is named, before anything is written, with what to do instead."""
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    packed = gguf.quantize(torch.randn(4, 32).numpy(), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("a.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    words = ["convert", tmp_path / "other.gguf", tmp_path / "out", "--dialect", "gptq"]
    error = answer(capsys, *words, status=2)["error"]
    assert error["name"] == "general.architecture"
    assert error["value"] == "mamba"
    assert "OUT.safetensors" in error["hint"]
    assert not (tmp_path / "out").exists()
    assert (
        run([*map(str, words[:2]), str(tmp_path / "out.safetensors"), "--dialect", "simple-nf4", "--requantize"]) == 0
    )


SCORED = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def scored(**changes: Any) -> dict[str, Any]:
    """Return a vocabulary of scored pieces, with bytes."""
    joined = ["\u2581t", "he", "\u2581the", "in", "\u2581a", "\u2581\u2581", "th", "\u2581in"]
    letters = ["\u2581", *"theinab", "ü"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *pieces, *joined, *letters, "<mark>"]
    scores = [0.0] * 259 + [-float(place) for place in range(len(joined) + len(letters))] + [0.0]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(joined) + len(letters)) + [4]
    known = {"tokens": tokens, "scores": scores, "token_type": types}
    return {**SCORED, **{f"tokenizer.ggml.{name}": item for name, item in known.items()}, **changes}


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("text", ["the the in", " the", "a  b", "<s>the</s>in", "ü€ \n", "<mark>the<mark> a", "", "  "])
def test_scored_pieces_become_the_same_tokens(prefix: bool, text: str) -> None:
    """``tokenizer.json`` cuts a text as the scores do, and writes the same text back."""
    metadata = scored(**{"tokenizer.ggml.add_space_prefix": prefix})
    own = build_tokenizer(Metadata(metadata, "here"))
    engine = Engine.from_str(tokenizer_files(Metadata(metadata, "here"))["tokenizer.json"])
    numbers = engine.encode(text, add_special_tokens=False).ids
    assert numbers == own.encode(text, add_bos=False)
    assert engine.encode(text).ids == own.encode(text)
    assert engine.decode(numbers, skip_special_tokens=False).strip() == own.decode(numbers, skip_special=False).strip()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_divisors_of_llama_3_reach_the_config(factor: float, write_llama: Any, tmp_path: Path) -> None:
    """The divisors that a converter computed say which scaling they came from; others are refused."""
    path = write_llama(head_dim=32, hidden=128)
    plain = RopeScaling().frequencies(32, 1000.0, 1)
    scaling = RopeScaling(kind="llama3", factor=factor, original_context=8192)
    divisors = plain / scaling.frequencies(32, 1000.0, 1)
    for name, values in (("good", divisors), ("bad", divisors + 1)):
        target = tmp_path / f"{name}.gguf"
        with_tensor(path, target, "rope_freqs.weight", values)
        with q4.open(target) as checkpoint:
            if name == "good":
                found = to_hf_folder(checkpoint).config["rope_parameters"]
                assert (found["rope_type"], found["factor"]) == ("llama3", factor)
            else:
                with pytest.raises(q4.CheckpointError, match=r"rope_freqs\.weight"):
                    to_hf_folder(checkpoint)


def with_tensor(source: Path, target: Path, name: str, values: torch.Tensor) -> None:
    """Write a GGUF file again with one more tensor."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(key, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    writer.add_tensor(name, values.numpy())
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
