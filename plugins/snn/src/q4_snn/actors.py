"""Networks of actors: each population's state is a shared tensor, and its version is the clock."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import threading
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4_actors import Actor, MailboxFullError
from q4_snn.network import advance
from q4_snn.projection import coming_of, numbers_of, product_of
from q4_snn.sparse import SparseSynapses
from q4core import ConfigError, InputError, Q4Linear, Session, SessionConfig

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from q4_actors import ActorSystem, MutableTensor, SharedWeight
    from q4_snn.network import Arrival, Network
    from q4_snn.population import Population
    from q4_snn.projection import Product, Synapses

__all__ = ["ActorNetwork"]

_POLL_S = 0.5
"""Interval at which a waiting side checks that the others are alive."""


@attrs.frozen(eq=False)
class _Shared:
    """A projection as an actor gets it: a copy, whose packed layers are in shared memory.

    Args:
        item: The copy, with a place for each packed layer.
        layers: Name of the place → the shared weight, and what the layer was asked for.
        coming: Shape of what is on its way; None for a projection that has no such tensor.
    """

    item: Synapses
    layers: Mapping[str, tuple[SharedWeight, SessionConfig]]
    coming: tuple[int, ...] | None

    def product(self) -> Product:
        """Return what computes the projection in this process."""
        module: Any = self.item
        for name, (weight, config) in self.layers.items():
            module.set_submodule(name, weight.layer(Session(config)))
        return product_of(self.item)


@attrs.frozen(eq=False)
class _Part:
    """A population as an actor has it; ``rows`` is the number of tensors before the ring of outputs.

    They are the neurons' state, then what is on its way in each projection, of which the last row may be filled up.
    """

    population: Population
    rows: int
    into: tuple[_Shared, ...]


class _Worker(Actor):
    """Advances some populations by one step for each message, which is the number of the step.

    A message may come twice, after a restart or where sources are late: a population that has done the step is not
    advanced again. An actor waits for others with a timeout, so that it can be stopped.
    """

    def __init__(
        self,
        parts: Mapping[str, _Part],
        tensors: Mapping[str, MutableTensor],
        rows: Mapping[str, int],
        side: str | None,
    ) -> None:
        self.parts, self.tensors, self.rows, self.side = parts, tensors, rows, side
        with torch.no_grad():
            self.products = {name: [item.product() for item in part.into] for name, part in parts.items()}

    def on_receive(self, message: int) -> None:
        """Do a step, or what of it can be done now."""
        with torch.no_grad():
            for name, part in self.parts.items():
                if self.tensors[name].version < message:
                    for shared in part.into:
                        needed = max(0, message - shared.item.delay)
                        if not self.tensors[shared.item.source].wait(needed, timeout=_POLL_S):
                            return
                    self._advance(name, part, message)

    def _advance(self, name: str, part: _Part, step: int) -> None:
        """Do a population's step; its sources have done theirs."""
        own, population = self.tensors[name], part.population
        with own.read(device=self.side) as seen:
            before = seen.tensor[: part.rows].clone()
            rest = torch.zeros_like(seen.tensor[0])
        states = 0 if population.neuron is None else len(population.neuron.states)
        with contextlib.closing(self._arrivals(name, part, before[states:], step)) as arrivals:
            given, *after = advance(population, arrivals, tuple(before[:states]), rest=rest, clock=step - 1)
        population.check_finite(after, step=step - 1)
        with own.write(wait=True, device=self.side) as state:
            for row, value in enumerate((*after, *before[states:])):
                state[row] = value
            _output(state, part.rows, step).copy_(given)

    def _arrivals(self, name: str, part: _Part, rings: torch.Tensor, step: int) -> Generator[Arrival]:
        """Yield what reaches a population, each read while it is used; ``rings`` holds what is on its way."""
        for shared, product in zip(part.into, self.products[name], strict=True):
            item, coming = shared.item, None
            if shared.coming is not None:
                coming = rings.reshape(-1)[: math.prod(shared.coming)].view(shared.coming)
                rings = rings[_rows_of(shared.coming, rings[0]) :]
            with self.tensors[item.source].read(device=self.side) as seen:
                spikes = _output(seen.tensor, self.rows[item.source], step - item.delay)
                yield item, product, spikes, coming


def _output(state: torch.Tensor, rows: int, step: int) -> torch.Tensor:
    """Return a view of a population's output in a step: after its state, in a ring."""
    return state[rows + step % (len(state) - rows)]


