"""Rotary options of GGUF headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4_nn.blocks.rotary import RopeScaling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from q4_lm.models.metadata import Metadata
    from q4core import Checkpoint

__all__ = ["FACTORS", "LONG", "SHORT", "UNSUPPORTED", "read_factors", "read_rope_scaling", "require"]

FACTORS, SHORT, LONG = (f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long"))
UNSUPPORTED = ("expert_count", "attn_logit_softcapping", "final_logit_softcapping")


def read_rope_scaling(
    checkpoint: Checkpoint, metadata: Metadata, prefix: str, context: int, turned: int
) -> RopeScaling:
    """Return how the header changes the rotary frequencies.

    Raises:
        CheckpointError: A key or tensor is missing, not legal, or asks for what is not computed here.
    """
    kind = metadata.text(f"{prefix}.type", default=None)
    is_long = kind == "longrope" or LONG in checkpoint.dense or SHORT in checkpoint.dense
    if is_long and kind not in {None, "none", "longrope"}:
        metadata.fail(f"{prefix}.type", "'longrope', as there are factors for it", kind)
    if kind not in {None, "none", "linear", "yarn", "longrope"}:
        metadata.fail(f"{prefix}.type", "'none', 'linear', 'yarn' or 'longrope'", kind)
    original = metadata.integer(f"{prefix}.original_context_length", default=context)
    amplitude = metadata.number(f"{prefix}.attn_factor", above=0, default=1.0)
    if amplitude != 1 and not is_long:
        metadata.fail(f"{prefix}.attn_factor", "1, but for LongRoPE", amplitude)
    require(metadata, {f"{prefix}.yarn_attn_factor": 1.0})
    newer, older = f"{prefix}.factor", f"{prefix.removesuffix('scaling')}scale_linear"
    if kind == "yarn":
        return _yarn(metadata, prefix, _factor(metadata, newer, older), original)
    metadata.pass_over(*(f"{prefix}.yarn_{name}" for name in ("beta_fast", "beta_slow", "log_multiplier")))
    if kind == "none":
        metadata.pass_over(newer, older, f"{prefix}.yarn_ext_factor")
    else:  # an ext_factor makes llama.cpp compute YaRN for every type
        require(metadata, {f"{prefix}.yarn_ext_factor": 0.0})
    if is_long:
        if kind != "none":
            require(metadata, {newer: 1.0, older: 1.0})
        long, short = (read_factors(checkpoint, metadata, name, turned) for name in (LONG, SHORT))
        facts = {"factor": context / original, "original_context": original, "attention_factor": amplitude}
        return RopeScaling(kind="longrope", short_factor=(*short.tolist(),), long_factor=(*long.tolist(),), **facts)
    factor = 1.0 if kind == "none" else _factor(metadata, newer, older)
    return RopeScaling() if factor == 1 else RopeScaling(kind="linear", factor=factor)


def _factor(metadata: Metadata, newer: str, older: str) -> float:
    found: float = metadata.number(newer, above=0, default=metadata.number(older, above=0, default=1.0))
    return found


def _yarn(metadata: Metadata, prefix: str, factor: float, original: int) -> RopeScaling:
    require(metadata, {f"{prefix}.yarn_log_multiplier": 0.0, f"{prefix}.yarn_ext_factor": 1.0})
    beta = {
        f"beta_{name}": metadata.number(f"{prefix}.yarn_beta_{name}", above=0, default=default)
        for name, default in (("fast", 32.0), ("slow", 1.0))
    }
    rounds = not prefix.startswith("gpt-oss.")  # as its own config says, and the header can't
    return RopeScaling(kind="yarn", factor=factor, original_context=original, truncate=rounds, **beta)


def require(metadata: Metadata, plain: Mapping[str, float]) -> None:
    """Refuse each key that says another number than the one at which it changes nothing."""
    for key, number in plain.items():
        if (value := metadata.number(key, above=-1e9, default=number)) != number:
            is_known = key.rpartition(".")[2] in UNSUPPORTED
            why = "experts and capped logits are not supported" if is_known else "nothing else is computed here"
            metadata.fail(key, f"{number:g}, as {why}", value)


def read_factors(checkpoint: Checkpoint, metadata: Metadata, name: str, turned: int) -> torch.Tensor:
    """Return divisors of the rotary frequencies: float32 [turned / 2]."""
    if name not in checkpoint.dense:
        metadata.fail_tensor(name, "present and dense", "none")
    factors = checkpoint.dense[name]
    if list(factors.shape) != [turned // 2]:
        metadata.fail_tensor(name, f"of shape {[turned // 2]}, which the metadata asks for", list(factors.shape))
    return factors.to(torch.float32, copy=True)
