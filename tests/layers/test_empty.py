"""``Q4Linear.empty`` and ``adopt``: a layer that is there before its weight."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

import q4core as q4


class _AlsoLinear(q4.Q4Linear, torch.nn.Linear):  # type: ignore[misc]  # answers other types than it declares
    """A layer that other code takes for an ``nn.Linear``."""


def _weight(n: int = 6, k: int = 64, format_: str = "nf4") -> q4.PackedWeight:
    return q4.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(3)), format_)


@pytest.mark.parametrize("kind", [q4.Q4Linear, _AlsoLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adopts(kind: type[q4.Q4Linear], dtype: torch.dtype) -> None:
    """A layer made empty computes what one made from the weight does, in the dtype that it was made for."""
    weight, bias = _weight(), torch.randn(6)
    layer = kind.empty(6, 64, bias, dtype=dtype, name="proj")
    assert not layer.is_prepared
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device.type) == ((6, 64), dtype, "meta")
    assert "none yet" in repr(layer)
    assert layer.adopt(weight) is layer
    x = torch.randn(3, 64).to(dtype)
    expected = q4.Q4Linear(weight, bias, config=q4.SessionConfig(compute_dtype=dtype))
    assert torch.equal(layer(x), expected(x))
    assert layer.bias is not None
    assert layer.bias.dtype is dtype
    assert layer.name == "proj"
    assert layer.weight.format == "nf4"


def test_adopts_again() -> None:
    """A layer takes another weight, of another format, in place of its own."""
    layer = q4.Q4Linear.empty(6, 64).adopt(_weight())
    weight = _weight(format_="nvfp4")
    x = torch.randn(2, 64)
    assert torch.equal(layer.adopt(weight)(x), q4.Q4Linear(weight)(x))
    assert layer.weight.format == "nvfp4"


def test_adopts_a_prepared_layer() -> None:
    """A layer takes over what another one prepared, in the same memory, and that one is closed."""
    bias, x = torch.randn(6), torch.randn(2, 64)
    given = q4.Q4Linear(_weight(), torch.randn(6))
    addresses = [buffer.data_ptr() for buffer in given.buffers()]
    layer = q4.Q4Linear.empty(6, 64, bias, name="proj").adopt(given)
    assert [buffer.data_ptr() for buffer in layer.buffers()] == addresses
    assert torch.equal(layer(x), q4.Q4Linear(_weight(), bias)(x))
    with pytest.raises(q4.LifecycleError, match="closed"):
        given(x)
    del given
    gc.collect()
    traced = x.clone().requires_grad_()  # by way of the op
    assert torch.equal(layer(traced), layer(x))
    assert sum(layer.diagnostics().calls) == 3
    assert q4.Q4Linear.empty(6, 64).adopt(layer).packed_weight().name == _weight().name


def test_refuses_a_prepared_layer_that_does_not_fit() -> None:
    """Another shape, another dtype, and a layer without a weight are errors that leave both as they were."""
    layer, closed = q4.Q4Linear.empty(6, 64, name="proj"), q4.Q4Linear(_weight())
    closed.close()
    for wrong in (q4.Q4Linear(_weight(8)), q4.Q4Linear(_weight()).half()):
        with pytest.raises(q4.InputError, match=r"'proj': weight must be 6×64 for torch\.float32"):
            layer.adopt(wrong)
        assert wrong.is_prepared
    for empty in (closed, q4.Q4Linear.empty(6, 64)):
        with pytest.raises(q4.LifecycleError):
            layer.adopt(empty)
    assert not layer.is_prepared


def test_meta_bias_waits() -> None:
    """A bias on the meta device stays as it is, for the code that loads it."""
    layer = q4.Q4Linear.empty(6, 64, torch.empty(6, device="meta")).adopt(_weight())
    assert layer.bias is not None
    assert layer.bias.is_meta
    layer.bias = torch.nn.Parameter(torch.zeros(6))
    assert layer(torch.ones(64)).shape == (6,)


def test_state_dict_fills() -> None:
    """A state dict gives an empty layer its weight, too."""
    full = q4.Q4Linear(_weight())
    layer = q4.Q4Linear.empty(6, 64)
    layer.load_state_dict(full.state_dict(), assign=True)
    x = torch.randn(64)
    assert torch.equal(layer(x), full(x))


def test_copies() -> None:
    """Copies and pickles of an empty layer, also one of another dtype, are empty layers."""
    layer = q4.Q4Linear.empty(6, 64).half()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301  # our own
        assert not twin.is_prepared
        assert twin.adopt(_weight()).dtype is torch.float16


def test_refusals() -> None:
    """Wrong sizes, weights and biases are named, and the layer stays as it was; without a weight nothing runs."""
    layer = q4.Q4Linear.empty(6, 64, name="proj")
    for use in (lambda: layer(torch.ones(64)), layer.packed_weight, layer.state_dict):
        with pytest.raises(q4.LifecycleError, match="has no weight yet"):
            use()
    for wrong in (_weight(8), torch.zeros(6, 64), _weight().to("meta")):
        with pytest.raises(q4.InputError, match="'proj'"):
            layer.adopt(wrong)  # type: ignore[arg-type]  # on purpose
    assert not layer.is_prepared
    for dtype in ("float32", torch.int8):
        with pytest.raises(q4.InputError, match="dtype must be"):
            q4.Q4Linear.empty(6, 64, dtype=dtype)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(q4.InputError, match="in_features must be a positive integer"):
        q4.Q4Linear.empty(6, 0)
    with pytest.raises(q4.InputError, match="bias"):
        q4.Q4Linear.empty(6, 64, torch.zeros(5))
    layer.close()
    with pytest.raises(q4.LifecycleError, match="closed"):
        layer.adopt(_weight())
    assert layer.weight.format == ""
    with pytest.raises(AttributeError):
        _ = layer.weight.qdata
