"""GGUF files in transformers: packed, with the logits of the model that was converted, or refused by the header."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import test_gguf_bert as bert
import test_gguf_families as families
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, Keys
from huggingface_adapters import OLDER_NAME, adapter_gradients, with_adapters
from huggingface_models import EXACT, packed
from tokenizers import BertWordPieceTokenizer

import q4_transformers
import q4core as q4
from q4_lm import Metadata, build_tokenizer, load_model
from q4_transformers import Q4Config
from q4_transformers.gguf import config_of
from tests.support.checkpoints import retype

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers")]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR_FACTS = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
YARN_FACTS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
SCALED: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    **{
        f"{arch}-linear": (arch, kind, {"rope_type": "linear", "factor": 8.0}, LINEAR_FACTS)
        for arch, kind in (("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("gemma3", "Gemma3Text"))
    },
    **{f"{arch}-yarn": (arch, kind, YARN, YARN_FACTS) for arch, kind in (("llama", "Llama"), ("qwen3", "Qwen3"))},
}
BASE: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "vocab_size": 96,
}
KEYS = sorted(
    {
        key.removeprefix("{arch}.").replace("{dense}", "dense_2")
        for group in vars(Keys).values()
        if isinstance(group, type)
        for key in vars(group).values()
        if isinstance(key, str) and key.startswith("{arch}.")
    }
)
CHANGES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "attention.head_count": (8, ("num_attention_heads",)),
    "attention.head_count_kv": (4, ("num_key_value_heads",)),
    "attention.key_length": (32, ("head_dim",)),
    "attention.layer_norm_rms_epsilon": (0.5, ("rms_norm_eps",)),
    "attention.sliding_window": (5, ("sliding_window",)),
    "block_count": (3, ("num_hidden_layers",)),
    "context_length": (256, ("max_position_embeddings",)),
    "embedding_length": (128, ("hidden_size",)),
    "feed_forward_length": (160, ("intermediate_size",)),
    "rope.freq_base": (500.0, ("rope_parameters",)),
    "vocab_size": (128, ("vocab_size",)),
    "rope.scaling.factor": (8.0, ("rope_parameters",)),
    "rope.scaling.type": ("dynamic", ()),
    "rope.dimension_count": (8, ()),
}
"""Key → a value, and what of the config it changes; nothing where it is refused by that value, as all others are."""
CHANGES_OF: dict[str, dict[str, tuple[Any, tuple[str, ...]]]] = {
    "phi3": {"rope.dimension_count": (8, ("rope_parameters",)), "rope.scaling.factor": (8.0, ())},
    "gemma3": {
        "attention.sliding_window_pattern": (2, ("layer_types",)),
        "rope.freq_base_swa": (500.0, ("rope_parameters",)),
    },
    "gemma2": {
        "attention.sliding_window_pattern": (3, ("layer_types",)),
        "attn_logit_softcapping": (5.0, ("attn_logit_softcapping",)),
        "final_logit_softcapping": (5.0, ("final_logit_softcapping",)),
        "rope.freq_base_swa": (500.0, ()),
    },
    "granite": {
        "attention.scale": (0.5, ("attention_multiplier",)),
        "attention.sliding_window": (5, ()),
        "embedding_scale": (2.0, ("embedding_multiplier",)),
        "residual_scale": (2.0, ("residual_multiplier",)),
        "logit_scale": (2.0, ("logits_scaling",)),
        "rope.scaling.finetuned": (False, ()),
    },
}
IDLE = {
    "attention.layer_norm_epsilon",
    "attention.sliding_window_pattern",
    "expert_chunk_feed_forward_length",
    "expert_feed_forward_length",
    "expert_gating_func",
    "expert_group_count",
    "expert_group_scale",
    "expert_group_used_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_used_count",
    "expert_weights_norm",
    "expert_weights_scale",
    "experts_per_group",
    "interleave_moe_layer_step",
    "leading_dense_block_count",
    "moe_every_n_layers",
    "moe_latent_size",
    "pooling_type",
    "rope.freq_base_swa",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
    "router_logit_softcapping",
    "tensor_data_layout",
}
"""Keys of what these models do not have (experts, sliding blocks, YaRN), of embeddings, or of the weights' past."""


