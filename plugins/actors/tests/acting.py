"""Actors for the tests, where every process can import them."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from q4_actors import Actor, ActorSystem
from tests.support.limits import scaled

if TYPE_CHECKING:
    import pytest

    from q4_actors import ActorRef, MutableTensor


def actor_events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of actors that were logged, with their fields."""
    found = [record for record in caplog.records if getattr(record, "q4_event", "").startswith("q4.actor.")]
    return [(vars(record)["q4_event"].removeprefix("q4.actor."), vars(record)["q4_fields"]) for record in found]


class Echo(Actor):
    """Answers what it is asked, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def on_receive(self, message: Any) -> Any:
        """Answer, or do what the message says."""
        self.count += 1
        facts: dict[str, Any] = {
            "count": self.count,
            "name": self.name,
            "lambda": lambda: None,
            "generator": (number for number in range(7, 10)),
            "gone": Gone(),
            "config": q4.resolve_config().activation_precision,
            "threads": torch.get_num_threads(),
            "pid": os.getpid(),
        }
        match message:
            case ("raise", text):
                raise ValueError(text)
            case ("exit", code):
                raise SystemExit(code)
            case ("sleep", seconds):
                time.sleep(seconds)
        return facts.get(message, message) if isinstance(message, str) else message


class Nesting(Actor):
    """Asks an actor of a system of its own what it is asked."""

    def __init__(self, runtime: str) -> None:
        self.system = ActorSystem(runtime)
        self.inner = self.system.spawn(Echo, name="inner")

    def on_receive(self, message: Any) -> Any:
        """Pass on; and say in which processes this is done."""
        return os.getpid(), self.inner.ask("pid", timeout=scaled(30.0)), self.inner.ask(message, timeout=scaled(30.0))

    def on_stop(self) -> None:
        """Stop the inner system."""
        self.system.stop()


class Starting(Actor):
    """Fails while it starts, unless a file is there."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.touch()
            raise OSError("not there yet")

    def on_receive(self, message: Any) -> Any:
        """Answer."""
        return message


class Friend(Actor):
    """Asks others."""

    def __init__(self, other: ActorRef | None = None) -> None:
        self.other = other

    def on_receive(self, message: Any) -> Any:
        """Ask the one that it has, or the one that comes with the message."""
        if isinstance(message, tuple):
            other, question = message
            return other.ask(question, timeout=scaled(20.0))
        assert self.other is not None
        return self.other.ask(message, timeout=scaled(20.0))


class Holding(Actor):
    """Has a large argument."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def on_receive(self, message: Any) -> float:
        """Return its sum."""
        return float(self.tensor.sum())


class Unsendable(Actor):
    """Raises errors that can't be pickled."""

    def on_receive(self, message: Any) -> Any:
        """Raise one."""
        raise Pair(1, 2) if message == "pair" else Odd(threading.Lock())


class Gone:
    """Can be sent, and not be unpickled."""

    def __reduce__(self) -> Any:
        """Pickle as what raises."""
        return _vanish, ()


def _vanish() -> None:
    raise q4.LifecycleError("it has vanished")


class Odd(Exception):  # noqa: N818  # a test's own
    """Holds what can't be pickled."""


class Pair(Exception):  # noqa: N818  # as above
    """Can be pickled, and not be made again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Stepper(Actor):
    """Computes a state from its own and its neighbours', step by step; the version of its state is its clock."""

    def __init__(self, own: MutableTensor, other: MutableTensor, fatal: tuple[int, ...] = (), dies: Any = None) -> None:
        self.own, self.other, self.fatal, self.dies = own, other, fatal, dies

    def on_receive(self, step: int) -> int:
        """Do a step, unless it is done."""
        if self.own.version >= step:
            return self.own.version
        with self.other.read() as seen:
            message = seen.tensor.clone()
        with self.own.write(wait=True) as state:
            state.mul_(0.9).add_(message.roll(1), alpha=0.3).add_(step * 0.01)
            if self.dies is not None and step in self.fatal:
                with self.dies.write(wait=True) as told:
                    is_first = not told[step]
                    told[step] = 1
                if is_first:
                    os.kill(os.getpid(), signal.SIGKILL)  # in the middle of its update
        return step


class Numbers:
    """What lies in tensors alone."""

    def __init__(self, factor: int, index: torch.Tensor, values: torch.Tensor) -> None:
        self.factor, self.index, self.values = factor, index, values

    def shared_form(self) -> tuple[Any, list[torch.Tensor]]:
        """Return what makes it, and its tensors."""
        return functools.partial(Numbers, self.factor), [self.index, self.values]

    def total(self) -> torch.Tensor:
        """Return a sum of what it holds."""
        return self.factor * self.values[self.index].sum()


class Adding(Actor):
    """Computes with shared numbers."""

    def __init__(self, shared: Any) -> None:
        self.numbers = shared.layer()

    def on_receive(self, message: Any) -> Any:
        """Return a product, or whether the numbers lie in shared memory."""
        if message == "is shared":
            lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
            spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines if "q4core-" in line]
            return any(low <= self.numbers.values.data_ptr() < high for low, high in spans)
        return float(self.numbers.total() * message)


class Layered(Actor):
    """Computes with a shared weight."""

    def __init__(self, weight: Any) -> None:
        self.layer = weight.layer()

    def on_receive(self, message: Any) -> Any:
        """Return a product, or where the layer's buffers lie."""
        if message == "buffers":
            lines = open("/proc/self/smaps", encoding="utf-8").read()  # noqa: SIM115, PTH123  # short
            return "q4core-" in lines
        if isinstance(message, tuple):
            _, weight, x = message
            self.layer = weight.layer()
            return self.layer(x)
        return self.layer(message)
