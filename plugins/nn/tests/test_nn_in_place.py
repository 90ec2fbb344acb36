"""Conversions in place: whole or not at all, and what a new layer would lose is left alone with a reason."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import q4core as q4
from q4_nn import ConversionTable, STEConv2d, STELinear, STERecurrent, convert_linears_, pack_, to_ste_
from q4_nn.training import layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIG = q4.SessionConfig(device="cpu", activation_precision="exact")


@pytest.fixture
def session() -> Iterator[q4.Session]:
    """Return a session for exact products."""
    with q4.Session(CONFIG) as made:
        yield made


def _with_forward(layer: Any) -> None:
    layer.forward = lambda x: x[..., :32] * 0


def _with_children(layer: Any) -> None:
    layer.adapter = nn.Linear(4, 4)
    layer.register_buffer("mask", torch.ones(4))


LOSSES: dict[str, tuple[Callable[[Any], object], str]] = {
    "hook": (lambda layer: layer.register_forward_hook(lambda _module, _given, result: result * 2), "forward hooks"),
    "pre-hook": (lambda layer: layer.register_forward_pre_hook(lambda _module, given: given), "forward pre hooks"),
    "backward hook": (lambda layer: layer.register_full_backward_hook(lambda *_: None), "backward hooks"),
    "state dict hook": (lambda layer: layer.register_state_dict_post_hook(lambda *_: None), "state dict hooks"),
    "forward": (_with_forward, "its forward was replaced"),
    "parts": (_with_children, "mask, adapter in addition to"),
    "weight norm": (lambda layer: parametrizations.weight_norm(layer, _weight(layer)), "parametrized"),
    "spectral norm": (lambda layer: parametrizations.spectral_norm(layer, _weight(layer)), "parametrized"),
    "old weight norm": (lambda layer: weight_norm(layer, _weight(layer)), "weight_g"),
    "old spectral norm": (lambda layer: spectral_norm(layer, _weight(layer)), "weight_orig"),
    "pruned": (lambda layer: prune.l1_unstructured(layer, _weight(layer), 0.5), "weight_orig"),
}


def _weight(layer: nn.Module) -> str:
    return "weight_hh_l0" if isinstance(layer, nn.RNNBase) else "weight"


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(64, 32), (2, 64)),
    "conv": (lambda: nn.Conv2d(4, 32, 3), (2, 4, 5, 5)),
    "gru": (lambda: nn.GRU(64, 32), (3, 2, 64)),
}


def _value(result: Any) -> torch.Tensor:
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_to_ste_leaves_alone_what_it_would_lose(loss: str, layer: str) -> None:
    """Hooks, forwards, parametrizations and parts of a layer's own stay, with the reason in the table."""
    make, shape = LAYERS[layer]
    change, reason = LOSSES[loss]
    torch.manual_seed(0)
    model = nn.ModuleDict({"special": make(), "plain": make()})
    special: Any = model["special"]
    with torch.enable_grad():
        change(special)
    x = torch.randn(shape)
    model.eval()
    before = _value(special(x))
    table = to_ste_(model, "q8_0")
    rows = {row.name: row for row in table.rows}
    assert table.names == ["plain"]
    assert (rows["special"].action, model["special"]) == ("skipped", special)
    assert reason.replace("weight", _weight(special)) in rows["special"].reason or reason in rows["special"].reason
    assert torch.equal(_value(special(x)), before)
    assert isinstance(model["plain"], (STELinear, STEConv2d, STERecurrent))
    assert "special" in str(table)


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("loss", ["hook", "pre-hook", "forward", "parts", "weight norm", "pruned"])
def test_pack_leaves_alone_what_it_would_lose(loss: str, layer: str, session: q4.Session) -> None:
    """A layer that got hooks, a parametrization or parts while it trained goes on as it was; the others are packed."""
    make, shape = LAYERS[layer]
    model = nn.ModuleDict({"special": make(), "plain": make()})
    to_ste_(model, "q8_0")
    special: Any = model["special"]
    inner = special.inner if layer == "gru" else special
    with torch.enable_grad():
        LOSSES[loss][0](inner)
    x = torch.randn(shape)
    model.eval()
    before = _value(special(x)) if loss != "forward" else None
    table = pack_(model, session)
    assert table.names == ["plain"]
    assert next(row.reason for row in table.rows if row.name == "special")
    assert model["special"] is special
    assert before is None or torch.equal(_value(special(x)), before)


