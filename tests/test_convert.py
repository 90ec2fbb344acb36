"""``convert_linears_``: in place, told in a table, never half-done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import registry
from torch import nn

import q4core as q4


def _session() -> q4.Session:
    return q4.Session(registry=registry())


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Sequential(nn.Linear(128, 64, bias=False), nn.Linear(64, 10))
    )


def test_every_linear_becomes_four_bit_in_place() -> None:
    """The layers are replaced, biases kept, and the model computes what its quantised weights say."""
    model = _model()
    dense = [module.weight.detach().clone() for module in model.modules() if isinstance(module, nn.Linear)]
    first: Any = model[0]
    bias: torch.Tensor = first.bias
    table = q4.convert_linears_(model, format="nvfp4", session=_session())
    assert [row.name for row in table.converted] == ["0", "2.0", "2.1"]
    inner: Any = model[2]
    assert all(isinstance(layer, q4.Q4Linear) for layer in (model[0], *inner))
    assert model[0].bias is bias
    x = torch.randn(5, 64)
    last: torch.Tensor = inner[1].bias
    w = [q4.dequantize(q4.quantize(item, "nvfp4")) for item in dense]
    expected = torch.relu(x @ w[0].T + bias) @ w[1].T @ w[2].T + last
    torch.testing.assert_close(model(x), expected)
    assert "3 of 3 converted" in str(table)
    assert 0.05 < (table.rows[0].relative_error or 0) < 0.15


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["2.*"], ["2.0", "2.1"]),
        (["0"], ["0", "2.0"]),
        ("2.1", ["2.1"]),
        (lambda name, layer: layer.bias is None, ["2.0"]),
    ],
)
def test_skip_takes_names_globs_and_functions(skip: object, left: list[str]) -> None:
    """Full names, last parts, patterns and functions leave layers alone, with the reason in the table."""
    table = q4.convert_linears_(_model(), format="nf4", skip=skip, session=_session())  # type: ignore[arg-type]  # all legal kinds
    assert [row.name for row in table.rows if row.action == "skipped"] == left
    assert all(row.reason for row in table.rows if row.action == "skipped")


def test_a_tied_weight_is_not_cut() -> None:
    """A head that shares the embedding's weight is skipped, and the table says with whom it shares."""
    model = nn.ModuleDict({"embedding": nn.Embedding(32, 64), "head": nn.Linear(64, 32, bias=False)})
    model["head"].weight = model["embedding"].weight
    (row,) = q4.convert_linears_(model, format="nf4", session=_session()).rows
    assert (row.action, row.reason) == ("skipped", "its weight is shared with embedding.weight")


def test_a_layer_that_does_not_fit_stays_whole() -> None:
    """A layer whose K the format can't take stays as it was; with strict it is an error and nothing changes."""
    model = nn.Sequential(nn.Linear(64, 50), nn.Linear(50, 64), nn.Linear(64, 64))
    table = q4.convert_linears_(model, format="nvfp4", session=_session())
    assert [row.action for row in table.rows] == ["converted", "failed", "converted"]
    assert type(model[1]) is nn.Linear
    assert "50" in table.rows[1].reason
    model = nn.Sequential(nn.Linear(50, 64), nn.Linear(64, 64))
    with pytest.raises(q4.FormatError):
        q4.convert_linears_(model, format="nvfp4", session=_session(), strict=True)
    assert all(type(layer) is nn.Linear for layer in model)


def test_a_bare_linear_and_an_unknown_format_are_refused() -> None:
    """A module that can't replace itself, and a format that nobody has, are typed errors."""
    with pytest.raises(q4.InputError):
        q4.convert_linears_(nn.Linear(64, 64), format="nf4", session=_session())
    with pytest.raises(q4.FormatError, match="nf4"):
        q4.convert_linears_(_model(), format="nf5", session=_session(), strict=True)


def test_a_converted_model_saves_and_loads() -> None:
    """The state dict of a converted model loads strictly into another converted one."""
    first, second = _model(), nn.Sequential(*_model())
    for model in (first, second):
        q4.convert_linears_(model, format="nf4", session=_session())
    for layer in second.modules():
        if isinstance(layer, q4.Q4Linear) and layer.bias is not None:
            layer.bias.data.zero_()
    second.load_state_dict(first.state_dict(), strict=True)
    x = torch.randn(2, 64)
    assert torch.equal(first(x), second(x))
