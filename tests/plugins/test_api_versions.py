"""Backends that were written to API 1.0: what runs unchanged, and the error for the others."""

from __future__ import annotations

import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_programs import REFERENCE, Buffer, Op, Program, Step, View, bind
from q4_snn.products import SpikeProduct
from tests.support.fakes import FakeBackend

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "q4-example-backend" / "src" / "q4_example_backend" / "__init__.py"
CONFIG = q4.SessionConfig(device="cpu", activation_precision="exact")


class OfFirstVersion(FakeBackend):
    """A backend as it was written to 1.0, with programs and spikes: it imports nothing for them at its top."""

    def __init__(self) -> None:
        super().__init__("first", api_version=(1, 0), ops={"linear", "program", "spikes"})

    def bind_program(self, program: Any, buffers: Any, layers: Any) -> Callable[[], object]:
        """Bind by the reference."""
        return REFERENCE.bind_program(program, buffers, layers)

    def spike_limit(self, rows: int) -> float:
        """Return one: every product is sparse."""
        del rows
        return 1.0

    def spikes(self, prepared: q4.Prepared, x: torch.Tensor, out: torch.Tensor, *, bias: torch.Tensor | None) -> None:
        """Multiply as if x were any."""
        self.linear(prepared, x.float(), out, bias=bias, path="fake_gemm")


def test_the_example_of_version_1_runs_as_it_is() -> None:
    """The tutorial's backend, declaring 1.0, is proven and computes."""
    source = EXAMPLE.read_text(encoding="utf-8")
    assert source.count("api_version = (2, 0)") == 1
    module = types.ModuleType("example_of_version_1")
    exec(source.replace("api_version = (2, 0)", "api_version = (1, 0)"), vars(module))  # noqa: S102  # our own file
    registry = q4.Registry([("example", module)])
    weight = q4.quantize(torch.randn(8, 64), "nf4")
    with q4.Session(CONFIG, registry=registry) as session:
        layer = session.linear(weight)
        x = torch.randn(3, 64)
        torch.testing.assert_close(layer(x), x @ q4.dequantize(weight).T, rtol=1e-4, atol=1e-5)
        assert layer.diagnostics().backend == "example-backend"


def test_programs_and_spikes_of_version_1_run_as_they_are() -> None:
    """Methods that a backend of 1.0 declares by its ops are proven and used."""
    backend = OfFirstVersion()
    registry = q4.Registry([("first", types.SimpleNamespace(q4_backends=q4.hookimpl(lambda: [backend])))])
    layer = q4.Q4Linear(q4.quantize(torch.randn(8, 64), "nf4"), config=CONFIG, registry=registry)
    buffers = [Buffer("x", 64, is_bound=True), Buffer("y", 8, is_bound=True)]
    step = Step(Op.LINEAR, (View(0, 1, 64),), (View(1, 1, 8),), 0)
    x, y = (torch.rand(1, 64) < 0.2).float(), torch.zeros(1, 8)
    bound = bind(Program(buffers, (step,), ((8, 64),)), [x, y], [layer], registry=registry)
    bound()
    assert bound.record.backend == "first"
    product = SpikeProduct(layer)
    assert torch.equal(product(x), y)
    assert (product.record.sparse, product.record.reason) == (1, None)


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        (
            "from q4core.programs import Op",
            "q4core.programs moved to q4_programs: pip install q4-programs, then import q4_programs",
        ),
        (
            "from q4core.spikes import RunsSpikes",
            "q4core.spikes moved to q4_snn.products: pip install q4-snn, then import q4_snn.products",
        ),
    ],
)
def test_imports_of_version_1_that_are_gone_name_the_new_ones(
    statement: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that has one at its top is recorded with what moved and how to change it, and others go on."""
    name = f"plugin_of_version_1_{statement.split()[1].replace('.', '_')}"
    (tmp_path / f"{name}.py").write_text(f"{statement}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    registry = q4.Registry(environment={"Q4_PLUGINS": "dequant-fallback", "Q4_PLUGIN_MODULES": name})
    with pytest.warns(q4.Q4PluginWarning, match=name):
        assert list(registry.backends()) == ["dequant-fallback"]
    (record,) = (item for item in registry.records() if item.name == name)
    assert record.state == "failed"
    assert told in record.errors[0]


def test_modules_that_moved_are_attributes_where_their_package_is_installed() -> None:
    """``q4.programs`` and ``q4.spikes`` go on to work."""
    assert q4.programs.bind is bind
    assert q4.spikes.SpikeProduct is SpikeProduct


def test_a_newer_version_is_refused_with_those_that_are_served() -> None:
    """The reason names the versions that run here."""
    given = types.SimpleNamespace(q4_backends=q4.hookimpl(lambda: [FakeBackend(api_version=(2, 1))]))
    registry = q4.Registry([("newer", given)])
    with pytest.warns(q4.Q4PluginWarning):
        (refused,) = registry.invalid_backends()
    assert str(refused.reason.message) == "api_version must be (1, 0) or (2, 0), or an older minor, got (2, 1)"
