"""``Names``: the names of a checkpoint's tensors in a model of transformers; and of what releases call otherwise."""

from __future__ import annotations

import copy
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_outputs import BaseModelOutputWithPast

__all__ = ["CACHE", "Names"]

CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
"""A cache in calls and outputs: since 5.24 under another name."""


class Names:
    """The names that transformers gives the checkpoint's tensors in one model, with or without the base's prefix.

    It is asked before modules are replaced, as transformers uses the model's own state dict. Merged and split
    tensors (experts, a fused qkv) have no name of their own.
    """

    def __init__(self, model: Any) -> None:
        conversions = copy.deepcopy(get_model_conversion_mapping(model))  # matching leaves marks
        self._renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
        self._converters = [item for item in conversions if isinstance(item, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._state = model.state_dict()

    def rename(self, key: str) -> str | None:
        """Return the name of a checkpoint's tensor in the model; None where it is merged or split."""
        state = self._state
        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, state)
        if pattern is not None:
            return None
        if name not in state and key in state:
            name, _ = rename_source_key(key, [], [], self._prefix, state)
        return str(name)

    def holder(self, key: str) -> str:
        """Return the path of the module to which a checkpoint's tensor goes, merged or as it is."""
        name, _ = rename_source_key(key, self._renamings, self._converters, self._prefix, self._state)
        return str(name).rpartition(".")[0]

    def is_float(self, name: str | None) -> bool:
        """Return whether the model has a floating-point tensor of a name."""
        return name in self._state and self._state[name].is_floating_point()

    def shape(self, name: str | None) -> tuple[int, ...] | None:
        """Return the shape of the model's tensor of a name, or None where there is none."""
        return tuple(self._state[name].shape) if name in self._state else None

    def forms(self, key: str) -> set[str]:
        """Return every name under which transformers may report a tensor that it finds no place for."""
        merged, _ = rename_source_key(key, self._renamings, self._converters)
        renamed, _ = rename_source_key(key, self._renamings, [])
        return {key, str(merged), str(renamed), self.rename(key) or key}
