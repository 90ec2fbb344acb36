"""``SpikeProduct``: which product runs, what is proven first, and what is refused."""

from __future__ import annotations

import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_snn.products import SpikeProduct
from tests.support.fakes import FakeBackend

if TYPE_CHECKING:
    from collections.abc import Callable

N, K = 40, 96


class Spikes(FakeBackend):
    """A backend of spikes, through the reference codec; ``harm`` changes what it gives."""

    def __init__(self, harm: Callable[[torch.Tensor], torch.Tensor] | None = None, limit: float = 0.25) -> None:
        super().__init__(ops={"linear", "spikes"})
        self.harm, self.limit, self.rows = harm, limit, list[int]()

    def spike_limit(self, rows: int) -> float:
        """Return the given share."""
        del rows
        return self.limit

    def spikes(self, prepared: q4.Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None) -> None:
        """Multiply through the codec."""
        self.rows.append(len(out))
        dense = q4.dequantize(prepared.meta.build(prepared.tensors), torch.float32)
        out.copy_(x.float() @ dense.T + (0 if bias is None else bias))
        if self.harm is not None:
            out.copy_(self.harm(out))


def layer_of(
    backend: FakeBackend, *, bias: bool = True, dtype: torch.dtype | None = None, columns: int = K
) -> q4.Q4Linear:
    """Return a layer that a backend prepared."""
    registry = q4.Registry([("given", types.SimpleNamespace(q4_backends=q4.hookimpl(lambda: [backend])))])
    config = q4.SessionConfig(device="cpu", activation_precision="exact", compute_dtype=dtype)
    weight = q4.quantize(torch.randn(N, columns), "nf4")
    return q4.Q4Linear(weight, torch.randn(N) if bias else None, config=config, registry=registry, name="synapses")


def spikes(*sizes: int, rate: float = 0.1) -> torch.Tensor:
    """Return random spikes, bool."""
    return torch.rand(sizes) < rate


@pytest.mark.parametrize("bias", [False, True])
def test_rare_spikes_run_sparsely_and_many_densely(bias: bool) -> None:
    """Up to the backend's limit its sparse product runs, above it the layer, with the same numbers, and both count."""
    layer = layer_of(Spikes(), bias=bias)
    product = SpikeProduct(layer)
    for x in (spikes(2, 3, K), spikes(K, 3).T[0], spikes(4, K, rate=0.6)):
        for given in (x, x.float()):
            torch.testing.assert_close(product(given), layer(x.float()).detach())
    assert (product.record.sparse, product.record.dense, product.record.reason) == (4, 2, None)
    report = q4.explain(layer)
    assert report.section("spikes") == (product.record,)
    assert "spikes of synapses on fake: 4 × sparse, 2 × dense" in str(report)
    assert report.to_dict()["spikes"][0]["sparse"] == 4


def test_steps_are_calls_of_their_own() -> None:
    """Each step runs sparsely or densely as a call of its own would, but the sparse ones in one run."""
    layer = layer_of(Spikes())
    x = torch.stack([spikes(2, K, rate=rate) for rate in (0.1, 0.9, 0.0, 0.1, 0.9)])
    for given, runs in ((x, [6]), (x[::3], [4]), (x[1::3], [])):
        backend: Any = layer._require_ready().plan.backend
        product, before = SpikeProduct(layer), len(backend.rows)
        counted = (product.record.sparse, product.record.dense)
        torch.testing.assert_close(product.steps(given), layer(given.float()).detach())
        assert backend.rows[before:] == runs
        sparse, dense = sum(runs) // 2, len(given) - sum(runs) // 2
        assert (product.record.sparse - counted[0], product.record.dense - counted[1]) == (sparse, dense)
    assert SpikeProduct(layer).steps(x[:0].float()).shape == (0, 2, N)
    with pytest.raises(q4.InputError, match=r"of shape \[T, M, K\]"):
        SpikeProduct(layer).steps(x[0])


def test_a_negative_zero_is_a_zero() -> None:
    """Both zeros stand for no spike."""
    layer = layer_of(Spikes())
    x = torch.zeros(2, K)
    x[0, 3], x[1] = 1, -0.0
    torch.testing.assert_close(SpikeProduct(layer)(x), layer(x).detach())


