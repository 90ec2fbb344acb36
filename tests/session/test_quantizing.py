"""``q4.quantize`` finds the quantiser that has a format's rule, and formats of plugins are quantised by their row."""

from __future__ import annotations

import types
from typing import Any

import attrs
import pytest
import torch

import q4core as q4
from tests.support.fakes import FakeBackend, plugin, registry

LEVELS = tuple(value / 8 for value in range(-8, 8))
ROW = q4.Format(
    "steps",
    q4.Form.CODEBOOK,
    4,
    32,
    LEVELS,
    packing=q4.Packing.HIGH_FIRST,
    has_flat_blocks=True,
    rule="absmax",
)


class Constant:
    """A quantiser of one rule, that writes code 3 under a scale of 1, and remembers what it was asked."""

    def __init__(self, name: str = "constant", rule: str = "constant") -> None:
        self.name, self.rules = name, frozenset({rule})
        self.asked: list[dict[str, Any]] = []

    def quantize(self, dense: torch.Tensor, kind: q4.Format, **options: Any) -> q4.PackedWeight:
        """Write the one code."""
        self.asked.append(options)
        rows, columns = dense.shape
        return q4.PackedWeight(
            format=kind,
            qdata=torch.full((rows, columns // 2), 0x33, dtype=torch.uint8),
            scale=torch.ones(rows, columns // kind.block_size),
            out_features=rows,
            in_features=columns,
            block_size=kind.block_size,
        )


def _registry(*quantizers: Any, formats: tuple[q4.Format, ...] = (), reference: bool = True) -> q4.Registry:
    module = plugin(q4_quantizers=lambda: list(quantizers), q4_formats=lambda: list(formats))
    own: list[tuple[str, object]] = [("own", module)]
    if reference:
        import q4_quantize  # noqa: PLC0415  # found like any plugin; named here for tests only

        own.append(("quantize", q4_quantize))
    return q4.Registry(own)


def test_without_the_package_the_error_names_it() -> None:
    """Nothing quantises without a plugin: the error says which package brings the rule, and how to install it."""
    with pytest.raises(q4.PluginError, match=r"pip install q4-quantize") as caught:
        q4.quantize(torch.randn(4, 64), "nf4", registry=registry(FakeBackend(), reference=False))
    assert (caught.value.name, caught.value.value) == ("rule", "absmax")


def test_a_package_that_is_shut_out_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Q4_PLUGINS`` never shuts the references out; ``Q4_DISABLE_PLUGINS`` does, and the error says so."""
    monkeypatch.setenv("Q4_PLUGINS", "dialects")
    assert q4.quantize(torch.randn(4, 64), "nf4", registry=q4.Registry()).shape == (4, 64)
    monkeypatch.setenv("Q4_DISABLE_PLUGINS", "quantize")
    with pytest.raises(q4.PluginError, match="Q4_DISABLE_PLUGINS"):
        q4.quantize(torch.randn(4, 64), "nf4", registry=q4.Registry())


def test_a_plugins_format_is_quantised_by_its_row() -> None:
    """Packing, flat blocks and rule come from the row: nothing else knows of the format; a layer runs it."""
    plugins = _registry(formats=(ROW,))
    dense = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    weight = q4.quantize(dense, "steps", registry=plugins)
    assert (weight.packing, weight.blocks) == (q4.Packing.HIGH_FIRST, q4.BlockOrder.FLAT)
    values, scale = dense.reshape(-1), weight.scale.repeat_interleave(32)[: dense.numel()]
    levels = torch.tensor(LEVELS)
    nearest = levels[(values[:, None] / scale[:, None] - levels).abs().argmin(1)] * scale
    assert torch.allclose(q4.dequantize(weight).reshape(-1), nearest)
    even = q4.quantize(dense[:, :32], ROW, registry=plugins)
    layer = q4.Session(registry=registry(FakeBackend(formats={q4.EVERY_FORMAT}))).linear(even)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(4))
    assert torch.allclose(layer(x), x @ q4.dequantize(even).T, atol=1e-5)


def test_a_plugin_brings_a_rule_of_its_own() -> None:
    """Its quantiser gets every option as it was given, and the registry that it was found in."""
    mine = Constant()
    kind = q4.Format("mine", q4.Form.CODEBOOK, 4, 32, LEVELS, rule="constant")
    plugins = _registry(mine, formats=(kind,), reference=False)
    weight = q4.quantize(torch.randn(4, 64), "mine", registry=plugins, name="proj", seed=7, rounding="stochastic")
    assert weight.codes().unique().tolist() == [3]
    (asked,) = mine.asked
    assert asked == {
        "block_size": None, "scale_kind": None, "packing": None, "symmetric": False, "name": "proj",
        "rounding": q4.Rounding.STOCHASTIC, "seed": 7, "registry": plugins,
    }  # fmt: skip


def test_two_quantisers_of_one_rule_are_refused() -> None:
    """The user alone decides which of the two writes."""
    with pytest.raises(q4.PluginError, match="constant, reference"):
        q4.quantize(torch.randn(4, 64), "nf4", registry=_registry(Constant(rule="absmax")))


def test_a_format_without_a_rule_is_refused() -> None:
    """The error lists the formats that have one."""
    kind = q4.Format("dumb", q4.Form.CODEBOOK, 4, 32, LEVELS)
    with pytest.raises(q4.FormatError, match="nf4") as caught:
        q4.quantize(torch.randn(4, 64), kind, registry=_registry())
    assert (caught.value.name, caught.value.value) == ("format", "dumb")


@pytest.mark.parametrize("rule", ["e2m1", "q4_0", "q4_1", "q8_0", "affine"])
def test_a_rule_whose_codes_mean_something_else_is_refused(rule: str) -> None:
    """A row whose codebook is not the one that its rule writes codes of would decode to other values."""
    kind = q4.Format("wrong", q4.Form.CODEBOOK, 4, 32, LEVELS, rule=rule)
    with pytest.raises(q4.FormatError) as caught:
        q4.quantize(torch.randn(4, 64), kind, registry=_registry())
    assert caught.value.value == rule


class Wrong(Constant):
    """A quantiser that raises, or answers with something else."""

    def __init__(self, answer: object) -> None:
        super().__init__("wrong", "constant")
        self.answer = answer

    def quantize(self, dense: torch.Tensor, kind: q4.Format, **options: Any) -> Any:
        """Answer."""
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (RuntimeError("boom"), "quantizer 'wrong' raised RuntimeError: boom"),
        ("text", "quantizer 'wrong': result must be a PackedWeight of [4, 64], got 'str'"),
    ],
    ids=["raises", "text"],
)
def test_what_a_quantiser_does_wrong_is_a_plugin_error(answer: object, says: str) -> None:
    """Its own exception and its own answer are not passed on: the error names the quantiser."""
    kind = attrs.evolve(ROW, has_flat_blocks=False, rule="constant")
    with pytest.raises(q4.PluginError) as caught:
        q4.quantize(torch.randn(4, 64), kind, registry=_registry(Wrong(answer), reference=False))
    assert says in str(caught.value)


@pytest.mark.filterwarnings("ignore::q4core.Q4PluginWarning")
def test_an_item_that_is_no_quantiser_stops_no_other() -> None:
    """Without rules it is recorded as a fault of its plugin, and the reference still quantises."""
    plugins = _registry(types.SimpleNamespace(name="bare"))
    assert q4.quantize(torch.randn(4, 64), "nf4", registry=plugins).shape == (4, 64)
    assert any("a quantizer must have rules" in error for item in plugins.records() for error in item.errors)
