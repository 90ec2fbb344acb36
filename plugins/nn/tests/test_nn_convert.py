"""``convert_linears_``: in place, reported in a table, never half-done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

import q4_dequant_fallback
import q4core as q4
from q4_nn import convert_linears_

if TYPE_CHECKING:
    from collections.abc import Callable


def _session(**options: Any) -> q4.Session:
    return q4.Session(q4.SessionConfig(**options), registry=q4.Registry([("dequant-fallback", q4_dequant_fallback)]))


def _closed() -> q4.Session:
    session = _session()
    session.close()
    return session


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Sequential(nn.Linear(128, 64, bias=False), nn.Linear(64, 10))
    )


def test_every_linear_becomes_four_bit_in_place() -> None:
    """The layers are replaced, biases stay, and the model computes what its quantised weights say."""
    model = _model()
    dense = [module.weight.detach().clone() for module in model.modules() if isinstance(module, nn.Linear)]
    first: Any = model[0]
    bias: torch.Tensor = first.bias
    table = convert_linears_(model, format="nvfp4", session=_session())
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
    table = convert_linears_(_model(), format="nf4", skip=skip, session=_session())  # type: ignore[arg-type]  # all legal kinds
    assert [row.name for row in table.rows if row.action == "skipped"] == left
    assert all(row.reason for row in table.rows if row.action == "skipped")


def test_a_tied_weight_is_not_cut() -> None:
    """A head that shares the embedding's weight is skipped, and the table says with whom it shares."""
    model = nn.ModuleDict({"embedding": nn.Embedding(32, 64), "head": nn.Linear(64, 32, bias=False)})
    model["head"].weight = model["embedding"].weight
    (row,) = convert_linears_(model, format="nf4", session=_session()).rows
    assert (row.action, row.reason) == ("skipped", "its weight is shared with embedding.weight")


def test_a_layer_that_does_not_fit_stays_whole() -> None:
    """A layer whose K the format can't take stays as it was; with strict it is an error and nothing changes."""
    model = nn.Sequential(nn.Linear(64, 50), nn.Linear(50, 64), nn.Linear(64, 64))
    table = convert_linears_(model, format="nvfp4", session=_session())
    assert [row.action for row in table.rows] == ["converted", "failed", "converted"]
    assert type(model[1]) is nn.Linear
    assert "50" in table.rows[1].reason
    model = nn.Sequential(nn.Linear(50, 64), nn.Linear(64, 64))
    with pytest.raises(q4.FormatError):
        convert_linears_(model, format="nvfp4", session=_session(), strict=True)
    assert all(type(layer) is nn.Linear for layer in model)


def test_a_bare_linear_and_an_unknown_format_are_refused() -> None:
    """A module that can't replace itself, what is no module, and a format that nobody has, are typed errors."""
    with pytest.raises(q4.InputError):
        convert_linears_(nn.Linear(64, 64), format="nf4", session=_session())
    with pytest.raises(q4.InputError):
        convert_linears_("x", format="nf4", session=_session())  # type: ignore[arg-type]
    with pytest.raises(q4.FormatError, match="nf4"):
        convert_linears_(_model(), format="nf5", session=_session())


