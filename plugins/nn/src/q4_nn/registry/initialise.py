"""Initial random weights, by the same rule for every network."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch import nn

from q4core import ConfigError
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["initialise_"]

_Module = TypeVar("_Module", bound=nn.Module)
_MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def initialise_(model: _Module, rule: str = "normal", *, std: float = 0.02) -> _Module:
    """Fill the matrices and embeddings of a network with random values, and return it; biases become zero.

    Recurrent cells keep torch's own rule, and norms are untouched. ``torch.manual_seed`` makes it repeatable.

    Args:
        model: Any module.
        rule: ``normal`` (of ``std``, as transformers are), ``kaiming`` (for ReLU and its kin) or ``xavier``; embeddings
            are normal under every rule.
        std: Standard deviation of ``normal``, and of embeddings.

    Raises:
        ConfigError: There is no such rule.

    Reference:
        He et al., Delving Deep into Rectifiers. Glorot and Bengio, Understanding the difficulty of training deep
        feedforward neural networks.
    """
    rules: dict[str, Callable[[torch.Tensor], object]] = {
        "normal": lambda weight: nn.init.normal_(weight, std=std),
        "kaiming": lambda weight: nn.init.kaiming_normal_(weight, nonlinearity="relu"),
        "xavier": nn.init.xavier_uniform_,
    }
    if rule not in rules:
        close = closest_name(rule, rules)
        hint = f"Did you mean {close!r}?" if close else None
        raise ConfigError("initialise_", name="rule", rule=f"one of {', '.join(rules)}", value=rule, hint=hint)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, _MATRICES):
            rules[rule](module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
