"""Straight-through training: exact forward, the identity's gradient, flat memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import q4core as q4
from q4_nn import training

N, K = 24, 64


def _tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    """Start with an empty eval cache."""
    training.clear_eval_cache()


@pytest.mark.parametrize("format_", ["nvfp4", "mxfp4", "nf4", "int4", "q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_equals_the_quantised_weight(format_: str, dtype: torch.dtype) -> None:
    """The forward weight is exactly dequantise(quantise(master)), with and without gradients."""
    master = _tensor(N, 128, dtype=dtype)
    wanted = q4.dequantize(q4.quantize(master, format_), dtype)
    assert torch.equal(training.ste_weight(master, format_), wanted)
    assert torch.equal(training.ste_weight(master.requires_grad_(), format_).detach(), wanted)
    x = _tensor(3, 128, seed=1, dtype=dtype)
    y = training.linear_ste(x, master, format=format_)
    assert torch.equal(y.detach(), torch.nn.functional.linear(x, wanted))


def test_gradients_are_the_analytic_ones() -> None:
    """Master: gradᵀ @ x, as if not quantised. x: grad @ quantised weight. Bias: the sum."""
    master, x, bias = (
        _tensor(N, K).requires_grad_(),
        _tensor(2, 3, K, seed=1).requires_grad_(),
        _tensor(N).requires_grad_(),
    )
    grad = _tensor(2, 3, N, seed=2)
    training.linear_ste(x, master, bias).backward(grad)
    quantised = q4.dequantize(q4.quantize(master.detach(), "nvfp4"))
    flat_grad, flat_x = grad.reshape(-1, N), x.detach().reshape(-1, K)
    torch.testing.assert_close(master.grad, flat_grad.T @ flat_x)
    torch.testing.assert_close(x.grad, grad @ quantised)
    torch.testing.assert_close(bias.grad, flat_grad.sum(0))
    assert bool(master.grad.abs().sum() > 0)  # type: ignore[union-attr]  # just made


def test_double_backward_works() -> None:
    """The gradient of a gradient flows, as through a plain linear layer."""
    master, x = _tensor(N, K).requires_grad_(), _tensor(3, K, seed=1).requires_grad_()
    (first,) = torch.autograd.grad(training.linear_ste(x, master).square().sum(), x, create_graph=True)
    first.square().sum().backward()
    assert master.grad is not None
    assert bool(torch.isfinite(master.grad).all())
    assert bool((master.grad != 0).any())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, when it loads forward mode
def test_forward_mode_passes_tangents() -> None:
    """linear_ste passes tangents of x, and those of the master unchanged."""
    master, x, seed = _tensor(N, K), _tensor(3, K, seed=1), _tensor(N, K, seed=2)
    dense = training.ste_weight(master)
    with forward_ad.dual_level():
        y = training.linear_ste(forward_ad.make_dual(x, 2 * x), master)
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, 2 * x @ dense.T)
        y = training.linear_ste(x, forward_ad.make_dual(master, seed))
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, x @ seed.T)
    tangent = torch.func.jvp(lambda item: training.linear_ste(x, item), (master,), (seed,))[1]
    torch.testing.assert_close(tangent, x @ seed.T)


def test_the_eval_cache_follows_the_masters_version() -> None:
    """Without gradients the quantised weight is cached, and made again after each change of the master."""
    master = torch.nn.Parameter(_tensor(N, K))
    with torch.no_grad():
        first = training.ste_weight(master)
        assert training.ste_weight(master) is first
        assert training.eval_cache_bytes() == N * K * 4
        master.mul_(2.0)
        second = training.ste_weight(master)
        assert second is not first
        assert torch.equal(second, q4.dequantize(q4.quantize(master.detach(), "nvfp4")))
        master.data = _tensor(N, K, seed=5)
        assert torch.equal(training.ste_weight(master), q4.dequantize(q4.quantize(master.detach(), "nvfp4")))
    assert training.ste_weight(master, "nf4").shape == (N, K)


def test_the_cache_lets_go_of_a_dead_master() -> None:
    """The cache keeps no master alive, and drops its entry with it."""
    master = _tensor(N, K)
    reference = weakref.ref(master)
    training.ste_weight(master)
    del master
    gc.collect()
    assert reference() is None
    assert training.eval_cache_bytes() == 0


def test_inference_tensors_are_computed_each_time() -> None:
    """A tensor without a version can't be told apart from its changed self, so it is not cached."""
    with torch.inference_mode():
        master = _tensor(N, K)
        assert torch.equal(training.ste_weight(master), q4.dequantize(q4.quantize(master, "nvfp4")))
    assert training.eval_cache_bytes() == 0