class _Doubled(STELinear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_subclass_is_left_alone(session: q4.Session) -> None:
    """What a subclass of a layer adds is not lost, neither by ``to_ste_`` nor by ``pack_``."""
    model = nn.Sequential(_Doubled(64, 64, format="nf4"), STELinear(64, 64, format="nf4"))
    table = pack_(model, session)
    assert table.names == ["1"]
    assert "_Doubled" in table.rows[0].reason
    other = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))
    assert to_ste_(other, "q4_0").names == ["1"]


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: nn.Conv2d(8, 8, 3, padding="same"), "padding must be numbers"),
        (lambda: nn.Conv2d(8, 8, 3, padding_mode="circular", padding=1), "padding must be numbers"),
        (lambda: nn.Conv2d(8, 8, 3, groups=2), "groups must be 1"),
        (lambda: nn.LSTM(8, 8, proj_size=4), "LSTM without projections"),
        (lambda: nn.Linear(8, 8, dtype=torch.float64), "float32, bfloat16 or float16"),
        (lambda: nn.GRU(8, 8, dtype=torch.float64), "float32, bfloat16 or float16"),
    ],
)
def test_what_has_no_four_bit_form_stays(layer: Callable[[], nn.Module], reason: str) -> None:
    """A layer that can't train in four bits stays torch's, and the table says why; the others are changed."""
    model = nn.Sequential(nn.Linear(8, 8), layer(), nn.Linear(8, 8))
    old = model[1]
    table = to_ste_(model, "nf4")
    assert [(row.action) for row in table.rows] == ["converted", "failed", "converted"]
    assert reason in table.rows[1].reason
    assert model[1] is old


def test_again_changes_nothing() -> None:
    """Layers that train in four bits are not changed a second time, what is inside them neither."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(8, 8, 3), nn.LSTM(8, 8))
    to_ste_(model, "nf4")
    before = [*model.modules()]
    table = to_ste_(model, "q4_0")
    assert table.names == []
    assert all("already" in row.reason for row in table.rows)
    assert [*model.modules()] == before


def _ste(model: nn.Module) -> None:
    """Let every layer of a model train in four bits, those too that the test wants skipped later."""
    to_ste_(model, "nf4")


@torch.no_grad()
@pytest.mark.parametrize("how", ["to_ste_", "convert_linears_", "pack_"])
def test_a_layer_in_two_places_stays_one(how: str, session: q4.Session) -> None:
    """A layer that a model has under several names becomes one new layer under all of them, and counts once."""
    layer = nn.Linear(64, 64)
    block = nn.Sequential(layer)
    model: Any = nn.Sequential(layer, nn.ReLU(), layer, block, block)
    if how == "pack_":
        _ste(model)
    x = torch.randn(2, 64)
    before = model(x)
    table = CONVERSIONS[how](model, session)
    assert model[0] is model[2] is model[3][0]
    assert model[3] is model[4]
    assert isinstance(model[0], STELinear if how == "to_ste_" else q4.Q4Linear)
    assert how != "pack_" or (model(x) - before).abs().max() <= 1e-5
    assert table.names == ["0", "2", "3.0", "4.0"]
    assert [row.reason for row in table.rows] == ["", *["the same layer as 0"] * 3]
    assert sum(row.bytes_before for row in table.rows) == 64 * 64 * 4
    assert len(session.report().layers) == (0 if how == "to_ste_" else 1)


class _Wrapping(nn.Linear):
    """A linear layer with another one inside, which it uses in its own way."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(64, 64)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inner layer's product, doubled."""
        y: torch.Tensor = 2 * self.inner(x)
        return y


