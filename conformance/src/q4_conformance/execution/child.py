"""The program of a process that runs cases. It talks with ``process.Child`` alone, which starts it.

Before a plugin is loaded, the pipes are moved out of its reach: stdin becomes empty and stdout becomes stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import json
import math
import os
import signal
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from q4_conformance.execution.environment import manifest_of, survey
from q4_conformance.execution.in_process import run_case
from q4_conformance.outcome import CaseResult, FailureError, Outcome
from q4_conformance.subjects.manifest import split
from q4_conformance.subjects.profiles import UnknownTargetError, cases_for, find_target, subject_for
from q4_conformance.subjects.reference import REFERENCE, reference_backend
from q4core import Q4Error, default_registry
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TextIO

    from q4_conformance.subjects.profiles import ConformanceTarget

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_TEXT = 1 << 16
_GROUP, _MODULES = "q4core.plugins", "Q4_PLUGIN_MODULES"


def _names() -> dict[str, str]:
    """Return every module that brings a plugin, with the name by which the plugin is disabled."""
    points = importlib.metadata.entry_points(group=_GROUP)
    found = {point.value.partition(":")[0].strip(): point.name for point in points}
    # A plugin in a package begins with the package.
    found |= {module.partition(".")[0]: name for module, name in found.items() if module.partition(".")[0] not in found}
    modules = (name.strip() for name in os.environ.get(_MODULES, "").split(","))
    return found | {module: module for module in modules if module}


def _is_under_way(module: str) -> bool:
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


@contextlib.contextmanager
def _steps(send: Callable[[str], None], name: str) -> Iterator[None]:
    """Report each plugin whose import begins inside the block; the hint leaves out the plugin that is judged."""
    names = _names()
    begun: list[str] = []

    def find_spec(module: str, *_: object) -> None:
        if module in names:
            begun[:] = [*filter(_is_under_way, begun), module]
            plugins = list(dict.fromkeys(names[item] for item in begun))
            hint = "" if plugins[0] == name else f" (Q4_DISABLE_PLUGINS={plugins[0]} disables it)"
            send(f"importing the plugin {', which imports '.join(map(repr, plugins))}{hint}")

    send("loading plugins")
    watcher: Any = types.SimpleNamespace(find_spec=find_spec)  # the first finder of modules, which finds none
    sys.meta_path.insert(0, watcher)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(watcher)


class _Pipes:
    """The two ends that only we know."""

    def __init__(self) -> None:
        self._in: TextIO = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._mark = ""
        first = self.receive()
        self._mark = str(first["mark"])
        _limit_memory(int(first["data_bytes"]))

    def receive(self) -> dict[str, Any]:
        """Return the next message; the process exits when its parent has gone."""
        line = self._in.readline()
        if not line:
            gc.freeze()  # what is left ends with the process: no garbage collection is needed
            raise SystemExit(0)
        message: dict[str, Any] = json.loads(line)
        return message

    def send(self, **message: Any) -> None:
        """Send a message, whose texts come from a plugin: none is endless, none can't be written down."""
        message = _plain(message)
        self._out.write(f"\n{self._mark}{json.dumps(message)}\n")  # what came before may have no end of line
        self._out.flush()


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold, whose texts have an end, and no half of a surrogate pair."""
    if isinstance(value, str):
        text = value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]}… ({len(value)} characters)"
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    try:
        return _plain(repr(value))
    except PLUGIN_FAULTS as error:
        return f"a {type(value).__name__} that can't be shown: {type(error).__name__}"


def _limit_memory(data_bytes: int) -> None:
    """Make far too large allocations fail, and let the system end this process first when memory runs out."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # noqa: PLC0415  # not on every system

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if not any(Path("/dev").glob("nvidia*")):  # a CUDA process maps more than it takes
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            system = ctypes.CDLL(None)
            system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            system.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what hides from its own parent is still found among ours


def _refuse(pipes: _Pipes, error: Q4Error) -> NoReturn:
    """Send why there is nothing to judge, and exit."""
    fields = {name: getattr(error, name, None) for name in ("what", "name", "rule", "hint", "available", "closest")}
    pipes.send(refused=type(error).__name__, fields={**fields, "value": str(error.value)})
    raise SystemExit(0) from None


def _find(pipes: _Pipes) -> tuple[ConformanceTarget, dict[str, Any]]:
    """Find the target and send it; exit where there is none. Return also the query."""
    query = pipes.receive()
    with _steps(lambda step: pipes.send(step=step), query["name"]):
        default_registry().records()
    pipes.send(step="asking the plugins what they bring")
    try:
        target = find_target(query["name"], profile=query["profile"], formats=query["formats"], device=query["device"])
        if target.profile not in {"dialect", "file", "layer"} and target.name != REFERENCE:
            reference_backend()
    except Q4Error as error:
        _refuse(pipes, error)
    facts = survey(target) if query["survey"] else {}
    pipes.send(target=attrs.asdict(target), facts=facts)
    return target, query


def _serve(pipes: _Pipes, target: ConformanceTarget, query: dict[str, Any]) -> None:
    """Run the requested cases until the parent has gone."""
    cases = {case.id: case for case in cases_for(target)}
    subject, fault = None, None
    pipes.send(step=f"making {target.name!r}")
    try:
        subject = subject_for(target)
    except (FailureError, UnknownTargetError) as error:
        if isinstance(error, UnknownTargetError) and query["survey"]:
            _refuse(pipes, error)
        fault = str(error)
    except PLUGIN_FAULTS as error:
        fault = f"{target.name!r} can't be had: {describe_exception(error)}"
    pipes.send(step=f"asking {target.name!r} what it offers")
    if query["survey"] and fault is None:
        pipes.send(manifest=manifest_of(subject, target.formats), undeclared=split(cases.values(), subject)[1])
    else:
        pipes.send(manifest={}, undeclared={})
    while True:
        order = pipes.receive()
        for name in order.get("cases", ()):
            case = cases[name]
            pipes.send(start=name)
            if fault is None:
                result = run_case(case, subject)
            else:
                result = CaseResult(case=name, contract=case.contract, outcome=Outcome.FAIL, message=fault)
            pipes.send(result=result.to_dict())
        pipes.send(done=True)


def main() -> None:
    """Find the target, then run cases until the parent has no more."""
    os.environ["Q4_CACHE"] = "off"  # no proof of another process counts, and none is left behind
    pipes = _Pipes()
    target, query = _find(pipes)
    _serve(pipes, target, query)
