"""Cores with one fault each, planted in this process for as long as a case runs, and the case that must catch each."""

from __future__ import annotations

import _ctypes
import contextlib
import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor

import q4core as q4
from q4_conformance.checks import endurance
from q4_nn.training import straight_through
from q4core import memory
from q4core.layers import preparation
from q4core.ops import registration
from q4core.plugins import registry
from q4core.schema import detection
from q4core.selection import candidates, result, select
from q4core.session import detecting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CORE_FAULTS", "CoreFault"]


@attrs.frozen(kw_only=True)
class CoreFault:
    """One planted fault.

    Args:
        name: Its name.
        breaks: Returns a context inside which the core has the fault.
        caught_by: Id of the core's case that must catch it, or how the id of a backend's case starts: the toy kernel
            is right, so that such a case can fail for the core's fault alone.
        says: A pattern in that case's message.
    """

    name: str
    breaks: Callable[[], contextlib.AbstractContextManager[object]]
    caught_by: str
    says: str


def _replaced(where: Any, name: str, put: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return how to replace one name by what is made of it."""
    return lambda: mock.patch.object(where, name, put(getattr(where, name)))


def _evolving_layers(**facts: Any) -> Callable[[Any], Any]:
    """Let a dialect's layers be found with other facts."""

    def put(found: Any) -> Any:
        def find(*given: Any) -> list[Any]:
            return [attrs.evolve(item, **{key: value(item) for key, value in facts.items()}) for item in found(*given)]

        return find

    return put


@contextlib.contextmanager
def _compiled_code() -> Iterator[None]:
    """Let each Python load a library that is ours by its name, and one that a distribution of ours has installed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = folder / "q4_hidden-1.0.dist-info"
        lines = ["import ctypes"]
        for path in (folder / "libq4_fast.so.1", folder / "q4_hidden.libs" / "product.so"):
            path.parent.mkdir(exist_ok=True)
            shutil.copyfile(_ctypes.__file__, path)
            lines.append(f"ctypes.CDLL({str(path)!r})")
        (folder / "sitecustomize.py").write_text("\n".join(lines), encoding="utf-8")
        record.mkdir()
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: q4-hidden\nVersion: 1.0\n", encoding="utf-8")
        (record / "RECORD").write_text("q4_hidden.libs/product.so,,\n", encoding="utf-8")
        with mock.patch.object(sys, "path", [str(folder), *sys.path]):
            yield


def _without(code: q4.ReasonCode) -> Callable[[Any], Any]:
    """Let the manifest pass over refusals of one kind."""

    def put(refusals: Any) -> Any:
        def told(self: q4.Capabilities, request: q4.Request, **wishes: Any) -> tuple[q4.Reason, ...]:
            return tuple(reason for reason in refusals(self, request, **wishes) if reason.code is not code)

        return told

    return put


def _first_of_namesakes(backends: Any) -> Any:
    def first(self: registry.Registry) -> dict[str, q4.Backend]:
        hooks = self._implementations("q4_backends")
        given = [item for hook in hooks for item in self._call("q4_backends", hook, hook.function) or ()]
        twice = {item.name: item for item in given if hasattr(item, "capabilities")}
        return {**twice, **backends(self)}

    return first


def _counted_backwards(kind: Any) -> Any:
    return lambda *, calls, **facts: kind(calls=calls[::-1], **facts)


def _event_without(field: str, event: str = "q4.select") -> Callable[[Any], Any]:
    """Let one field of an event be empty."""

    def put(emit: Any) -> Any:
        def sent(name: str, **fields: Any) -> None:
            if name == event:
                fields[field] = type(fields[field])()
            emit(name, **fields)

        return sent

    return put


def _always_fine(rejection: Any) -> Any:
    return lambda backend, reasons, native_state="": rejection(backend, reasons, native_state and "fine")


def _one_row_more(check_buffers: Any) -> Any:
    def checked(key: str, buffers: Any) -> Any:
        plan, device = check_buffers(key, buffers)
        is_fake = any(isinstance(buffer, FakeTensor) for buffer in buffers)
        return (attrs.evolve(plan, out_features=plan.out_features + 1) if is_fake else plan), device

    return checked


def _breaks_graph(call: Any) -> Any:
    def called(*args: Any, **facts: Any) -> Any:
        torch._dynamo.graph_break()
        return call(*args, **facts)

    return called


def _by_chance(quantize: Any) -> Any:
    def quantized(dense: torch.Tensor, format_: str, **wishes: Any) -> q4.PackedWeight:
        weight: q4.PackedWeight = quantize(dense, format_, **wishes)
        qdata = weight.qdata.clone()
        qdata.view(-1)[0] ^= int(torch.randint(1, 16, ()))
        return attrs.evolve(weight, qdata=qdata)

    return quantized


def _backward(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    """Let the straight-through estimator's gradient be changed."""
    backward = staticmethod(lambda _, grad: (change(grad), None))
    return lambda: mock.patch.object(straight_through._StraightThrough, "backward", backward)


def _raising_without_facts(_: Any) -> Any:
    def raise_error(_: object, what: str, *_args: object, **_facts: object) -> Any:
        raise q4.UnifiedMemoryError(f"{what}: refused")

    return raise_error


def _copying(place: Any) -> Any:
    def placed(x: torch.Tensor, *args: Any, **facts: Any) -> Any:
        same, decision = place(x, *args, **facts)
        return same.clone(), decision

    return placed


def _refusal(**facts: Any) -> Callable[[Any], Any]:
    """Let what is wrong with x be reported with other facts."""

    def put(check_linear_call: Any) -> Any:
        def refuse(*call: Any, **more: Any) -> None:
            try:
                check_linear_call(*call, **more)
            except q4.InputError as error:
                told = {"what": error.what, "name": error.name, "rule": error.rule, "hint": error.hint} | facts
                raise q4.InputError(**told) from None

        return refuse

    return put


_LINEAR = importlib.import_module("q4core.layers.linear")
_NF4 = "nf4-plain-high_first-48x256b64-s0"
_Q4_1 = "q4_1-plain-half_split32-48x256b32-s0"

CORE_FAULTS: tuple[CoreFault, ...] = tuple(
    CoreFault(name=name, breaks=breaks, caught_by=case, says=says)
    for name, breaks, case, says in (
        (
            "claims-a-neighbours-tensor",
            _replaced(
                detection, "_found", _evolving_layers(keys=lambda layer: layer.keys | {"bias": "model.norm.weight"})
            ),
            "TC-01/detect",
            r"^proj: keys .*'model\.norm\.weight'",
        ),
        (
            "doubles-the-blocks",
            _replaced(detection, "_found", _evolving_layers(block_size=lambda layer: 2 * layer.block_size)),
            "TC-02/detect",
            r"^proj: \(8, 64\), 32$",
        ),
        (
            "reports-the-first-problem",
            _replaced(detecting, "validate_in", lambda found: lambda *args: found(*args)[:1]),
            "TC-03/validate",
            "^not reported, or with another code: ",
        ),
        (
            "falls-back-without-the-reason",
            _replaced(select, "_why_fallback", lambda _: lambda *args: "no kernel path"),
            f"TC-05/unavailable/{_NF4}",
            "^reason 'no kernel path'$",
        ),
        (
            "brings-compiled-code",
            _compiled_code,
            "TC-06/bare",
            r"^compiled code: \[\] \['\S*/libq4_fast\.so\.1', '\S*/product\.so'\]$",
        ),
        (
            "records-no-placement",
            _replaced(preparation, "_place", lambda _: lambda buffers, *args: (buffers, ())),
            "TC-07/prefer",
            r"^memory is recorded as \(\)$",
        ),
        (
            "names-no-attributes",
            _replaced(memory.MemoryPlacer, "unplaced", _raising_without_facts),
            "TC-08/require",
            "the error names no device attribute",
        ),
        (
            "names-no-layer",
            _replaced(_LINEAR, "check_linear_call", _refusal(what="linear")),
            f"TC-10/refusals/{_NF4}",
            "the error does not name the layer: linear: x must be",
        ),
        (
            "knows-no-way-out",
            _replaced(_LINEAR, "check_linear_call", _refusal(hint=None)),
            f"TC-10/refusals/{_NF4}",
            "the error does not say what to do: ",
        ),
        (
            "tells-no-legal-choice",
            _replaced(_LINEAR, "check_linear_call", _refusal(rule="right", hint="Try another one.")),
            f"TC-10/refusals/{_NF4}",
            "the error does not name the legal choice '256'",
        ),
        (
            "tells-no-rejection-in-the-event",
            _replaced(result, "emit", _event_without("rejections")),
            f"TC-12/mix/{_NF4}",
            r"the event says rejections = \[\], not ",
        ),
        (
            "tells-no-path-in-the-event",
            _replaced(result, "emit", _event_without("paths")),
            f"TC-12/mix/{_NF4}",
            r"the event says paths = \[\], not ",
        ),
        (
            "tells-no-native-state-in-the-event",
            _replaced(result, "emit", _event_without("native_load_state")),
            f"TC-12/mix/{_NF4}",
            "the event says native_load_state = '', not 'numpy'",
        ),
        (
            "makes-up-the-native-state",
            _replaced(select, "Selection", lambda kind: lambda **facts: kind(**facts | {"native_state": "loaded"})),
            f"TC-12/mix/{_NF4}",
            "the native state is 'loaded', the backend says 'numpy'",
        ),
        (
            "makes-up-a-losers-native-state",
            _replaced(candidates, "Rejection", _always_fine),
            f"TC-12/mix/{_NF4}",
            "'toy' is rejected with the native state 'fine'",
        ),
        (
            "serves-on-any-device",
            _replaced(q4.Capabilities, "refusals", _without(q4.ReasonCode.DEVICE)),
            f"TC-17/cuda-only/{_NF4}",
            "^a CUDA-only backend served on the CPU$",
        ),
        (
            "quantises-by-chance",
            _replaced(endurance, "quantize", _by_chance),
            "TC-18/often",
            r"call \d+: other bytes",
        ),
        ("halves-gradients", _backward(lambda grad: grad / 2), "TC-19/gradients", "master: out_of_bound"),
        (
            "spoils-gradients",
            _backward(lambda grad: grad * torch.nan),
            "TC-20/training",
            "gradient of first is not finite",
        ),
        (
            "copies-activations",
            _replaced(memory.MemoryPlacer, "input", _copying),
            "TC-23/activation",
            "^another tensor came back$",
        ),
        (
            "serves-the-first-of-namesakes",
            _replaced(registry.Registry, "backends", _first_of_namesakes),
            f"EX-12/isolation/{_NF4}",
            "^a backend served although its name is taken twice$",
        ),
        (
            "serves-any-version",
            _replaced(registry, "_is_served_version", lambda _: lambda version: True),
            "EX-12/plugins",
            "'next-major' does not mention 'api_version'",
        ),
        (
            "counts-the-wrong-path",
            _replaced(_LINEAR, "Diagnostics", _counted_backwards),
            f"EX-14/record/{_NF4}",
            "^calls are recorded as ",
        ),
        (
            "serves-what-is-not-declared",
            _replaced(q4.Capabilities, "refusals", _without(q4.ReasonCode.FEATURE)),
            f"EX-17/undeclared/{_NF4}",
            "was served without its being declared$",
        ),
        (
            "serves-precisions-that-nobody-asked-for",
            _replaced(q4.Request, "allows", lambda _: lambda *_: True),
            f"EX-17/refused/{_NF4}",
            "^a request was served that is not declared: ",
        ),
        (
            "fakes-one-row-more",
            _replaced(registration, "check_buffers", _one_row_more),
            f"EX-07/opcheck/{_NF4}",
            r"^opcheck of q4core\.linear\.default",
        ),
        (
            "breaks-the-graph",
            _replaced(_LINEAR, "call_op", _breaks_graph),
            f"EX-07/compile/{_NF4}",
            r"^torch\.compile\(fullgraph=True\): ",
        ),
    )
)
