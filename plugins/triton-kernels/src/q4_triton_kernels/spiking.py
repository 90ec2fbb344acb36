"""``Spiking``: steps of spiking neurons and sparse synapses on one device, captured as a graph, with the CPU's bits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_triton_kernels.program import Program
from q4core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4_triton_kernels.target import Target

__all__ = ["Neurons", "Spiking", "SynapseTable", "word_count"]

_WORD = 64
_LANES, _WORDS, _MOST_LISTED = 32, 4, 2048
_RESETS = {"none": 0, "subtract": 1, "value": 2}
_BLOCK, _SHORT = 32, 1 << 16
_SHARE = 32
"""Synapses of a source in one stretch of targets, on average: the table of cuts takes a quarter of a byte of each."""


def word_count(neurons: int) -> int:
    """Return how many words of 64 bits hold the spikes of some neurons."""
    return -(-neurons // _WORD)


@attrs.frozen(eq=False)
class SynapseTable:
    """Sparse synapses on a device: what a ``SparseWeight`` of q4-programs holds, with targets that need no sums.

    Args:
        index: int16 (as unsigned) or int32 [E], targets.
        steps: uint8 [E], delays; 0 for what is no synapse.
        codes: uint8 [E / 2], two codes of four bits, the even one low.
        levels: float16 [E / 32, 2], scale and offset; a weight is offset + scale · code.
        parts: Stretches of targets.
        cut: int64 [sources, parts + 1], where each stretch begins.
        rank: uint8 [E], of synapses that share source, target and delay; of one element where there are none.
        ranks: How many ranks there are.
    """

    index: torch.Tensor
    steps: torch.Tensor
    codes: torch.Tensor
    levels: torch.Tensor
    parts: int
    cut: torch.Tensor
    rank: torch.Tensor
    ranks: int

    @classmethod
    def of(cls, weight: Any, device: torch.device) -> SynapseTable:
        """Return the table of a ``SparseWeight``, on any device, for kernels on a device."""
        starts, first, gaps, steps, codes, levels = (tensor.to(device) for tensor in weight.tensors())
        counts = starts.diff()
        end, sources, targets = int(starts[-1]), len(counts), int(weight.targets)
        total = (gaps[:end].long() & 0xFFFF if gaps.dtype is torch.int16 else gaps[:end].long()).cumsum(0)
        source = torch.repeat_interleave(torch.arange(sources, device=device), counts)
        target = total + (first.long() - total[starts[:-1].clamp(max=max(end - 1, 0))])[source]
        parts = max(1, min(word_count(targets), end // (sources * _SHARE)))
        stretch = -(-targets // parts)
        each = torch.bincount(source * parts + target // stretch, minlength=sources * parts).view(sources, parts)
        cut = torch.cat([starts[:-1, None], starts[:-1, None] + each.cumsum(1)], 1)
        rank = _ranks((source * targets + target) * 256 + steps[:end])
        ranks = int(rank.max()) + 1
        return cls(
            index=target.to(torch.int16 if targets <= _SHORT else torch.int32),
            steps=steps,
            codes=codes,
            levels=levels.view(torch.float16),
            parts=parts,
            cut=cut,
            rank=(rank if ranks > 1 else rank[:1]).to(torch.uint8),
            ranks=ranks,
        )


def _ranks(key: torch.Tensor) -> torch.Tensor:
    """Return of each element how many equal ones are before it."""
    order = key.argsort(stable=True)
    ordered = key[order]
    place = torch.arange(len(key), device=key.device)
    is_first = torch.ones(len(key), dtype=torch.bool, device=key.device)
    is_first[1:] = ordered[1:] != ordered[:-1]
    found = torch.empty_like(place)
    found[order] = place - torch.where(is_first, place, 0).cummax(0).values
    if int(found.max()) > 255:  # noqa: PLR2004  # the largest of a byte
        rule = "at most 256 of one source, target and delay"
        raise ConfigError("sparse synapses", name="synapses", rule=rule, value=int(found.max()) + 1)
    return found


@attrs.frozen(eq=False)
class Neurons:
    """Neurons of one population, for B samples, on a device.

    Args:
        mem: float32 [B, n], changed in place.
        beta: float32 [n] or [1]: the share of a membrane that a step leaves.
        threshold: float32 [n] or [1].
        bits: int64 [slots, B, words]; the spikes of step t are in slot t % slots.
        gain: float32 [n] or [1], a factor of the current; None for 1.
        leak: float32 [n] or [1], added in each step; None for 0.
        reset: ``subtract`` the threshold, set to the ``value`` of v_reset, or ``none``.
        v_reset: float32 [n] or [1].
        inclusive: Whether a membrane at exactly the threshold fires.
        refractory: Steps that a neuron waits after a spike, at its reset and deaf.
        waiting: int32 [B, n], the steps that each still waits; needed where ``refractory`` is above 0.
    """

    mem: torch.Tensor
    beta: torch.Tensor
    threshold: torch.Tensor
    bits: torch.Tensor
    gain: torch.Tensor | None = None
    leak: torch.Tensor | None = None
    reset: str = "subtract"
    v_reset: torch.Tensor | None = None
    inclusive: bool = False
    refractory: int = 0
    waiting: torch.Tensor | None = None


Launch = Any
"""A function without arguments that starts one kernel on the current stream."""


@attrs.frozen(eq=False)
class Spiking:
    """Makes launches of the kernels for one device.

    Args:
        target: What runs them.
        device: Of the tensors.
    """

    target: Target
    device: torch.device

    def advance(
        self,
        neurons: Neurons,
        clock: torch.Tensor,
        *,
        given: torch.Tensor | None = None,
        ring: torch.Tensor | None = None,
    ) -> Launch:
        """Return the launch of a step of neurons: membranes, spikes, resets and bits.

        Args:
            neurons: What is advanced.
            clock: int64 [1], the number of the step.
            given: float32 [n] or [B, n], a current of every step; or [steps, B, n], of which step t takes row t.
            ring: float32 [slots, B, n]; what arrives now is taken out of it.
        """
        batch, size = neurons.mem.shape
        slots, _, words = neurons.bits.shape
        strides = (0, 0)
        if given is not None and given.dim() > 1:
            strides = (size, batch * size) if given.dim() == 3 else (size, 0)  # noqa: PLR2004  # [steps, B, n]
        program = self.advance_program(
            given=given is not None,
            ring=ring is not None,
            gain=neurons.gain is not None,
            leak=neurons.leak is not None,
            reset=neurons.reset,
            inclusive=neurons.inclusive,
            refractory=neurons.refractory > 0,
        )
        zero = neurons.mem
        parameters = [neurons.beta, neurons.gain, neurons.leak, neurons.threshold, neurons.v_reset]
        steps = [0 if item is None or item.numel() == 1 else 1 for item in parameters]
        tensors = [
            neurons.mem,
            zero if given is None else given,
            zero if ring is None else ring,
            clock,
            *(zero if item is None else item for item in parameters),
            clock if neurons.waiting is None else neurons.waiting,
            neurons.bits,
        ]
        numbers = [size, batch, words, 1 if ring is None else len(ring), *strides, slots, *steps, neurons.refractory]
        return self._launch(program, (-(-words // _WORDS), batch, 1), tensors, numbers)

    def list_fired(  # noqa: PLR0913  # one argument per tensor
        self,
        bits: torch.Tensor,
        clock: torch.Tensor,
        fired: torch.Tensor,
        count: torch.Tensor,
        *,
        delay: int,
        tick: bool,
    ) -> Launch:
        """Return the launch that lists who fired some steps ago.

        Args:
            bits: int64 [slots, B, words].
            clock: int64 [1].
            fired: int32 [B, n], written: by number, of each sample.
            count: int32 [B], written: how many they are.
            delay: Steps, fewer than there are slots.
            tick: Whether the clock moves on before; of one sample alone.
        """
        slots, batch, words = bits.shape
        if tick and batch > 1:
            raise ConfigError("list of spikes", name="tick", rule="of one sample", value=batch)
        program = self.list_program(words, tick=tick)
        numbers = [words, fired.shape[1], slots, batch, delay]
        return self._launch(program, (batch, 1, 1), [bits, clock, fired, count], numbers)

    def send(  # noqa: PLR0913  # one argument per tensor
        self,
        synapses: SynapseTable,
        clock: torch.Tensor,
        fired: torch.Tensor,
        count: torch.Tensor,
        ring: torch.Tensor,
        *,
        delay: int,
    ) -> Launch:
        """Return the launch that adds the weights of who fired to a ring, by source and by synapse.

        Args:
            synapses: Of the sources.
            clock: int64 [1].
            fired: int32 [B, sources], as ``list_fired`` writes it.
            count: int32 [B].
            ring: float32 [slots, B, targets], more slots than the longest delay.
            delay: Steps since they fired.
        """
        slots, batch, targets = ring.shape
        table = synapses
        program = self.send_program(index=table.index.dtype, has_ranks=table.ranks > 1)
        tensors = [
            fired,
            count,
            clock,
            table.cut,
            table.index,
            table.codes,
            table.levels,
            table.steps,
            table.rank,
            ring,
        ]
        numbers = [batch, targets, slots, table.parts, fired.shape[1], delay, table.ranks]
        return self._launch(program, (table.parts, batch, 1), tensors, numbers)

    def captured(self, launches: Sequence[Launch], steps: int) -> Callable[[], object]:
        """Return what runs launches in their order, so many times: one CUDA graph where the device is one.

        Nothing runs while it is made.
        """
        if self.device.type != "cuda":

            def run() -> None:
                for _ in range(steps):
                    for launch in launches:
                        launch()

            return run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            for _ in range(steps):
                for launch in launches:
                    launch()
        return graph.replay

    # -- programs

    def advance_program(  # noqa: PLR0913  # what it is specialised on
        self, *, given: bool, ring: bool, gain: bool, leak: bool, reset: str, inclusive: bool, refractory: bool
    ) -> Program:
        """Return the kernel of ``advance`` with what it is specialised on."""
        from q4_triton_kernels.kernels.spiking import advance  # noqa: PLC0415  # needs Triton

        floats = ("mem", "given", "ring", "beta", "gain", "leak", "threshold", "reset")
        names = [name.removesuffix("_ptr") for name in advance.arg_names if name.endswith("_ptr")]
        kinds = {"clock": "*i64", "bits": "*i64", "wait": "*i32"} | dict.fromkeys(floats, "*fp32")
        signature = {f"{name}_ptr": kinds[name] for name in names}
        constants = {
            "WORDS": _WORDS,
            "GIVEN": given,
            "RING": ring,
            "GAIN": gain,
            "LEAK": leak,
            "RESET": _RESETS[reset],
            "INCLUSIVE": inclusive,
            "WAIT": refractory,
        }
        return self._program(advance, signature, constants, 2)

    def list_program(self, words: int, *, tick: bool) -> Program:
        """Return the kernel of ``list_fired`` for some words of bits."""
        from q4_triton_kernels.kernels.spiking import list_fired  # noqa: PLC0415  # needs Triton

        signature = {"bits_ptr": "*i64", "clock_ptr": "*i64", "list_ptr": "*i32", "count_ptr": "*i32"}
        tile = min(_MOST_LISTED, max(32, 1 << (words - 1).bit_length()))
        return self._program(list_fired, signature, {"WORDS": tile, "TICK": tick}, max(1, min(8, tile // 64)))

    def send_program(self, *, index: torch.dtype, has_ranks: bool) -> Program:
        """Return the kernel of ``send`` for some dtypes of a table."""
        from q4_triton_kernels.kernels.spiking import send  # noqa: PLC0415  # needs Triton

        is_short = index is torch.int16
        signature = {
            "list_ptr": "*i32",
            "count_ptr": "*i32",
            "clock_ptr": "*i64",
            "cut_ptr": "*i64",
            "index_ptr": "*i16" if is_short else "*i32",
            "codes_ptr": "*u8",
            "levels_ptr": "*fp16",
            "steps_ptr": "*u8",
            "rank_ptr": "*u8",
            "ring_ptr": "*fp32",
        }
        constants = {"SHORT": is_short, "LANES": _LANES, "BLOCK": _BLOCK, "RANKS": has_ranks}
        return self._program(send, signature, constants, 1)

    def _program(self, kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int) -> Program:
        numbers = [name for name in kernel.arg_names if name not in signature and name not in constants]
        signature = signature | dict.fromkeys(numbers, "i32")
        index = self.device.index if self.device.type == "cuda" else None
        return Program(kernel, signature, constants, (), self.target, warps, 1, device=index, fuses=False)

    @staticmethod
    def _launch(
        program: Program, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor], numbers: Sequence[int]
    ) -> Launch:
        program.load()
        return functools.partial(program, grid, *tensors, *numbers)
