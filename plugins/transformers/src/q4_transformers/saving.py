"""The content that ``save_pretrained`` writes: layers in a dialect, dense tensors, and the dialect's entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import q4core as q4
from q4_transformers.experts import GPT_OSS, is_stacked, with_stacked_experts
from q4_transformers.linear import HfLinear, dense_state_only
from q4_transformers.split import SplitLinear
from q4core import ConfigError, WeightSpec
from q4core.plugin_api import find_dialect

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from q4_transformers.config import Q4Config
    from q4core import WrittenLayer

__all__ = ["state_and_metadata"]

_MATRIX = 2
_BY_FORMAT = {
    "nf4": "bitsandbytes",
    "fp4": "bitsandbytes",
    "nvfp4": "torchao-nvfp4-linear",
    "mxfp4": "torchao-mxfp4-linear",
    "int4": "compressed-tensors-int4",
}
"""Format → the dialect in which a model is saved that was quantised here."""


def state_and_metadata(
    model: Any, config: Q4Config, read: Sequence[str], entry: dict[str, Any] | None
) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
    """Return the tensors of a model by name, packed ones in a dialect, and the metadata for each file.

    Sets what ``config`` writes to ``config.json``: the entry that was read, unless the dialect is another one now.

    Args:
        model: A model of transformers with ``HfLinear`` layers.
        config: The model's; its ``dialect`` is what to write, by default the one that was read.
        read: The dialects that were read.
        entry: The entry of ``config.json`` that was read.

    Returns:
        ``(None, {})`` where adapters alone are saved.

    Raises:
        ConfigError: Neither the file nor the format has a dialect.
        DialectError: The dialect can't express a weight.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        return None, {}
    found = {name: module for name, module in model.named_modules() if isinstance(module, HfLinear | SplitLinear)}
    layers = {name: module for name, module in found.items() if not isinstance(found.get(_parent(name)), SplitLinear)}
    with dense_state_only():
        state: dict[str, torch.Tensor] = model.state_dict()
    if not layers:
        return state, {}
    names = list(state)
    specs = {}
    is_mixed = config.dialect is None and entry is not None and len(read) > 1  # each layer as it was read
    chosen = None if is_mixed else find_dialect(_dialect_name(config, read), q4.dialects())
    groups: dict[str, dict[str, WrittenLayer]] = {}
    for name, layer in layers.items():
        weight, stored = layer.packed_weight(), layer.stored_name or name
        dialect = chosen or find_dialect(layer.dialect or "", q4.dialects())
        weight = dialect.approximate(weight) if config.lossy else weight
        if dialect.name == GPT_OSS and not is_stacked(stored):
            rule = "an expert's, as transformers reads no other layer in it"
            hint = "Quantise with modules_to_not_convert=['self_attn', 'lm_head'], or save in another dialect."
            raise dialect.refusal(stored, "layer", rule, type(model).__name__, hint)
        specs[stored] = WeightSpec.of(weight)
        written = dialect.write(stored, weight)
        groups.setdefault(dialect.name, {})[stored] = written
        state |= (written if stored == name else dialect.write(name, weight)).tensors
    if GPT_OSS in groups:
        state = with_stacked_experts(state)
    config.stored = entry
    if chosen is not None and (entry is None or (chosen.name,) != tuple(read)):
        matrices = [name for name in names if name.endswith(".weight") and state[name].dim() == _MATRIX]
        unquantised = tuple(name.removesuffix(".weight") for name in matrices)
        config.stored = chosen.quantization_config(specs, unquantised)
        vars(model.config).pop("quantization", None)  # MLX's second entry
    metadata: dict[str, str] = {}
    for name, group in groups.items():
        metadata |= find_dialect(name, q4.dialects()).merge_metadata(group, names)
    return state, metadata


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _dialect_name(config: Q4Config, read: Sequence[str]) -> str:
    if config.dialect is not None:
        return config.dialect
    if len(read) == 1 and read[0] in {dialect.name for dialect in q4.dialects()}:
        return read[0]
    if not read and config.format in _BY_FORMAT:
        return _BY_FORMAT[config.format]
    known = ", ".join(sorted(dialect.name for dialect in q4.dialects() if dialect.formats))
    rule, hint = f"one of {known}", "Set model.config.quantization_config.dialect, or Q4Config(dialect=…)."
    found = ", ".join(read) or config.format
    raise ConfigError("save_pretrained", name="dialect", rule=rule, value=found, hint=hint)
