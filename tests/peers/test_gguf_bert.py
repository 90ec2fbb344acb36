"""BERT encoders in GGUF files: the vectors of transformers' own model, and BERT's own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from tokenizers import BertWordPieceTokenizer

import q4core as q4
from q4_lm import LanguageModel, SentenceEncoder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.peer

EXACT = q4.SessionConfig(device="cpu", activation_precision="exact")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "##s", "sea", "is", "blue", "un", "##like", "!", "a", "##b", "e"]
TEXTS = ["The sea is blue!", "unlike seas", "a", "xyz éab the the the"]
PARTS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
WHOLE = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}


def write(path: Path, kind: Type, pooling: gguf.PoolingType) -> Any:
    """Write a random model as the converter of llama.cpp does, and return transformers', of the same numbers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, initializer_range=0.2, **sizes)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(2)
    writer.add_context_length(32)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(value=False)
    writer.add_pooling_type(pooling)
    writer.add_tokenizer_model("bert")
    written = [word[2:] if word.startswith("##") else f"\u2581{word}" for word in WORDS]
    writer.add_token_list([*WORDS[:4], *written[4:]])
    writer.add_token_types([3] * 4 + [1] * (len(WORDS) - 4))
    writer.add_token_type_count(2)
    for role, number in (("bos", 2), ("seperator", 3), ("unknown", 1), ("padding", 0)):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", number)
    for key, tensor in model.state_dict().items():
        module, _, leaf = key.rpartition(".")
        part = module.split(".", 3)
        name = WHOLE.get(module) or f"blk.{part[2]}.{PARTS[part[3]]}"
        to = kind if name.startswith("blk") and tensor.dim() > 1 else Type.F32
        with torch.no_grad():
            tensor.add_(0.1 * torch.randn_like(tensor) if tensor.dim() == 1 else 0)
            packed = gguf.quantize(tensor.numpy(), to)
            tensor.copy_(torch.from_numpy(np.array(gguf.dequantize(packed, to))))
        writer.add_tensor(f"{name}.{leaf}", packed, raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("pooling", [gguf.PoolingType.MEAN, gguf.PoolingType.CLS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q4_0, Type.Q8_0], ids=lambda kind: kind.name)
def test_vectors(kind: Type, pooling: gguf.PoolingType, tmp_path: Path) -> None:
    """Vectors are the model's pooled features of length one, of its own tokens; from the cache, too."""
    theirs = write(tmp_path / "bert.gguf", kind, pooling)
    tokenizer = BertWordPieceTokenizer(vocab={word: number for number, word in enumerate(WORDS)}, lowercase=True)
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            features = theirs(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        chosen = features.mean(0) if pooling is gguf.PoolingType.MEAN else features[0]
        expected.append(torch.nn.functional.normalize(chosen, dim=0))
    for state in ("written", "opened"):
        with SentenceEncoder.open(tmp_path / "bert.gguf", EXACT, cache=tmp_path / "cache") as encoder:
            assert bool(encoder.session.layers()) == (kind in {Type.Q4_0, Type.Q8_0})
            assert float((encoder.encode(TEXTS) - torch.stack(expected)).abs().max()) < 1e-5
            assert encoder.cached is not None
            if kind in {Type.F32, Type.F16}:  # packed layers are stored where their backend exports them
                assert encoder.cached.state == state


def test_refusals(tmp_path: Path) -> None:
    """An encoder gives no text, and pooling that is not computed is refused by its key."""
    write(tmp_path / "bert.gguf", Type.F32, gguf.PoolingType.NONE)
    with pytest.raises(q4.CheckpointError, match="an encoder gives no text"):
        LanguageModel.open(tmp_path / "bert.gguf", EXACT, cache="off")
    with pytest.raises(q4.CheckpointError, match="one of 1") as caught:
        SentenceEncoder.open(tmp_path / "bert.gguf", EXACT, cache="off")
    assert caught.value.name == "metadata 'bert.pooling_type'"
