"""Fixtures of the tests on Ray: a cluster of three raylets on this machine, and a system of it."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from q4_actors import ActorSystem
from tests.support.limits import until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    import ray
    from ray.cluster_utils import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cluster", "ray_processes", "system"]

PLUGINS = Path(__file__).parents[2] / "plugins"


def ray_processes() -> set[int]:
    """Return the numbers of the processes of Ray that this one has started, by whatever of them, and that still run."""
    parents, found, new = {}, set(), {os.getpid()}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent, *_ = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    while new:
        new = {process for process, parent in parents.items() if parent in new}
        found |= new
    return {process for process in found if _is_of_ray(process)}


def _is_of_ray(process: int) -> bool:
    with contextlib.suppress(OSError):  # as above
        words = Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8").split("\0")
        files = (word for word in words if word.endswith((".py", "/raylet", "/gcs_server")))
        return words[0].startswith("ray::") or any("/ray/" in file for file in files)
    return False


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Give a cluster of three nodes, of which no process is left."""
    with pytest.MonkeyPatch.context() as patch:
        helpers = [str(PLUGINS / name / "tests") for name in ("actors", "snn")]
        patch.setenv("PYTHONPATH", os.pathsep.join([*helpers, *sys.path]))
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 200_000_000})
        for _ in range(2):
            made.add_node(num_cpus=2, object_store_memory=200_000_000)
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()
    until(lambda: not ray_processes())


@pytest.fixture
def system(cluster: Any) -> Iterator[ActorSystem]:
    """Give a system that is stopped after the test."""
    with ActorSystem("ray", mailbox=4, restarts=2) as made:
        yield made
