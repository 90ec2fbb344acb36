"""Ray: versions in the object store, and an actor that holds the reference to the newest one."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.memory.actors import summary
from benchmarks.memory.ways import SAMPLE, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.memory.actors import Scene

__all__ = ["cluster", "facts", "samples"]

STORE_BYTES = 1 << 30


def facts() -> dict[str, Any]:
    """Return the installed version, or that there is none."""
    try:
        return {"installed": True, "version": importlib.metadata.version("ray")}
    except importlib.metadata.PackageNotFoundError:
        return {"installed": False, "why": "not installed"}


class _Newest:
    """Holds the reference to the newest version."""

    def __init__(self) -> None:
        self.boxed: list[Any] = []

    def set(self, boxed: list[Any]) -> None:
        self.boxed = boxed  # in a list, or Ray would fetch what it names

    def get(self) -> list[Any]:
        return self.boxed


class _Writer:
    def __init__(self, newest: Any, elements: int) -> None:
        torch.set_num_threads(1)
        self.newest, self.state = newest, torch.zeros(elements)
        self.publish()

    def publish(self) -> None:
        import ray  # noqa: PLC0415  # not installed everywhere

        ray.get(self.newest.set.remote([ray.put(self.state.numpy())]))

    def run(self, seconds: float) -> dict[str, float]:
        count, began = 0, time.perf_counter()
        while time.perf_counter() < began + seconds:
            self.state.add_(1.0)
            self.publish()
            count += 1
        took = time.perf_counter() - began
        return {"count": count, "per_s": count / took, "bytes_copied": count * self.state.nbytes}


class _Reader:
    def __init__(self, newest: Any) -> None:
        torch.set_num_threads(1)
        self.newest, self.oldest = newest, 0.0

    def read(self) -> None:
        import ray  # noqa: PLC0415  # not installed everywhere

        (boxed,) = ray.get(self.newest.get.remote())
        array = ray.get(boxed)  # in the store's memory, uncopied
        self.oldest = check(torch.tensor(array[:: max(1, len(array) // SAMPLE)]), self.oldest)

    def run(self, seconds: float, pause_s: float) -> dict[str, float]:
        times, began = [], time.perf_counter()
        while time.perf_counter() < began + seconds:
            started = time.perf_counter()
            self.read()
            times.append(time.perf_counter() - started)
            time.sleep(pause_s)
        took = time.perf_counter() - began
        median = statistics.median(times) * 1e6
        return {"per_s": len(times) / took, "median_us": median, "longest_us": max(times) * 1e6}


@contextlib.contextmanager
def cluster(cpus: int) -> Iterator[None]:
    """Run Ray's processes in the block; they use the machine for as long as they live."""
    import ray  # noqa: PLC0415  # not installed everywhere

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    options: dict[str, Any] = {"include_dashboard": False, "logging_level": logging.CRITICAL, "log_to_driver": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=cpus, object_store_memory=STORE_BYTES, **options)
    try:
        yield
    finally:
        ray.shutdown()


def samples(scene: Scene, seconds: float, rounds: int) -> list[dict[str, float]]:
    """Run one writer and some readers, and return the summary of each round."""
    import ray  # noqa: PLC0415  # not installed everywhere

    newest = ray.remote(_Newest).remote()
    writer = ray.remote(_Writer).remote(newest, scene.elements)
    ray.get(writer.publish.remote())
    readers = [ray.remote(_Reader).remote(newest) for _ in range(scene.readers)]
    ray.get([one.read.remote() for one in readers])
    found = []
    for _ in range(rounds):
        runs = [one.run.remote(seconds, scene.pause_s) for one in readers]
        updates, *rest = ray.get([writer.run.remote(seconds), *runs])
        found.append(summary(updates, rest))
    for actor in (writer, newest, *readers):
        ray.kill(actor)
    return found
