"""Folders of sentence-transformers: every part of ``modules.json`` is computed as the library does, or refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import sentence_transformers
import torch
import transformers
from sentence_transformers.sentence_transformer import modules

import q4core as q4
from q4_lm import SentenceEncoder
from tests.peers.test_transformers_folders import EXACT, SENTENCES, write_sentence_encoder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.peer

TEXTS = [*SENTENCES, "THE CAT", "[SEP] the", "", "the " * 40]
# float32 sums in batches of other lengths than theirs; a part passed over is off by far more than 1e-2
LIMIT = 1e-5


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with a small encoder and a tokenizer that keeps upper case."""
    folder = tmp_path / "base"
    folder.mkdir()
    write_sentence_encoder(folder)
    text = json.loads((folder / "tokenizer.json").read_text())
    text["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(text))
    return folder


def save(base: Path, *parts: Any, lower: bool = False, **told: Any) -> tuple[Path, Any]:
    """Save an encoder with parts of the library's own, and return the folder and the library's model of it."""
    torch.manual_seed(5)
    encoder = modules.Transformer(str(base), max_seq_length=24)
    model = sentence_transformers.SentenceTransformer(modules=[encoder, *parts], device="cpu", **told)
    folder = base.parent / "saved"
    model.save_pretrained(str(folder))
    path = folder / "sentence_bert_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_lower_case": lower}))
    return folder, sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def differ(found: torch.Tensor, theirs: Any) -> float:
    """Return the greatest difference, relative to the greatest number."""
    expected = torch.from_numpy(theirs)
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    "mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("max", "cls")]
)
def test_pooling(mode: Any, base: Path) -> None:
    """Each mode, and several joined, give the library's vectors; without a Normalize they keep their length."""
    folder, theirs = save(base, modules.Pooling(64, pooling_mode=mode))
    with SentenceEncoder.open(folder, EXACT, cache="off") as model:
        assert differ(model.encode(TEXTS), theirs.encode(TEXTS)) < LIMIT


@pytest.mark.parametrize("activation", [torch.nn.Tanh(), torch.nn.Identity(), torch.nn.GELU(), None])
@pytest.mark.parametrize("bias", [True, False])
def test_dense_and_normalize(activation: Any, base: Path, *, bias: bool) -> None:
    """LaBSE's parts: first token, a dense layer with its activation, length one; the vector's size is the layer's."""
    dense = modules.Dense(64, 16, bias=bias, activation_function=activation)
    folder, theirs = save(base, modules.Pooling(64, "cls"), dense, modules.Normalize())
    with SentenceEncoder.open(folder, EXACT, cache="off") as model:
        found = model.encode(TEXTS)
        assert found.shape == (len(TEXTS), 16)
        assert differ(found, theirs.encode(TEXTS)) < LIMIT