def test_a_backend_without_spikes_runs_densely_and_says_so() -> None:
    """Where the backend declares no spikes the layer's own product serves, and the record says why."""
    layer = layer_of(FakeBackend())
    product = SpikeProduct(layer)
    x = spikes(2, K)
    torch.testing.assert_close(product(x), layer(x.float()).detach())
    assert (product.record.dense, product.record.reason) == (1, "op 'spikes' is not declared for cpu")
    assert str(product.record).endswith("not sparsely: op 'spikes' is not declared for cpu")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda y: y * 1.001, "wrong numbers"),
        (lambda y: y * 0, "all zero"),
        (lambda y: y[:, :1].expand_as(y) * torch.nan, "not written, or NaN"),
    ],
)
def test_wrong_numbers_are_found_before_the_first_use(
    harm: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    """A backend whose numbers are wrong is not used for spikes, with a warning, and the dense product serves."""
    layer = layer_of(Spikes(harm))
    with pytest.warns(q4.Q4ProbeWarning, match="is not used for spikes"):
        product = SpikeProduct(layer)
    x = spikes(2, K)
    torch.testing.assert_close(product(x), layer(x.float()).detach())
    assert message in str(product.record.reason)


@pytest.mark.parametrize(
    ("x", "rule"),
    [
        (torch.zeros(2, K - 1), "0 and 1"),
        (torch.zeros(2, K, dtype=torch.float64), "0 and 1"),
        (torch.full((2, K), 0.5), "0 and 1 alone"),
        (torch.full((2, K), torch.nan), "0 and 1 alone"),
        (torch.eye(2, K) * (1 - 2**-24), "0 and 1 alone"),
        (torch.eye(2, K) * 2 - torch.eye(2, K)[[1, 0]] * 1e-30, "0 and 1 alone"),
        (torch.eye(2, K) * -1, "0 and 1 alone"),
        (torch.zeros(2, K, requires_grad=True), "without gradients"),
        ([0, 1], "0 and 1"),
    ],
)
def test_what_is_no_spike_is_refused(x: Any, rule: str) -> None:
    """Other shapes, dtypes and numbers are typed errors that name the layer and the way out."""
    with pytest.raises(q4.InputError, match=f"synapses.*{rule}.*Call the layer itself"):
        SpikeProduct(layer_of(Spikes()))(x)


def test_only_float32_layers_take_spikes() -> None:
    """A layer of another dtype, and what is no layer, is refused."""
    for layer in (layer_of(Spikes(), dtype=torch.bfloat16), torch.nn.Linear(2, 2)):
        with pytest.raises(q4.InputError, match="a Q4Linear of float32"):
            SpikeProduct(layer)  # type: ignore[arg-type]


def test_a_layer_that_was_loaded_again_is_proven_again() -> None:
    """After ``load_state_dict`` the product is that of the new weight; a closed layer is a typed error."""
    layer, other = layer_of(Spikes()), layer_of(Spikes())
    product, x = SpikeProduct(layer), spikes(2, K)
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(product(x), other(x.float()).detach())
    layer.close()
    with pytest.raises(q4.LifecycleError):
        product(x)


def test_a_backend_that_declares_spikes_must_have_them() -> None:
    """The op without its methods is no product: the record names what is missing, and the dense product serves."""
    layer = layer_of(FakeBackend(ops={"linear", "spikes"}))
    product, x = SpikeProduct(layer), spikes(2, K)
    torch.testing.assert_close(product(x), layer(x.float()).detach())
    assert product.record.reason == "op 'spikes' is declared without the methods spikes, spike_limit"
    assert "without the methods spikes, spike_limit" in str(q4.explain(layer))


def test_the_page_says_what_the_probe_runs() -> None:
    """One call of four rows, with the shares of ones that docs/backend-api.md names, and without a bias."""
    seen: list[tuple[torch.Tensor, object]] = []

    class Watching(Spikes):
        def spikes(self, prepared: q4.Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: Any) -> None:
            seen.append((x.clone(), bias))
            super().spikes(prepared, x, out, bias=bias)

    backend = Watching()
    product = SpikeProduct(layer_of(backend, columns=4096))
    assert product.record.reason is None
    ((x, bias),) = seen
    shares = [round(float(share), 2) for share in x.double().mean(1)]
    page = Path(__file__).parents[3] / "docs" / "backend-api.md"
    assert (shares, bias) == ([0.0, 0.02, 0.2, 1.0], None)
    assert "four rows, of no ones, 2 %, 20 % and all ones, without a bias" in page.read_text(encoding="utf-8")


def test_a_product_that_writes_to_x_or_raises_is_not_used() -> None:
    """What the probe is lent stays as it is, and an error in it is a reason."""

    class Writing(Spikes):
        def spikes(self, prepared: q4.Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: Any) -> None:
            super().spikes(prepared, x, out, bias=bias)
            x[0, 0] = True

    class Raising(Spikes):
        def spikes(self, prepared: q4.Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: Any) -> None:
            raise RuntimeError("no such instruction")

    for backend, reason in ((Writing(), "spikes wrote to x"), (Raising(), "spikes raised RuntimeError: no such inst")):
        with pytest.warns(q4.Q4ProbeWarning, match=reason):
            product = SpikeProduct(layer_of(backend))
        assert str(product.record.reason).startswith(reason)
