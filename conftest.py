"""What every test here runs under: no settings of the user's, one thread policy, one Hypothesis profile."""

from __future__ import annotations

import functools
import gc
import os
import types
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.limits import EXPIRED, explain

try:
    import hypothesis
except ImportError:  # a machine with a GPU has few packages, and the tests marked "gpu" use none of Hypothesis
    hypothesis = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

# These say where tests run, not what they test: where plugins that are not installed come from, which instruction set
# the CPU kernels take (each test holds on every one), and where the samples are.
_KEPT = {"Q4_PLUGIN_MODULES", "Q4_CPU_ISA", "Q4_SAMPLES"}
_OF_THE_USER = {"NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES"}
for _name in [name for name in os.environ if name.startswith("Q4_") or name in _OF_THE_USER]:
    if _name not in _KEPT:
        del os.environ[_name]
os.environ["Q4_CACHE"] = "off"  # a test that wants one names a folder of its own

# Two threads are enough for tests' sizes; more would make a parallel run oversubscribe a small machine.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))

# In CI the examples are the same in every run, so that a failure there is a change's and not the day's; elsewhere new
# examples are searched. Time limits per example would fail on a busy machine and say nothing about the code.
if hypothesis is not None:
    hypothesis.settings.register_profile("dev", deadline=None, print_blob=True)
    hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("dev"), derandomize=True, database=None)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


_OF_PATHS = {"diagnostics", "explain", "path_name", "report", "segments"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m "isa and …"`` pass over the files without any of those words, of which no test is marked."""
    is_file = config.option.markexpr.startswith("isa and") and collection_path.suffix == ".py"
    text = collection_path.read_text(encoding="utf-8") if is_file else ""
    return True if is_file and not any(word in text for word in _OF_PATHS) else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With ``-m "not soak …"`` make no test of the soak's parameters: ten thousand cost each worker ten seconds."""
    if "not soak" in metafunc.config.option.markexpr:
        marks = metafunc.definition.own_markers
        marks[:] = [_of_every_run(mark) if mark.name == "parametrize" else mark for mark in marks]


def _of_every_run(mark: pytest.Mark) -> pytest.Mark:
    """Return a parametrisation without what has the marker ``soak``, if anything is left of it."""
    if len(mark.args) != 2 or isinstance(mark.kwargs.get("ids"), (list, tuple)):  # noqa: PLR2004  # names and values
        return mark
    names, values = mark.args[0], [*mark.args[1]]
    left = [value for value in values if not any(item.name == "soak" for item in getattr(value, "marks", ()))]
    return pytest.mark.parametrize(names, left or values, **mark.kwargs).mark


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Put what lives to the end, a million objects, where no collection of garbage looks at it.

    Each one would take a fifth of a second for them, and hundreds of tests ask for one.
    """
    gc.collect()
    gc.freeze()


@functools.cache
def _names(code: types.CodeType) -> frozenset[object]:
    """Return the names and words that a function uses."""
    inner = [item for item in code.co_consts if isinstance(item, types.CodeType)]
    words = frozenset(item for item in code.co_consts if isinstance(item, str))
    return words.union(code.co_names, *map(_names, inner))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what looks at paths, or at which rows each serves: both depend on the instruction set."""
    code = getattr(getattr(item, "function", None), "__code__", None)
    if code is not None and _OF_PATHS & _names(code):
        item.add_marker("isa")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say what an expired time limit means; all limits are scaled by ``tests.support.limits``."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(EXPIRED):
        report.sections.append(("expired time limit", explain()))
    return report


@pytest.hookimpl(trylast=True)  # after those that are not wanted are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of samples that are not here, and put the files with slow tests first: workers end together."""
    if "Q4_SAMPLES" not in os.environ:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("samples")])
        items[:] = [item for item in items if not item.get_closest_marker("samples")]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
