"""Weights that a model's own code reads: found where a forward pass reaches them, and nowhere else."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import q4core as q4
from q4_nn import STELinear, convert_linears_, pack_, to_ste_
from q4_nn.convert.reads import weight_reads
from q4_nn.convert.source import FACTS

if TYPE_CHECKING:
    from collections.abc import Callable


class _Model(nn.Module):
    """A model with two layers and a block of two, for forward passes of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.many = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])


def _found(model: nn.Module) -> dict[str, str]:
    """Return the layers that a forward pass reads, and where."""
    return {name: read.where for name, read in weight_reads(model).items() if read.pass_reason is not None}


# -- what does not matter


class _Penalised(_Model):
    def forward(self, x: torch.Tensor) -> Any:
        return self.other(self.fc(x))

    def penalty(self) -> Any:
        return self.fc.weight.norm() + self._sum(self.other)

    def _sum(self, layer: nn.Linear) -> torch.Tensor:
        return layer.weight.sum()

    @property
    def scale(self) -> torch.Tensor:
        return self.fc.weight.abs().max()


class _Old(_Model):
    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.fc.weight

    def _inner(self, x: torch.Tensor) -> Any:
        return x @ self.fc.weight


class _Overriding(_Old):
    def forward(self, x: torch.Tensor) -> Any:
        return self._inner(x)

    def _inner(self, x: torch.Tensor) -> Any:
        return self.fc(x)


class _Facts(_Model):
    def forward(self, x: torch.Tensor) -> Any:
        w = self.fc.weight
        if w.is_cuda or w.data.device.type == "cuda" or len(w) != w.size(0) or not w.is_floating_point():
            raise ValueError(repr(w))
        self.fc.weight.requires_grad_(False)  # torch's
        return self.fc(x.to(w.data.dtype)) * w.ndim * w.element_size() * w.nelement() + w.data.shape[0]


class _Frozen(_Model):
    def forward(self, x: torch.Tensor) -> Any:
        self.freeze_fc()
        return self.fc(x)

    def freeze_fc(self) -> None:
        self.fc.weight.requires_grad = False

    def set_output_embeddings(self, layer: nn.Linear) -> None:
        self.fc.weight = layer.weight

    def tie_heads(self) -> None:
        self.fc.weight = self.other.weight


@pytest.mark.parametrize("kind", [_Penalised, _Overriding, _Facts, _Frozen])
def test_what_no_pass_reads_is_converted(kind: Any) -> None:
    """Penalties, overridden methods, facts and freezing leave no layer dense."""
    assert _found(kind()) == {}
    assert [row.reason for row in to_ste_(nn.Sequential(kind()), "nf4").rows] == [""] * 4
    assert [row.reason for row in convert_linears_(nn.Sequential(kind()), format="nf4").rows] == [""] * 4


def test_a_penalty_still_trains() -> None:
    """After ``to_ste_`` a penalty reads the master, and has gradients."""
    model = nn.Sequential(_Penalised())
    to_ste_(model, "nf4")
    inner: Any = model[0]
    assert isinstance(inner.fc, STELinear)
    inner.penalty().backward()
    assert inner.fc.weight.grad is not None


@pytest.mark.parametrize("fact", sorted(FACTS))
def test_a_packed_weight_answers_each_fact(fact: str) -> None:
    """What counts as a fact, and so leaves no layer dense, is answered by the packed layer."""
    assert hasattr(q4.Q4Linear(q4.quantize(torch.ones(4, 64), "nf4")).weight, fact)


# -- what does


class _Super(_Old):
    def forward(self, x: torch.Tensor) -> Any:
        return self._inner(x)

    def _inner(self, x: torch.Tensor) -> Any:
        return super()._inner(x)


class _SuperRead(_Old):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)


class _ByName(_Old):
    def forward(self, x: torch.Tensor) -> Any:
        return _Old.forward(self, x)


class _Called(_Model):
    def __call__(self, x: torch.Tensor) -> Any:
        return x @ self.fc.weight


class _Property(_Model):
    @property
    def w(self) -> torch.Tensor:
        return self.fc.weight

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.w


class _Cached(_Model):
    @functools.cached_property
    def w(self) -> torch.Tensor:
        return self.fc.weight

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.w


