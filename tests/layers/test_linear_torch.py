"""``Q4Linear`` among torch's own tools: parametrized and pruned biases, inference mode, distributed checkpoints."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.utils import parametrize, prune

import q4core as q4
from tests.support.fakes import FakeBackend, registry

if TYPE_CHECKING:
    from collections.abc import Callable

N, K = 48, 128
X = torch.randn(3, K, generator=torch.Generator().manual_seed(1))


def _layer(*, seed: int = 0, format_: str = "nf4") -> Any:
    generator = torch.Generator().manual_seed(seed)
    weight = q4.quantize(torch.randn(N, K, generator=generator), format_)
    return q4.Session(registry=registry()).linear(weight, torch.randn(N, generator=generator))


class _Doubled(nn.Module):
    def forward(self, bias: torch.Tensor) -> torch.Tensor:
        return 2 * bias


def test_a_parametrized_bias_is_used() -> None:
    """A parametrization of the bias counts in every call and gets gradients, and can be removed again."""
    layer = _layer()
    bias = layer.bias.detach().clone()
    plain = layer.with_bias(X, torch.zeros(N))
    parametrize.register_parametrization(layer, "bias", _Doubled())
    torch.testing.assert_close(layer(X), plain + 2 * bias)
    layer.parametrizations.bias.original.requires_grad_()
    layer(X).sum().backward()
    assert torch.equal(layer.parametrizations.bias.original.grad, torch.full((N,), 2.0 * len(X)))
    assert layer.to(torch.bfloat16)(X.bfloat16()).dtype == torch.bfloat16
    layer.to(torch.float32)
    parametrize.remove_parametrizations(layer, "bias", leave_parametrized=False)
    torch.testing.assert_close(layer(X), plain + layer.bias)


def test_a_pruned_bias_is_used() -> None:
    """``prune`` of the bias counts in every call, and survives ``prune.remove`` and a state dict."""
    layer, other = _layer(), _layer(seed=5)
    plain = layer.with_bias(X, torch.zeros(N))
    for pruned in (layer, other):
        prune.l1_unstructured(pruned, "bias", amount=0.5)
    assert int(torch.sum(layer.bias == 0)) == N // 2
    y = layer(X)
    torch.testing.assert_close(y, plain + layer.bias)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(X), y)
    prune.remove(layer, "bias")
    assert torch.equal(layer(X), y)


def test_a_deleted_bias_is_missing_as_in_a_dense_layer() -> None:
    """After ``del layer.bias`` a call is the AttributeError of ``nn.Linear``; None set in its place serves."""
    layer, dense = _layer(), nn.Linear(K, N)
    for module in (layer, dense):
        del module.bias
        with pytest.raises(AttributeError, match="has no attribute 'bias'"):
            module(X)
    layer.to(torch.bfloat16).to(torch.float32)
    layer.bias = None
    assert torch.equal(layer(X), layer.with_bias(X, torch.zeros(N)))


def _quantized() -> q4.PackedWeight:
    return q4.quantize(torch.ones(N, K), "nf4")


@pytest.mark.parametrize("exports", [False, True])
@pytest.mark.parametrize("weight_inside", [False, True])
def test_a_layer_made_in_inference_mode_serves_gradients_outside(exports: bool, weight_inside: bool) -> None:
    """Weight, buffers and bias of a layer are ordinary tensors wherever it was made, moved, copied or loaded."""
    session = q4.Session(registry=registry(FakeBackend(exports=exports)))
    weight = None if weight_inside else _quantized()
    with torch.inference_mode():
        layer = session.linear(weight or _quantized(), nn.Parameter(torch.ones(N)))
        state = layer.state_dict()
        loaded = session.linear(_quantized(), torch.zeros(N))
        loaded.load_state_dict(state)
        moved = session.linear(_quantized(), torch.ones(N)).to(torch.bfloat16).to(torch.float32)
        copied = copy.deepcopy(layer)
    made: Any
    for made in (layer, loaded, moved, copied):
        assert not any(tensor.is_inference() for tensor in (*made.buffers(), *made.parameters()))
        x = X.clone().requires_grad_()
        made.bias.requires_grad_()
        made(x).sum().backward()
        assert x.grad is not None
        assert torch.equal(made.bias.grad, torch.full((N,), float(len(X))))


@pytest.mark.parametrize("format_", ["nf4", "nvfp4"])
def test_a_distributed_state_dict_comes_round(format_: str) -> None:
    """What torch's distributed checkpoints take from a model can be set into another one."""
    model = nn.Sequential(_layer(format_=format_), nn.Linear(N, 4))
    other = nn.Sequential(_layer(seed=7, format_=format_), nn.Linear(N, 4))
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    set_model_state_dict(other, state)
    assert torch.equal(other(X), model(X))


def test_the_stored_tensors_are_attributes_of_the_weight() -> None:
    """``layer.weight`` has every name of the state dict, as distributed checkpoints look them up."""
    layer = _layer()
    for key, tensor in layer.state_dict().items():
        value = layer.get_parameter(key) if key == "bias" else getattr(layer.weight, key.removeprefix("weight."))
        assert isinstance(value, q4.WeightSpec) or torch.equal(value, tensor)
    with pytest.raises(AttributeError, match="zero"):
        layer.weight.zero  # noqa: B018  # on purpose


MAKERS: dict[str, Callable[[q4.PackedWeight], q4.Q4Linear]] = {
    "session": lambda weight: q4.Session().linear(weight),
    "default": lambda weight: q4.Q4Linear(weight),  # noqa: PLW0108  # the call as a user writes it
}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_layer_is_a_context_manager(maker: str) -> None:
    """Leaving ``with`` closes a layer; a closed one can't be entered."""
    with MAKERS[maker](_quantized()) as layer:
        assert layer(X).shape == (3, N)
    for use in (lambda: layer(X), layer.__enter__):
        with pytest.raises(q4.LifecycleError):
            use()


def test_a_layer_needs_only_a_weight() -> None:
    """Without a session, context, environment and defaults fill the configuration, and other arguments are refused."""
    with q4.using(q4.SessionConfig(compute_path="dequant_matmul_only")):
        layer = q4.Q4Linear(_quantized())
    assert layer.diagnostics().compute_path is q4.ComputePath.DEQUANT_MATMUL_ONLY
    wrong: Any
    for wrong in (torch.ones(N, K), K):
        with pytest.raises(q4.InputError, match=r"q4\.quantize"):
            q4.Q4Linear(wrong)
