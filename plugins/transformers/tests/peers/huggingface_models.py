"""Small models of transformers: random, saved by q4core, loaded by it, and compared by their logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

import q4core as q4
from q4_transformers import HfLinear, Q4Config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["EXACT", "IDS", "SIZES", "UNTIED", "dense_model", "error", "load", "logits", "packed", "save_by_q4"]

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
UNTIED = {**SIZES, "vocab_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
IDS = torch.arange(12)[None]
EXACT = {"activation_precision": "exact"}


def _spread(model: Any) -> None:
    """Move norms and biases far from their initial values, and enlarge matrices."""
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(3)


def dense_model(kind: str = "Llama", *, change: Callable[[Any], object] = _spread, **options: Any) -> Any:
    """Return a random model of transformers, whose parameters ``change`` has changed in place."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        change(model)
    return model


def save_by_q4(folder: Path, dialect: str, format_: str, kind: str = "Llama", **options: Any) -> Any:
    """Save a random model whose linear layers are in a dialect, written by q4core; return it dense, as decoded."""
    model = dense_model(kind, **options)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    tied = "lm_head.weight" in model.all_tied_weights_keys
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weights[name] = q4.quantize(state.pop(f"{name}.weight"), format_, name=name)
            module.weight.data = q4.dequantize(weights[name], torch.float32)
    if tied:
        del state["lm_head.weight"]
    q4.save_checkpoint(folder, weights, dialect=dialect, dense=state, lossy=True)
    return model


def load(folder: Path, **options: Any) -> Any:
    """Load a folder by q4core, in exact precision."""
    config = Q4Config(**EXACT, **options.pop("config", {}))
    kind = options.pop("kind", transformers.AutoModelForCausalLM)
    return kind.from_pretrained(folder, quantization_config=config, **{"dtype": torch.float32, **options})


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Return the logits of a few tokens."""
    found: torch.Tensor = model(ids).logits
    return found


def error(found: Any, expected: Any, ids: torch.Tensor = IDS) -> float:
    """Return the greatest difference of two models' logits over the greatest one."""
    ours, theirs = logits(found, ids), logits(expected, ids)
    return float((ours - theirs).abs().max() / theirs.abs().max())


def packed(model: Any) -> list[str]:
    """Return the names of the packed layers."""
    return [name for name, module in model.named_modules() if isinstance(module, HfLinear)]
