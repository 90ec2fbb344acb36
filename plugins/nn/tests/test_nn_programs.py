"""Programs of q4-nn's layers: what each layer type emits, third parties' too, and when the modules run instead."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import q4core as q4
from q4_nn import LayerType, OffsetRMSNorm, RMSNorm, build_mlp, build_rnn, make, pack_
from q4_programs import Op, make_program
from tests.support.programs import check_program as check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4_programs import ProgramBuilder, Value

CONFIG = q4.SessionConfig(device="cpu", activation_precision=q4.ActivationPrecision.EXACT)


@pytest.fixture
def session() -> Iterator[q4.Session]:
    """Return a session of exact layers."""
    with q4.Session(CONFIG) as opened:
        yield opened


X = torch.randn(3, 8)


@pytest.mark.parametrize(
    "layer",
    [
        OffsetRMSNorm(8, eps=1e-3),
        RMSNorm(8),
        make("feed_forward", hidden_size=8, intermediate_size=12),
        make("feed_forward", hidden_size=8, intermediate_size=12, gated=False, activation="gelu_tanh", bias=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_give_the_numbers_of_their_modules(layer: nn.Module) -> None:
    """Each layer of q4-nn that is an operation, or several, runs as one program."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    check(layer, X)
    check(layer, X[0])
    check(layer, torch.randn(2, 3, 8))


@pytest.mark.parametrize("format_name", [None, "nf4", "q4_0"])
@pytest.mark.parametrize("sizes", [[12, 64, 2], [64, 96, 33]])
def test_perceptrons(sizes: list[int], format_name: str | None, session: q4.Session) -> None:
    """Float and packed, with rows that are filled up and such as are not, for one sample and for many."""
    model = build_mlp(sizes, format=format_name, dropout=0.1).eval()
    if format_name is not None:
        pack_(model, session)
    for rows in (1, 5):
        check(model, torch.randn(rows, sizes[0]))


@pytest.mark.parametrize("format_name", [None, "q4_0"])
@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
def test_recurrent_networks(cell: str, format_name: str | None, session: q4.Session) -> None:
    """Position by position, for several samples and layers, float and packed."""
    for last in (False, True):
        model = build_rnn(32, 24, cell=cell, num_layers=2, last=last, format=format_name).eval()
        if format_name is not None:
            pack_(model, session)
        check(model, torch.randint(0, 32, (2, 5)))


class Wrapped(nn.Module):
    """A third party's layer without a method: its layer type emits."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inner layer's result, twice."""
        y: torch.Tensor = self.inner(x) * 2
        return y


def test_third_parties_layer_types_emit(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ``emit`` of its layer type, where its class has no method."""

    def emit(module: Wrapped, builder: ProgramBuilder, x: Value) -> Value:
        return builder.step(Op.AFFINE, builder.emit(module.inner, x), numbers=(2, 0))

    kind = LayerType("wrapped", Wrapped, emit=emit)
    plugin = types.SimpleNamespace(q4_layers=q4.hookimpl(lambda: [kind]))
    registry = q4.Registry([("wrapped", plugin), *_installed()])
    for module in ("q4_nn.layer_type", "q4_programs.builder"):
        monkeypatch.setattr(f"{module}.default_registry", lambda: registry)
    layer = make("wrapped")
    check(nn.Sequential(nn.Tanh(), layer), X)
    check(layer, X)


def _installed() -> list[tuple[str, object]]:
    import q4_nn  # noqa: PLC0415  # as a plugin

    return [("q4-nn", q4_nn)]


def test_attention_is_emitted_over_a_cache() -> None:
    """The record names the module and why."""
    model = nn.Sequential(nn.Identity(), make("attention", hidden_size=8, num_heads=2)).eval()
    record = make_program(model, X).record
    assert record.backend is None
    assert "1: attention is emitted for tokens of one sequence over a cache" in record.reasons[0]


def test_what_changes_later_runs_as_modules(session: q4.Session) -> None:
    """Hooks, other modules, training, gradients and other inputs since: the modules run, and the report says why."""
    model = build_mlp([64, 32, 4], format="q4_0").eval()
    pack_(model, session)
    x = torch.randn(3, 64)
    program = make_program(model, x)
    assert program(x.clone().requires_grad_()).requires_grad
    assert program.record.reasons[-1] == "modules ran instead: gradients are recorded"
    with torch.no_grad():
        program(x[:2])
        program(x[0])
        handle = model[0].register_forward_hook(lambda _module, _x, y: y + 1)
        assert torch.equal(program(x), model(x))
        handle.remove()
        before = program.record.calls
        program(x)
        assert program.record.calls == before + 1
        model.train()
        program(x)
        model.eval()
        model[1] = nn.Tanh()
        assert torch.equal(program(x), model(x))
    reasons = "\n".join(program.record.reasons)
    for part in ("gradients are recorded", "other shapes", "has a hook", "training mode", "replaced or removed"):
        assert part in reasons
    assert session.report().section("programs") == (program.record,)
