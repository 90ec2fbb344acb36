"""Spiking kernels: the CPU's spikes, membranes and rings, bit for bit; interpreted, compiled, and on a device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from spiking_circuits import BETA, by_kernels, on_the_cpu, synapses_of

from q4_snn import LIF
from q4_triton_kernels import Target
from q4_triton_kernels.interpreting import IGNORED_WARNINGS, hasten, require_interpreter
from q4_triton_kernels.spiking import Spiking

OPTIONS: list[dict[str, Any]] = [
    {"reset": "value"},
    {"reset": "value", "v_reset": -0.25},
    {"reset": "subtract"},
    {"reset": "none", "threshold_inclusive": True},
]


def _assert_same(neurons: int, count: int, steps: int, options: dict[str, Any], **more: Any) -> float:
    """Assert equal bits of spikes, membranes and ring; return the share of spikes."""
    synapses = synapses_of(neurons, count, scale=0.5)
    cells = LIF.from_beta(
        BETA, v_reset=options.get("v_reset", 0.0), **{k: v for k, v in options.items() if k != "v_reset"}
    )
    draw = torch.Generator().manual_seed(3)
    drive, mem = 0.2 * torch.rand(neurons, generator=draw), torch.rand(neurons, generator=draw)
    wanted = on_the_cpu(synapses, cells, drive, mem, steps)
    found = by_kernels(synapses, cells, drive, mem, steps, **more)
    for name, one, other in zip(("spikes", "membranes", "ring"), found, wanted, strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32)), name
    rate = float(wanted[0].mean())
    assert rate > 0.005  # so that something is shown
    return rate


@pytest.mark.interpreted
@pytest.mark.parametrize("warning", IGNORED_WARNINGS[:1])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_interpreted_circuits_have_the_bits_of_the_cpu(options: dict[str, Any], warning: str) -> None:
    """A small circuit, with synapses that share source, target and delay, in chunks of ten steps."""
    del warning
    require_interpreter()
    hasten()
    _assert_same(70, 1_500, 20, options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("neurons", "count"), [(100, 4_000), (2_000, 400_000), (70_000, 700_000)])
def test_circuits_on_a_device_have_the_bits_of_the_cpu(neurons: int, count: int, options: dict[str, Any]) -> None:
    """Circuits of several sizes, as one graph of ten steps that replays; more than 65,536 targets, too."""
    _assert_same(neurons, count, 50, options, device="cuda")


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_kernels_compile_and_round_each_by_itself(arch: int) -> None:
    """No product is fused with a sum, no number below the normal ones is flushed, and nothing lies in local memory."""
    spiking = Spiking(Target(arch), torch.device("cpu"))
    flags = dict.fromkeys(("given", "ring", "gain", "leak", "inclusive", "refractory"), True)
    programs = [
        spiking.advance_program(**flags, reset="subtract"),
        spiking.advance_program(**dict.fromkeys(flags, False), reset="value"),
        spiking.list_program(94, tick=True),
        spiking.list_program(5_000, tick=False),
        spiking.send_program(index=torch.int16, has_ranks=False),
        spiking.send_program(index=torch.int32, has_ranks=True),
    ]
    for program in programs:
        ptx = program.compile().ptx
        assert not re.search(r"fma\.|\.ftz", ptx), program.name
        assert re.search(r"ld\.local|st\.local", ptx) is None, program.name