@pytest.mark.parametrize(
    "master",
    [
        torch.zeros(N, K, dtype=torch.int8),
        torch.zeros(K),
        torch.zeros(2, N, K),
        torch.zeros(N, K, dtype=torch.float64),
        [1.0],
    ],
    ids=["integers", "vector", "3-D", "float64", "list"],
)
def test_a_bad_master_is_refused(master: Any) -> None:
    """A master that can't carry gradients in four bits is a typed error, never a silent zero gradient."""
    for function in (training.ste_weight, training.quantize_packed):
        with pytest.raises(q4.InputError) as caught:
            function(master)
        assert caught.value.name == "master"


@pytest.mark.parametrize(
    "x",
    [torch.zeros(2, K + 1), torch.zeros(2, K, dtype=torch.bfloat16), torch.zeros(2, K, device="meta"), torch.zeros(())],
)
def test_a_bad_input_is_refused(x: torch.Tensor) -> None:
    """x of another size, dtype or device is a typed error."""
    with pytest.raises(q4.InputError) as caught:
        training.linear_ste(x, _tensor(N, K))
    assert caught.value.name == "x"


def test_a_list_as_input_and_a_bad_bias_are_refused() -> None:
    """x that is no tensor, and a bias of another shape or dtype, are typed errors that name them."""
    master = torch.ones(2, 16)
    with pytest.raises(q4.InputError) as caught:
        training.linear_ste([1.0], master)  # type: ignore[arg-type]
    assert caught.value.name == "x"
    for bias in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(q4.InputError) as caught:
            training.linear_ste(torch.ones(1, 16), master, bias)
        assert caught.value.name == "bias"


def test_rounding_and_seed_are_passed_on() -> None:
    """Rounding by chance, which nobody offers on the CPU, is refused here too; so is a seed below zero."""
    with pytest.raises(q4.BackendUnavailableError):
        training.quantize_packed(_tensor(N, K), rounding=q4.Rounding.STOCHASTIC, seed=3)
    with pytest.raises(q4.InputError) as caught:
        training.quantize_packed(_tensor(N, K), seed=-1)
    assert caught.value.name == "seed"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_master_that_went_astray_is_refused(bad: float) -> None:
    """NaN or infinity in the master is an error that says so, before it becomes a scale."""
    master = _tensor(N, K)
    master[1, 2] = bad
    with pytest.raises(q4.Q4Error):
        training.ste_weight(master.requires_grad_())


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # one short read
        return int(file.read().split()[1]) * 4096


@pytest.mark.slow
def test_a_thousand_steps_of_a_plain_loop() -> None:
    """TC-20: 1,000 steps of a loop that knows nothing of q4core: gradients finite, loss falls, memory flat."""
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(64, 32, generator=generator), torch.randn(64, 8, generator=generator)
    first = torch.nn.Parameter(torch.randn(64, 32, generator=generator) / 8)
    second = torch.nn.Parameter(torch.randn(8, 64, generator=generator) / 8)
    optimiser = torch.optim.Adam([first, second], lr=3e-3)
    losses, held = [], []
    for step in range(1_000):
        if step in {100, 550}:
            gc.collect()
            held.append(_resident_bytes())
        hidden = torch.relu(training.linear_ste(x, first))
        loss = (training.linear_ste(hidden, second) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        assert all(bool(torch.isfinite(item.grad).all()) for item in (first, second) if item.grad is not None)
        optimiser.step()
        losses.append(loss.item())
    gc.collect()
    assert sum(losses[-50:]) < 0.5 * sum(losses[:50])
    held.append(_resident_bytes())
    assert min(held[1] - held[0], held[2] - held[1]) < 2 << 20  # what leaks grows in both halves; a heap grows once
    assert training.eval_cache_bytes() == 0
