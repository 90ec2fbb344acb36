"""Tests of weights that actors share, and of the memory that they have."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from acting import Adding, Layered, Numbers, actor_events

import q4core as q4
from q4_actors import ActorSystem, share
from tests.support.limits import scaled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are for Linux")


@pytest.fixture(scope="module")
def layer() -> q4.Q4Linear:
    """Return a prepared layer with a bias."""
    torch.manual_seed(0)
    weight = q4.quantize(torch.randn(512, 1024), "nf4")
    return q4.Session(q4.SessionConfig(device="cpu")).linear(weight, torch.randn(512), name="shared")


@pytest.mark.parametrize("runtime", ["threads", "processes"])
def test_actors_compute_with_one_weight(runtime: str, layer: q4.Q4Linear) -> None:
    """Actors give the layer's own bits, over memory that all of them map."""
    x = torch.randn(3, 1024)
    with ActorSystem(runtime) as system:
        weight = system.share(layer)
        refs = [system.spawn(Layered, weight, name=f"a{index}") for index in range(3)]
        assert all(torch.equal(ref.ask(x, timeout=scaled(60.0)), layer(x)) for ref in refs)
        report = system.memory_report()
        assert len({one.pid for one in report.values()}) == (1 if runtime == "threads" else 3)
        assert all(one.private_bytes > 0 and one.shared_bytes > 0 for one in report.values())
        if runtime == "processes":
            assert all(ref.ask("buffers", timeout=scaled(20.0)) for ref in refs)
            refs[0].stop()
            assert set(system.memory_report()) == {"a1", "a2"}
    with pytest.raises(q4.LifecycleError, match=r"closed|vanished"):
        weight.layer()


def test_actors_share_a_large_weight() -> None:
    """Actors that have used a weight of 75 MB have grown by less than 5 % of a copy each."""
    torch.manual_seed(0)
    blocks = q4.quantize(torch.randn(4096, 1024), "nf4")
    large = q4.Session(q4.SessionConfig(device="cpu")).linear(q4.cat([blocks] * 32), name="large")
    x = torch.randn(1, 1024)
    with ActorSystem("processes") as system:
        weight = system.share(large, canonical=False)
        small = system.share(blocks, canonical=False)  # what a process needs once is not the large one's
        refs = [system.spawn(Layered, small, name=f"a{index}") for index in range(4)]
        for ref in refs:
            ref.ask(x, timeout=scaled(60.0))
        before = system.memory_report()
        for ref in refs:
            ref.ask(("take", weight, x), timeout=scaled(60.0))
        after = system.memory_report()
        grown = sum(after[name].private_bytes - before[name].private_bytes for name in after)
        assert grown < 0.05 * len(refs) * weight.nbytes
        assert all(after[name].shared_bytes - before[name].shared_bytes > 0.9 * weight.nbytes for name in after)


def test_other_backend_prepares_anew(layer: q4.Q4Linear, caplog: pytest.LogCaptureFixture) -> None:
    """Where another backend serves, the weight is prepared from its canonical form, and an event says why."""
    x = torch.randn(3, 1024)
    weight = share(layer)
    with q4.Session(q4.SessionConfig(compute_path="dequant_matmul_only")) as session:
        other = weight.layer(session, name="other")
        assert torch.allclose(other(x), layer(x), rtol=0.05, atol=0.5)
        (told,) = [fields for event, fields in actor_events(caplog) if event == "prepared"]
        assert told["layer"] == "other"
        assert "cannot reuse prepared layer" in told["why"]
        lone = share(layer, canonical=False)
        with pytest.raises(q4.LifecycleError, match="cannot reuse prepared layer"):
            lone.layer(session)
        lone.close()
    weight.close()


def test_memory_goes_with_the_last_layer(layer: q4.Q4Linear) -> None:
    """Handles that came by messages have one mapping together, which is gone when they and their layers are."""
    weight = share(layer)
    handles = [pickle.loads(pickle.dumps(weight)) for _ in range(2)]  # noqa: S301  # our own
    layers = [handle.layer() for handle in handles]

    maps, name = Path("/proc/self/maps"), handles[0]._where.name
    assert maps.read_text(encoding="utf-8").count(name) == 1  # the maker's has no name
    weight.close()
    layers.clear()
    handles.clear()
    gc.collect()
    assert name not in maps.read_text(encoding="utf-8")


def test_weight_without_a_layer() -> None:
    """A packed weight is prepared before it is shared."""
    packed = q4.quantize(torch.randn(64, 128), "nf4")
    weight, x = share(packed), torch.randn(2, 128)
    with q4.Session() as session:
        assert torch.equal(weight.layer()(x), session.linear(packed)(x))
    weight.close()
    weight.close()


@pytest.mark.parametrize("runtime", ["threads", "processes"])
def test_tensors_are_shared_by_their_form(runtime: str) -> None:
    """What lies in tensors alone is made over the shared ones in each actor, equal bits, and gone with the system."""
    torch.manual_seed(0)
    numbers = Numbers(3, torch.arange(5), torch.randn(1000, 7))
    with ActorSystem(runtime) as system:
        shared = system.share(numbers)
        refs = [system.spawn(Adding, shared, name=f"a{index}") for index in range(2)]
        assert [ref.ask(4.0, timeout=scaled(60.0)) for ref in refs] == [float(numbers.total() * 4)] * 2
        assert (shared.name, shared.nbytes) == ("Numbers", 5 * 8 + 7000 * 4)
        if runtime == "threads":
            assert shared.layer().values is numbers.values
        else:
            assert all(ref.ask("is shared", timeout=scaled(20.0)) for ref in refs)
    with pytest.raises(q4.LifecycleError, match=r"closed|vanished"):
        shared.layer()


def test_what_cannot_be_shared(layer: q4.Q4Linear) -> None:
    """What is no layer is refused, and a weight of threads does not go to a process."""
    with pytest.raises(q4.InputError, match=r"a PackedWeight, or of tensors alone .*, got 'Tensor'"):
        share(torch.zeros(3))  # type: ignore[arg-type]  # on purpose
    with ActorSystem("threads") as threads, ActorSystem("processes") as processes:
        weight = threads.share(layer)
        with pytest.raises(q4.LifecycleError, match="can't be sent to a process"):
            processes.spawn(Layered, weight)


def test_full_shared_memory(layer: q4.Q4Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little shared memory is a typed error with the numbers."""

    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    with pytest.raises(q4.InputError, match="size must be at most the 4096 bytes that are free"):
        share(layer)