def add(writer: GGUFWriter, arch: str, facts: dict[str, Any]) -> None:
    """Add facts of an architecture to a header."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in facts.items():
        kinds[type(value)](f"{arch}.{key}", value)


@torch.inference_mode()
def difference(ours: Any, theirs: Any) -> float:
    """Return the greatest difference of the logits over the greatest of theirs."""
    tokens = torch.randint(0, 96, (2, 40))
    expected, found = theirs(tokens).logits, ours(tokens).logits
    assert packed(ours)
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", families.MODELS)
def test_logits(name: str, tmp_path: Path) -> None:
    """Logits are those of the model that was converted, over the same numbers."""
    theirs = families.make(name)
    families.write(tmp_path / "model.gguf", name, theirs, Type.Q8_0)
    ours, _ = q4_transformers.load(tmp_path / "model.gguf", Q4Config(**EXACT), dtype=torch.float32)
    assert difference(ours, theirs) < 1e-5
    assert "Linear" not in {row.kind for row in q4_transformers.explain(ours).dense}


def test_an_encoder(tmp_path: Path) -> None:
    """A BERT is transformers' own without a pooler: its features, of the tokens that BERT's own tokenizer gives."""
    theirs = bert.write(tmp_path / "model.gguf", Type.Q8_0, gguf.PoolingType.MEAN)
    ours, tokenizer = q4_transformers.load(tmp_path / "model.gguf", Q4Config(**EXACT), dtype=torch.float32)
    assert type(ours) is transformers.BertModel
    assert len(packed(ours)) == 12
    own = BertWordPieceTokenizer(vocab={word: number for number, word in enumerate(bert.WORDS)}, lowercase=True)
    for text in bert.TEXTS:
        assert tokenizer(text)["input_ids"] == own.encode(text).ids
        with torch.inference_mode():
            ids = tokenizer(text, return_tensors="pt")
            found, expected = ours(**ids).last_hidden_state, theirs(**ids).last_hidden_state
        assert float((found - expected).abs().max()) < 1e-5
    assert (tokenizer.pad_token, tokenizer.unk_token, tokenizer.sep_token) == ("[PAD]", "[UNK]", "[SEP]")


@pytest.mark.parametrize(("name", "tied"), [("mixtral", False), ("smollm3", True)])
def test_layers_are_dense_where_asked(name: str, tied: bool, tmp_path: Path) -> None:
    """Layers that ``modules_to_not_convert`` names are dequantised, in transformers' order of rows, and listed."""
    families.write(tmp_path / "model.gguf", name, theirs := families.make(name), Type.Q8_0)
    asked = Q4Config(**EXACT, modules_to_not_convert=["q_proj", "0.mlp", "lm_head"])
    ours, _ = q4_transformers.load(tmp_path / "model.gguf", asked, dtype=torch.float32)
    assert difference(ours, theirs) < 1e-5
    assert not [one for one in packed(ours) if "q_proj" in one or ".0.mlp." in one or one == "lm_head"]
    reasons = {row.name: row.reason for row in q4_transformers.explain(ours).dense}
    assert reasons["model.layers.1.self_attn.q_proj"].endswith("as 'q_proj': dequantised")
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) is tied
    with pytest.raises(q4.ConfigError, match="'q_prj'"):
        q4_transformers.load(tmp_path / "model.gguf", Q4Config(modules_to_not_convert=["q_prj"]))


@OLDER_NAME
@pytest.mark.parametrize("dialect", ["compressed-tensors-mxfp4", "modelopt-mxfp4"])
def test_experts_are_saved_and_trained(dialect: str, tmp_path: Path) -> None:
    """Experts of a GGUF file are written in another dialect, load again with the same logits, and take adapters."""
    families.write(tmp_path / "model.gguf", "mixtral", families.make("mixtral"), Type.MXFP4)
    ours, _ = q4_transformers.load(tmp_path / "model.gguf", Q4Config(**EXACT, dialect=dialect), dtype=torch.float32)
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        expected = ours(ids).logits
    ours.save_pretrained(tmp_path / "saved")
    auto = transformers.AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path / "saved", quantization_config=Q4Config(**EXACT), dtype=torch.float32)
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, expected)
    gradients = adapter_gradients(with_adapters(q4_transformers.prepare_for_training(again)), ids)
    assert any(".experts." in name for name in gradients)