class _Passed(_Model):
    def forward(self, x: torch.Tensor) -> Any:
        return self._proj(x, layer=self.fc) + self._fixed(self.other, x)

    def _proj(self, x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        return functional.linear(x, layer.weight)

    @staticmethod
    def _fixed(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, layer.weight)


class _Registered(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.product = self._slow

    def _slow(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.fc.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.product(x)


class _Outside(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.child = _Helping()

    def forward(self, x: torch.Tensor) -> Any:
        return self.child.product(x) + self.child.scale


class _Helping(_Model):
    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(x)

    def product(self, x: torch.Tensor) -> Any:
        return x @ self.fc.weight

    @property
    def scale(self) -> torch.Tensor:
        return self.other.weight.abs().max()

    def unused(self) -> Any:
        return self.many[0].weight


def _read(forward: Callable[[Any, torch.Tensor], Any]) -> Any:
    """Return a class whose forward pass is a function."""
    return type("_Made", (_Model,), {"forward": forward})


def _by_constant(self: Any, x: torch.Tensor) -> Any:
    return x @ getattr(self, "fc").weight  # noqa: B009  # on purpose


def _by_loop(self: Any, x: torch.Tensor) -> Any:
    for name in ("fc", "other"):
        x = x @ getattr(self, name).weight
    return x


def _by_pattern(self: Any, x: torch.Tensor) -> Any:
    for index in range(1):
        x = x @ getattr(self, f"{'f' * (index + 1)}c").weight
    return x


def _by_unknown(self: Any, x: torch.Tensor) -> Any:
    for name in self.names:
        x = x @ getattr(self, name).weight
    return x


def _weight_by_name(self: Any, x: torch.Tensor) -> Any:
    return x @ getattr(self.fc, "weight")  # noqa: B009  # on purpose


def _walrus(self: Any, x: torch.Tensor) -> Any:
    return x @ w if (w := self.fc.weight) is not None else x


def _walrus_layer(self: Any, x: torch.Tensor) -> Any:
    return x.to((layer := self.fc).weight.dtype) @ layer.weight


def _either(self: Any, x: torch.Tensor) -> Any:
    layer = self.fc if x.dim() > 1 else self.other
    return x @ layer.weight


def _branches(self: Any, x: torch.Tensor) -> Any:
    layer = self.fc
    if x.dim() > 1:
        layer = self.other
    return x @ layer.weight


def _alias(self: Any, x: torch.Tensor) -> Any:
    w: torch.Tensor = self.fc.weight
    return x.to(w.dtype) @ w


def _slice(self: Any, x: torch.Tensor) -> Any:
    for layer in self.many[:2]:
        x = x @ layer.weight
    return x


def _tuple(self: Any, x: torch.Tensor) -> Any:
    return sum(x @ layer.weight for layer in (self.fc, self.other))


def _modules(self: Any, x: torch.Tensor) -> Any:
    for layer in self.many.modules():
        if isinstance(layer, nn.Linear):
            x = x @ layer.weight
    return x


MANY = {"many.0", "many.1"}
BOTH = {"fc", "other"}
READS: dict[str, tuple[Any, set[str]]] = {
    "super": (_Super, {"fc"}),
    "super forward": (_SuperRead, {"fc"}),
    "base by name": (_ByName, {"fc"}),
    "__call__": (_Called, {"fc"}),
    "property": (_Property, {"fc"}),
    "cached property": (_Cached, {"fc"}),
    "passed into a method": (_Passed, BOTH),
    "method as a value": (_Registered, {"fc"}),
    "called from outside": (_Outside, {"child.fc", "child.other"}),
    "getattr, constant": (_read(_by_constant), {"fc"}),
    "getattr, loop": (_read(_by_loop), BOTH),
    "getattr, pattern": (_read(_by_pattern), {"fc"}),
    "getattr, unknown": (_read(_by_unknown), BOTH | {"many"}),
    "getattr, weight": (_read(_weight_by_name), {"fc"}),
    "walrus": (_read(_walrus), {"fc"}),
    "walrus of a layer": (_read(_walrus_layer), {"fc"}),
    "either": (_read(_either), BOTH),
    "branches": (_read(_branches), BOTH),
    "alias of a weight": (_read(_alias), {"fc"}),
    "slice": (_read(_slice), MANY),
    "tuple": (_read(_tuple), BOTH),
    "modules()": (_read(_modules), {"many"} | MANY),
}


@pytest.mark.parametrize("case", READS)
def test_what_a_pass_reads_is_left_alone(case: str) -> None:
    """A layer whose weight a forward pass reads, in whichever way, would train in float: it stays."""
    kind, expected = READS[case]
    assert _found(kind()).keys() == expected
    table = to_ste_(nn.Sequential(kind()), "nf4")
    assert {row.name.removeprefix("0.") for row in table.rows if row.action == "skipped"} == expected - {"many"}


class _Changing(_Model):
    def forward(self, x: torch.Tensor) -> Any:
        w = self.fc.weight
        w.data.mul_(2)
        self._clamp(self.other.weight)
        return self.fc(x)

    def _clamp(self, weight: torch.Tensor) -> None:
        weight.data.clamp_(-1, 1)


def test_changes_are_found_by_way_of_names() -> None:
    """A weight that is changed under a local name, or in a method that it is passed to, is a change."""
    assert {name for name, read in weight_reads(_Changing()).items() if read.is_change} == BOTH


def test_a_read_that_a_user_calls_is_known() -> None:
    """What no pass reads may still be read by a call: a packed layer may answer there."""
    reads = weight_reads(_Penalised())
    assert not any(read.is_reached for read in reads.values())
    assert reads["fc"].where in {"_Penalised.penalty", "_Penalised.scale"}
    assert reads["fc"].reason is None


class _Raising(_Model):
    @property
    def slow(self) -> bool:
        raise RuntimeError("not ready")

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.fc.weight if self.slow else self.fc(x)


def test_a_property_that_raises_decides_nothing() -> None:
    """A condition over a property that raises is unknown: the layer stays, and the search goes on."""
    assert _found(nn.Sequential(_Raising(), _Property())) == {"0.fc": "_Raising.forward", "1.fc": "_Property.w"}


class _Regularised(_Model):
    def forward(self, x: torch.Tensor) -> Any:
        self.norm = self.fc.weight.norm() if self.training else 0.0
        return self.fc(x)


def test_pack_ignores_reads_that_trained_the_master() -> None:
    """A layer that trained in four bits is packed though code reads its weight where it trains."""
    model = nn.Sequential(_Regularised())
    inner: Any = model[0]
    inner.fc = STELinear(64, 32, format="nf4")
    x = torch.randn(2, 64)
    expected = model.eval()(x)
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        assert pack_(model, session).names == ["0.fc"]
        assert (model(x) - expected).abs().max() <= 1e-5
