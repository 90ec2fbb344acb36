"""Copies and pickles of ``Q4Linear`` are what those of any module are: whole, independent, and able to run."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import q4core as q4
from tests.support.fakes import FakeBackend, registry

N, K = 40, 128
X = torch.randn(2, K, generator=torch.Generator().manual_seed(1))


def _weight(format_: str = "nf4") -> q4.PackedWeight:
    return q4.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(3)), format_, name="proj")


# Copies choose for themselves where they are unpickled; the reference is there everywhere, and gives the same bits.
REFERENCE = q4.SessionConfig(compute_path=q4.ComputePath.DEQUANT_MATMUL_ONLY)


def _layer(bias: torch.Tensor | None = None, weight: q4.PackedWeight | None = None) -> q4.Q4Linear:
    return q4.Session(REFERENCE, registry=registry()).linear(weight or _weight(), bias)


def _pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))  # noqa: S301  # our own bytes


def _doubled(module: torch.nn.Module, args: tuple[Any, ...], y: torch.Tensor) -> torch.Tensor:
    return y * 2


COPIES = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": _pickled}
every_copy = pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)


def test_deepcopy_is_independent() -> None:
    """A deep copy computes the same, counts for itself, and outlives the original's close."""
    layer = _layer(torch.randn(N))
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(X), layer(X))
    assert twin.diagnostics().calls == (1,)
    own = {buffer.data_ptr() for buffer in twin.buffers()}
    assert own.isdisjoint({buffer.data_ptr() for buffer in layer.buffers()})
    layer.close()
    assert twin(X).shape == (2, N)


def test_pickle_prepares_again() -> None:
    """A pickled layer carries the canonical weight and selects for itself where it is loaded."""
    config = q4.SessionConfig(compute_dtype=torch.bfloat16)
    layer = q4.Session(config).linear(_weight("q4_1"), torch.randn(N), m=(1, 4))
    layer.eval()
    twin = _pickled(layer)
    x = X.to(torch.bfloat16)
    assert torch.equal(twin(x), layer(x))
    assert twin.name == "proj"
    assert not twin.training
    assert twin.diagnostics().calls == (1,)
    with pytest.raises(q4.InputError, match="between 1 and 4"):
        twin(torch.ones(5, K, dtype=torch.bfloat16))


@every_copy
def test_a_copy_keeps_what_the_user_put_on_the_layer(duplicate: Any) -> None:
    """Hooks, attributes, buffers, parameters and modules that were added go with a copy, as with any module's."""
    layer = _layer(torch.randn(N))
    layer.register_forward_hook(_doubled)
    layer.tag_of_mine = {"a": [1]}  # type: ignore[assignment]
    layer.register_buffer("packed_mask", torch.ones(3))
    layer.register_parameter("gain", torch.nn.Parameter(torch.full((2,), 5.0)))
    layer.adapter = torch.nn.Linear(2, 2)
    twin = duplicate(layer)
    assert torch.equal(twin(X), layer(X))
    assert torch.equal(twin(X), twin.forward(X) * 2)
    assert twin.tag_of_mine == {"a": [1]}
    assert torch.equal(twin.get_buffer("packed_mask"), torch.ones(3))
    assert torch.equal(twin.gain, torch.full((2,), 5.0))
    assert torch.equal(twin.adapter.weight, layer.adapter.weight)
    assert list(twin.state_dict()) == list(layer.state_dict())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled])
def test_what_a_copy_keeps_is_its_own(duplicate: Any) -> None:
    """What a deep copy or a pickle took along is not shared with the original."""
    layer = _layer(torch.randn(N))
    layer.tag_of_mine = {"a": [1]}  # type: ignore[assignment]
    layer.register_buffer("extra", torch.ones(3))
    twin = duplicate(layer)
    assert twin.tag_of_mine is not layer.tag_of_mine
    assert twin.get_buffer("extra").data_ptr() != layer.get_buffer("extra").data_ptr()
    assert twin.get_parameter("bias").data_ptr() != layer.get_parameter("bias").data_ptr()
    twin.register_forward_hook(_doubled)
    assert torch.equal(twin(X), layer(X) * 2)
    assert layer.diagnostics().calls == (1,)


