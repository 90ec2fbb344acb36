"""Names of parts and tensors in GGUF files."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from q4_lm.models.gguf_rope import FACTORS, LONG, SHORT
from q4_lm.models.hf_names import fused_parts
from q4_lm.models.load import Names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_lm.models.config import TransformerConfig

__all__ = ["names_of"]

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.router",
    "attn_sinks": "self_attn.sinks",
}
_FUSED_PHI3 = {"ffn_up": "mlp.gate_up_proj"}
_OF_OSS = {"post_attention_norm": "pre_feedforward_layernorm"}
_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)(?:_exps)?(?:\.(\d+))?(\.weight|\.bias)?")
"""A matrix of an expert, by its number, or of all experts in one."""
_WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_OF_BERT = {
    **{name: _PARTS[name] for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")},
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_feedforward_layernorm",
}
_WHOLE_OF_BERT = {
    "token_embd": "embed_tokens",
    "position_embd": "embed_positions",
    "token_types": "embed_types",
    "token_embd_norm": "embed_norm",
}
_SINKS = _PARTS["attn_sinks"]


def _ours(name: str, parts: dict[str, str], whole: dict[str, str], experts: int) -> str:
    """Return our name of a tensor or module of the file."""
    if experts and (found := _EXPERT.fullmatch(name)) is not None:
        layer, part, number, leaf = found.groups(default="")
        return f"layers.{layer}.mlp.experts.{number and number + '.'}{part}_proj{leaf}"
    if (found := re.fullmatch(r"blk\.(\d+)\.(.+?)(\.weight|\.bias)?", name)) is not None:
        part = parts.get(found[2], found[2])
        return f"layers.{found[1]}.{part}{'' if part == _SINKS else found[3] or ''}"
    head, dot, leaf = name.partition(".")
    return f"{whole.get(head, head)}{dot}{leaf}"


def _theirs(name: str, parts: dict[str, str], whole: dict[str, str]) -> str:
    """Return what the file calls a tensor or module of ours."""
    if (found := re.fullmatch(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj(\.weight|\.bias)?", name)) is not None:
        return f"blk.{found[1]}.ffn_{found[3]}_exps{found[4] or ''}"
    back = {value: key for key, value in parts.items()}
    if (found := re.fullmatch(r"layers\.(\d+)\.(.+?)(\.weight|\.bias)?", name)) is not None:
        leaf = ".weight" if found[2] == _SINKS else found[3] or ""
        return f"blk.{found[1]}.{back.get(found[2], found[2])}{leaf}"
    head, dot, leaf = name.partition(".")
    return f"{next((key for key, value in whole.items() if value == head), head)}{dot}{leaf}"


def _fused(name: str, config: TransformerConfig) -> Mapping[str, int]:
    """Return the parts whose rows one matrix holds, such as those of all experts, with their numbers."""
    at, found, part = name.partition(".mlp.experts.")
    if not found or part[0].isdigit():
        return fused_parts(name, config)
    rows = config.hidden_size if part.startswith("down") else config.intermediate_size
    return {f"{at}{found}{number}.{part}": rows for number in range(config.num_experts)}


def names_of(config: TransformerConfig, kind: str) -> Names:
    """Return the names of a kind's files."""
    if kind == "bert":
        ours = functools.partial(_ours, parts=_OF_BERT, whole=_WHOLE_OF_BERT, experts=0)
        return Names(ours, functools.partial(_theirs, parts=_OF_BERT, whole=_WHOLE_OF_BERT))
    parts = {**_PARTS, **{"phi3": _FUSED_PHI3, "gpt-oss": _OF_OSS}.get(kind, {})}
    if kind == "gpt-oss":
        del parts["ffn_norm"]
    return Names(
        ours=functools.partial(_ours, parts=parts, whole=_WHOLE, experts=config.num_experts),
        theirs=functools.partial(_theirs, parts=parts, whole=_WHOLE),
        fused=functools.partial(_fused, config=config),
        ignored={"llama": (FACTORS, SHORT, LONG), "phi3": (SHORT, LONG)}.get(kind, ()),
    )
