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
from q4_lm import LanguageModel, Metadata, build_tokenizer, build_transformer, config_from_hf, load_model
from q4_lm.exchange.gguf_to_hf import to_hf_folder
from q4_lm.exchange.vocabulary_to_gguf import vocabulary_keys
from q4_lm.exchange.vocabulary_to_hf import tokenizer_files
from q4_lm.models.hf_names import to_hf_name
from q4_nn.blocks.rotary import RopeScaling
from tests.support.commands import answer

if TYPE_CHECKING:
    from pathlib import Path

EXACT = q4.SessionConfig(device="cpu", activation_precision="exact", compute_dtype=torch.float32)


TEXTS = ("the thing in 12", "<|im_start|>user\nthe<|im_end|>", "  a\n\n b ü€", "<added> the<added>", "")


def test_an_embedding_is_dequantised_some_rows_at_a_time(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed embedding becomes dense in chunks, with the same values; no call has more rows than a chunk's."""
    with q4.open(tiny_llama) as checkpoint:
        assert "token_embd" in checkpoint
        expected = q4.dequantize(checkpoint["token_embd"], torch.float32)
        asked = []
        monkeypatch.setattr("q4_lm.exchange.gguf_to_hf._CHUNK_ELEMENTS", 7 * expected.shape[1])

        def dequantize(weight: q4.PackedWeight, dtype: torch.dtype, rows: slice) -> torch.Tensor:
            asked.append(rows.stop - rows.start)
            return real(weight, dtype, rows=rows)

        real = q4.dequantize
        monkeypatch.setattr(q4, "dequantize", dequantize)
        found = to_hf_folder(checkpoint).dense["model.embed_tokens.weight"]
    assert torch.equal(found.to(torch.float32), expected)
    assert max(asked) == 7


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
    back = tmp_path / "back.gguf"
    answer(capsys, "convert", out, back, "--dialect", "gguf")
    with q4.open(source) as old, q4.open(back) as new:
        for name in new:
            assert torch.equal(q4.dequantize(old[name], torch.float32), q4.dequantize(new[name], torch.float32)), name
        assert new.metadata["tokenizer.ggml.pre"] in {"smollm", "starcoder"}
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
            assert list(new.metadata[key]) == list(old.metadata[key]), key
    with (
        LanguageModel.open(source, EXACT, cache="off") as before,
        LanguageModel.open(back, EXACT, cache="off") as after,
        torch.no_grad(),
    ):
        assert torch.allclose(before.decoder(ids), after.decoder(ids), atol=1e-5, rtol=1e-5)
        assert before.chat_template == after.chat_template


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


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False},
    "gemma3_text": {"model_type": "gemma3_text", "query_pre_attn_scalar": 32, "sliding_window": 5},
    "smollm3": {"model_type": "smollm3"},
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 32, "sliding_window": 5},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
        "attention_multiplier": 0.25,
    },
    "olmo2": {"model_type": "olmo2"},
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 2**-20,  # which float32 holds
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_folder_becomes_a_file_and_back(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names, rows, norms and the header's facts of each family give the folder's logits, there and back."""
    facts = {**SIZES, **FAMILIES[kind]}
    config = config_from_hf(facts)
    torch.manual_seed(1)
    state = {to_hf_name(name, config): tensor for name, tensor in build_transformer(config).state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    state = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in state.items()}
    modules = [name.removesuffix(".weight") for name in state if "_proj.weight" in name]
    weights = {module: q4.quantize(state.pop(f"{module}.weight"), "q4_1") for module in modules}
    one, two, three = tmp_path / "one", tmp_path / "two.gguf", tmp_path / "three"
    q4.save_checkpoint(one, weights, dialect="mlx", dense=state, config=facts)
    answer(capsys, "convert", one, two, "--dialect", "gguf")
    answer(capsys, "convert", two, three, "--dialect", "mlx")
    tokens = torch.randint(0, 64, (2, 20))
    with torch.no_grad(), q4.Session(EXACT) as session:
        models: list[Any] = [load_model(path, session) for path in (one, two, three)]
        first, *others = (model(tokens) for model in models)
        for logits in others:
            assert float((logits - first).abs().max() / first.abs().max()) < 1e-5
    with q4.open(one) as before, q4.open(three) as after:
        for name in before:
            assert torch.equal(q4.dequantize(before[name], torch.float32), q4.dequantize(after[name], torch.float32))


@pytest.mark.parametrize("changes", [{"model_type": "phi3"}, {"attention_bias": True}])
def test_what_a_header_can_not_say_is_refused(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model of which a file would say something else is named with the fact, and nothing is written."""
    facts = {**SIZES, "model_type": "llama", "num_hidden_layers": 1}
    config = config_from_hf(facts)
    state = {to_hf_name(key, config): tensor for key, tensor in build_transformer(config).state_dict().items()}
    packed = {"model.layers.0.mlp.up_proj": q4.quantize(state.pop("model.layers.0.mlp.up_proj.weight"), "q4_1")}
    q4.save_checkpoint(tmp_path / "one", packed, dialect="mlx", dense=state, config={**facts, **changes})
    words = ["convert", tmp_path / "one", tmp_path / "two.gguf", "--dialect", "gguf"]
    assert answer(capsys, *words, status=2)["error"]["name"] == "tensor"
    assert not (tmp_path / "two.gguf").exists()


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_come_back_from_a_folder(prefix: bool, tmp_path: Path) -> None:
    """A vocabulary that became a folder's becomes one of a file again that cuts texts alike."""
    metadata = scored(**{"tokenizer.ggml.add_space_prefix": prefix})
    for name, text in tokenizer_files(Metadata(metadata, "here")).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    keys = vocabulary_keys(tmp_path, len(metadata["tokenizer.ggml.tokens"]) + 2)
    assert keys["tokenizer.ggml.tokens"][:-2] == metadata["tokenizer.ggml.tokens"]
    assert keys["tokenizer.ggml.token_type"] == [*metadata["tokenizer.ggml.token_type"], 5, 5]
    before, after = (build_tokenizer(Metadata(values, "here")) for values in (metadata, keys))
    for text in ("the the in", " the", "a  b", "<s>the</s>in", "ü€ \n", "<mark>the<mark> a"):
        assert before.encode(text) == after.encode(text)
