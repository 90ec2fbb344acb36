"""Checks of a backend's operations of spiking networks: their bits, rounds, threads, memory and refusals."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.checks.endurance import threads
from q4_conformance.checks.programs import expect_canaries, scenes_for
from q4_conformance.checks.surroundings import judge_fork
from q4_conformance.contract.case import check, expect, raised, within
from q4_conformance.measurement.allocations import watch
from q4_conformance.measurement.guard_pages import on_last_page
from q4_conformance.outcome import FailureError, NotTestableError
from q4core import InputError
from q4core.extension import LayerHandle

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from q4_conformance.contract.case import Case
    from q4_conformance.subjects.backend import BackendSubject

_COUNTS = (1, 2, 3, 4)
_RATE, _QUIETEST, _LOUDEST = 0.2, 0.02, 0.5
_PARTS = (7, 1, 32)
"""Rounds of calls that follow one another; 40 in all."""


def _expect_bits(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    same = found == wanted
    if found.is_floating_point():
        same &= found.signbit() == wanted.signbit()
        same |= found.isnan() & wanted.isnan()
    if not bool(same.all()):
        place = tuple(int(number) for number in (~same).nonzero()[0])
        wrong = f"{int((~same).sum())} of {same.numel()} elements of {what} are wrong"
        raise FailureError(f"{wrong}; {[*place]} is {found[place].item()!r}, exact {wanted[place].item()!r}")


def _judge_alone(subject: BackendSubject, circuits: Any, items: Iterable[Any]) -> str:
    """Judge operations one by one: outputs by their bits, all else by its canaries."""
    count = 0
    for item in items:
        scene = circuits.Scene(subject)
        outputs = item.add(scene)
        before = [tensor.to("cpu", copy=True) for tensor in scene.tensors]
        with within(str(item)):
            scene.bound()()
            for index, (view, wanted) in enumerate(zip(outputs, item.exact(), strict=True)):
                _expect_bits(scene.read(view), wanted, f"output {index}")
            expect_canaries(scene, before, outputs)
        count += 1
    return f"{count} operations"


@check("spiking_operations")
@threads(1)
def check_spiking_operations(case: Case, subject: BackendSubject) -> str:
    """Every operation alone has the bits of float32 rounded one by one, at any round, and writes its outputs alone."""
    del case
    circuits = scenes_for(subject, "sparse", "circuits")
    return _judge_alone(subject, circuits, circuits.alone())


@check("spiking_send")
def check_spiking_send(case: Case, subject: BackendSubject) -> str:
    """Sums of sparse synapses are in the order of sources, then synapses, for any number of threads."""
    del case
    circuits = scenes_for(subject, "sparse", "circuits")
    found = ""
    for count in _COUNTS:
        with threads(count), within(f"{count} threads"):
            found = _judge_alone(subject, circuits, circuits.sends())
    return f"{found}, {_COUNTS} threads"


@check("spiking_packed")
@threads(1)
def check_spiking_packed(case: Case, subject: BackendSubject) -> str:
    """A packed product with bits has the bits of the backend's product with spikes, of each round and row."""
    circuits = scenes_for(subject, "sparse", "circuits")
    k = case.weight_recipe.k
    for rows in case.rows:
        scene = circuits.Scene(subject)
        number = scene.layer(case, 67, k)
        ones = torch.rand((3 * rows, k), generator=torch.Generator().manual_seed(rows)) < _RATE
        ones[:, -1] = True
        bits, clock = scene.view(circuits.packed_bits(ones)), scene.round(7)
        out = scene.add(circuits.Op.SPIKES, [bits, clock], scene.out(rows, 67), (2,), layer=number)
        before = [tensor.to("cpu", copy=True) for tensor in scene.tensors]
        scene.bound()()
        handle = LayerHandle(scene.layers[0])
        given, backend = ones[2 * rows :].to(subject.device), subject.backend
        if "spikes" in subject.backend.capabilities.ops:
            wanted = torch.empty(rows, 67, device=subject.device)
            backend.spikes(handle.prepared, given.contiguous(), wanted, bias=None)  # type: ignore[attr-defined]  # it is declared
        else:
            with torch.no_grad():
                wanted = handle.layer(given.float())
        with within(f"{rows} rows"):
            _expect_bits(scene.read(out), wanted.cpu(), "the product")
            expect_canaries(scene, before, [out])
    return f"{len(case.rows)} numbers of rows"


