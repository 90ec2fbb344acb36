"""What cpu-native promises of spikes beyond the contract: the bits of its exact product."""

from __future__ import annotations

import attrs
import pytest
import torch

import q4core as q4
from q4_cpu_native import CpuNative
from q4_snn.products import SpikeProduct
from tests.support.cpu_layers import ISAS, quantised


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", sorted(CpuNative.capabilities.formats))
def test_spikes_have_the_bits_of_the_exact_product(name: str, isa: str) -> None:
    """Sparse and dense products are equal in every bit, for each form of weight, some rows and any share of ones."""

    class Plugin:
        @q4.hookimpl
        def q4_backends(self) -> list[CpuNative]:
            return [CpuNative(isa)]

    random = torch.Generator().manual_seed(4)
    config = q4.SessionConfig(device="cpu", activation_precision="exact")
    registry = q4.Registry([("cpu-native", Plugin())])
    for rows, columns in ((67, 384), (16, 2048)):
        weight = quantised(torch.randn(rows, columns, generator=random), name)
        layer = q4.Q4Linear(weight, torch.randn(rows), config=config, registry=registry)
        product = SpikeProduct(layer)
        for count, rate in ((1, 0.02), (1, 0.25), (7, 0.1), (20, 0.01)):
            x = torch.rand((count, columns), generator=random) < rate
            with torch.no_grad():
                assert torch.equal(product(x), layer(x.float()))
        assert (product.record.sparse, product.record.dense) == (4, 0)
        x = torch.rand((5, 2, columns), generator=random) < torch.tensor([0.01, 0.15, 0.5, 0.0, 0.02])[:, None, None]
        with torch.no_grad():
            assert torch.equal(product.steps(x), torch.stack([product(step) for step in x]))


def test_spikes_are_permuted_but_meet_no_factors() -> None:
    """With act-order the sparse product has the bits of the exact one; with factors of in-features it is not run."""
    order = torch.randperm(384, generator=torch.Generator().manual_seed(5))
    weight = attrs.evolve(q4.quantize(torch.randn(40, 384), "int4"), input_permutation=order)
    config = q4.SessionConfig(device="cpu", backend="cpu-native", activation_precision="exact")
    x = torch.rand(7, 384) < 0.1
    layer = q4.Q4Linear(weight, config=config)
    product = SpikeProduct(layer)
    with torch.no_grad():
        assert torch.equal(product(x), layer(x.float()))
    assert product.record.sparse == 1
    layer = q4.Q4Linear(attrs.evolve(weight, input_channel_scale=torch.rand(384) + 0.5), config=config)
    product = SpikeProduct(layer)  # no fault, so nothing warns
    with torch.no_grad():
        assert torch.equal(product(x), layer(x.float()))
    assert (product.record.sparse, product.record.reason) == (0, "in-features have factors of their own")


@pytest.mark.parametrize(("rows", "columns"), [(3, 131_072), (200, 4096)])
def test_many_spikes_go_in_batches_and_threads(rows: int, columns: int) -> None:
    """More spikes than one batch holds give the bits of the exact product on one thread and two."""
    weight = q4.quantize(torch.randn(48, columns), "q4_0")
    config = q4.SessionConfig(device="cpu", backend="cpu-native", activation_precision="exact")
    layer = q4.Q4Linear(weight, config=config)
    x = torch.rand(rows, columns) < 0.17
    product, before = SpikeProduct(layer), torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with torch.no_grad():
                assert torch.equal(product(x), layer(x.float()))
    finally:
        torch.set_num_threads(before)
    assert product.record.sparse == 2