@pytest.mark.parametrize("name", ["mixtral", "mixtral-apart", "gpt-oss"])
def test_experts_that_are_dense_in_part(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' matrices that a file has as float16 are dense next to packed ones."""

    def change(key: str, values: Any, kind: Any) -> Any:
        if "ffn_down" not in key or kind is not Type.Q8_0:
            return values, kind
        return gguf.dequantize(values, kind).astype(np.float32), Type.F32

    model = write_changed(tmp_path / "model.gguf", name, change, monkeypatch)
    ours, _ = q4_transformers.load(tmp_path / "model.gguf", Q4Config(**EXACT), dtype=torch.float32)
    assert difference(ours, model) < 1e-5
    assert not [one for one in packed(ours) if "down_proj" in one]


def test_models_of_other_kinds_are_refused(tmp_path: Path) -> None:
    """A file of a kind that is not read here is an error that names the reader that may support it."""
    with pytest.raises(q4.CheckpointError, match=r"general\.architecture' must be one of.*q4_lm\.LanguageModel\.open"):
        header(tmp_path / "model.gguf", "falcon", BASE)


@pytest.mark.parametrize("factors", [[1.0, 3.0, 1.0, 2.0, 1, 1, 1, 1], [1.0] * 5])
def test_divisors_of_no_scaling_are_refused(
    factors: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divisors of the frequencies that no scaling of Llama 3 gives can't be said in transformers' config."""

    def change(key: str, values: Any, kind: Any) -> Any:
        return (np.array(factors, np.float32) if key == "rope_freqs.weight" else values), kind

    write_changed(tmp_path / "model.gguf", "llama-3", change, monkeypatch)
    with pytest.raises(q4.CheckpointError, match=r"rope_freqs\.weight"):
        q4_transformers.load(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", SCALED)
def test_scaled_positions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear and YaRN scaling reach the config: the logits, and the frequencies, are those of the converted model."""
    arch, kind, rope, facts = SCALED[name]
    sizes = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5} if arch == "gemma3" else {}
    plain = {"rope_theta": 10_000.0}
    rope = {"full_attention": plain | rope, "sliding_attention": plain} if arch == "gemma3" else plain | rope
    monkeypatch.setitem(families.MODELS, name, (kind, arch, {**sizes, "rope_parameters": rope}))
    original = families.write_metadata

    def write_metadata(writer: GGUFWriter, config: Any, arch: str) -> None:
        plain = copy.deepcopy(config)
        for part in plain.rope_parameters.values():
            if isinstance(part, dict):
                part["rope_type"] = "default"
        plain.rope_parameters["rope_type"] = "default"
        original(writer, plain, arch)
        add(writer, arch, facts)

    monkeypatch.setattr(families, "write_metadata", write_metadata)
    theirs = families.make(name)
    families.write(tmp_path / "model.gguf", name, theirs, Type.Q8_0)
    ours, _ = q4_transformers.load(tmp_path / "model.gguf", Q4Config(**EXACT), dtype=torch.float32)
    assert difference(ours, theirs) < 1e-5


# -- the header, key by key


def header(path: Path, arch: str, facts: dict[str, Any]) -> Any:
    """Write a file with a header and the tensors that say of which kind it is; return transformers' config."""
    writer = GGUFWriter(path, arch)
    add(writer, arch, facts)
    marks = {"qwen2": ["blk.0.attn_q.bias"], "qwen3": ["blk.0.attn_q_norm.weight"]}
    for name in ("output.weight", *marks.get(arch, marks["qwen3"] if arch == "gemma3" else [])):
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with q4.open(path) as checkpoint:
        return config_of(checkpoint).to_dict()


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "phi3", "gemma3", "gemma2", "olmo2", "granite", "smollm3"])
def test_every_key(arch: str, tmp_path: Path) -> None:
    """Every key that llama.cpp's converter may write changes the config, is refused, or is without effect by name."""
    facts = {**BASE, "attention.sliding_window": 7} if arch.startswith("gemma") else BASE
    base = header(tmp_path / "model.gguf", arch, facts)
    expected = CHANGES | CHANGES_OF.get(arch, {})
    for key in KEYS:
        value, names = expected.get(key, (3, ()))
        if key in IDLE - expected.keys():
            assert header(tmp_path / "model.gguf", arch, {**facts, key: value}) == base, key
        elif names:
            found = header(tmp_path / "model.gguf", arch, {**facts, key: value})
            assert {name for name in found if found[name] != base.get(name)} >= set(names), key
        else:
            with pytest.raises(q4.CheckpointError) as caught:
                header(tmp_path / "model.gguf", arch, {**facts, key: value})
            named = key.replace("expert_count", "expert_")  # or the count of those in use, which is missing
            assert named.partition(".scaling")[0].removeprefix("attention.") in str(caught.value), key


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "phi3", "gemma3"])
def test_every_key_of_scaling(arch: str, tmp_path: Path) -> None:
    """Each fact of a scaling changes the config, or is refused where it is not of that scaling."""

    def rope(**facts: Any) -> Any:
        scaling = {f"rope.scaling.{name}": item for name, item in facts.items()}
        found = header(tmp_path / "model.gguf", arch, {**BASE, **scaling})["rope_parameters"]
        return found.get("full_attention", found)

    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    if arch == "phi3":  # of which transformers has LongRoPE alone
        for facts in ({"type": "linear", "factor": 8.0}, yarn):
            with pytest.raises(q4.CheckpointError, match="longrope"):
                rope(**facts)
        return
    assert rope(type="linear", factor=8.0)["factor"] == rope(factor=8.0)["factor"] == 8
    assert rope(**yarn)["rope_type"] == "yarn"
    assert rope(**{**yarn, "original_context_length": 64})["original_max_position_embeddings"] == 64
    assert rope(**yarn, yarn_beta_fast=16.0)["beta_fast"] == 16
    assert rope(**yarn, yarn_beta_slow=2.0)["beta_slow"] == 2
    for facts in (
        *({**yarn, f"yarn_{name}": 0.5} for name in ("ext_factor", "attn_factor", "log_multiplier")),
        *({"type": "linear", "factor": 8.0, f"yarn_{name}": 2.0} for name in ("ext_factor", "attn_factor")),
        *({"type": "linear", "factor": 8.0, name: 2.0} for name in ("alpha", "attn_factor")),
        {"type": "longrope", "factor": 8.0},
    ):
        with pytest.raises(q4.CheckpointError, match="scaling"):
            rope(**facts)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_idle_keys_of_scaling(arch: str, tmp_path: Path) -> None:
    """What llama.cpp does not use of a header loads: a factor of no scaling, and YaRN's options of another one."""
    path = tmp_path / "model.gguf"
    yarn = {f"rope.scaling.yarn_{name}": 2.0 for name in ("beta_fast", "beta_slow", "log_multiplier")}
    none = {"rope.scaling.type": "none", "rope.scaling.factor": 8.0, "rope.scaling.yarn_ext_factor": 1.0}
    assert header(path, arch, {**BASE, **none, **yarn}) == header(path, arch, BASE)
    assert header(path, arch, {**BASE, **LINEAR_FACTS, **yarn}) == header(path, arch, {**BASE, **LINEAR_FACTS})


