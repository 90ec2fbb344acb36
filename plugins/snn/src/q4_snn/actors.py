"""Networks of actors: each population's state is a tensor that all share, and its version is the clock."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import threading
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from q4_actors import Actor, MailboxFullError, SharedWeight
from q4_nn import FilledLinear
from q4_snn.network import Projection, check_finite, event_product, packed_layer
from q4_snn.sparse import SparseProjection
from q4core import ConfigError, InputError, Session, SessionConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from q4_actors import ActorSystem, MutableTensor
    from q4_snn.network import Network
    from q4_snn.neurons import Neuron

__all__ = ["ActorNetwork"]

_LOOK_S = 0.5
"""How often whoever waits looks whether others still live."""


@attrs.frozen(eq=False)
class _Synapses:
    """What an actor computes a projection with: a shared 4-bit weight, or a dense one of its own."""

    source: str
    delay: int
    columns: int
    is_binary: bool
    weight: SharedWeight | torch.Tensor
    bias: torch.Tensor | None
    config: SessionConfig | None

    def product(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what gives [B, targets] from [B, sources]."""
        if isinstance(self.weight, torch.Tensor):
            dense, bias = self.weight, self.bias
            return lambda spikes: nn.functional.linear(spikes, dense, bias)
        layer = self.weight.layer(Session(self.config))
        filled = layer if layer.in_features == self.columns else FilledLinear(layer, self.columns)
        return event_product(filled) if self.is_binary else filled


@attrs.frozen(eq=False)
class _Part:
    """A population as an actor has it; ``rows`` is how many tensors lie before the ring of outputs.

    They are the neurons' state, then what is on its way in each sparse projection.
    """

    neuron: Neuron
    rows: int
    synapses: tuple[_Synapses | SparseProjection, ...]


class _Worker(Actor):
    """Advances some populations by one step for each message, which is the number of the step.

    A message may come twice, after a restart or where sources are late: populations that have done the step are let
    be. An actor waits for nobody who may be dead, so that it can be stopped.
    """

    def __init__(
        self,
        parts: Mapping[str, _Part],
        tensors: Mapping[str, MutableTensor],
        rows: Mapping[str, int],
        side: str | None,
    ) -> None:
        self.parts, self.tensors, self.rows, self.side = parts, tensors, rows, side
        self.products = {
            name: [item if isinstance(item, SparseProjection) else item.product() for item in part.synapses]
            for name, part in parts.items()
        }

    def on_receive(self, message: int) -> None:
        """Do a step, or what of it can be done now."""
        with torch.no_grad():
            for name, part in self.parts.items():
                if self.tensors[name].version < message and not self._advance(name, part, message):
                    return

    def _advance(self, name: str, part: _Part, step: int) -> bool:
        """Do a population's step; return False, with nothing done, if a source is late."""
        own = self.tensors[name]
        with own.read(device=self.side) as seen:
            before = seen.tensor[: part.rows].clone()
        states = len(part.neuron.states)
        rings, current = before[states:], torch.zeros(own.shape[1:], device=before.device)
        for item, product in zip(part.synapses, self.products[name], strict=True):
            source = self.tensors[item.source]
            if not source.wait(max(0, step - item.delay), timeout=_LOOK_S):
                return False
            with source.read(device=self.side) as seen:
                spikes = _output(seen.tensor, self.rows[item.source], step - item.delay)
                if isinstance(item, SparseProjection):
                    current = current + item(spikes, rings[: len(item.ring)], step)
                    rings = rings[len(item.ring) :]
                else:
                    current = current + product(spikes)
        given, *after = part.neuron(current, *before[:states])
        check_finite(name, part.neuron, after)
        with own.write(wait=True, device=self.side) as state:
            for row, value in enumerate((*after, *before[states:])):
                state[row] = value
            _output(state, part.rows, step).copy_(given)
        return True


def _output(state: torch.Tensor, rows: int, step: int) -> torch.Tensor:
    """Return what a population gave in a step, where it lies: behind its state, in a ring."""
    return state[rows + step % (len(state) - rows)]


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
    for item in network.into(name):
        add(item.source, item.delay)
        if isinstance(item, Projection):
            add(item.dense_weight(), getattr(packed_layer(item.synapses) or item.synapses, "bias", None))
        elif isinstance(item, SparseProjection):
            add(*item.state_dict().values())
    return f"neurons and weights of digest {found.hexdigest()[:16]}"