BERT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
BERT |= {
    "initializer_range": 0.3,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "xlm-roberta": (transformers.XLMRobertaModel, {"type_vocab_size": 1, "pad_token_id": 5}),
    "roberta": (transformers.RobertaModel, {"type_vocab_size": 1, "pad_token_id": 5, "layer_norm_eps": 1e-5}),
    "nomic": (transformers.NomicBertModel, {}),
    "modernbert": (
        transformers.ModernBertModel,
        {"local_attention": 6, "num_hidden_layers": 4, "cls_token_id": 2, "sep_token_id": 3},
    ),
    "qwen3": (transformers.Qwen3Model, {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, base: Path) -> None:
    """Each family of encoders, and a decoder's last token as of Qwen3-Embedding, has the library's vectors."""
    kind, facts = FAMILIES[name]
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    torch.manual_seed(6)
    kind(kind.config_class(**{**BERT, **facts, "vocab_size": vocabulary})).eval().save_pretrained(base)
    folder, theirs = save(base, modules.Pooling(64, "lasttoken" if name == "qwen3" else "mean"), modules.Normalize())
    with SentenceEncoder.open(folder, EXACT, cache="off") as model:
        assert differ(model.encode(TEXTS), theirs.encode(TEXTS)) < LIMIT


def test_prompts(base: Path) -> None:
    """The default prompt precedes every text; others are chosen by name, and an unknown name is an error."""
    prompts = {"query": "the query ", "passage": "a passage ", "none": ""}
    folder, theirs = save(base, modules.Pooling(64, "mean"), prompts=prompts, default_prompt_name="query")
    with SentenceEncoder.open(folder, EXACT, cache="off") as model:
        assert differ(model.encode(TEXTS), theirs.encode(TEXTS)) < LIMIT
        for name in prompts:
            assert differ(model.encode(TEXTS, prompt=name), theirs.encode(TEXTS, prompt_name=name)) < LIMIT
        with pytest.raises(q4.InputError, match=r"Did you mean 'query'"):
            model.encode(TEXTS, prompt="quer")


@pytest.mark.parametrize("lower", [True, False])
def test_lower_case(base: Path, *, lower: bool) -> None:
    """``do_lower_case`` holds whatever the tokenizer's own file says."""
    folder, theirs = save(base, modules.Pooling(64, "mean"), lower=lower)
    with SentenceEncoder.open(folder, EXACT, cache="off") as model:
        found = model.encode(TEXTS)
        assert differ(found, theirs.encode(TEXTS)) < LIMIT
        assert torch.equal(found[0], found[4]) is lower


@pytest.mark.parametrize("stored", [{}, {"max_seq_length": 11}])
def test_length(stored: dict[str, int], base: Path) -> None:
    """``max_seq_length`` cuts texts; where it is not stored, as by newer releases, ``model_max_length`` does."""
    folder, _ = save(base, modules.Pooling(64, "mean"))
    path = folder / "sentence_bert_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **stored}))
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    with SentenceEncoder.open(folder, EXACT, cache="off") as model:
        assert model.limit == theirs.max_seq_length == (11 if stored else 24)
        assert differ(model.encode(TEXTS), theirs.encode(TEXTS)) < LIMIT


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("2_Dense/config.json", lambda told: {**told, "in_features": 65, "bias": False}, "linear.weight"),
        ("modules.json", lambda told: [*told, {"idx": 4, "path": "4_LSTM", "type": "models.LSTM"}], "models.LSTM"),
        ("modules.json", lambda told: told[:1], "a Pooling"),
        ("modules.json", lambda told: told[1:], "a Transformer"),
        ("modules.json", lambda told: [told[0], {**told[1], "path": "../x"}], r"\.\./x"),
        ("modules.json", lambda _: {"a": 1}, "a list of objects"),
        ("1_Pooling/config.json", lambda told: {**told, "pooling_mode": "median"}, "median"),
        ("1_Pooling/config.json", lambda told: {**told, "include_prompt": False}, "include_prompt"),
        ("2_Dense/config.json", lambda told: {**told, "activation_function": "torch.nn.Mish9"}, "Mish9"),
        ("2_Dense/config.json", lambda told: {**told, "use_residual": True}, "use_residual"),
        ("2_Dense/config.json", lambda told: {**told, "module_input_name": "token_embeddings"}, "module_input_name"),
        ("2_Dense/config.json", lambda told: {**told, "out_features": 8}, "linear.weight"),
        ("sentence_bert_config.json", lambda told: {**told, "transformer_task": "fill-mask"}, "transformer_task"),
        ("sentence_bert_config.json", lambda told: {**told, "max_seq_length": "64"}, "max_seq_length"),
        ("config_sentence_transformers.json", lambda _: {"default_prompt_name": "query"}, "default_prompt_name"),
        ("config_sentence_transformers.json", lambda _: {"prompts": {"query": 1}}, "prompts"),
    ],
)
def test_refused_by_name(file: str, change: Any, named: str, base: Path) -> None:
    """What is not computed is an error before any vector is given, and names the part and the file."""
    folder, _ = save(base, modules.Pooling(64, "mean"), modules.Dense(64, 16))
    path = folder / file
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(q4.CheckpointError, match=named) as caught:
        SentenceEncoder.open(folder, EXACT, cache="off")
    assert str(folder) in str(caught.value.where)


def test_dense_pickle_is_refused(base: Path) -> None:
    """A dense layer stored as a pickle says what to do."""
    folder, _ = save(base, modules.Pooling(64, "mean"), modules.Dense(64, 16))
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(q4.CheckpointError, match="pickle"):
        SentenceEncoder.open(folder, EXACT, cache="off")
