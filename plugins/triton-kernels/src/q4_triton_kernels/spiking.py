"""``SpikingRunner``: programs of spiking networks on one device, in graphs of rounds, with the reference's bits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_triton_kernels.program import Program
from q4core import ConfigError, InputError, PrepareError, Reason, ReasonCode
from q4core.plugin_api import on_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from q4_triton_kernels.target import Target

    Launch = Callable[[], object]
    Linear = Callable[[Any, torch.Tensor, torch.Tensor], object]
    Tensors = Sequence[torch.Tensor]

__all__ = ["OPERATIONS", "SpikingKernels", "SpikingRunner", "SynapseTable"]

_WORD, _BLOCK, _SHORT = 64, 32, 1 << 16
_LANES, _WORDS, _COLUMNS, _MOST_LISTED = 32, 4, 256, 2048
_SHARE = 32
"""Entries of a source in one stretch of targets, on average: the table of cuts takes a quarter of a byte of each."""
_GRAPH = 64
"""Most rounds of one graph."""
_MOVES = {"take": 0, "row": 1, "store_row": 2}
OPERATIONS = frozenset({"integrate", "fire", "spikes", "send", "pack", "unpack", *_MOVES})
OPERATIONS |= {"copy", "add", "multiply", "affine", "linear"}
"""What runs, by the names of q4_programs.Op; LINEAR of packed layers alone."""


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
        parts = max(1, min(-(-targets // _WORD), end // (sources * _SHARE)))
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


@attrs.frozen
class SpikingKernels:
    """Kernels of spiking networks for one target, and their launches.

    Args:
        target: What runs them.
        device: Of the tensors.
    """

    target: Target
    device: torch.device

    def advance(self, *, integrate: Tensors, ring: bool, given: bool, fire: int, numbers: Sequence[float]) -> Program:
        """Return the kernel of INTEGRATE and FIRE, as ``advance_program`` does, for the tensors of the one."""
        return self.advance_program(
            integrate=bool(integrate),
            ring=ring,
            given=given,
            gain=len(integrate) > 3,  # noqa: PLR2004  # x, i, beta
            leak=len(integrate) > 4,  # noqa: PLR2004  # and gain
            fire=fire > 0,
            reset=int(numbers[0]) if fire else 0,
            inclusive=bool(fire and numbers[1]),
            wait=fire > 4,  # noqa: PLR2004  # mem, threshold, vector, clock
        )

    def advance_program(self, **constants: Any) -> Program:
        """Return the kernel of INTEGRATE and FIRE with what it is specialised on."""
        from q4_triton_kernels.kernels.spiking import advance  # noqa: PLC0415  # needs Triton

        return self._program(advance, {"WORDS": _WORDS} | {name.upper(): value for name, value in constants.items()}, 2)

    def move_program(self, kind: str) -> Program:
        """Return the kernel of TAKE, ROW or STORE_ROW."""
        from q4_triton_kernels.kernels.spiking import move  # noqa: PLC0415  # needs Triton

        return self._program(move, {"BLOCK": _COLUMNS, "KIND": _MOVES[kind]}, 2)

    def pack_program(self) -> Program:
        """Return the kernel of PACK."""
        from q4_triton_kernels.kernels.spiking import pack  # noqa: PLC0415  # needs Triton

        return self._program(pack, {"WORDS": _WORDS}, 2)

    def unpack_program(self) -> Program:
        """Return the kernel of UNPACK."""
        from q4_triton_kernels.kernels.spiking import unpack  # noqa: PLC0415  # needs Triton

        return self._program(unpack, {"WORDS": _WORDS}, 2)

    def list_program(self, words: int) -> Program:
        """Return the kernel that lists who fired, for some words of bits."""
        from q4_triton_kernels.kernels.spiking import list_fired  # noqa: PLC0415  # needs Triton

        tile = min(_MOST_LISTED, max(32, 1 << (words - 1).bit_length()))
        return self._program(list_fired, {"WORDS": tile}, max(1, min(8, tile // 64)))

    def send_program(self, *, short: bool, ranks: bool) -> Program:
        """Return the kernel of SEND, for targets of two bytes or of four, with synapses that need ranks or without."""
        from q4_triton_kernels.kernels.spiking import send  # noqa: PLC0415  # needs Triton

        constants = {"SHORT": short, "LANES": _LANES, "BLOCK": _BLOCK, "RANKS": ranks}
        return self._program(send, constants, 1, index_ptr="*i16" if short else "*i32")

    def _program(self, kernel: Any, constants: dict[str, Any], warps: int, **types: str) -> Program:
        types = _TYPES | types
        names = [name for name in kernel.arg_names if name not in constants]
        signature = {name: types.get(name, "*fp32") if name.endswith("_ptr") else "i32" for name in names}
        index = self.device.index if self.device.type == "cuda" else None
        key = self, kernel.__name__, *constants.items(), *types.items()
        if key not in _MADE:
            _MADE[key] = Program(kernel, signature, constants, (), self.target, warps, 1, device=index, fuses=False)
        return _MADE[key]


_MADE: dict[Any, Program] = {}
"""Kernels of this process: equal ones are compiled and loaded once."""


_TYPES = {
    "clock_ptr": "*i64",
    "bits_ptr": "*i64",
    "odd_ptr": "*i64",
    "list_ptr": "*i32",
    "number_ptr": "*i32",
    "cut_ptr": "*i64",
    "codes_ptr": "*u8",
    "levels_ptr": "*fp16",
    "steps_ptr": "*u8",
    "rank_ptr": "*u8",
}
"""Triton's types of the kernels' pointers that are not to float32."""


class SpikingRunner:
    """A bound program: its operations as launches, and graphs of many rounds of them.

    Args:
        program: Of q4-programs.
        buffers: Flat.
        layers: Bound.
        target: What runs the kernels.
        linear: Runs a bound layer: x, out.

    Raises:
        PrepareError: An operation is none of these kernels', or code does not compile or load.
    """

    def __init__(self, program: Any, buffers: Tensors, layers: Sequence[Any], target: Target, linear: Linear) -> None:
        names = [f"{step.op.value} of dense numbers" if _is_dense(step) else step.op.value for step in program.steps]
        if missing := sorted({*names} - OPERATIONS):
            raise PrepareError([Reason(ReasonCode.FEATURE, f"no kernel for {', '.join(missing)}")])
        self._buffers, self._layers, self._run_layer = buffers, layers, linear
        self._device = buffers[0].device
        self._kernels = SpikingKernels(target, self._device)
        self._clock = None if program.clock is None else buffers[program.clock]
        clocks = {view.buffer for step in program.steps for view, name in step.patterns() if name == "i11"}
        written = program.written
        self._streams = [_Stream(buffers[i], program.buffers[i].given == "round", i in written) for i in program.given]
        self._clocks = [buffers[index] for index in sorted(clocks)]
        self._lists: dict[tuple[Any, float], Tensors] = {}
        self._launches: list[Launch] = []
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._has_run = False
        tables = {step.layer for step in program.steps if step.op.value == "send"}
        self._tables = {index: SynapseTable.of(layers[index].prepared, self._device) for index in tables}
        steps = [*program.steps]
        while steps:
            step, after = steps.pop(0), steps[0] if steps else None
            if (
                step.op.value == "integrate"
                and after
                and after.op.value == "fire"
                and after.inputs[0] == step.inputs[0]
            ):
                self._advance(step, steps.pop(0))
            elif step.op.value in {"integrate", "fire"}:
                self._advance(*((step, None) if step.op.value == "integrate" else (None, step)))
            else:
                getattr(self, f"_{step.op.value}", self._move)(step, *self._views(step))

    def __call__(self, rounds: int = 1, given: Tensors = ()) -> None:
        """Run every step, for some rounds.

        Graphs have their memory where it was when they were captured. So given states are copied there and back once a
        run; and given rounds once a graph, to and from memory that each of its rounds has a row of.

        Raises:
            InputError: A clock is negative. Nothing has been written.
        """
        for clock in self._clocks:
            if (value := int(clock)) < 0:
                raise InputError("program", name="clock", rule="0 or more", value=value)
        is_first, self._has_run = not self._has_run, True
        # A self-probe's programs run once.
        is_plain = self._device.type != "cuda" or (is_first and rounds == 1)
        with on_device(self._device), torch.inference_mode():
            moved = [*zip(self._streams, given, strict=bool(given))]
            for stream, tensor in moved:
                stream.begin(tensor)
            done = 0
            while done < rounds:
                count = min(_GRAPH, 1 << (rounds - done).bit_length() - 1)
                for stream, tensor in moved:
                    stream.take(tensor, done, count)
                if is_plain:
                    self._rounds(count, is_moved=bool(given))
                else:
                    self._graph(count, is_moved=bool(given)).replay()
                for stream, tensor in moved:
                    stream.give(tensor, done, count)
                done += count
            for stream, tensor in moved:
                stream.end(tensor)

    def _graph(self, rounds: int, *, is_moved: bool) -> torch.cuda.CUDAGraph:
        key = rounds, is_moved
        if key not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._rounds(rounds, is_moved=is_moved)
            self._graphs[key] = graph
        return self._graphs[key]

    def _rounds(self, rounds: int, *, is_moved: bool) -> None:
        """Run some rounds; ``is_moved`` where the rows of given rounds go to and from their buffers."""
        streams = [stream for stream in self._streams if is_moved and stream.rows is not None]
        for number in range(rounds):
            for stream in streams:
                stream.load(number)
            for launch in self._launches:
                launch()
            for stream in streams:
                stream.store(number)
            if self._clock is not None:
                self._clock.add_(1)

    # -- operations

    def _views(self, step: Any) -> tuple[Tensors, Tensors]:
        """Return a tensor for each input and each output; lists of who fired end where their bits are written."""
        for view in step.outputs:
            self._lists = {key: value for key, value in self._lists.items() if key[0].buffer != view.buffer}
        both = ([view.of(self._buffers[view.buffer]) for view in views] for views in (step.inputs, step.outputs))
        inputs, outputs = both
        return inputs, outputs

    def _add_launch(self, program: Program, grid: tuple[int, int], tensors: Tensors, numbers: Sequence[int]) -> None:
        program.load()
        self._launches.append(functools.partial(program, (*grid, 1), *tensors, *numbers))

    def _advance(self, integrate: Any, fire: Any) -> None:
        """INTEGRATE, FIRE, or both in one launch."""
        moved = self._views(integrate)[0] if integrate else []
        fired, written = self._views(fire) if fire else ([], [])
        mem = (moved or fired)[0]
        parts = [*moved[1:], *[mem] * (5 - len(moved))][:4]
        current, beta, gain, leak = parts
        threshold, reset, clock, count, before, wait = (*fired[1:], *[mem] * (7 - len(fired)))[:6]
        bits = written[0] if fire else mem
        numbers = fire.numbers if fire else ()
        program = self._kernels.advance(integrate=moved, ring=False, given=True, fire=len(fired), numbers=numbers)
        rows, columns = mem.shape
        steps = [_step(item) for item in (beta, gain, leak, threshold, reset, wait)]
        strides = [mem, current, mem, threshold, count, before, bits]
        sizes = [columns, rows, 1, len(bits) // rows, *(item.stride(0) for item in strides), *steps]
        if fire and len(threshold) == 1:
            sizes[7] = 0
        tensors = [mem, current, mem, clock, beta, gain, leak, threshold, reset, count, before, wait, bits]
        self._add_launch(program, (-(-columns // (_WORDS * _WORD)), rows), tensors, sizes)

    def _move(self, step: Any, inputs: Tensors, outputs: Tensors) -> None:
        """TAKE, ROW and STORE_ROW."""
        kind = step.op.value
        ring, x = (outputs[0], inputs[0]) if kind == "store_row" else (inputs[0], outputs[0])
        rows, columns = x.shape
        lag = int(step.numbers[0]) if step.numbers else 0
        numbers = [columns, rows, len(ring) // rows, ring.stride(0), x.stride(0), lag]
        grid = -(-columns // _COLUMNS), rows
        self._add_launch(self._kernels.move_program(kind), grid, [ring, x, inputs[1]], numbers)

    def _pack(self, step: Any, inputs: Tensors, outputs: Tensors) -> None:
        del step
        (x, clock), (bits, odd) = inputs, outputs
        rows, columns = x.shape
        slots = len(bits) // rows, len(odd) // rows
        numbers = [columns, rows, *slots, x.stride(0), bits.stride(0), odd.stride(0)]
        grid = -(-columns // (_WORDS * _WORD)), rows
        self._add_launch(self._kernels.pack_program(), grid, [x, clock, bits, odd], numbers)

    def _unpack(self, step: Any, inputs: Tensors, outputs: Tensors) -> None:
        (bits, clock), (x,) = inputs, outputs
        rows, columns = x.shape
        numbers = [columns, rows, bits.shape[1], len(bits) // rows, bits.stride(0), x.stride(0), int(step.numbers[0])]
        grid = -(-columns // (_WORDS * _WORD)), rows
        self._add_launch(self._kernels.unpack_program(), grid, [bits, clock, x], numbers)

    def _spikes(self, step: Any, inputs: Tensors, outputs: Tensors) -> None:
        layer = self._layers[step.layer]
        x = torch.empty(len(outputs[0]), layer.module.in_features, device=self._device)
        self._unpack(step, inputs, [x])
        self._product(layer, x, outputs[0])

    def _linear(self, step: Any, inputs: Tensors, outputs: Tensors) -> None:
        self._product(self._layers[step.layer], inputs[0], outputs[0])

    def _product(self, layer: Any, x: torch.Tensor, out: torch.Tensor) -> None:
        whole = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        self._launches.append(functools.partial(self._run_layer, layer, x, whole))
        if whole is not out:
            self._launches.append(functools.partial(out.copy_, whole))

    def _send(self, step: Any, inputs: Tensors, outputs: Tensors) -> None:
        (bits, clock, _), (ring,) = inputs, outputs
        table, (lag, rows) = self._tables[step.layer], map(int, step.numbers)
        key = step.inputs[0], lag
        if key not in self._lists:
            room = bits.shape[1] * _WORD
            fired = torch.empty(rows, room, dtype=torch.int32, device=self._device)
            count = torch.empty(rows, dtype=torch.int32, device=self._device)
            numbers = [len(table.cut), bits.shape[1], room, bits.stride(0), len(bits) // rows, rows, lag]
            program = self._kernels.list_program(bits.shape[1])
            self._add_launch(program, (rows, 1), [bits, clock, fired, count], numbers)
            self._lists[key] = fired, count
        fired, count = self._lists[key]
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
        numbers = [rows, len(ring) // rows, table.parts, fired.shape[1], ring.stride(0), lag, table.ranks]
        program = self._kernels.send_program(short=table.index.dtype is torch.int16, ranks=table.ranks > 1)
        self._add_launch(program, (table.parts, rows), tensors, numbers)

    def _copy(self, step: Any, inputs: Tensors, outputs: Tensors) -> None:
        del step
        self._launches.append(functools.partial(outputs[0].copy_, inputs[0]))

    def _add(self, step: Any, inputs: Tensors, outputs: Tensors) -> None:
        function: Any = torch.add if step.op.value == "add" else torch.mul
        self._launches.append(functools.partial(function, *inputs, out=outputs[0]))

    _multiply = _add

    def _affine(self, step: Any, inputs: Tensors, outputs: Tensors) -> None:
        out, (factor, term) = outputs[0], step.numbers
        self._launches.append(functools.partial(torch.mul, inputs[0], factor, out=out))
        self._launches.append(functools.partial(out.add_, term))


class _Stream:
    """A given buffer: what stands for it, and where rounds of a graph have their rows.

    Args:
        place: The buffer, flat.
        is_rounds: Whether each round has a row of its own.
        is_written: Whether a step writes it.
    """

    def __init__(self, place: torch.Tensor, is_rounds: bool, is_written: bool) -> None:  # noqa: FBT001  # two facts
        self._place, self._is_rounds, self._is_written = place, is_rounds, is_written
        self.rows: torch.Tensor | None = None

    def begin(self, tensor: torch.Tensor) -> None:
        """Take what all rounds of a run have in one place; or have rows for those of a graph."""
        if not self._is_rounds:
            self._place.copy_(tensor.view(-1))
        elif self.rows is None:
            self.rows = self._place.new_zeros(_GRAPH, len(self._place))

    def take(self, tensor: torch.Tensor, done: int, count: int) -> None:
        """Take the rows of a graph's rounds."""
        if self.rows is not None:
            self.rows[:count].copy_(tensor[done : done + count].reshape(count, -1))

    def load(self, number: int) -> None:
        """Copy a round's row to where the program has it."""
        if self.rows is not None:
            self._place.copy_(self.rows[number])

    def store(self, number: int) -> None:
        """Copy what a round wrote to its row."""
        if self.rows is not None and self._is_written:
            self.rows[number].copy_(self._place)

    def give(self, tensor: torch.Tensor, done: int, count: int) -> None:
        """Give the rows that a graph wrote."""
        if self.rows is not None and self._is_written:
            tensor[done : done + count].copy_(self.rows[:count].view_as(tensor[:count]))

    def end(self, tensor: torch.Tensor) -> None:
        """Give what all rounds of a run wrote in one place."""
        if not self._is_rounds and self._is_written:
            tensor.view(-1).copy_(self._place)


def _is_dense(step: Any) -> bool:
    return step.op.value == "linear" and step.layer is None


def _step(vector: torch.Tensor) -> int:
    """Return the distance from one number of a vector to the next."""
    return 1 if vector.shape[-1] > 1 else 0
