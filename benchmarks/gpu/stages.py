"""Stages of a run, those that answer most first, and their error handling."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import attrs
import torch

from benchmarks.gpu import (
    cases,
    gradient,
    ours,
    overhead,
    probe_time,
    products,
    quantiser,
    spiking,
    tree_tests,
    tuning,
    warming,
)
from benchmarks.gpu import limits as yardsticks
from benchmarks.gpu.place import Place
from benchmarks.gpu.timing import Budget

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.deadline import Deadline

__all__ = ["STAGES", "Stage", "Work", "limits", "native_states"]

_FULL, _QUICK = Budget(31, 2000.0), Budget(3, 100.0)


@attrs.frozen
class Work:
    """What a stage is given.

    Args:
        place: Where.
        deadline: Until when something may be begun.
        is_tiny: Whether sizes are small enough for an interpreter.
        jobs: Processes that run cases at once.
        only: Texts with which the ids of the cases to run start.
    """

    place: Place
    deadline: Deadline
    is_tiny: bool = attrs.field(default=False, kw_only=True)
    jobs: int = attrs.field(default=1, kw_only=True)
    only: tuple[str, ...] = attrs.field(default=(), kw_only=True)

    @property
    def budget(self) -> Budget:
        """How long sampling may take."""
        return _QUICK if self.is_tiny else _FULL


@attrs.frozen
class Stage:
    """One stage.

    Args:
        text: What it does, for people.
        run: Returns what the result file stores.
        has_ratios: Whether its targets are ratios with the device's own limits, which are then measured first.
        is_default: Whether it runs where no stage is named.
    """

    text: str
    run: Callable[[Work], dict[str, Any]]
    has_ratios: bool = False
    is_default: bool = True

    def guarded(self, work: Work) -> dict[str, Any]:
        """Run; an error becomes part of the result, so that the stages before and after it are stored."""
        try:
            return self.run(work)
        except Exception as error:  # noqa: BLE001  # reported in the result, and by the exit status
            trace = traceback.format_exc()
            print(trace, flush=True)
            return {"error": f"{type(error).__name__}: {error}", "trace": trace[-4000:]}


def _gemv(work: Work) -> dict[str, Any]:
    tables = products.TINY_GEMV if work.is_tiny else products.GEMV
    return products.measure(tables, work.place, work.budget, work.deadline)


def _gemm(work: Work) -> dict[str, Any]:
    tables = products.TINY_GEMM if work.is_tiny else products.GEMM
    return products.measure(tables, work.place, work.budget, work.deadline)


def _gradient(work: Work) -> dict[str, Any]:
    tables = products.TINY_GRADIENT if work.is_tiny else products.GRADIENT
    return gradient.measure(tables, work.place, work.budget, work.deadline)


def _quantiser(work: Work) -> dict[str, Any]:
    shapes = quantiser.TINY_SHAPES if work.is_tiny else quantiser.SHAPES
    return quantiser.measure(shapes, work.place, work.budget, work.deadline)


STAGES = {
    "compile": Stage(
        "the kernels of what is measured, by several processes at once",
        lambda work: warming.measure(work.place, work.deadline, jobs=work.jobs),
    ),
    "gemv": Stage("M = 1 … 8 compared with bf16 F.linear and the copy bandwidth", _gemv, has_ratios=True),
    "overhead": Stage("the host's time per call", lambda work: overhead.measure(work.place, work.deadline)),
    "probe": Stage(
        "prepare and self-probe of a first layer", lambda work: probe_time.measure(work.place, work.deadline)
    ),
    "quantiser": Stage("the native quantiser", _quantiser, has_ratios=True),
    "gemm": Stage("M = 16 … 8192 compared with cuBLAS, each path alone as well", _gemm, has_ratios=True),
    "gradient": Stage("input gradients for M = 1 … 8192 compared with cuBLAS", _gradient),
    "spiking": Stage(
        "a step of spiking circuits and of a layer, spikes compared with the CPU's",
        lambda work: spiking.measure(work.place, work.deadline),
    ),
    "cases": Stage(
        "every contract case",
        lambda work: cases.run(work.place, work.deadline, jobs=work.jobs, only=work.only),
    ),
    "tune": Stage(
        "other launch configurations, only where it is named",
        lambda work: tuning.measure(work.place, work.deadline, jobs=work.jobs),
        is_default=False,
    ),
    "tests": Stage("the repository's tests that need a GPU", lambda work: tree_tests.run(work.deadline)),
}


def limits(work: Work) -> dict[str, Any]:
    """Return what the device itself can do."""
    return yardsticks.measure(work.place, work.budget)


def native_states(place: Place | None) -> dict[str, Any]:
    """Return what each backend says of a device; of a CUDA device that is not there, where there is none."""
    return ours.native_states(place or Place(torch.device("cuda", 0), "none", "none"))