@pytest.mark.parametrize("how", ["to_ste_", "convert_linears_", "pack_"])
def test_a_layer_that_is_left_is_left_under_each_of_its_names(how: str, session: q4.Session) -> None:
    """What holds for a layer under one name, here that it is part of another one, holds under all."""
    layer: nn.Module = STELinear(64, 64, format="nf4") if how == "pack_" else nn.Linear(64, 64)
    plain: nn.Module = STELinear(64, 64, format="nf4") if how == "pack_" else nn.Linear(64, 64)
    model: Any = nn.ModuleDict({"own": layer, "wrapped": _Wrapping(layer), "plain": plain})
    table = CONVERSIONS[how](model, session)
    reasons = {row.name: row.reason for row in table.rows}
    assert table.names == ["plain"]
    assert reasons["own"] == reasons["wrapped.inner"] == "it is a part of wrapped, which may use it in its own way"
    assert model["own"] is model["wrapped"].inner is layer


@pytest.mark.parametrize("how", ["to_ste_", "convert_linears_"])
@pytest.mark.parametrize("pattern", ["a", "b", "list.0", "again.*"])
def test_a_skipped_layer_stays_under_each_of_its_names(how: str, pattern: str, session: q4.Session) -> None:
    """A layer that is skipped by one of its names, whichever, is not replaced by way of another."""
    layer = nn.Linear(64, 64)
    model: Any = nn.ModuleDict({"a": layer, "b": layer, "list": nn.ModuleList([layer, nn.Linear(64, 64)])})
    model["again"] = nn.ModuleList([layer])
    if how == "to_ste_":
        table = to_ste_(model, "nf4", skip=[pattern])
    else:
        table = convert_linears_(model, format="nf4", skip=[pattern], session=session)
    assert table.names == ["list.1"]
    assert {row.reason for row in table.rows} == {"", f"matches {pattern!r}"}
    assert model["a"] is model["b"] is model["list"][0] is model["again"][0] is layer


