"""Programs on the native engine: every step in one native call, on one team of threads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from q4_cpu_native.layout import TYPES
from q4_programs import Op, SparseWeight
from q4_programs.ops import WITH_CLOCK, WITH_SPANS
from q4core import InputError, PrepareError, Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from q4_cpu_native.layout import TileMeta
    from q4_programs import BoundLayer, Program, Step, Turns

__all__ = ["NativeRunner"]

_NUMBERS = {op: number for number, op in enumerate(Op)}
"""The C ABI counts operations in their order."""


class NativeRunner:
    """A bound program; each call runs it once.

    Args:
        program: Checked.
        buffers: Flat, one for each buffer of the program.
        layers: Prepared by this backend.
        families: The kernels' number of each path.
        isa: Number of the instruction set.

    Raises:
        PrepareError: A step can't be bound, or a layer has no path for its rows.
    """

    def __init__(
        self,
        program: Program,
        buffers: Sequence[torch.Tensor],
        layers: Sequence[BoundLayer],
        families: Mapping[str, int],
        isa: int,
    ) -> None:
        from q4_cpu_native import _native  # noqa: PLC0415  # missing where it was not built

        self._program = program
        self._native = _native.Program()
        self._buffers, self._tensors = (*buffers,), list[torch.Tensor]()
        for step in program.steps:
            self._add(step, buffers, None if step.layer is None else layers[step.layer], families)
        clock = 0 if program.clock is None else buffers[program.clock].data_ptr()
        given = [buffers[index] for index in program.given]
        self._sizes = [
            item.element_size() * (program.buffers[index].given == "round")
            for index, item in zip(program.given, given, strict=True)
        ]
        streams = [number for item in given for number in (item.data_ptr(), item.numel() * item.element_size())]
        number, most = (0, 0) if program.tokens is None else (buffers[program.tokens[0]].data_ptr(), program.tokens[1])
        threads = max(torch.get_num_threads(), os.cpu_count() or 1)
        if failed := self._native.bind(threads, isa, clock, streams, number, most):
            why = "views overlap, a delay is longer than its ring, or an earlier step writes a token, position or clock"
            raise _refusal(program.steps[failed - 1], why)
        self._run = self._native.run
        self.takes_turns = True

    def _add(
        self, step: Step, buffers: Sequence[torch.Tensor], layer: BoundLayer | None, families: Mapping[str, int]
    ) -> None:
        views: list[int] = []
        for view in (*step.inputs, *step.outputs):
            buffer = buffers[view.buffer]
            address = buffer.data_ptr() + view.offset * buffer.element_size()
            views += [address, view.rows, view.columns, view.stride]
        inputs, numbers = len(step.inputs), [*step.numbers]
        if step.op is Op.LINEAR:
            numbers = numbers or [0.0]
        matrix, facts, synapses = None, (0, 0, 0, False, 0, 0, 0, 0), list[int]()
        prepared = None if layer is None else layer.prepared
        if isinstance(prepared, SparseWeight):
            synapses = _synapses(prepared)
            self._tensors += prepared.tensors()
        elif layer is not None and prepared is not None:
            meta: TileMeta = prepared.meta
            call, tensors = meta.call, prepared.tensors
            address = count = 0
            if call.place is not None:
                scale = tensors[call.place].to(torch.float32)
                address, count = scale.data_ptr(), scale.numel()
                self._tensors.append(scale)
            self._tensors += tensors
            family = 0
            if step.op is Op.LINEAR:
                rows = step.inputs[0].rows
                least = rows if self._program.tokens is None else rows // self._program.tokens[1]
                served = [item for item in layer.segments if item.low <= rows and least <= (item.high or rows)]
                kinds = {families[item.path.name] for item in served}
                if len(kinds) != 1:
                    what = "kernels of several precisions for up to" if kinds else "no path for"
                    raise _refusal(step, f"the layer has {what} {rows} rows")
                family = kinds.pop()
                numbers = [float(layer.bias is not None)]
            if layer.bias is not None and step.op is not Op.EMBEDDING:
                views[4 * inputs : 4 * inputs] = [layer.bias.data_ptr(), 1, call.out_features, call.out_features]
                inputs += 1
                self._tensors.append(layer.bias)
            if call.has_inputs and step.op is Op.EMBEDDING:
                raise _refusal(step, "the in-features are stored in another order or scaled")
            inputs_of = call.inputs_of(tensors) if call.has_inputs else (0, 0, 0)
            matrix, facts = call.matrix, (tensors[0].data_ptr(), address, count, call.divides, family, *inputs_of)
        cache = next((buffers[view.buffer].dtype for view, name in step.patterns() if name[0] == "M"), torch.float32)
        self._native.add(_NUMBERS[step.op], views, inputs, numbers, matrix, *facts, synapses, TYPES[cache])

    def __call__(self, rounds: int = 1, given: Sequence[torch.Tensor] = (), turns: Turns | None = None) -> list[int]:
        """Run every step for some rounds, on as many threads as torch has now.

        Args:
            rounds: How many.
            given: A tensor for each given buffer of the program.
            turns: What is called between rounds, by its address.

        Returns:
            Of each step, how many rows of x had outliers in the last round; empty where none had.

        Raises:
            InputError: A token, a position, the clock or the number of tokens is out of range. Nothing has been
                written.
        """
        streams = [
            number
            for item, size in zip(given, self._sizes, strict=True)
            for number in (item.data_ptr(), item.stride(0) * size)
        ]
        if failed := self._run(torch.get_num_threads(), rounds, streams, *(turns.address if turns else (0, 0))):
            if failed < 0:
                buffer, most = self._program.tokens or (0, 0)
                count = int(self._buffers[buffer])
                raise InputError("program", name="tokens", rule=f"from 1 to {most}", value=count)
            step = self._program.steps[failed - 1]
            view = next(view for view, name in step.patterns() if name[0] == "i")
            value = self._buffers[view.buffer][view.offset : view.offset + view.columns].tolist()
            rule = f"in the range of its {'table' if step.op is Op.EMBEDDING else 'cache'}"
            rule = f"from 0 to {self._program.limit(step) - 1}" if step.op in WITH_CLOCK else rule
            name = "token, position or clock"
            if step.op in WITH_SPANS:
                name, rule = "spans", f"from 0 to {self._program.limit(step) - 1}, of a row at least"
            raise InputError(f"program step {failed - 1}, {_label(step)}", name=name, rule=rule, value=value)
        return self._native.outlier_rows()


def _synapses(weight: SparseWeight) -> list[int]:
    """Return synapses as ``q4_synapses`` of the C ABI."""
    starts, first, gaps, delays, codes, levels = (tensor.data_ptr() for tensor in weight.tensors())
    sizes = [weight.sources, weight.targets, weight.steps.numel()]
    return [*sizes, starts, first, gaps, weight.gaps.element_size(), delays, codes, levels]


def _label(step: Step) -> str:
    return f"{step.op.value} {step.label}".rstrip()


def _refusal(step: Step, why: str) -> PrepareError:
    return PrepareError([Reason(ReasonCode.SHAPE, f"{_label(step)}: {why}")])
