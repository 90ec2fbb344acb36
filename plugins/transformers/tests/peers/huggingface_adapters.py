"""Random adapters of PEFT, and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OLDER_NAME", "adapter_gradients", "with_adapters"]

OLDER_NAME = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
"""Mark of tests in which PEFT uses an older name of transformers'."""


def with_adapters(model: Any, **options: Any) -> Any:
    """Return a model with random LoRA adapters on all linear layers, the same ones in each call."""
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"target_modules": "all-linear", "r": 4, "init_lora_weights": False, **options})
    return peft.get_peft_model(model, config)


def adapter_gradients(model: Any, ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Return the gradients of adapters by name; those of an expert without a token are left out."""
    model(ids, labels=ids).loss.backward()
    return {name: item.grad for name, item in model.named_parameters() if item.grad is not None}