def _expect_state(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        _expect_bits(found[name], value, name)


@check("spiking_rounds")
def check_spiking_rounds(case: Case, subject: BackendSubject) -> str:
    """A recurrent circuit has its exact bits after many rounds: in one call, in several, and on any threads."""
    del case
    circuits = scenes_for(subject, "sparse", "circuits")
    rate = 0.0
    for count in _COUNTS:
        for parts, is_given in itertools.product(((sum(_PARTS),), _PARTS), (False, True)):
            where = f"{count} threads, calls of {parts} rounds" + ", with what each is given" * is_given
            with threads(count), within(where):
                circuit, wanted = circuits.circuit(circuits.Scene(subject), is_given=is_given)
                bound = circuit.scene.bound()
                start = int(circuit.scene.tensors[circuit.scene.clock])
                for number, rounds in enumerate(parts):
                    bound(rounds, circuit.scene.streams(sum(parts[:number]), rounds))
                _expect_state(circuit.read(), wanted)
                passed = int(circuit.scene.tensors[circuit.scene.clock]) - start
                expect(passed == sum(parts), f"the clock is {passed} rounds later after {sum(parts)}")
                rate = float(wanted["record"].mean())
    expect(_QUIETEST < rate < _LOUDEST, f"the circuit fires at a rate of {rate}")
    return f"{sum(_PARTS)} rounds, {_COUNTS} threads, rate {rate:.3f}"


@check("spiking_pages")
def check_spiking_pages(case: Case, subject: BackendSubject) -> str:
    """Buffers and synapses end where readable memory ends: a read or a write past an end kills the process."""
    del case
    circuits = scenes_for(subject, "sparse", "circuits")
    if subject.device.type != "cpu":
        raise NotTestableError("only the CPU's memory can be made unreadable page by page")
    for item in (*circuits.alone(), *circuits.sends()):
        scene = circuits.Scene(subject, on_last_page, 0)
        item.add(scene)
        scene.bound()()
    circuit, _ = circuits.circuit(circuits.Scene(subject, on_last_page, 0))
    circuit.scene.bound()(sum(_PARTS))
    return "every operation, and a circuit"


@check("spiking_refused")
def check_spiking_refused(case: Case, subject: BackendSubject) -> str:
    """A negative clock, and a ring too short for a delay, are typed errors; nothing is written."""
    del case
    circuits = scenes_for(subject, "sparse", "circuits")
    circuit, _ = circuits.circuit(circuits.Scene(subject))
    scene, bound = circuit.scene, circuit.scene.bound()
    for wrong in (-1, -(2**40), -(2**63)):
        scene.tensors[scene.clock].fill_(wrong)
        before = [tensor.clone() for tensor in scene.tensors]
        raised(InputError, lambda: bound(3), f"round {wrong} was not refused")
        expect(all(map(torch.equal, scene.tensors, before)), f"round {wrong} was refused after something was written")
    short = circuits.Scene(subject)
    item = next(circuits.sends())
    views = [short.view(item.inputs[0]), short.round(0), short.view(item.inputs[2][:2])]
    layer = short.synapses(item.synapses)
    short.add(circuits.Op.SEND, views, views[2], (0, 1), layer=layer)
    raised(InputError, short.bound, "a ring that is shorter than a delay was not refused")
    return "3 rounds, and a ring"


@check("spiking_quiet")
def check_spiking_quiet(case: Case, subject: BackendSubject) -> str:
    """A run of many rounds makes no tensor."""
    del case
    circuits = scenes_for(subject, "sparse", "circuits")
    circuit, _ = circuits.circuit(circuits.Scene(subject))
    bound = circuit.scene.bound()
    bound(2)
    elements = watch(lambda: bound(5), subject.device).elements
    expect(elements == 0, f"a run made tensors of {elements} elements")
    return f"{len(circuit.scene.steps)} steps"


@check("spiking_forked")
def check_spiking_forked(case: Case, subject: BackendSubject) -> str:
    """A process that was forked after a run goes on with the bits of its parent."""
    del case
    circuits = scenes_for(subject, "sparse", "circuits")
    if subject.device.type != "cpu":
        raise NotTestableError("a forked process can't use its parent's CUDA device")
    circuit, wanted = circuits.circuit(circuits.Scene(subject))
    bound, start = circuit.scene.bound(), int(circuit.scene.tensors[circuit.scene.clock])
    bound(_PARTS[0])

    def goes_on() -> bool:
        bound(sum(_PARTS[1:]))
        _expect_state(circuit.read(), wanted)
        return int(circuit.scene.tensors[circuit.scene.clock]) == start + sum(_PARTS)

    judge_fork(goes_on)
    return f"{sum(_PARTS[1:])} rounds in a forked process"
