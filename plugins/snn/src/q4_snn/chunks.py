"""Inputs of a long run, some steps at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from q4_snn.sources import Source
from q4core import ConfigError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from q4_snn.recorders import Recorder

__all__ = ["Inputs", "chunks", "run_chunks"]

Inputs = Source | Iterable[Any] | Mapping[str, Source | Iterable[torch.Tensor]]
"""A source; an iterable of steps, each [B, n] or a mapping of inputs' names to it; or a mapping of names to these."""


def chunks(
    inputs: Inputs, names: Sequence[str], *, first: int, steps: int | None, at_once: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the inputs' names → [T, B, n], with T of at most ``at_once``.

    Args:
        inputs: As ``Network.run`` takes them.
        names: Of the network's inputs.
        first: The step at which sources begin.
        steps: How many in all; None to end with the first iterable.
        at_once: Steps of a chunk.

    Raises:
        ConfigError: A number is not legal, or no input ends and ``steps`` is None.
        InputError: Inputs are missing, or have other steps than [B, n], or one ends before another or before ``steps``.
    """
    for name, value, least in (("steps", steps, 1), ("chunk", at_once, 1)):
        if not (name == "steps" and value is None) and (not _is_whole(value) or value < least):  # type: ignore[operator]  # a number
            raise ConfigError("network", name=name, rule=f"a whole number, {least} or more", value=value)
    feeds = _feeds(inputs, names)
    if steps is None and all(isinstance(feed, Source) for feed in feeds.values()):
        raise ConfigError("network", name="steps", rule="given, as sources have no end", value=None)
    rests = {name: iter(feed) for name, feed in feeds.items() if not isinstance(feed, Source)}
    done = 0
    while steps is None or done < steps:
        count = at_once if steps is None else min(at_once, steps - done)
        taken = {name: [*itertools.islice(rest, count)] for name, rest in rests.items()}
        lengths = {name: len(items) for name, items in taken.items()}
        found = min(lengths.values(), default=count)
        if len({*lengths.values()}) > 1 or (steps is not None and found < count):
            ends = {name: done + length for name, length in lengths.items()}
            rule = "of one length" if steps is None else f"of {steps} steps or more"
            raise InputError("network", name="inputs", rule=rule, value=ends)
        if not found:
            return
        yield {
            name: feed.draw(first + done, found) if isinstance(feed, Source) else _stacked(name, taken[name])
            for name, feed in feeds.items()
        }
        done += found
        if found < count:
            return


def run_chunks(
    call: Callable[[dict[str, torch.Tensor], tuple[str, ...]], Mapping[str, torch.Tensor]],
    parts: Iterable[dict[str, torch.Tensor]],
    recorders: Sequence[Recorder],
    first: int,
    firing: Container[str],
) -> int:
    """Call for each chunk with what recorders want of it, and give it to them; return the number of steps.

    Args:
        call: Inputs and names of ``record`` → what a network's call returns of these.
        parts: Inputs of each chunk.
        recorders: What to record.
        first: The number of steps before.
        firing: Populations whose events can be asked for.
    """
    done = 0
    for part in parts:
        length = len(next(iter(part.values())))
        wanted = [item for item in recorders if item.wants(first + done, length)]
        names = [f"{item.what}.events" if item.takes_events(firing) else item.what for item in wanted]
        found = call(part, tuple(dict.fromkeys(names)))
        for name, item in zip(names, wanted, strict=True):
            if item.takes_events(firing):
                item.add_events(first + done, length, found[name])
            else:
                item.add(first + done, found[name])
        done += length
    return done


def _feeds(inputs: Inputs, names: Sequence[str]) -> dict[str, Any]:
    """Return what feeds each input; steps that are mappings are taken apart."""
    if isinstance(inputs, Mapping):
        if {*inputs} != {*names}:
            rule = f"a mapping of inputs {', '.join(names)}"
            raise InputError("network", name="inputs", rule=rule, value=sorted(map(str, inputs)))
        return {name: inputs[name] for name in names}
    if isinstance(inputs, Source) and len(names) > 1:
        rule = f"a mapping of inputs {', '.join(names)}"
        raise InputError("network", name="inputs", rule=rule, value=type(inputs).__name__)
    if isinstance(inputs, Source):
        return {names[0]: inputs}
    if not hasattr(inputs, "__iter__"):
        rule = "a source, an iterable of steps, or a mapping of inputs to these"
        raise InputError("network", name="inputs", rule=rule, value=type(inputs).__name__)
    copies = itertools.tee(inputs, len(names))
    return {name: map(_part_of(name, names), copy) for name, copy in zip(names, copies, strict=True)}


def _part_of(name: str, names: Sequence[str]) -> Callable[[Any], torch.Tensor]:
    """Return what takes one input's part of a step."""

    def part(step: Any) -> torch.Tensor:
        if isinstance(step, Mapping):
            if {*step} != {*names}:
                rule = f"a mapping of inputs {', '.join(names)}"
                raise InputError("network", name="inputs", rule=rule, value=sorted(map(str, step)))
            step = step[name]
        elif len(names) > 1:
            rule = f"a mapping of inputs {', '.join(names)}"
            raise InputError("network", name="inputs", rule=rule, value=type(step).__name__)
        if not isinstance(step, torch.Tensor):
            raise InputError(f"population {name!r}", name="input", rule="a tensor [B, n]", value=type(step).__name__)
        return step

    return part


def _stacked(name: str, items: Sequence[torch.Tensor]) -> torch.Tensor:
    for item in items:
        if not isinstance(item, torch.Tensor) or item.dim() != 2 or item.shape != items[0].shape:  # noqa: PLR2004  # [B, n]
            value = [*item.shape] if isinstance(item, torch.Tensor) else type(item).__name__
            raise InputError(f"population {name!r}", name="input", rule="tensors [B, n] of one shape", value=value)
    return torch.stack([*items])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