def test_a_pickle_keeps_tied_parameters_tied() -> None:
    """A bias that two layers share is one parameter in a pickle of both, too."""
    bias = torch.nn.Parameter(torch.randn(N))
    twins = _pickled(torch.nn.ModuleList([_layer(bias), _layer(bias)]))
    assert twins[0].bias is twins[1].bias
    assert twins[0].bias.requires_grad


def test_a_hook_that_does_not_pickle_is_refused() -> None:
    """A hook without a name can't be pickled, here as on nn.Linear: nothing is dropped in silence."""
    for layer in (_layer(), torch.nn.Linear(2, 2)):
        layer.register_forward_hook(lambda _module, _args, y: y)
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(layer)


@every_copy
def test_a_copy_of_a_compiled_layer_is_not_the_original(duplicate: Any) -> None:
    """After layer.compile() a copy runs itself, uncompiled, as any module's copy does."""
    layer = _layer(torch.zeros(N))
    layer.compile(backend="eager")
    layer(X)
    twin = duplicate(layer)
    twin.bias = torch.nn.Parameter(torch.ones(N))
    torch.testing.assert_close(twin(X), layer(X) + 1)
    assert twin.diagnostics().calls == (1,)


@every_copy
def test_a_copy_on_the_meta_device_waits_for_its_state(duplicate: Any) -> None:
    """A copy of a layer on the meta device, moved there or made there, runs once its state is loaded."""
    source = _layer()
    source(X)
    state = source.state_dict()
    y = source(X)
    for layer in (copy.deepcopy(source).to("meta"), _layer(weight=_weight().to("meta"))):
        twin = duplicate(layer)
        assert not twin.is_prepared
        assert twin.weight.device.type == "meta"
        with pytest.raises(q4.LifecycleError, match="meta"):
            twin(X)
        twin.load_state_dict(state, assign=True)
        assert torch.equal(twin(X), y)
        assert twin.diagnostics().calls == (1,)


def test_a_layer_on_the_meta_device_forgets_what_it_was() -> None:
    """A layer that gave its weight away keeps nothing of it: neither counters, nor plan, nor records."""
    config = q4.SessionConfig(unified_memory=q4.UnifiedMemoryPolicy.PREFER_UNIFIED)
    layer = q4.Session(config, registry=registry()).linear(_weight())
    layer(X)
    layer.to("meta")
    assert (layer._fast, layer._plan_key, layer._is_managed) == (None, "", False)
    assert not layer.is_prepared


def test_a_closed_layer_is_not_pickled() -> None:
    """A closed layer has no weight to pickle, and says so."""
    layer = _layer()
    layer.close()
    with pytest.raises(q4.LifecycleError, match="closed"):
        pickle.dumps(layer)


def test_a_load_keeps_the_users_buffers() -> None:
    """A buffer of the user's stays through load_state_dict and close, whatever it is called."""
    layer = _layer()
    layer.register_buffer("packed_mask", torch.ones(3), persistent=False)
    layer.load_state_dict(_layer().state_dict())
    assert torch.equal(layer.get_buffer("packed_mask"), torch.ones(3))
    layer.close()
    assert list(layer.buffers()) == [layer.packed_mask]


def test_a_backend_that_keeps_its_source_serves_copies() -> None:
    """Where the backend has no export, a deep copy gets the source's bytes, and a pickle the source."""
    layer = q4.Session(registry=registry(FakeBackend(exports=False))).linear(_weight())
    assert torch.equal(copy.deepcopy(layer)(X), layer(X))
    assert torch.equal(q4.dequantize(_pickled(layer).packed_weight()), q4.dequantize(_weight()))
