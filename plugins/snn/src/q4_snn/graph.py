"""The graph of populations and projections: sources, targets, and the order of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4_snn.projection import Synapses, lacking
from q4core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from q4_snn.population import Population

__all__ = ["Graph"]


class Graph:
    """Populations, the projections between them, and the order in which populations step.

    Args:
        populations: With names unlike one another; those without a neuron are inputs.
        projections: Between them.

    Raises:
        ConfigError: A projection has not what ``Synapses`` names, a name is there twice or unknown, sizes don't fit, an
            input has a projection into it, or projections without delay form a cycle.
    """

    def __init__(self, populations: Sequence[Population], projections: Sequence[Synapses]) -> None:
        for item in projections:
            if missing := lacking(item):
                rule = f"a module with {', '.join(Synapses.__annotations__)}"
                value = f"a {type(item).__name__} without {', '.join(missing)}"
                raise ConfigError("network", name="projection", rule=rule, value=value)
        for what, names in (
            ("population", [item.name for item in populations]),
            ("projection", [item.name for item in projections]),
        ):
            if twice := {name for name in names if names.count(name) > 1}:
                hint = "Give it name=." if what == "projection" else None
                raise ConfigError("network", name=f"{what}s", rule="of different names", value=min(twice), hint=hint)
        self.populations = {item.name: item for item in populations}
        self.projections = {item.name: item for item in projections}
        self.inputs = tuple(name for name, item in self.populations.items() if item.neuron is None)
        """Names of the populations without a neuron."""
        read = {item.source for item in projections if item.source != item.target}
        self.outputs = tuple(name for name in self.populations if name not in read)
        """Names of the populations that no other one takes spikes of."""
        if not self.inputs:
            raise ConfigError("network", name="populations", rule="at least one without a neuron, its input", value=[])
        self._into: dict[str, list[Synapses]] = {name: [] for name in self.populations}
        self.depths: dict[str, int] = {}
        """Name of each population with delayed projections → the longest delay of what it gives, in steps."""
        for item in projections:
            self._check_projection(item)
            self._into[item.target].append(item)
            if item.delay:
                self.depths[item.source] = max(self.depths.get(item.source, 0), item.delay)
            if getattr(item, "sees_target", False):
                self.depths[item.target] = max(self.depths.get(item.target, 0), 1)
        self.order = tuple(self._sorted())
        """Names of the populations, each after those that it needs in the same step."""

    def _check_projection(self, item: Synapses) -> None:
        what = f"projection {item.name!r}"
        for role in ("source", "target"):
            name, size = getattr(item, role), getattr(item, f"{role}_size")
            if name not in self.populations:
                rule = f"one of the network's populations, {', '.join(self.populations)}"
                raise ConfigError(what, name=role, rule=rule, value=name)
            if self.populations[name].size != size:
                rule = f"of {self.populations[name].size} neurons, as population {name!r} is"
                raise ConfigError(what, name=role, rule=rule, value=size)
        neuron = self.populations[item.target].neuron
        if neuron is None:
            raise ConfigError(what, name="target", rule="a population with a neuron, not an input", value=item.target)
        if (dt := getattr(item, "dt", neuron.dt)) != neuron.dt:
            rule = f"{neuron.dt:g} s, as of population {item.target!r}"
            raise ConfigError(what, name="dt", rule=rule, value=dt)
        if getattr(item, "reversal", None) is not None and "mem" not in neuron.states:
            rule = "neurons with a state mem, where conductances lead"
            raise ConfigError(what, name="target", rule=rule, value=f"{item.target}, of {type(neuron).__name__}")

    def _sorted(self) -> list[str]:
        """Return the populations so that each comes after those that it needs in the same step."""
        order: list[str] = []
        left = list(self.populations)
        while left:
            ready = [name for name in left if all(item.delay or item.source in order for item in self._into[name])]
            if not ready:
                raise self._cycle(left)
            order.append(ready[0])
            left.remove(ready[0])
        return order

    def _cycle(self, left: Sequence[str]) -> ConfigError:
        path = [left[0]]
        while path.count(path[-1]) < 2:  # noqa: PLR2004  # until one is met again
            sources = [item.source for item in self._into[path[-1]] if not item.delay and item.source in left]
            path.append(sources[0])
        cycle = "->".join(reversed(path[path.index(path[-1]) :]))
        hint = "Give one of them delay=1."
        return ConfigError("network", name="projections", rule="free of cycles without delay", value=cycle, hint=hint)

    def into(self, name: str) -> Sequence[Synapses]:
        """Return the projections into a population."""
        return tuple(self._into[name])

    def closes_cycle(self, projection: Synapses) -> bool:
        """Return whether a projection leads back to a population that it depends on, and is not before it in a step."""
        reached, left = set(), [projection.target]
        while left:
            name = left.pop()
            if name not in reached:
                reached.add(name)
                left += [item.target for item in self.projections.values() if item.source == name]
        is_back = self.order.index(projection.source) >= self.order.index(projection.target)
        return is_back and projection.source in reached
