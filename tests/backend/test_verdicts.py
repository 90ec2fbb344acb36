"""What a backend may answer: each part is checked where it is made, so that a sloppy plugin is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
import torch

import q4core as q4
from tests.support.fakes import KERNEL_PATH, FakeBackend, registry

if TYPE_CHECKING:
    from collections.abc import Callable

NF4 = q4.BUILTIN_FORMATS["nf4"].codebook
A8 = attrs.evolve(KERNEL_PATH, precision=q4.Precision.W4A8)


def _path(base: q4.KernelPath = KERNEL_PATH, **facts: Any) -> q4.KernelPath:
    return attrs.evolve(base, **facts)


def _offer(**facts: Any) -> q4.Support:
    return q4.Support.yes([KERNEL_PATH], native_state="x", **facts)


REASON = q4.Reason(q4.ReasonCode.ARCH, "no")
ILLEGAL: dict[str, tuple[Callable[[], Any], str]] = {
    "no name": (lambda: _path(name=""), "name"),
    "a number as name": (lambda: _path(name=3), "name"),
    "one number as m": (lambda: _path(m=3), "m"),
    "m from zero": (lambda: _path(m=(0, 3)), "m"),
    "m backwards": (lambda: _path(m=(4, 3)), "m"),
    "m as texts": (lambda: _path(m=("1", "2")), "m"),
    "kind as text": (lambda: _path(kind="kernel"), "kind"),
    "precision as text": (lambda: _path(precision="w4a8"), "precision"),
    "tier as text": (lambda: _path(tier="x"), "tier"),
    "tier that is no number": (lambda: _path(tier=float("nan")), "tier"),
    "codebook of an exact path": (lambda: _path(codebook=NF4), "codebook"),
    "codebook that is not finite": (lambda: _path(A8, codebook=(float("inf"),) * 16), "codebook"),
    "codebook of texts": (lambda: _path(A8, codebook=("a",) * 16), "codebook"),
    "reason without a code": (lambda: q4.Reason("device", "no"), "code"),  # type: ignore[arg-type]
    "reason without a sentence": (lambda: q4.Reason(q4.ReasonCode.DEVICE, 3), "message"),  # type: ignore[arg-type]
    "refusal by texts": (lambda: q4.Support.no(["no"], native_state="x"), "reasons"),  # type: ignore[list-item]
    "offer of texts": (lambda: q4.Support.yes(["path"], native_state="x"), "paths"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_an_illegal_part_of_a_verdict_is_a_config_error(case: str) -> None:
    """Paths, reasons and verdicts refuse what they can't mean, by name."""
    make, name = ILLEGAL[case]
    with pytest.raises(q4.ConfigError) as caught:
        make()
    assert caught.value.name == name


def _weight() -> q4.PackedWeight:
    return q4.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), "nf4")


TABLES: dict[str, tuple[float, ...]] = {
    "turned and doubled": tuple(-2 * value for value in NF4),
    "too short": NF4[:3],
    "one level off": (*NF4[:7], 0.03, *NF4[8:]),
    "swapped neighbours": (NF4[1], NF4[0], *NF4[2:]),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_that_is_not_the_formats_is_refused(table: str) -> None:
    """A declared codebook is judged once against the format: no path is proven by a table of its own making."""
    path = attrs.evolve(A8, codebook=TABLES[table])
    layer = q4.Session(registry=registry(FakeBackend("liar", paths=(path,)))).linear(_weight())
    record = layer.diagnostics()
    assert record.backend == "dequant-fallback"
    (reason,) = record.rejections[0].reasons
    assert reason.code is q4.ReasonCode.PROBE_FAILED
    assert "codebook" in reason.message


@pytest.mark.parametrize(
    ("precision", "levels", "is_near"),
    [
        (q4.Precision.W4A8, 124, True),
        (q4.Precision.W4A8, 63, True),
        (q4.Precision.W4I16, 8191, True),
        (q4.Precision.W4I16, 2047, False),
        (q4.Precision.W4I16, 124, False),
    ],
)
def test_a_table_of_the_formats_own_values_is_served(precision: q4.Precision, levels: int, *, is_near: bool) -> None:
    """A table is near enough in the steps of the path's precision: ±63 with int8, ±8191 with int16."""
    table = tuple(round(value * levels) / levels for value in NF4)

    class Table(FakeBackend):
        def linear(self, prepared: q4.Prepared, x: Any, out: Any, *, bias: Any, path: str) -> None:
            weight = attrs.evolve(prepared.meta.build(prepared.tensors), codebook=torch.tensor(table))
            out.copy_(x.to(torch.float32) @ q4.dequantize(weight, torch.float32).T)

    backend = Table("table", paths=(_path(precision=precision, codebook=table),))
    config = q4.SessionConfig(activation_precision="int16" if precision is q4.Precision.W4I16 else "int8")
    session = q4.Session(config, registry=registry(backend))
    if is_near:
        assert session.linear(_weight()).diagnostics().backend == "table"
    else:
        with pytest.raises(q4.BackendUnavailableError, match="codebook"):
            session.linear(_weight())


def test_a_table_for_a_weight_with_its_own_codebook_is_refused() -> None:
    """A table of the format's says nothing about a weight that brings another codebook."""
    own = torch.linspace(-1, 1, 16)
    weight = attrs.evolve(_weight(), codebook=own)
    backend = FakeBackend("table", paths=(attrs.evolve(A8, codebook=NF4),))
    assert q4.Session(registry=registry(backend)).linear(weight).diagnostics().backend == "dequant-fallback"


class Odd:
    """A meta whose methods raise, as configured."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __hash__(self) -> int:
        """Be hashable."""
        return 7

    def __repr__(self) -> str:
        """Raise if configured to."""
        if self.fault == "repr":
            raise RuntimeError("no words")
        return "Odd()"

    def __eq__(self, other: object) -> bool:
        """Raise if configured to."""
        if self.fault == "eq":
            raise RuntimeError("no equals")
        return isinstance(other, Odd)


@pytest.mark.parametrize(
    "junk",
    [
        lambda: q4.Prepared((torch.zeros(3),), Odd("repr")),
        lambda: q4.Prepared((torch.zeros(3),), Odd("eq")),
        lambda: q4.Prepared((torch.zeros(3, dtype=torch.complex64).conj(),)),
        lambda: q4.Prepared((torch.zeros(3, dtype=torch.complex64).conj().imag,)),
    ],
)
def test_what_the_core_can_not_keep_is_a_rejection(junk: Callable[[], q4.Prepared]) -> None:
    """A meta that can't be compared or named, and tensors that are lazily conjugated or negated, are refused."""
    backend = FakeBackend("odd")
    backend.prepare = lambda *_: junk()  # type: ignore[method-assign]
    record = q4.Session(registry=registry(backend)).linear(_weight()).diagnostics()
    assert record.backend == "dequant-fallback"
    assert record.rejections[0].reasons[0].code is q4.ReasonCode.PLUGIN_ERROR