def test_special_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens reach the config, and every one that ends a text ends what is generated."""
    original = families.write_metadata

    def write_metadata(writer: GGUFWriter, config: Any, arch: str) -> None:
        original(writer, config, arch)
        for number, name in enumerate(("bos", "eos", "eot", "eom", "padding"), 7):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", min(number, 9))

    monkeypatch.setattr(families, "write_metadata", write_metadata)
    families.write(tmp_path / "model.gguf", "qwen2", families.make("qwen2"), Type.Q8_0)
    model, _ = q4_transformers.load(tmp_path / "model.gguf")
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (7, [8, 9], 9)


# -- what else a file may lack


def test_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without a tokenizer gives None; one that is not read is an error before the weights."""
    theirs = families.make("qwen2")
    families.write(tmp_path / "model.gguf", "qwen2", theirs, Type.Q8_0)
    assert q4_transformers.load(tmp_path / "model.gguf")[1] is None
    original = families.write_metadata

    def write_metadata(writer: GGUFWriter, config: Any, arch: str) -> None:
        original(writer, config, arch)
        writer.add_tokenizer_model("rwkv")

    monkeypatch.setattr(families, "write_metadata", write_metadata)
    families.write(tmp_path / "model.gguf", "qwen2", theirs, Type.Q8_0)
    with pytest.raises(q4.CheckpointError, match=r"tokenizer\.ggml\.model' must be one of"):
        q4_transformers.load(tmp_path / "model.gguf")


