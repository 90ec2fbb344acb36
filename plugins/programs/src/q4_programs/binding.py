"""``bind``: selection of a backend for a program, its self-probe, and the program that runs."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from q4_programs.contract import BoundLayer
from q4_programs.ops import SPIKING, Op
from q4_programs.probe import find_fault
from q4_programs.records import ProgramRecord, attach
from q4_programs.reference import REFERENCE
from q4_programs.sparse import SparseWeight
from q4core import BackendUnavailableError, InputError, LifecycleError, PrepareError, default_registry
from q4core.extension import LayerHandle, find_refusal, prove_once, raise_broken_call, watch
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception, outside_inference

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from q4_programs.contract import Runner, Turns
    from q4_programs.program import Program, Step, View
    from q4core import Q4Linear, Registry

__all__ = ["BoundProgram", "bind"]

_ALIGNMENT = 64
_ADDRESS, _SIZE, _STRIDE = torch.Tensor.data_ptr, torch.Tensor.numel, torch.Tensor.stride

_bound: weakref.WeakSet[BoundProgram] = weakref.WeakSet()


def _renew_locks() -> None:
    """Make new locks for a forked child's programs: threads of the parent, absent in the child, may hold theirs."""
    for program in _bound:
        program.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


class BoundProgram:
    """A program with its buffers and layers; a call runs every step once, or for some rounds.

    Args:
        program: What is run.
        buffers: A tensor for each buffer of the program: the caller's, and flat scratch ones.
        layers: Handles on the packed layers; synapses as they are.
        runner: What the backend gave.
        backend: The backend.
        record: Name, backend, reasons and calls, as reports show them.
    """

    def __init__(  # noqa: PLR0913  # one argument per part
        self,
        program: Program,
        buffers: Sequence[torch.Tensor],
        layers: Sequence[LayerHandle | SparseWeight],
        runner: Runner,
        backend: Any,
        record: ProgramRecord,
    ) -> None:
        self.program = program
        self.buffers = tuple(buffers)
        self.record = record
        self.lock = threading.RLock()
        """Held in each run; who fills the buffers and reads them holds it round both, so that threads take turns."""
        _bound.add(self)
        self._run, self._backend = runner, backend
        packed = [layer for layer in layers if isinstance(layer, LayerHandle)]
        self._layers, self._are_current = tuple(packed), watch(packed)
        own = [tensor for layer in layers for tensor in _tensors_of(layer)]
        own += [layer.bias for layer in packed if layer.bias is not None]
        bound = [pair for pair in zip(program.buffers, self.buffers, strict=True) if pair[0].is_bound]
        self._names, self._given = [item.name for item, _ in bound], [tensor for _, tensor in bound]
        written = program.written
        self._streams = [(program.buffers[index], index in written) for index in program.given]
        self._spans = [
            (*_span(self.buffers[index]), index in written)
            for index, item in enumerate(program.buffers)
            if item.given is None
        ]
        self._tensors = [*self._given, *own]
        self._places = self._found()
        self._packed = uses = list[tuple[int, LayerHandle, int]]()
        place, most = program.tokens or (None, 1)
        self._tokens: torch.Tensor | int = 1 if place is None else self.buffers[place]
        for number, step in enumerate(() if backend is REFERENCE else program.steps):  # its layers count for themselves
            layer = layers[step.layer] if step.op is Op.LINEAR and step.layer is not None else None
            if isinstance(layer, LayerHandle):
                uses.append((number, layer, step.inputs[0].rows // most))
        self._counts = functools.lru_cache(maxsize=1024)(  # number of tokens → counter and segment of each layer
            lambda count: [(layer.calls, layer.segment_index(rows * count) or 0) for _, layer, rows in uses]
        )

    def __call__(self, rounds: int = 1, given: Sequence[torch.Tensor] = (), turns: Turns | None = None) -> None:
        """Run every step, in their order, for some rounds, by one call of the backend.

        Args:
            rounds: How often. The clock, where the program has one, is one more after each.
            given: A tensor for each given buffer, in their order, of its size, dtype and device: a contiguous one, or
                with ``given="round"`` [rounds, …] of which each row is contiguous. What is written shares no memory
                with any other tensor of the program.
            turns: What is called between rounds. It may end the run: the clock says how many rounds were run.

        Raises:
            InputError: A token, a position or the clock is out of range, ``rounds`` is no positive whole number, or a
                given tensor does not fit. Nothing has been written.
            LifecycleError: A buffer was resized, moved or freed, or a layer was closed, moved or loaded again.
            BackendError: The backend raised.
        """
        if type(rounds) is not int or rounds < 1:
            rule = "a positive whole number"
            raise InputError(f"program {self.record.name!r}", name="rounds", rule=rule, value=rounds)
        with self.lock:
            if not self.is_whole():
                self._refuse()
            if given or self._streams:
                self._check_given(rounds, given)
            try:
                if turns is not None:
                    found = self._run_by_turns(rounds, given, turns)
                else:
                    found = self._run(*((rounds, given) if given else (rounds,) if rounds > 1 else ()))
            except PLUGIN_FAULTS as error:
                raise_broken_call(error, self._backend, "program")
            self.record.calls += 1
            for counts, index in self._counts(int(self._tokens)):
                counts[index] += rounds
            if found:
                for number, layer, _ in self._packed:
                    if rows := found[number]:
                        layer.add_outlier_rows(rows)

    def _run_by_turns(self, rounds: int, given: Sequence[torch.Tensor], turns: Turns) -> Sequence[int] | None:
        """Let the backend call what happens between rounds, or run them one by one."""
        if getattr(self._run, "takes_turns", False):
            run: Any = self._run
            return run(rounds, given, turns)  # type: ignore[no-any-return]  # as any other run
        found = None
        for number in range(rounds):
            if not turns(number, rounds):
                return found
            pairs = zip(self._streams, given, strict=True)
            one = [tensor[number : number + 1] if item.given == "round" else tensor for (item, _), tensor in pairs]
            found = self._run(1, one) if one else self._run()
        turns(rounds, rounds)
        return found

    def _check_given(self, rounds: int, given: Sequence[torch.Tensor]) -> None:
        """Refuse given tensors that do not fit the program, or each other."""
        what = f"program {self.record.name!r}"
        if len(given) != len(self._streams):
            raise InputError(what, name="given", rule=f"{len(self._streams)} tensors", value=len(given))
        device = self.buffers[0].device
        spans: list[tuple[int, int, bool]] = []
        for (item, is_written), tensor in zip(self._streams, given, strict=True):
            is_rounds = item.given == "round"
            one = tensor[0] if is_rounds and tensor.dim() and len(tensor) == rounds else tensor
            facts = one.numel(), tensor.dtype, tensor.device, one.is_contiguous(), one is not tensor
            apart = not is_written or not is_rounds or rounds == 1 or tensor.stride(0) >= item.size
            if facts != (item.size, item.dtype, device, True, is_rounds) or tensor.is_neg() or not apart:
                shape = f"[{rounds}, …] with contiguous rows" if is_rounds else "a contiguous tensor"
                end = ", each apart" if is_rounds and is_written else ""
                rule = f"{shape} of {item.size} × {item.dtype} on {device}{end}"
                value = f"{[*tensor.shape]} × {tensor.dtype} on {tensor.device}"
                raise InputError(what, name=f"buffer {item.name!r}", rule=rule, value=value)
            spans.append((*_span(tensor), is_written))
        for index, (first, last, is_written) in enumerate(spans):
            for other_first, other_last, is_other_written in (*self._spans, *spans[:index]):
                if first < other_last and other_first < last and (is_written or is_other_written):
                    rule = "memory that nothing else of the program has"
                    name = f"buffer {self._streams[index][0].name!r}"
                    raise InputError(what, name=name, rule=rule, value="shared memory, which is written")

    def is_whole(self) -> bool:
        """Return whether every buffer and layer is where and what it was: whether a call runs, and does not raise."""
        return self._found() == self._places and self._are_current()

    def _found(self) -> tuple[list[int], list[int], list[Any]]:
        return [*map(_ADDRESS, self._tensors)], [*map(_SIZE, self._given)], [*map(_STRIDE, self._given)]

    def _refuse(self) -> None:
        hint = "Make the program again."
        for handle in self._layers:
            if not handle.is_current:
                layer = LayerHandle(handle.layer).layer  # raises for a closed one
                what = f"layer {layer.name!r} was moved or loaded after it was bound to program {self.record.name!r}"
                raise LifecycleError(what, hint=hint)
        for name, tensor, *place in zip(self._names, self._given, *self._places, strict=False):  # addresses are more
            if [tensor.data_ptr(), tensor.numel(), tensor.stride()] != place:
                what = f"buffer {name!r} of program {self.record.name!r} was resized, moved or freed"
                raise LifecycleError(what, hint=hint)
        raise LifecycleError(f"the weight of a layer of program {self.record.name!r} was moved or freed", hint=hint)

    def tensor(self, view: View) -> torch.Tensor:
        """Return a view of the program's as a tensor [rows, columns] over the same memory."""
        return view.of(self.buffers[view.buffer].detach().view(-1))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor and behind the last one."""
    first = tensor.data_ptr()
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first, first + length * tensor.element_size()


def bind(
    program: Program,
    buffers: Sequence[torch.Tensor],
    layers: Sequence[Q4Linear | SparseWeight] = (),
    *,
    name: str = "program",
    registry: Registry | None = None,
) -> BoundProgram:
    """Bind a program to buffers and layers, and choose who runs it.

    That is a backend that declares programs and has prepared every packed layer, once its results are those of the
    reference; else the reference, by the name of ``"reference"``.

    Args:
        program: What to run.
        buffers: A contiguous tensor for each bound buffer of the program, in their order, on one device: of its size
            and dtype, in any shape.
        layers: The packed layers of the program, float32, on that device, and the synapses of SEND.
        name: For messages and reports.
        registry: The plugins to choose among. Defaults to the process's.

    Raises:
        InputError: A buffer or a layer does not fit.
        LifecycleError: A layer is closed, or waits for its state.
        BackendUnavailableError: Not even the reference can run the program.
    """
    registry = registry or default_registry()
    device = buffers[0].device if buffers else torch.device("cpu")
    _check_buffers(program, buffers, device, name)
    given = iter(buffers)
    with outside_inference():
        scratch = _scratch(program, device)
    tensors = [next(given) if item.is_bound else scratch[index] for index, item in enumerate(program.buffers)]
    if len(layers) != len(program.layers):
        raise InputError(f"program {name!r}", name="layers", rule=f"{len(program.layers)} layers", value=len(layers))
    handles = [_checked(layer, sizes, device, name) for layer, sizes in zip(layers, program.layers, strict=True)]
    for step in program.steps:
        if step.layer is not None:
            _check_layer(step, handles[step.layer], name)
    flat = [tensor.detach().view(-1) for tensor in tensors]
    bound = [_bound_layer(handle) for handle in handles]
    packed = [handle for handle in handles if isinstance(handle, LayerHandle)]
    reasons: list[str] = []
    candidates: list[Any] = [*registry.backends().values(), REFERENCE]
    for backend in candidates:
        runner = None
        if (reason := _refusal(backend, program, packed, device)) is None:
            try:
                runner = backend.bind_program(program, flat, bound)
                own = [None if step.layer is None else _kind_of(handles[step.layer]) for step in program.steps]
                facts = program.clock is not None, None if program.tokens is None else program.tokens[1]
                kinds = zip((program.kind(step) for step in program.steps), own, strict=True)
                kind = str(device), *facts, *kinds
                reason = _fault(registry, backend, kind, packed, (program, flat, bound))
            except PrepareError as error:
                reason = "; ".join(map(str, error.reasons))
            except PLUGIN_FAULTS as error:
                reason = f"bind_program raised {describe_exception(error)}"
        if runner is not None and reason is None:
            record = ProgramRecord(name, backend.name, len(program.steps), tuple(reasons))
            attach(record, [handle.layer for handle in packed])
            return BoundProgram(program, tensors, handles, runner, backend, record)
        is_asked = backend is REFERENCE or _ops_of(backend, program)[0] in backend.capabilities.ops
        if is_asked or any(handle.backend is backend for handle in packed):
            reasons.append(f"not {backend.name}: {reason}")
    raise BackendUnavailableError(f"no backend can run program {name!r} on {device}", rejections=reasons)


def _ops_of(backend: Any, program: Program) -> list[str]:
    """Return what a backend must declare: for operations of spiking networks ``spiking`` will do."""
    ops = {step.op for step in program.steps}
    needed = ["spiking" if ops & SPIKING and "spiking" in backend.capabilities.ops else "program"]
    return needed + ["sparse"] * (Op.SEND in ops) + ["tokens"] * program.has_tokens


def _refusal(backend: Any, program: Program, layers: Iterable[LayerHandle], device: torch.device) -> str | None:
    """Return why a backend is not asked to bind a program, or None."""
    if backend is REFERENCE:
        return None
    for op in _ops_of(backend, program):
        if refusal := find_refusal(backend, op, device, ["bind_program"]):
            return refusal
    others = sorted({layer.backend.name for layer in layers} - {backend.name})
    return f"layers were prepared by {', '.join(others)}" if others else None


def _fault(
    registry: Registry,
    backend: Any,
    kind: Hashable,
    layers: Sequence[LayerHandle],
    bound: tuple[Program, Sequence[torch.Tensor], Sequence[BoundLayer]],
) -> str | None:
    """Return what is wrong with a backend's programs of a kind, or None."""
    if backend is REFERENCE:
        return None
    with contextlib.ExitStack() as trial:
        for layer in layers:
            trial.enter_context(layer.uncounted())
        return prove_once(registry, backend, "programs", kind, lambda: find_fault(backend, REFERENCE, *bound))


def _check_buffers(program: Program, buffers: Sequence[torch.Tensor], device: torch.device, name: str) -> None:
    bound = [item for item in program.buffers if item.is_bound]
    if len(bound) != len(buffers):
        raise InputError(f"program {name!r}", name="buffers", rule=f"{len(bound)} tensors", value=len(buffers))
    for item, tensor in zip(bound, buffers, strict=True):
        facts = tensor.numel(), tensor.dtype, tensor.device, tensor.is_contiguous() and not tensor.is_neg()
        if facts != (item.size, item.dtype, device, True):
            rule = f"a contiguous tensor of {item.size} × {item.dtype} on {device}"
            value = f"{list(tensor.shape)} × {tensor.dtype} on {tensor.device}"
            raise InputError(f"program {name!r}", name=f"buffer {item.name!r}", rule=rule, value=value)


def _check_layer(step: Step, handle: LayerHandle | SparseWeight, name: str) -> None:
    is_packed, rows = isinstance(handle, LayerHandle), step.outputs[0].rows
    if is_packed is (step.op is Op.SEND):
        rule = "synapses for send, and a packed layer for all else"
        raise InputError(f"program {name!r}", name=f"layer {step.layer}", rule=rule, value=step.op.value)
    if isinstance(handle, SparseWeight):
        ago, of_slot = (int(number) for number in step.numbers)
        if handle.longest - ago >= rows // of_slot:
            rule = f"longer than the longest delay, {handle.longest} steps, less the {ago} that passed"
            raise InputError(f"program {name!r}", name=f"ring {step.label}".rstrip(), rule=rule, value=rows // of_slot)
    if isinstance(handle, LayerHandle) and handle.segment_index(rows) is None:
        rule = "prepared for the rows of the program"
        raise InputError(f"program {name!r}", name=f"layer {handle.layer.name!r}", rule=rule, value=rows)


def _tensors_of(layer: LayerHandle | SparseWeight) -> tuple[torch.Tensor, ...]:
    return layer.tensors if isinstance(layer, LayerHandle) else layer.tensors()


def _kind_of(layer: LayerHandle | SparseWeight) -> Hashable:
    """Return what is equal for layers that a backend runs in the same way."""
    if isinstance(layer, LayerHandle):
        return layer.kind
    return (layer.sources, layer.targets, *(tensor.dtype for tensor in layer.tensors()))


def _bound_layer(handle: LayerHandle | SparseWeight) -> BoundLayer:
    if not isinstance(handle, LayerHandle):
        return BoundLayer(handle, None, (), handle)
    bias = handle.layer.bias
    return BoundLayer(handle.prepared, None if bias is None else bias.detach(), handle.segments, handle.layer)


def _checked(
    layer: Q4Linear | SparseWeight, sizes: tuple[int, int], device: torch.device, name: str
) -> LayerHandle | SparseWeight:
    """Return a handle on a layer, or synapses, once it is known to fit a program."""
    if isinstance(layer, SparseWeight):
        if ((layer.targets, layer.sources), layer.device) != (sizes, device):
            rule, value = f"{sizes[0]}×{sizes[1]} on {device}", f"{layer.targets}×{layer.sources} on {layer.device}"
            raise InputError(f"program {name!r}", name="synapses", rule=rule, value=value)
        return layer
    handle = LayerHandle(layer)
    facts = (layer.out_features, layer.in_features), layer.dtype, layer.device, handle.is_managed
    if facts != (sizes, torch.float32, device, False):
        rule = f"float32 {sizes[0]}×{sizes[1]} on {device}, in ordinary memory"
        value = f"{layer.dtype} {layer.out_features}×{layer.in_features} on {layer.device}"
        raise InputError(f"program {name!r}", name=f"layer {layer.name!r}", rule=rule, value=value)
    return handle


def _scratch(program: Program, device: torch.device) -> dict[int, torch.Tensor]:
    """Return a flat tensor for each scratch buffer, in one arena; buffers that are not needed at once share memory."""
    spans: dict[int, tuple[int, int]] = {}
    for index, step in enumerate(program.steps):
        for view in (*step.inputs, *step.outputs):
            if not (program.buffers[view.buffer].is_bound or program.buffers[view.buffer].given):
                spans[view.buffer] = spans.get(view.buffer, (index, index))[0], index
    places: dict[int, int] = {}
    live: list[tuple[int, int, int]] = []
    for number, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        buffer, start = program.buffers[number], 0
        size = -(-buffer.size * buffer.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        live = sorted(item for item in live if item[2] >= first)
        for low, high, _ in live:
            if start + size <= low:
                break
            start = max(start, high)
        live.append((start, start + size, last))
        places[number] = start
    sizes = {number: program.buffers[number].size * program.buffers[number].dtype.itemsize for number in places}
    total = max((place + sizes[number] for number, place in places.items()), default=0)
    arena = torch.empty(total + _ALIGNMENT, dtype=torch.uint8, device=device)
    arena = arena[-arena.data_ptr() % _ALIGNMENT :]
    found = {number: arena[place : place + sizes[number]] for number, place in places.items()}
    for number, buffer in enumerate(program.buffers):
        if number in found:
            found[number] = found[number].view(buffer.dtype)
        elif not buffer.is_bound:  # given, or of no step
            found[number] = torch.empty(buffer.size, dtype=buffer.dtype, device=device)
    return found
