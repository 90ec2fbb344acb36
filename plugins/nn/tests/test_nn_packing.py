"""Straight-through layers and what they become: the numbers that training saw, bit for bit."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import q4core as q4
from q4_lm import TransformerConfig, TransformerDecoder
from q4_nn import (
    FilledLinear,
    Q4Conv2d,
    STEConv2d,
    STELinear,
    STERecurrent,
    Trainer,
    build_mlp,
    eval_cache_bytes,
    pack_,
    to_ste_,
)
from tests.support.footprint import resident

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = ("nf4", "fp4", "q4_0", "q4_1", "int4", "nvfp4", "mxfp4")
EXACT = q4.SessionConfig(device="cpu", compute_path="dequant_matmul_only")


def first(model: nn.Module) -> Any:
    """Return the first module inside."""
    return next(model.children())


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("features", [128, 72])
def test_linear(format_: str, features: int) -> None:
    """A packed layer has the trained one's weight bit for bit, and its outputs where the weight is dequantised."""
    model = nn.Sequential(STELinear(features, 24, format=format_))
    x = torch.randn(5, features)
    dense = q4.dequantize(q4.quantize(nn.functional.pad(first(model).weight.detach(), (0, -features % 128)), format_))
    with torch.no_grad():
        expected = model(x)
    assert torch.equal(expected, nn.functional.linear(x, dense[:, :features].float(), first(model).bias))
    with q4.Session(EXACT) as session, torch.no_grad():
        assert pack_(model, session).names == ["0"]
        layer = first(model).layer if features == 72 else first(model)
        assert torch.equal(q4.dequantize(layer.packed_weight())[:, :features], dense[:, :features])
        assert torch.allclose(model(x), expected, rtol=0, atol=2e-5)
        assert isinstance(first(model), FilledLinear if features == 72 else q4.Q4Linear)


RECURRENT: dict[str, Callable[..., nn.RNNBase]] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "batch_first": True}, {"bidirectional": True, "bias": False}]
)
@pytest.mark.parametrize("given", [False, True])
def test_recurrent(name: str, options: dict[str, Any], given: bool) -> None:
    """A packed recurrent layer gives what torch's does with the quantised matrices, with and without a state."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"cell": STERecurrent(RECURRENT[name](40, 32, **options), "q4_0")})
    x = torch.randn(3, 6, 40)
    batch = 3 if options.get("batch_first") else 6
    one = torch.randn(options.get("num_layers", 1) * (1 + options.get("bidirectional", False)), batch, 32)
    state = None if not given else (one, -one) if name == "lstm" else one
    with torch.no_grad(), q4.Session(EXACT) as session:
        expected = model["cell"](x, state)
        pack_(model, session)
        found = model["cell"](x, state)
    pairs = zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True)
    assert all(torch.allclose(mine, theirs, rtol=0, atol=1e-5) for mine, theirs in pairs)
    assert found[0].shape == expected[0].shape


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": (2, 1), "bias": False}]
)
def test_convolution(options: dict[str, Any]) -> None:
    """A packed convolution gives what torch's does with the quantised kernels."""
    model = nn.Sequential(STEConv2d(5, 8, (3, 2), format="nf4", **options))
    x = torch.randn(2, 5, 9, 11)
    with torch.no_grad(), q4.Session(EXACT) as session:
        expected = model(x)
        pack_(model, session)
        assert isinstance(first(model), Q4Conv2d)
        assert torch.allclose(model(x), expected, rtol=0, atol=1e-5)


GRADIENTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: STELinear(40, 6), (5, 40)),
    "conv": (lambda: STEConv2d(3, 4, 3), (2, 3, 6, 6)),
    "lstm": (lambda: STERecurrent(nn.LSTM(40, 32)), (3, 2, 40)),
    "gru": (lambda: STERecurrent(nn.GRU(40, 32)), (3, 2, 40)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_go_past_the_quantiser(name: str) -> None:
    """Gradients are those of torch's layer over the quantised weights, for x and for each master."""
    make, shape = GRADIENTS[name]
    layer = make()
    plain: Any = layer.inner if isinstance(layer, STERecurrent) else layer
    x = torch.randn(shape, requires_grad=True)
    out = layer(x)
    loss = (out[0] if isinstance(out, tuple) else out).square().sum()
    loss.backward()
    found = [x.grad, *(parameter.grad for parameter in plain.parameters())]
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() > 1:
                flat = parameter.flatten(1)
                filled = nn.functional.pad(flat, (0, -flat.shape[1] % 16))
                parameter.copy_(q4.dequantize(q4.quantize(filled, "nvfp4"))[:, : flat.shape[1]].view_as(parameter))
    x2 = x.detach().clone().requires_grad_()
    base: Any = {"linear": nn.Linear, "conv": nn.Conv2d}.get(name)
    out = plain(x2) if base is None else base.forward(plain, x2)
    for parameter in plain.parameters():
        parameter.grad = None
    (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    expected = [x2.grad, *(parameter.grad for parameter in plain.parameters())]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_whole_models_train_and_pack() -> None:
    """A decoder is set to train in four bits, trains, and is packed: the same logits, its projections joined."""
    torch.manual_seed(0)
    config = TransformerConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, vocab_size=32
    )
    model = TransformerDecoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    changed = to_ste_(model, "q4_0", skip=("lm_head",)).names
    assert len(changed) == 7
    assert "lm_head" not in changed
    tokens = torch.arange(16).repeat(4, 2)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    model.eval()
    with torch.no_grad(), q4.Session(EXACT) as session:
        expected = model(tokens)
        assert pack_(model, session).names == changed
        assert len(session.layers()) == 4  # qkv, o, gate and up, down
        assert torch.allclose(model(tokens), expected, rtol=0, atol=1e-4)


def test_refusals() -> None:
    """A layer itself, unknown names and formats, and layers that have no 4-bit form are refused; nothing changes."""
    with pytest.raises(q4.InputError, match="Put a single layer into"):
        pack_(nn.Linear(4, 4))
    with pytest.raises(q4.ConfigError, match="skip must be names and patterns that each match a layer"):
        to_ste_(nn.Sequential(nn.Linear(4, 4)), skip=("head",))
    with pytest.raises(q4.FormatError, match="nvfp5"):
        STELinear(4, 4, format="nvfp5")
    with pytest.raises(q4.ConfigError, match="groups must be 1"):
        STEConv2d(4, 4, 3, groups=2)
    with pytest.raises(q4.ConfigError, match="an RNN, GRU, or LSTM without projections"):
        STERecurrent(nn.LSTM(32, 32, proj_size=8))
    model = nn.Sequential(STELinear(64, 4), STELinear(64, 4))
    broken: Any = model[1]
    with torch.no_grad():
        broken.weight[0, 0] = float("nan")
    with q4.Session(EXACT) as session, pytest.raises(q4.InputError):
        pack_(model, session)
    assert [type(layer) for layer in model] == [STELinear, STELinear]


@pytest.mark.parametrize("cycles", [60, pytest.param(10_000, marks=pytest.mark.soak)])
def test_networks_that_are_dropped_leave_nothing(cycles: int) -> None:
    """Built, trained, packed, run and dropped over and over: no tensor stays, and memory is where it was."""
    x, y = torch.randn(8, 32), torch.randint(0, 4, (8,))

    def cycle(session: q4.Session, number: int) -> None:
        model = build_mlp([32, 16, 4], format=FORMATS[number % len(FORMATS)])
        optimizer = torch.optim.AdamW(model.parameters())
        Trainer(model, optimizer, nn.functional.cross_entropy, show=False).fit([(x, y)])
        pack_(model.eval(), session)
        with torch.no_grad():
            model(x)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    gc.collect()
    of_others = eval_cache_bytes()  # networks of earlier tests that something still holds
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        for number in range(50):
            cycle(session, number)
        count, grown = tensors(), []
        for _ in range(3):  # what leaks grows each time; a heap that earlier tests left in pieces may grow once
            before = resident()
            for number in range(cycles):
                cycle(session, number)
            assert tensors() == count
            grown.append(resident() - before)
            if grown[-1] < 8 << 20:
                break
        assert min(grown) < 8 << 20
    assert eval_cache_bytes() <= of_others
