"""Runs of whole networks as programs: which run, what a program is made of, and states on their way to it and back."""

from __future__ import annotations

import collections
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from q4_programs import ProgramRecord, refuse
from q4_programs.watch import hook_of
from q4_snn.engine import EVENTS, PopulationProgram
from q4_snn.projection import packed_layer
from q4core import Q4Error, Q4Linear
from q4core.plugin_api import is_plain_call

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torch import nn

    from q4_snn.graph import Graph
    from q4_snn.state import NetworkState

__all__ = ["NetworkRuns", "runs_of"]

_MOST = 4
"""Programs of a network that stay: for so many batches and records."""
_LEAST_STEPS = 4
"""Fewer steps make no program, which costs more than they do; they run by one that is there."""

Places = dict[str, tuple[str, "int | None"]]
_runs: weakref.WeakKeyDictionary[nn.Module, NetworkRuns] = weakref.WeakKeyDictionary()


def runs_of(network: nn.Module, graph: Graph) -> NetworkRuns:
    """Return the programs of a network."""
    if network not in _runs:
        _runs[network] = NetworkRuns(network, graph)
    return _runs[network]


class NetworkRuns:
    """The programs of a network, made when they are needed, and the reason where there is none.

    Args:
        network: It is referenced weakly.
        graph: Its graph.
    """

    def __init__(self, network: nn.Module, graph: Graph) -> None:
        self._network, self._graph = weakref.ref(network), graph
        self._lock = threading.RLock()
        self._programs: collections.OrderedDict[Hashable, PopulationProgram | str] = collections.OrderedDict()
        self.record = ProgramRecord("network")
        """Who runs it, and why it is no program."""

    def program(self, sequences: Mapping[str, torch.Tensor], places: Places) -> PopulationProgram | None:
        """Return what runs inputs [T, B, n], or None; ``record`` has the reason."""
        reason, first = self._refusal(sequences), next(iter(sequences.values()))
        if reason is None and len(first) < _LEAST_STEPS and self._key(first, places) not in self._programs:
            reason = f"fewer than {_LEAST_STEPS} steps"
        if reason is None:
            found = self._found(first, places)
            if isinstance(found, PopulationProgram):
                self.record = found.bound.record
                return found
            reason = found
        if self.record.reasons != (reason,) or self.record.backend is not None:
            self.record = refuse(f"network of {len(self._graph.populations)} populations", self._layers(), reason)
        return None

    def _layers(self) -> list[Q4Linear]:
        network = self._network()
        return [] if network is None else [item for item in network.modules() if isinstance(item, Q4Linear)]

    def _refusal(self, sequences: Mapping[str, torch.Tensor]) -> str | None:
        if torch.is_grad_enabled():
            return "gradients are recorded: torch.no_grad() runs it as a program"
        if not is_plain_call():
            return "inside a trace, a transform, a mode or autocast"
        for name, x in sequences.items():
            if x.dtype is not torch.float32 or x.device.type not in {"cpu", "cuda"}:
                return f"input {name!r} is {x.dtype} on {x.device.type}, and programs take float32 on the CPU or a GPU"
        if len({x.device for x in sequences.values()}) > 1:
            return "inputs are on several devices"
        return None

    def run(
        self, program: PopulationProgram, sequences: Mapping[str, torch.Tensor], state: NetworkState, places: Places
    ) -> tuple[dict[str, torch.Tensor], NetworkState]:
        """Return what ``Network.forward`` does, from a state that was checked.

        Raises:
            InputError: An input of spikes holds other numbers than 0 and 1.
            NonFiniteStateError: A state is NaN or infinite after a chunk; the message names the first such step.
        """
        steps, batch = next(iter(sequences.values())).shape[:2]
        chunk, populations = program.chunk, self._graph.populations
        found = {
            place: torch.empty(steps, batch, populations[place[0]].size, device=program.device)
            for place in {*places.values()}
            if place[1] != EVENTS
        }
        parts: dict[str, list[torch.Tensor]] = {name: [] for name, index in places.values() if index == EVENTS}
        with program.bound.lock, torch.no_grad():
            program.load(state)
            for start in range(0, steps, chunk):
                count = min(chunk, steps - start)
                self._advance(program, sequences, start, state.clock, count, found)
                if program.non_finite():
                    self._raise_non_finite(program, sequences, state, start, found)
                for name, events in parts.items():
                    events.append(program.events(name, state.clock + start, count))
                    if start:
                        events[-1][:, 0] += start
            after = program.state(state, steps)
        fired = {name: torch.cat(items) if len(items) > 1 else items[0] for name, items in parts.items()}
        return {name: fired[at[0]] if at[1] == EVENTS else found[at] for name, at in places.items()}, after

    @staticmethod
    def _advance(  # noqa: PLR0913  # one argument per part
        program: PopulationProgram,
        sequences: Mapping[str, torch.Tensor],
        start: int,
        clock: int,
        count: int,
        found: Mapping[tuple[str, int | None], torch.Tensor],
    ) -> None:
        """Advance by some steps, of which ``start`` of the sequences is the first, and the clock was that of theirs."""
        part = slice(start, start + count)
        inputs = {name: x[part] for name, x in sequences.items()}
        program.run(clock + start, count, inputs, {place: item[part] for place, item in found.items()})

    def _raise_non_finite(
        self,
        program: PopulationProgram,
        sequences: Mapping[str, torch.Tensor],
        state: NetworkState,
        failed: int,
        found: Mapping[tuple[str, int | None], torch.Tensor],
    ) -> None:
        """Run again to find the step after which a state of the chunk that begins at ``failed`` is not finite."""
        program.load(state)
        for start in range(0, failed, program.chunk):
            self._advance(program, sequences, start, state.clock, program.chunk, found)
        for step in range(failed, len(next(iter(sequences.values())))):
            self._advance(program, sequences, step, state.clock, 1, found)
            for name in program.non_finite():
                self._graph.populations[name].check_finite(program.states[name], step=state.clock + step)

    def _found(self, x: torch.Tensor, places: Places) -> PopulationProgram | str:
        """Return the program of an input's batch and device and of what is recorded, or why there is none."""
        key = self._key(x, places)
        with self._lock:
            found = self._programs.get(key)
            if isinstance(found, PopulationProgram) and not found.bound.is_whole():
                found = None
            if found is None:
                found = self._made(x.shape[1], x.device, _record_of(places))
                self._programs[key] = found
                while len(self._programs) > _MOST:
                    self._programs.popitem(last=False)
            self._programs.move_to_end(key)
            return found

    def _key(self, x: torch.Tensor, places: Places) -> Hashable:
        return x.shape[1], x.device, tuple(_record_of(places)), self._facts()

    def _made(self, batch: int, device: torch.device, record: list[tuple[str, int | None]]) -> PopulationProgram | str:
        graph = self._graph
        names = [name for name in graph.order if name not in graph.inputs]
        try:
            made = PopulationProgram(graph, names, batch=batch, device=device, fed=graph.inputs, record=record)
        except Q4Error as error:
            return error.summary
        if made.bound.record.backend == "reference":
            return "; ".join(made.bound.record.reasons)
        return made

    def _facts(self) -> Hashable:
        """Return what a program depends on besides the addresses of weights."""
        facts: list[Hashable] = []
        for part in self._graph.populations.values():
            neuron: Any = part.neuron
            kind: Any = type(neuron)
            if neuron is None:
                continue
            facts += [kind, neuron.dt, "forward" in vars(neuron), hook_of(part), hook_of(neuron)]
            facts += [getattr(neuron, name, None) for name in ("reset", "threshold_inclusive", "reset_delay")]
            for value in (*neuron._buffers.values(), *neuron._parameters.values()):  # noqa: SLF001  # torch has no other way
                facts.append(_mark(value))
            facts += [vars(neuron).get(name) for name in neuron.parameter_names]
        for item in self._graph.projections.values():
            synapses: Any = item
            while synapses is not None:  # a time course, and the projection in it
                inside = getattr(synapses, "synapses", None)
                layer = None if inside is None else packed_layer(inside)
                facts += [hook_of(synapses), id(layer), id(getattr(synapses, "weight", None))]
                places = ((synapses, "reversal"), (synapses, "tau_syn"), (inside, "scale"))
                numbers = [getattr(where, name, None) for where, name in places]
                facts += [_mark(item) if isinstance(item, torch.Tensor) else item for item in numbers]
                synapses = getattr(synapses, "inner", None)
        return tuple(facts)


def _record_of(places: Places) -> list[tuple[str, int | None]]:
    return sorted({*places.values()}, key=str)


def _mark(value: torch.Tensor | None) -> Hashable:
    if value is None:
        return None
    return id(value), value.data_ptr(), 0 if value.is_inference() else value._version  # noqa: SLF001  # documented by torch
