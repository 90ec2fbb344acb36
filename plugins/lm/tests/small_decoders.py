"""Small decoders of random weights, in the forms of several families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from q4_lm import build_transformer
from q4_nn import pack_, to_ste_

if TYPE_CHECKING:
    from q4_lm import TransformerDecoder

CONFIG = q4.SessionConfig(device="cpu", activation_precision=q4.ActivationPrecision.EXACT)
TOKENS = [5, 100, 67, 0, 33, 33, 7, 50, 1, 64, 12, 3, 9, 8, 1, 2]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"vocab_size": 128, "max_position_embeddings": 64}
GEMMA_3 = {"norm": "offset_rms", "norm_position": "both", "qk_norm": True, "hidden_act": "gelu_tanh"}
GEMMA_3 |= {"embedding_scale": 8.0, "sliding_window": 4, "sliding_layers": (0, 2), "local_rope_theta": 100.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "rope_interleaved": True},
    "one head": {"num_key_value_heads": 1, "head_dim": 24, "attention_scale": 0.3},
    "gemma 3": {**GEMMA_3, "num_key_value_heads": 1},
    "gpt 2": {
        "norm": "layer",
        "hidden_act": "gelu",
        "gated": False,
        "positions": "learned",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "olmo 2": {"norm_position": "post", "hidden_act": "relu"},
    "smollm 3": {"no_rope_layers": (1,), "rope_dim": 8},
    "windows": {"sliding_window": 3, "sliding_layers": (0, 1, 2), "positions": "none"},
}


def build(*, packed: bool = False, **options: Any) -> TransformerDecoder:
    """Return a decoder of random weights, norms and biases among them, float or packed."""
    torch.manual_seed(0)
    made = build_transformer(**{**SIZES, **options}).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    if packed:
        to_ste_(made, "q4_0")
        pack_(made, q4.Session(CONFIG))
    return made  # type: ignore[return-value]  # causal
