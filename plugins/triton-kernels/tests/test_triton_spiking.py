"""Programs of spiking networks: every number of the reference, bit for bit; interpreted, compiled, and on a device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from spiking_circuits import Maker, circuit, run_both, synapses_of

from q4_programs import BoundLayer, Buffer, Op, Program, Step, View
from q4_triton_kernels import Target
from q4_triton_kernels.interpreting import IGNORED_WARNINGS, hasten, require_interpreter
from q4_triton_kernels.spiking import SpikingKernels, SpikingRunner
from q4core import InputError, PrepareError

OPTIONS: list[dict[str, Any]] = [
    {"reset": 2, "inclusive": 0, "rows": 1},
    {"reset": 1, "inclusive": 0, "rows": 2, "vectors": True, "leak": True},
    {"reset": 2, "inclusive": 1, "rows": 1, "refractory": 3},
    {"reset": 0, "inclusive": 0, "rows": 1, "vectors": True, "refractory": 2},
]


def _assert_same(made: Maker, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Assert equal bits of every buffer, but for those of NaN, which a GPU makes anew."""
    for buffer, *both in zip(made.buffers, found, wanted, strict=True):
        one, other = (item.where(~item.isnan(), torch.nan) if item.is_floating_point() else item for item in both)
        ints = torch.int64 if one.dtype is torch.int64 else torch.int32
        assert torch.equal(one.view(ints), other.view(ints)), buffer.name


def _run_circuit(neurons: int, count: int, rounds: list[int], options: dict[str, Any], device: str = "cpu") -> None:
    synapses = synapses_of(neurons, count)
    made = circuit(synapses, rounds=sum(rounds), **options)
    found, wanted = run_both(made, [synapses], rounds, device)
    _assert_same(made, found, wanted)
    fired = sum((word & 2**64 - 1).bit_count() for word in wanted[1].tolist())
    assert fired > 0.005 * sum(rounds) * neurons * options["rows"]


def _others(device: str) -> None:
    """Run the operations that a circuit has not, in rows that have gaps, with a clock that is far on."""
    draw, made = torch.Generator().manual_seed(1), Maker()
    made.tensors[0].fill_(1 << 33)
    x = torch.randint(0, 3, (3 * 2, 100), generator=draw).float()
    x[1, 7] = torch.nan
    values, ring = made.add("values", x), made.add("ring", torch.zeros(5 * 2, 100))
    given, odd = (made.add(name, torch.zeros(4 * 2, 2, dtype=torch.int64)) for name in ("given", "odd"))
    wide = made.add("wide", torch.zeros(2, 130))
    row, ones = View(wide.buffer, 2, 100, 0, 130), made.add("ones", torch.zeros(2, 100))
    made.step(Op.ROW, [values, made.clock], [row], numbers=[2])
    made.step(Op.PACK, [row, made.clock], [given, odd])
    made.step(Op.UNPACK, [given, made.clock], [ones], numbers=[1])
    made.step(Op.AFFINE, [ones], [ones], numbers=[0.3, 0.1])
    made.step(Op.MULTIPLY, [ones, row], [ones])
    made.step(Op.STORE_ROW, [ones, made.clock], [ring])
    _assert_same(made, *run_both(made, [], [1, 7], device))


@pytest.mark.interpreted
@pytest.mark.filterwarnings(IGNORED_WARNINGS[0])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_interpreted_circuits_have_the_bits_of_the_reference(options: dict[str, Any]) -> None:
    """A small circuit, with synapses that share source, target and delay."""
    require_interpreter()
    hasten()
    _run_circuit(70, 1_500, [1, 11], options)


@pytest.mark.interpreted
@pytest.mark.filterwarnings(IGNORED_WARNINGS[0])
def test_interpreted_rows_and_bits_are_those_of_the_reference() -> None:
    """Rows at a clock, bits of numbers that are none, and what is element by element."""
    require_interpreter()
    hasten()
    _others("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("neurons", "count"), [(100, 4_000), (2_000, 400_000), (70_000, 700_000)])
def test_circuits_on_a_device_have_the_bits_of_the_cpu(neurons: int, count: int, options: dict[str, Any]) -> None:
    """Circuits of several sizes, in graphs of many rounds that replay; more than 65,536 targets, too."""
    _run_circuit(neurons, count, [1, 43, 7], options, "cuda")


@pytest.mark.gpu
def test_rows_and_bits_on_a_device_are_those_of_the_cpu() -> None:
    """Rows at a clock, bits of numbers that are none, and what is element by element."""
    _others("cuda")


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_kernels_compile_and_round_each_by_itself(arch: int) -> None:
    """No product is fused with a sum, no number below the normal ones is flushed, and nothing lies in local memory."""
    kernels = SpikingKernels(Target(arch), torch.device("cpu"))
    flags = dict.fromkeys(("integrate", "ring", "given", "gain", "leak", "fire", "inclusive", "wait"), True)
    programs = [
        kernels.advance_program(**flags, reset=1),
        kernels.advance_program(**flags | {"wait": False, "leak": False, "gain": False, "ring": False}, reset=2),
        kernels.advance_program(**dict.fromkeys(flags, False) | {"fire": True}, reset=0),
        *(kernels.move_program(kind) for kind in ("take", "row", "store_row")),
        kernels.pack_program(),
        kernels.unpack_program(),
        kernels.list_program(94),
        kernels.list_program(5_000),
        kernels.send_program(short=True, ranks=False),
        kernels.send_program(short=False, ranks=True),
    ]
    for program in programs:
        ptx = program.compile().ptx
        assert not re.search(r"fma\.|\.ftz", ptx), program.name
        assert re.search(r"ld\.local|st\.local", ptx) is None, program.name


def test_what_has_no_kernel_is_refused_by_name() -> None:
    """An operation of other networks, and a product with dense numbers."""
    buffers = [Buffer(name, 4, is_bound=True) for name in "xy"]
    flat = [torch.zeros(4), torch.zeros(4)]
    softmax = Step(Op.SOFTMAX, [View(0, 1, 4)], [View(1, 1, 4)])
    dense = Step(Op.LINEAR, [View(0, 2, 2), View(0, 2, 2)], [View(1, 2, 2)], numbers=[0])
    for step, words in ((softmax, "no kernel for softmax"), (dense, "no kernel for linear of dense numbers")):
        with pytest.raises(PrepareError, match=words):
            SpikingRunner(Program(buffers, [step]), flat, [], Target(90), lambda *_: None)


@pytest.mark.interpreted
def test_a_negative_clock_is_refused() -> None:
    """Nothing is written then."""
    require_interpreter()
    synapses = synapses_of(70, 100)
    made = circuit(synapses, rounds=2, reset=1, inclusive=0, rows=1)
    buffers = [item.clone().view(-1) for item in made.tensors]
    bound = [BoundLayer(synapses, None, (), synapses)]
    runner = SpikingRunner(made.program([synapses]), buffers, bound, Target(None), lambda *_: None)
    buffers[0].fill_(-1)
    with pytest.raises(InputError, match="clock must be 0 or more"):
        runner()
    assert torch.equal(buffers[3], made.tensors[3].view(-1))
