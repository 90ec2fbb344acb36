"""``Watch``: what has changed in a network, and what has not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from q4_programs import Watch

if TYPE_CHECKING:
    from collections.abc import Callable


def _network() -> Any:
    block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Identity())
    block.register_parameter("gain", nn.Parameter(torch.ones(1)))
    return nn.Sequential(block, nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])).eval()


def _renamed(network: Any) -> None:
    network[0].register_parameter("other", network[0]._parameters.pop("gain"))  # as pruning does


REPLACED = "a module or parameter was added, replaced or removed"
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a module replaced": (lambda network: setattr(network[0], "2", nn.Identity().eval()), REPLACED),
    "one in a list": (lambda network: network[1].__setitem__(1, nn.ReLU().eval()), REPLACED),
    "one to one without": (lambda network: network[0][2].add_module("inner", nn.Identity().eval()), REPLACED),
    "one less": (lambda network: network[1].__delitem__(1), REPLACED),
    "a bias in place of None": (lambda network: setattr(network[0][0], "bias", nn.Parameter(torch.ones(4))), REPLACED),
    "a bias that is gone": (lambda network: setattr(network[1][0], "bias", None), REPLACED),
    "a parameter of other numbers": (
        lambda network: setattr(network[0][1], "weight", nn.Parameter(torch.zeros(4))),
        REPLACED,
    ),
    "an equal parameter": (lambda network: setattr(network[0], "gain", nn.Parameter(torch.ones(1))), REPLACED),
    "a parameter more": (
        lambda network: network[0][2].register_parameter("more", nn.Parameter(torch.ones(1))),
        REPLACED,
    ),
    "a parameter by another name": (_renamed, REPLACED),
    "a forward pass": (lambda network: setattr(network[0][1], "forward", torch.relu), "an attribute of a module"),
    "training": (lambda network: network[0][2].train(), "training mode"),
    "a hook": (lambda network: network[0][2].register_forward_hook(print), "Identity has a hook"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    """Whatever a call would run otherwise, or read, is seen; nothing is before it."""
    network = _network()
    watch = Watch([*network.modules()])
    assert watch.change() is None
    assert watch.change() is None
    change, expected = CHANGES[name]
    change(network)
    assert (watch.change() or "").startswith(expected)


def test_numbers_may_change() -> None:
    """Parameters that have other numbers, and the same attributes with other values, are no change."""
    network = _network()
    watch = Watch([*network.modules()])
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(2)
    network[0][1].eps = 1.0
    assert watch.change() is None