LETTERS = [chr(number) for number in range(33, 125)]
VOCABULARIES: dict[str, dict[str, Any]] = {
    "gpt2": {"tokens": ["<b>", "<e>", *LETTERS, "ab", "abc"], "merges": ["a b", "ab c"], "pre": "llama-bpe"},
    "llama": {"tokens": ["<u>", "<b>", "<e>", "\u2581", *LETTERS], "scores": [-float(number) for number in range(96)]},
}


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_tokens_are_those_of_q4_lm(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte-level BPE and scored pieces give q4_lm's tokens, with the file's special tokens and its chat template."""
    original = families.write_metadata
    facts, first = VOCABULARIES[kind], 1 if kind == "llama" else 0

    def write_metadata(writer: GGUFWriter, config: Any, arch: str) -> None:
        original(writer, config, arch)
        writer.add_tokenizer_model(kind)
        writer.add_token_list(facts["tokens"])
        writer.add_token_types([2] * first + [3, 3] + [1] * (94 - first))
        if kind == "llama":
            writer.add_token_scores(facts["scores"])
            writer.add_unk_token_id(0)
        else:
            writer.add_token_merges(facts["merges"])
            writer.add_tokenizer_pre(facts["pre"])
        writer.add_bos_token_id(first)
        writer.add_eos_token_id(first + 1)
        writer.add_add_bos_token(value=True)
        writer.add_chat_template("{{ messages[0].content }}")

    monkeypatch.setattr(families, "write_metadata", write_metadata)
    families.write(tmp_path / "model.gguf", "qwen2", families.make("qwen2"), Type.Q8_0)
    _, tokenizer = q4_transformers.load(tmp_path / "model.gguf")
    with q4.open(tmp_path / "model.gguf") as checkpoint:
        own = build_tokenizer(Metadata(checkpoint.metadata, "here"))
    for text in ("abcab", "a!b<e>c", "ab"):
        assert tokenizer(text)["input_ids"] == own.encode(text)
    assert tokenizer(["a", "b"])["input_ids"] == [own.encode("a"), own.encode("b")]
    assert tokenizer.decode(tokenizer("abc!")["input_ids"], skip_special_tokens=True).strip() == "abc!"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<b>", "<e>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def write_changed(path: Path, name: str, change: Callable[[str, Any, Any], Any], patch: pytest.MonkeyPatch) -> Any:
    """Write a model whose tensors go through a function (name, values, type) → what is written, or None for nothing.

    Returns:
        transformers' model of the numbers before they were changed.
    """
    original = GGUFWriter.add_tensor

    def add_tensor(writer: GGUFWriter, key: str, values: Any, raw_dtype: Any = None) -> None:
        found = change(key, values, raw_dtype)
        if found is not None:
            original(writer, key, found[0], raw_dtype=found[1])

    patch.setattr(GGUFWriter, "add_tensor", add_tensor)
    families.write(path, name, model := families.make(name), Type.Q8_0)
    return model


@pytest.mark.parametrize(
    "name", ["blk.1.ffn_up.weight", "output_norm.weight", "blk.5.attn_q.bias", "token_embd.weight"]
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that the file lacks is an error, where transformers would draw it at random."""
    place = {"blk.1.ffn_up.weight": "layers.1.mlp.up_proj.weight", "token_embd.weight": "embed_tokens.weight"}
    place |= {"output_norm.weight": "model.norm.weight", "blk.5.attn_q.bias": "layers.5.self_attn.q_proj.bias"}
    write_changed(
        tmp_path / "model.gguf", "qwen2-yarn", lambda key, *found: None if key == name else found, monkeypatch
    )
    with pytest.raises(q4.SchemaError, match=rf"{place[name]} must be in the file"):
        q4_transformers.load(tmp_path / "model.gguf")


def test_unread_types_are_counted(tmp_path: Path) -> None:
    """Layers of types that are not read are counted by type, and the message says what to do."""
    families.write(tmp_path / "model.gguf", "qwen2", families.make("qwen2"), Type.Q8_0)
    kinds = {"ffn_up": 133, "ffn_gate": 133, "ffn_down": 31}
    names = {f"blk.{layer}.{part}.weight": kind for layer in range(6) for part, kind in kinds.items()}
    retype(tmp_path / "model.gguf", names)
    with pytest.raises(q4.SchemaError) as caught:
        q4_transformers.load(tmp_path / "model.gguf")
    assert "18 problems, of which 18 can't be read: Q6_0 of ik_llama.cpp (12), Q4_0_4_4, which ggml removed (6)" in str(
        caught.value
    )
    assert "make a GGUF file of Q4_K, Q6_K or Q8_0" in str(caught.value)
    assert len(caught.value.problems) == 18


def test_dense_files_are_refused(tmp_path: Path) -> None:
    """A file in which nothing is packed is an error that names who serves it, and so is a format for any file."""
    families.write(tmp_path / "model.gguf", "qwen2", families.make("qwen2"), Type.F16)
    with pytest.raises(q4.CheckpointError, match=r"layers must be packed.*dense ones alone.*q4_lm"):
        q4_transformers.load(tmp_path / "model.gguf")
    with pytest.raises(q4.ConfigError, match="format must be None for a GGUF file"):
        q4_transformers.load(tmp_path / "model.gguf", Q4Config(format="nf4"))


SAMPLES = sorted(Path(os.environ.get("Q4_SAMPLES", "samples")).glob("gguf-llama-*"))


@pytest.mark.samples
@pytest.mark.parametrize("folder", SAMPLES, ids=lambda folder: folder.name)
def test_samples_have_the_logits_of_dequantised_weights(folder: Path) -> None:
    """Models of K-quants, IQ4_XS and MXFP4 have, here and in q4_lm, the logits of transformers' dequantised model."""
    path = folder / "checkpoint" / "model.gguf"
    tokens = torch.arange(3, 40)[None]
    dense = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours, _ = q4_transformers.load(path, config=Q4Config(**EXACT))
    with torch.inference_mode(), q4.Session(q4.SessionConfig(**EXACT)) as session:
        wanted = dense(tokens).logits
        for logits in (ours(tokens).logits, load_model(path, session)(tokens)):
            assert float((logits - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_a_split_model_loads_from_any_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any part of a split model loads all of it, with the tokens and logits of the whole file."""
    families.write(tmp_path / "whole.gguf", "qwen2", model := families.make("qwen2"), Type.Q8_0)
    monkeypatch.setattr(gguf, "GGUFWriter", functools.partial(GGUFWriter, split_max_tensors=20))
    families.write(tmp_path / "m.gguf", "qwen2", model, Type.Q8_0)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2
    whole, _ = q4_transformers.load(tmp_path / "whole.gguf")
    with torch.inference_mode():
        expected = whole(torch.arange(40)[None]).logits
        for path in (parts[0], parts[-1]):
            loaded, _ = q4_transformers.load(path)
            assert torch.equal(loaded(torch.arange(40)[None]).logits, expected)