def test_a_converted_model_saves_and_loads() -> None:
    """The state dict of a converted model loads strictly into another converted one."""
    first, second = _model(), nn.Sequential(*_model())
    for model in (first, second):
        convert_linears_(model, format="nf4", session=_session())
    for layer in second.modules():
        if isinstance(layer, q4.Q4Linear) and layer.bias is not None:
            layer.bias.data.zero_()
    second.load_state_dict(first.state_dict(), strict=True)
    x = torch.randn(2, 64)
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"format": "nf5"}, q4.FormatError, "format"),
        ({"format": 4}, q4.FormatError, "format"),
        ({"format": "nf4", "block_size": 48}, q4.FormatError, "block_size"),
        ({"format": "nf4", "block_size": "64"}, q4.FormatError, "block_size"),
        ({"session": _closed}, q4.LifecycleError, "session"),
        ({"session": lambda: "mine"}, q4.InputError, "session"),
        ({"session": lambda: _session(backend="dequant-falback")}, q4.UnknownBackendError, "backend"),
        (
            {"session": lambda: _session(backend="dequant-fallback", compute_path="kernel_only")},
            q4.PolicyConflictError,
            "backend",
        ),
        ({"skip": 3}, q4.ConfigError, "skip"),
        ({"skip": ["0", 3]}, q4.ConfigError, "skip"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_an_option_that_is_wrong_for_the_whole_call_is_an_error(
    arguments: dict[str, Any], error: type[q4.Q4Error], name: str, *, strict: bool
) -> None:
    """Format, block size, session and override are looked at first: no table full of failures, and no layer changed."""
    session = arguments.get("session", _session)()
    model = _model()
    with pytest.raises(error) as caught:
        convert_linears_(model, **{"format": "nf4", **arguments, "session": session, "strict": strict})
    assert caught.value.name == name or name in str(caught.value)  # states are sentences
    assert not any(isinstance(layer, q4.Q4Linear) for layer in model.modules())


def test_a_format_is_looked_at_even_where_there_is_no_layer() -> None:
    """A model without linear layers does not hide that nobody has the format."""
    with pytest.raises(q4.FormatError):
        convert_linears_(nn.Sequential(nn.ReLU()), format="nf5", session=_session())


@pytest.mark.parametrize("skip", [["lm_haed"], ["0", "3.*"], "2"])
def test_a_pattern_that_matches_nothing_is_an_error(skip: Any) -> None:
    """A typo in ``skip`` converts nothing: the pattern is named, with the closest name; so is a container's name."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 64)))
    model.add_module("lm_head", nn.Linear(64, 64))
    with pytest.raises(q4.ConfigError) as caught:
        convert_linears_(model, format="nf4", skip=skip, session=_session())
    assert caught.value.name == "skip"
    assert caught.value.value in ("lm_haed", "3.*", "2")
    if skip == ["lm_haed"]:
        assert "'lm_head'" in str(caught.value)
    if skip == "2":
        assert "'2.*'" in str(caught.value)
    assert not any(isinstance(layer, q4.Q4Linear) for layer in model.modules())


def test_a_pattern_may_match_what_is_no_linear_layer() -> None:
    """A pattern that names an embedding, or a layer that is four-bit already, is no typo."""
    model = nn.ModuleDict({"embedding": nn.Embedding(32, 64), "up": nn.Linear(64, 64), "down": nn.Linear(64, 64)})
    convert_linears_(model, format="nf4", skip=["down"], session=_session())
    table = convert_linears_(model, format="nf4", skip=["embedding", "up"], session=_session())
    assert [(row.name, row.action) for row in table.rows] == [("down", "converted")]


_HOOKS: dict[str, Callable[[nn.Linear], object]] = {
    "forward": lambda layer: layer.register_forward_hook(lambda *_: None),
    "forward pre": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    "backward": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "backward pre": lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
    "state dict": lambda layer: layer.register_state_dict_post_hook(lambda *_: None),
    "state dict pre": lambda layer: layer.register_state_dict_pre_hook(lambda *_: None),
    "load state dict pre": lambda layer: layer.register_load_state_dict_pre_hook(lambda *_: None),
    "load state dict post": lambda layer: layer.register_load_state_dict_post_hook(lambda *_: None),
    "gradient": lambda layer: layer.weight.register_hook(lambda _: None),
    "accumulated gradient": lambda layer: layer.weight.register_post_accumulate_grad_hook(lambda _: None),
}


@pytest.mark.parametrize("kind", _HOOKS)
def test_a_layer_with_hooks_is_left_alone(kind: str) -> None:
    """Hooks would be lost with the layer that they are on: it is skipped, and the table says which hooks."""
    model = _model()
    first: Any = model[0]
    _HOOKS[kind](first)
    row = convert_linears_(model, format="nf4", session=_session()).rows[0]
    assert model[0] is first
    assert row.action == "skipped"
    assert "hook" in row.reason


def _with_forward(layer: nn.Linear) -> nn.Linear:
    layer.forward = lambda x: x  # type: ignore[method-assign, assignment]  # as libraries do that wrap a layer
    return layer


def _with_child(layer: nn.Linear) -> nn.Linear:
    layer.add_module("adapter", nn.Linear(64, 64))
    return layer


def _with_buffer(layer: nn.Linear) -> nn.Linear:
    layer.register_buffer("mask", torch.ones(64, 64))
    return layer


class _Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        return 2 * super().forward(input)


_SPECIAL: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(64, 64)), "parametrized"),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(64, 64)), "parametrized"),
    "forward": (lambda: _with_forward(nn.Linear(64, 64)), "forward"),
    "child": (lambda: _with_child(nn.Linear(64, 64)), "adapter"),
    "buffer": (lambda: _with_buffer(nn.Linear(64, 64)), "mask"),
    "subclass": (lambda: _Scaled(64, 64), "_Scaled"),
    "lazy": (lambda: nn.LazyLinear(64), "LazyLinear"),
}


@pytest.mark.parametrize("kind", _SPECIAL)
def test_a_layer_that_does_more_than_a_linear_is_left_alone(kind: str) -> None:
    """What computes its weight, adds to it, or is no plain ``nn.Linear`` is skipped, and the table says why."""
    make, reason = _SPECIAL[kind]
    layer = make()
    model = nn.ModuleDict({"special": layer, "plain": nn.Linear(64, 64)})
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items() if kind != "lazy"}
    table = convert_linears_(model, format="nf4", session=_session())
    rows = {row.name: row for row in table.rows}
    assert model["special"] is layer
    assert (rows["special"].action, rows["plain"].action) == ("skipped", "converted")
    assert reason in rows["special"].reason
    assert all(torch.equal(layer.state_dict()[name], tensor) for name, tensor in before.items())
    assert "special" in str(table)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_layer_with_the_old_weight_norm_is_left_alone() -> None:
    """torch's older weight normalisation, which is a hook and two parameters, is skipped too."""
    layer = old_weight_norm(nn.Linear(64, 64))
    model = nn.ModuleDict({"special": layer})
    (row,) = convert_linears_(model, format="nf4", session=_session()).rows
    assert model["special"] is layer
    assert row.action == "skipped"
    assert row.bytes_before == (64 * 64 + 64) * 4


def test_attention_keeps_its_projection_and_says_so() -> None:
    """The output projection of ``nn.MultiheadAttention``, a subclass that it multiplies by itself, is in the table."""
    (row,) = convert_linears_(nn.MultiheadAttention(64, 4), format="nf4", session=_session()).rows
    assert (row.name, row.action) == ("out_proj", "skipped")
    assert "NonDynamicallyQuantizableLinear" in row.reason