def _rows_of(shape: tuple[int, ...], row: torch.Tensor) -> int:
    """Return how many rows a tensor of a shape takes, of which the last may be filled up."""
    return -(-math.prod(shape) // row.numel())


def _as_rows(coming: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what is on its way as rows of a population's state, the last one filled up with zeros."""
    count = _rows_of(tuple(coming.shape), row)
    filled = nn.functional.pad(coming.reshape(-1), (0, count * row.numel() - coming.numel()))
    return tuple(filled.view(count, *row.shape))


def _source_of(network: Network, name: str) -> str | None:
    """Return what identifies the neurons of a population and the synapses into it; None for an input."""
    neuron = network.population(name).neuron
    if neuron is None:
        return None
    found = hashlib.sha256()

    def add(*values: Any) -> None:
        for value in values:
            is_tensor = isinstance(value, torch.Tensor)
            found.update(repr((value.dtype, value.shape) if is_tensor else value).encode())
            if is_tensor:
                found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())

    add(type(neuron).__name__, neuron.dt)
    add(*(getattr(neuron, option, None) for option in ("reset", "threshold_inclusive", "reset_delay")))
    add(*(item for parameter in neuron.parameter_names for item in (parameter, getattr(neuron, parameter))))
    for item in network.graph.into(name):
        add(item.source, item.delay, *numbers_of(item))
    return f"neurons and weights of digest {found.hexdigest()[:16]}"


class ActorNetwork:
    """A network whose populations are advanced by actors; it gives what ``network(x)`` gives.

    A population's state and what it gave last are one shared tensor, and one update of it is one step. So the result
    does not depend on how many actors there are, who is late, or who is killed and restarted. Packed layers of
    projections are shared; neurons, and synapses that are not packed, are copied. ``system.checkpoint`` between two
    runs holds everything; with ``ActorSystem(resume=…)`` a network of equal neurons and weights resumes from there.

    Args:
        network: It is not changed, and later changes of it have no effect. Its projections may be of any class with
            the attributes of ``Synapses``. Processes get them pickled, hooks included: a projection with a hook that
            can't be pickled, such as a local function or a lambda, needs actors on threads.
        system: Runs the actors and holds the tensors, named as the populations.
        batch: B of what it will be given.
        actors: How many, at most one for each population with neurons.
        **options: Of ``system.mutable``, for all tensors. On threads ``device="cuda"`` and
            ``unified_memory="require_unified"`` put them where CPU and GPU reach them, uncopied; they are read and
            written from the device on which the network is.

    Raises:
        ConfigError: An argument is not legal, what is on its way in a projection has another dtype than the state, a
            population's name is taken in the system, or its checkpoint has steps of these populations that are not of
            one run.
        InputError: The checkpoint is of other neurons or weights, or of another batch.
        MessageError: Actors are processes, and a projection or one of its hooks can't be pickled.
        UnifiedMemoryError: Required, and impossible.
    """

    def __init__(self, network: Network, system: ActorSystem, *, batch: int, actors: int = 1, **options: Any) -> None:
        self._network, self._system, self._batch = network, system, batch
        self._turn = threading.Lock()
        names = [name for name in network.order if name not in network.inputs]
        for what, value, most in (("batch", batch, None), ("actors", actors, len(names))):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most and value > most):
                rule = f"1 … {most}" if most else "a positive whole number"
                raise ConfigError("ActorNetwork", name=what, rule=rule, value=value)
        home = next((item.device for item in (*network.parameters(), *network.buffers())), torch.device("cpu"))
        parts = {}
        self._rows: dict[str, int] = {}
        self._tensors: dict[str, MutableTensor] = {}
        for name in network.order:
            population = network.population(name)
            rest = torch.zeros(batch, population.size, device=home)
            into = tuple(self._share(item, rest) for item in network.graph.into(name))
            states = () if population.neuron is None else population.neuron.rest(rest)
            for item in network.graph.into(name):
                if (coming := coming_of(item, batch)) is not None:
                    states += _as_rows(coming, rest)
            self._rows[name] = len(states)
            ring = [rest] * (network.graph.depths.get(name, 0) + 1)
            source = _source_of(network, name)
            self._tensors[name] = system.mutable(torch.stack([*states, *ring]), name=name, source=source, **options)
            if population.neuron is not None:
                parts[name] = _Part(copy.deepcopy(population), len(states), into)
        versions = {name: tensor.version for name, tensor in self._tensors.items()}
        if max(versions.values()) > self.clock + 1:  # no population is two steps ahead
            hint = "Resume from a checkpoint of a network with these populations."
            raise ConfigError("ActorNetwork", name="steps", rule="those of one run", value=versions, hint=hint)
        is_apart = home.type == "cpu" and any(tensor.device.type != "cpu" for tensor in self._tensors.values())
        self._side = "cpu" if is_apart else None
        self._actors = [
            system.spawn(
                _Worker,
                {name: parts[name] for name in names[index::actors]},
                self._tensors,
                self._rows,
                self._side,
                name=f"neurons-{index}",
            )
            for index in range(actors)
        ]

    def _share(self, item: Synapses, row: torch.Tensor) -> _Shared:
        """Return a projection for an actor; ``row`` is one of the state of the population that it leads to."""
        module: Any = item
        packed = {
            name: layer
            for name, layer in module.named_modules(remove_duplicate=False)
            if name and isinstance(layer, (Q4Linear, SparseSynapses))
        }
        coming = coming_of(item, len(row))
        if coming is not None and (coming.dtype, coming.device) != (row.dtype, row.device):
            rule, value = f"{row.dtype} on {row.device}", f"{coming.dtype} on {coming.device}"
            raise ConfigError(f"projection {item.name!r}", name="coming", rule=rule, value=value)
        copied = copy.deepcopy(item, {id(layer): nn.Identity() for layer in packed.values()})
        shared = {id(layer): self._share_layer(layer) for layer in packed.values()}  # once, however many names it has
        layers = {name: shared[id(layer)] for name, layer in packed.items()}
        return _Shared(copied, layers, None if coming is None else tuple(coming.shape))

    def _share_layer(self, layer: Q4Linear | SparseSynapses) -> tuple[SharedWeight, SessionConfig]:
        """Return a packed layer's weight for all actors, and the session that asks for what the layer was asked for."""
        if isinstance(layer, SparseSynapses):
            return self._system.share(layer), SessionConfig()
        record = layer.diagnostics()
        config = SessionConfig(
            device=str(record.device),
            backend=record.override,
            compute_path=record.compute_path,
            activation_precision=record.request.precision,
        )
        return self._system.share(layer), config

    @property
    def clock(self) -> int:
        """The number of steps that all populations have done."""
        return min(tensor.version for tensor in self._tensors.values())

    def __call__(
        self, x: torch.Tensor | Mapping[str, torch.Tensor], record: Sequence[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Run over time, from where the last call ended. Calls of several threads run one after the other.

        Args:
            x: As ``Network`` takes it, with the batch of ``batch``.
            record: As ``Network`` takes it.

        Returns:
            Each name of ``record`` → [T, B, n].

        Raises:
            InputError: x does not fit the inputs, or ``record`` names what is not there.
            ActorDeadError: An actor failed more often than its system allows; the message has its error. It may be a
                ``NonFiniteStateError`` of a population, whose state is then that of the step before.
        """
        sequences, places = self._network.check_run(x, record)
        for name, value in sequences.items():
            if value.shape[1] != self._batch or value.shape[2] != self._network.population(name).size:
                rule = f"of shape [T, {self._batch}, {self._network.population(name).size}]"
                raise InputError(f"population {name!r}", name="input", rule=rule, value=list(value.shape))
        with self._turn:
            return self._run(sequences, places)

    def _run(
        self, sequences: Mapping[str, torch.Tensor], places: Mapping[str, tuple[str, int | None]]
    ) -> dict[str, torch.Tensor]:
        found: dict[str, list[torch.Tensor]] = {name: [] for name in places}
        start = self.clock
        for index in range(len(next(iter(sequences.values())))):
            step = start + 1 + index
            self._step(step, {name: value[index] for name, value in sequences.items()})
            for name, (population, state) in places.items():
                with self._tensors[population].read(device=self._side) as seen:
                    view = _output(seen.tensor, self._rows[population], step) if state is None else seen.tensor[state]
                    found[name].append(view.clone())
        return {name: torch.stack(steps) for name, steps in found.items()}

    def _step(self, step: int, inputs: Mapping[str, torch.Tensor]) -> None:
        """Run one step of all: inputs are written when all have done the last one, so none is two steps ahead."""
        for name, value in inputs.items():
            if self._tensors[name].version < step:
                with self._tensors[name].write(wait=True, device=self._side) as state:
                    _output(state, 0, step).copy_(value)
        for actor in self._actors:
            actor.tell(step)
        for tensor in self._tensors.values():
            while not tensor.wait(step, timeout=_POLL_S):
                self._system.check()
                for actor in self._actors:  # one that failed has lost the message, one that timed out needs another
                    with contextlib.suppress(MailboxFullError):
                        actor.tell(step, timeout=0)