class ActorNetwork:
    """A network whose populations are advanced by actors; it gives what ``network(x)`` gives.

    A population's state and what it gave last are one shared tensor, and one update of it is one step. So the result
    does not depend on how many actors there are, who is late, or who is killed and restarted. Packed synapses are
    shared; neurons, and synapses that are not packed, are copied. ``system.checkpoint`` between two runs holds
    everything; with ``ActorSystem(resume=…)`` a network of equal neurons and weights goes on from there.

    Args:
        network: Whose projections are all ``Projection`` or ``SparseProjection``; it is not changed, and later changes
            of it don't count.
        system: Runs the actors and holds the tensors, named as the populations.
        batch: B of what it will be given.
        actors: How many, at most one for each population with neurons.
        **options: Of ``system.mutable``, for all tensors. On threads ``device="cuda"`` and
            ``unified_memory="require_unified"`` put them where CPU and GPU reach them, uncopied; they are read and
            written from the side on which the network lies.

    Raises:
        ConfigError: An argument or a projection is not legal, a population's name is taken in the system, or its
            checkpoint has steps of these populations that are not of one run.
        InputError: The checkpoint is of other neurons or weights, or of another batch.
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
            states = () if population.neuron is None else population.neuron.rest(rest)
            coming = [item.coming(batch) for item in network.into(name) if isinstance(item, SparseProjection)]
            states += tuple(row for ring in coming for row in ring)
            self._rows[name] = len(states)
            ring = [rest] * (network.depth(name) + 1)
            source = _source_of(network, name)
            self._tensors[name] = system.mutable(torch.stack([*states, *ring]), name=name, source=source, **options)
            if population.neuron is not None:
                synapses = tuple(map(self._share, network.into(name)))
                parts[name] = _Part(copy.deepcopy(population.neuron), len(states), synapses)
        versions = {name: tensor.version for name, tensor in self._tensors.items()}
        if max(versions.values()) > self.clock + 1:  # nobody is two steps ahead
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

    def _share(self, item: Any) -> _Synapses | SparseProjection:
        if isinstance(item, SparseProjection):
            return copy.deepcopy(item)
        if not isinstance(item, Projection):
            rule = "a Projection or SparseProjection"
            raise ConfigError("ActorNetwork", name="projection", rule=rule, value=type(item).__name__)
        packed = packed_layer(item.synapses)
        common = (item.source, item.delay, item.source_size, item.is_binary)
        if packed is None:
            bias = getattr(item.synapses, "bias", None)
            return _Synapses(*common, item.dense_weight(), None if bias is None else bias.detach().clone(), None)
        served = packed.diagnostics()  # actors ask for what this layer was asked for
        config = SessionConfig(
            device=str(served.device),
            backend=served.override,
            compute_path=served.compute_path,
            activation_precision=served.request.precision,
        )
        return _Synapses(*common, self._system.share(packed), None, config)

    @property
    def clock(self) -> int:
        """How many steps all populations have done."""
        return min(tensor.version for tensor in self._tensors.values())

    def __call__(
        self, x: torch.Tensor | Mapping[str, torch.Tensor], record: Sequence[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Run over time, from where the last call ended. Calls of several threads run one after the other.

        Args:
            x: As ``Network`` takes it, with the batch told.
            record: As ``Network`` takes it.

        Returns:
            Each name of ``record`` → [T, B, n].

        Raises:
            InputError: x does not fit the inputs, or ``record`` names what is not there.
            ActorDeadError: An actor failed more often than its system allows: its error is told. It may be a
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
                    lies = _output(seen.tensor, self._rows[population], step) if state is None else seen.tensor[state]
                    found[name].append(lies.clone())
        return {name: torch.stack(steps) for name, steps in found.items()}

    def _step(self, step: int, inputs: Mapping[str, torch.Tensor]) -> None:
        """Let everybody do a step: inputs come when all have done the last one, so nobody is two steps ahead."""
        for name, value in inputs.items():
            if self._tensors[name].version < step:
                with self._tensors[name].write(wait=True, device=self._side) as state:
                    _output(state, 0, step).copy_(value)
        for actor in self._actors:
            actor.tell(step)
        for tensor in self._tensors.values():
            while not tensor.wait(step, timeout=_LOOK_S):
                self._system.check()
                for actor in self._actors:  # who failed has lost the message, and who gave up waiting needs another
                    with contextlib.suppress(MailboxFullError):
                        actor.tell(step, timeout=0)
