"""The paths that prepare receives, and that no other path is ever called."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

import q4core as q4
from tests.support.fakes import KERNEL_PATH, FakeBackend, registry

SMALL = attrs.evolve(KERNEL_PATH, name="small", m=(1, 100))
BIG = attrs.evolve(KERNEL_PATH, name="big", m=(5, None), tier=30)
ISLAND = attrs.evolve(KERNEL_PATH, name="island", m=(5, 8), tier=30)
WIDE = attrs.evolve(KERNEL_PATH, name="wide")


class Listening(FakeBackend):
    """Remembers the paths that it prepared for."""

    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*args, **facts)
        self.told: list[tuple[q4.Segment, ...]] = []

    def prepare(self, weight: q4.PackedWeight, request: q4.Request, context: q4.PrepareContext) -> q4.Prepared:
        """Copy the tensors."""
        self.told.append(context.paths)
        return super().prepare(weight, request, context)


def _weight() -> q4.PackedWeight:
    return q4.quantize(torch.randn(24, 128, generator=torch.Generator().manual_seed(3)), "nf4")


def test_prepare_receives_the_segments_of_its_selection() -> None:
    """The paths come with the ranges of M that they will serve, and not with those that a better path covers."""
    backend = Listening(paths=(SMALL, BIG))
    layer = q4.Session(registry=registry(backend)).linear(_weight())
    assert backend.told == [layer.diagnostics().segments]
    assert backend.told == [(q4.Segment(1, 4, SMALL), q4.Segment(5, None, BIG))]


def test_a_path_that_is_not_selected_is_not_passed() -> None:
    """A path outside the rows asked for, or of a kind that the policy leaves out, is not to be prepared."""
    dequant = attrs.evolve(BIG, name="dequant", kind=q4.PathKind.DEQUANT)
    backend = Listening(paths=(SMALL, BIG, dequant))
    config = q4.SessionConfig(compute_path=q4.ComputePath.KERNEL_ONLY)
    session = q4.Session(config, registry=registry(backend))
    session.linear(_weight(), m=(2, 3))
    session.linear(_weight(), m=(4, 9))
    assert backend.told == [(q4.Segment(2, 3, SMALL),), (q4.Segment(4, 4, SMALL), q4.Segment(5, 9, BIG))]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ((SMALL, BIG), [("small", 1), ("small", 2), ("small", 4), ("big", 5), ("big", 6), ("big", 21)]),
        (
            (WIDE, ISLAND),
            [*(("wide", rows) for rows in (1, 2, 4, 9, 10, 25)), *(("island", rows) for rows in (5, 6, 8))],
        ),
    ],
)
def test_the_probe_stays_where_a_path_serves(paths: tuple[q4.KernelPath, ...], expected: list[tuple[str, int]]) -> None:
    """A path is probed at both ends of every stretch that it serves, and nowhere else."""
    backend = Listening(paths=paths)
    q4.Session(registry=registry(backend)).linear(_weight())
    assert backend.calls == expected


def test_a_narrow_proof_proves_nothing_of_a_wider_range() -> None:
    """Rows that no probe has seen are probed when they are first to be served; a wide proof holds for a narrow one."""
    backend = Listening(paths=(WIDE,))
    plugins = registry(backend)
    session = q4.Session(registry=plugins)
    session.linear(_weight(), m=(1, 2))
    assert backend.calls == [("wide", 1), ("wide", 2)]
    assert not q4.select(q4.Request.for_weight(_weight()), registry=plugins).proven
    session.linear(_weight())
    assert backend.calls[2:] == [("wide", 1), ("wide", 2), ("wide", 17)]
    assert q4.select(q4.Request.for_weight(_weight(), m=(1, 2)), registry=plugins).proven
    session.linear(_weight(), m=(1, 2))
    assert len(backend.calls) == 5


def test_a_path_wrong_in_one_range_serves_in_none() -> None:
    """A path that was wrong where a narrow range ends is not used for a wide one, whose probe would not look there."""
    backend = Listening(paths=(WIDE,), damage=lambda y: torch.zeros_like(y) if len(y) == 40 else y)
    session = q4.Session(registry=registry(backend))
    with pytest.warns(q4.Q4ProbeWarning, match="wide"):
        assert session.linear(_weight(), m=(1, 40)).diagnostics().backend == "dequant-fallback"
    assert session.linear(_weight()).diagnostics().backend == "dequant-fallback"


def test_a_context_without_a_selection_has_no_paths() -> None:
    """Without a selection, as in a backend's own tests, no paths are given: prepare for all that are offered."""
    assert q4.PrepareContext("cpu").paths == ()
