"""A tiny Llama with random weights and a byte-level tokenizer, written by the package ``gguf``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["th", "the", "Ġthe", "in", "ing", "Ġt", "Ġa", "12"]
MERGES = ["t h", "th e", "Ġ the", "i n", "in g", "Ġ t", "Ġ a", "1 2"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES = {"hidden": 64, "feed_forward": 96, "heads": 4, "kv_heads": 2, "layers": 2, "head_dim": 16, "context": 48}


def byte_letters() -> list[str]:
    """Return the 256 characters that stand for bytes, in the order of the bytes (GPT-2's rule, restated)."""
    visible = set(range(ord("!"), ord("~") + 1)) | set(range(0xA1, 0xAC + 1)) | set(range(0xAE, 0xFF + 1))
    letters, extra = [], 0
    for byte in range(256):
        letters.append(chr(byte) if byte in visible else chr(256 + extra))
        extra += byte not in visible
    return letters


def vocabulary() -> dict[str, Any]:
    """Return the tokenizer's part of the metadata."""
    tokens = [*SPECIAL, *byte_letters(), *WORDS, "<added>"]
    types = [3] * len(SPECIAL) + [1] * (256 + len(WORDS)) + [4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_tiny_llama(  # one step for each part of a file
    path: Path, *, tied: bool = True, leave_out: str = "", extra: bool = False, up: Type = Type.F16, **sizes: int
) -> Path:
    """Write a random Llama; the same bytes every time."""
    size = {**SIZES, **sizes}
    tokens = vocabulary()["tokenizer.ggml.tokens"]
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(size["layers"])
    writer.add_context_length(size["context"])
    writer.add_embedding_length(size["hidden"])
    writer.add_feed_forward_length(size["feed_forward"])
    writer.add_head_count(size["heads"])
    writer.add_head_count_kv(size["kv_heads"])
    writer.add_rope_freq_base(1000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    for key, value in vocabulary().items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)

    def add(name: str, shape: tuple[int, ...], kind: Type) -> None:
        if name == leave_out:
            return
        dense = rng.standard_normal(shape).astype(np.float32)
        dense = 1 + 0.1 * dense if len(shape) == 1 else dense * (2.0 / shape[-1] ** 0.5)
        dense = dense.astype(np.float32)
        writer.add_tensor(name, gguf.quantize(dense, kind) if kind is not Type.F32 else dense, raw_dtype=kind)

    wide, narrow = size["heads"] * size["head_dim"], size["kv_heads"] * size["head_dim"]
    add("token_embd.weight", (len(tokens), size["hidden"]), Type.Q8_0)
    for layer in range(size["layers"]):
        at = f"blk.{layer}"
        add(f"{at}.attn_norm.weight", (size["hidden"],), Type.F32)
        add(f"{at}.attn_q.weight", (wide, size["hidden"]), Type.Q4_1)
        add(f"{at}.attn_k.weight", (narrow, size["hidden"]), Type.Q4_1)
        add(f"{at}.attn_v.weight", (narrow, size["hidden"]), Type.Q4_0)
        add(f"{at}.attn_output.weight", (size["hidden"], wide), Type.Q4_1)
        add(f"{at}.ffn_norm.weight", (size["hidden"],), Type.F32)
        add(f"{at}.ffn_gate.weight", (size["feed_forward"], size["hidden"]), Type.Q4_1)
        add(f"{at}.ffn_up.weight", (size["feed_forward"], size["hidden"]), up)
        add(f"{at}.ffn_down.weight", (size["hidden"], size["feed_forward"]), Type.Q4_1)
    add("output_norm.weight", (size["hidden"],), Type.F32)
    if not tied:
        add("output.weight", (len(tokens), size["hidden"]), Type.Q8_0)
    if extra:
        add("blk.0.attn_gate.weight", (wide, size["hidden"]), Type.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
