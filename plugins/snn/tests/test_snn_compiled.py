"""Networks within torch.compile, and why they can't be exported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_nn import pack_
from q4_snn import LIF, Network, Population, Projection, SparseProjection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _network(kind: str) -> Network:
    inputs, cells = Population("input", 64, spikes=True), Population("cells", 64, LIF.from_beta(0.9))
    if kind == "sparse":
        draw = torch.Generator().manual_seed(0)
        source, target = (torch.randint(64, (200,), generator=draw) for _ in range(2))
        delay = torch.randint(1, 4, (200,), generator=draw)
        weight = torch.rand(200, generator=draw)
        synapses = SparseProjection(source, target, weight, delay, sources=inputs, targets=cells)
        return Network([inputs, cells], [synapses])
    torch.manual_seed(0)
    network = Network([inputs, cells], [Projection(inputs, cells, format="nf4" if kind == "packed" else None)]).eval()
    if kind == "packed":
        pack_(network)
    return network


class _Outputs(torch.nn.Module):
    """A network, as a function of one tensor; of one step, too."""

    def __init__(self, network: Network, *, is_step: bool = False) -> None:
        super().__init__()
        self.network, self.is_step = network, is_step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, _ = self.network.step({"input": x[0]}) if self.is_step else self.network(x)
        return 2 * found["cells"]


X = (torch.rand(6, 2, 64, generator=torch.Generator().manual_seed(1)) < 0.3).float()


@pytest.mark.parametrize("is_step", [False, True], ids=["run", "step"])
@pytest.mark.parametrize("kind", ["packed", "sparse"])
def test_a_compiled_module_runs_its_network_as_it_is(kind: str, is_step: bool) -> None:  # pytest's
    """Within torch.compile a network of packed or sparse synapses has its own bits; all round it is compiled."""
    model = _Outputs(_network(kind), is_step=is_step)
    with torch.no_grad():
        compiled: Callable[..., Any] = torch.compile(model, backend="eager")
        assert torch.equal(compiled(X), model(X))
    assert is_step or float(model(X).detach().sum()) > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.trace's own
@pytest.mark.parametrize("kind", ["dense", "packed", "sparse"])
def test_a_network_is_not_exported(kind: str) -> None:
    """torch.export is refused by a typed error, which says what to do instead; so are runs and single steps."""
    for is_step in (False, True):
        model = _Outputs(_network(kind), is_step=is_step)
        with torch.no_grad(), pytest.raises(q4.LifecycleError, match=r"can't be exported.*write_nir"):
            torch.export.export(model, (X,))
    if kind != "dense":
        with torch.no_grad(), pytest.raises(q4.LifecycleError, match="can't be exported"):
            torch.jit.trace(model, (X,))


def test_sparse_synapses_are_not_exported() -> None:
    """By themselves neither; within torch.compile they have their own bits."""
    synapses: Any = next(iter(_network("sparse").projections.values()))
    coming = synapses.coming(2)
    with torch.no_grad():
        wanted = synapses(X[0], coming.clone(), 1)
        compiled: Callable[..., Any] = torch.compile(synapses, backend="eager")
        assert torch.equal(compiled(X[0], coming.clone(), 1), wanted)
        with pytest.raises(q4.LifecycleError, match="can't be exported"):
            torch.export.export(synapses, (X[0], coming, 1))