def test_pack_lists_what_it_has_nothing_to_pack_of(session: q4.Session) -> None:
    """Where no layer trained in four bits, the table says so of each, as for the other conversions."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(8, 8, 3), nn.LSTM(8, 8))
    before = [*model.modules()]
    table = pack_(model, session)
    assert table.names == []
    assert [row.name for row in table.rows] == ["0", "1", "2"]
    assert all("did not train in four bits" in row.reason for row in table.rows)
    assert [*model.modules()] == before


@pytest.mark.parametrize("how", ["to_ste_", "convert_linears_", "pack_"])
def test_a_model_without_layers_gives_an_empty_table(how: str, session: q4.Session) -> None:
    """Where there is nothing to convert, each conversion returns a table without rows."""
    assert CONVERSIONS[how](nn.Sequential(nn.ReLU()), session).rows == ()


@pytest.mark.parametrize("how", ["to_ste_", "convert_linears_", "pack_"])
@pytest.mark.parametrize("wrong", [nn.Linear(8, 8), STELinear(8, 8), "x"])
def test_what_can_not_replace_itself_is_refused(how: str, wrong: Any, session: q4.Session) -> None:
    """A layer itself, and what is no module, are a typed error of each conversion."""
    with pytest.raises(q4.InputError, match=f"{how}.*must be a module that contains"):
        CONVERSIONS[how](wrong, session)


def _strict(model: nn.Module, session: q4.Session) -> ConversionTable:
    return convert_linears_(model, format="nvfp4", session=session, strict=True)


CONVERSIONS: dict[str, Callable[[nn.Module, q4.Session], ConversionTable]] = {
    "convert_linears_": lambda model, session: convert_linears_(model, format="nf4", session=session),
    "strict": _strict,
    "to_ste_": lambda model, _: to_ste_(model, "nf4"),
    "pack_": pack_,
}


@pytest.mark.parametrize("how", CONVERSIONS)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_whole_or_not_at_all(
    how: str, error: type[BaseException], session: q4.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error in the middle, whatever raised it, the model is as it was."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32), nn.LSTM(32, 32), nn.Linear(32, 8))
    if how == "pack_":
        to_ste_(model, "nf4")
    before, states = [*model.modules()], copy.deepcopy(model.state_dict())
    calls = []

    def fail(function: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            calls.append(0)
            if len(calls) == 3:
                raise error
            return function(*arguments, **options)

        return called

    if how == "to_ste_":
        monkeypatch.setattr(layers, "_ste_of", fail(layers._ste_of))  # what makes one layer
    else:
        monkeypatch.setattr(q4.Session, "linear", fail(q4.Session.linear))
    with pytest.raises(error):
        CONVERSIONS[how](model, session)
    assert [*model.modules()] == before
    assert all(torch.equal(value, states[name]) for name, value in model.state_dict().items())


def test_strict_changes_nothing_where_a_later_layer_fails(session: q4.Session) -> None:
    """With ``strict``, the layers before one that can't be converted stay, too."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 50), nn.Linear(50, 64))
    with pytest.raises(q4.FormatError):
        _strict(model, session)
    assert all(type(layer) is nn.Linear for layer in model)


ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.TransformerEncoderLayer(64, 4, 96, batch_first=True),
    "layer, gelu, norm first": lambda: nn.TransformerEncoderLayer(
        64, 4, 96, batch_first=True, activation="gelu", norm_first=True
    ),
    "layer, filled": lambda: nn.TransformerEncoderLayer(40, 4, 50, batch_first=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2),
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4, 96, batch_first=True), 1),
    "both": lambda: nn.Transformer(64, 4, 1, 1, 96, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(64, 4, batch_first=True),
}


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("how", ["convert_linears_", "to_ste_", "pack_"])
def test_encoders_of_torch_run_in_every_mode(kind: str, how: str, session: q4.Session) -> None:
    """In evaluation, with and without gradients, torch's encoders give the numbers of their four-bit weights.

    Their fast path reads the weights of linear layers itself: dense masters, or what is no tensor.
    """
    torch.manual_seed(0)
    model: Any = ENCODERS[kind]().eval()
    size = 40 if "filled" in kind else 64
    if how != "convert_linears_":
        to_ste_(model, "nf4")
    else:
        convert_linears_(model, format="nf4", session=session)
    x = torch.randn(2, 5, size)
    inputs = (x, x, x) if kind == "attention" else (x, x) if kind in {"decoder", "both"} else (x,)
    if kind == "attention":
        assert type(model.out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear
        if how == "pack_":
            return
    expected = _value(model(*inputs))  # gradients are recorded: the slow path
    if how == "pack_":
        pack_(model, session)
    options: list[dict[str, torch.Tensor]] = [{}]
    if kind in {"layer", "encoder"}:
        mask = torch.zeros(2, 5, dtype=torch.bool)
        mask[1, 3:] = True
        options.append({"src_key_padding_mask": mask})
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for given in options:
            with mode():
                found = _value(model(*inputs, **given))
            wanted, seen = (expected, found) if not given else (expected[0], found[0])
            assert (wanted - seen).abs().max() < 1e-5, (mode, given)


class _Reader(nn.Module):
    """A block whose own code multiplies by one layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with the weight of ``read``, and then that of ``called``."""
        y: torch.Tensor = self.called(x @ self.read.weight)
        return y


@pytest.mark.parametrize("convert", [to_ste_, convert_linears_])
def test_layers_whose_weight_is_read_are_left_alone(convert: Any) -> None:
    """A layer whose weight the model's own code reads would train in float, or fail: it stays, with the reason."""
    model = nn.Sequential(_Reader(), nn.Linear(64, 2)).eval()
    x = torch.randn(3, 64)
    table = convert(model, format="nf4")
    reasons = {row.name: row.reason for row in table.rows}
    assert reasons == {"0.read": "its weight is read by _Reader.forward", "0.called": "", "1": ""}
    assert type(model[0].read) is nn.Linear
    assert model(x).shape == (3, 2)
