"""A toy backend of programs, and the faults planted in it; it makes tensors as it runs, which is one of them."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.outcome import Outcome
from q4_conformance_faults.fault import program_fault
from q4_conformance_faults.toy import ToyKernel
from q4_programs import REFERENCE, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from q4_programs import Program

__all__ = ["ToyPrograms"]

_HOME = os.getpid()
"""The process that binds programs; its forks have another number."""


class ToyPrograms(ToyKernel):
    """Runs programs by the reference, and lets a fault harm what they leave.

    Args:
        name: Its name.
        harm: Is given a program and its buffers after each run, and whether that raised an error.
    """

    def __init__(
        self, name: str = "toy-programs", harm: Callable[[Program, Sequence[Tensor], bool], None] = lambda *_: None
    ) -> None:
        super().__init__(name, ops={"linear", "program", "sparse", "tokens"})
        self.harm = harm

    def bind_program(self, program: Program, buffers: Sequence[Tensor], layers: Any) -> Callable[..., None]:
        """Bind by the reference."""
        run = REFERENCE.bind_program(program, buffers, layers)

        def call(rounds: int = 1, given: Sequence[Tensor] = ()) -> None:
            has_failed = True
            try:
                run(rounds, given)
                has_failed = False
            finally:
                self.harm(program, buffers, has_failed)

        return call


def _changed(program: Program, buffers: Sequence[Tensor], factor: float = 1 + 2**-20, step: int = -1) -> None:
    """Change a result, by default the last one, by a little."""
    view = program.steps[step].outputs[0]
    flat = buffers[view.buffer]
    flat[view.offset] = flat[view.offset] * factor if flat.is_floating_point() else 1 - flat[view.offset]


def _of(op: Op, factor: float = 1 + 2**-20) -> Callable[..., None]:
    def harm(program: Program, buffers: Sequence[Tensor], *_: bool) -> None:
        step = program.steps[-1]
        if step.op is op and (op is not Op.LINEAR or step.layer is not None):
            _changed(program, buffers, factor)

    return harm


def _before_output(program: Program, buffers: Sequence[Tensor], *_: bool) -> None:
    view = program.steps[-1].outputs[0]
    if view.offset:
        buffers[view.buffer][view.offset - 1] += 1


def _with_threads(program: Program, buffers: Sequence[Tensor], *_: bool) -> None:
    if torch.get_num_threads() == 3 and len(program.steps) > 1:  # noqa: PLR2004  # a number that divides little
        _changed(program, buffers)


def _with_tokens(step: int, program: Program, buffers: Sequence[Tensor], *_: bool) -> None:
    if program.tokens is not None and len(program.steps) > 1 and int(buffers[program.tokens[0]]) == 13:  # noqa: PLR2004  # as above
        _changed(program, buffers, step=step)


def _behind_tokens(program: Program, buffers: Sequence[Tensor], *_: bool) -> None:
    if program.tokens is not None and len(program.steps) > 1 and int(buffers[program.tokens[0]]) == 5:  # noqa: PLR2004  # as above
        view = program.steps[-2].outputs[0]  # the logits, before the token of the largest
        buffers[view.buffer][view.offset + 5 * view.stride] += 1


def _of_tokens(program: Program, buffers: Sequence[Tensor], *_: bool) -> None:
    step = program.steps[-1]
    if step.op is Op.ATTENTION and step.inputs[3].columns == 13:  # noqa: PLR2004  # as above
        _changed(program, buffers, 1.001)


def _short_of_a_span(program: Program, buffers: Sequence[Tensor], *_: bool) -> None:
    step = program.steps[-1]
    if step.op is Op.ATTEND_SPANS and len(program.steps) == 1:
        spans = step.inputs[3].of(buffers[step.inputs[3].buffer])
        first, last = spans[0, -2:].tolist()
        if last - first > 1:
            spans[0, -1] -= 1
            REFERENCE.bind_program(program, buffers, ())()
            spans[0, -1] += 1


def _after_errors(program: Program, buffers: Sequence[Tensor], has_failed: bool) -> None:  # noqa: FBT001  # as ``harm``
    if has_failed:
        _changed(program, buffers)


def _in_forks(program: Program, buffers: Sequence[Tensor], *_: bool) -> None:
    if os.getpid() != _HOME:
        _changed(program, buffers)


def _past_the_end(program: Program, buffers: Sequence[Tensor], *_: bool) -> None:
    read_behind(buffers[program.steps[-1].outputs[0].buffer])


def read_behind(tensor: Tensor) -> None:
    """Read a byte behind a tensor that ends with its page."""
    end = tensor.data_ptr() + tensor.nbytes
    if end % mmap.PAGESIZE == 0:
        ctypes.c_char.from_address(end).value  # noqa: B018  # to read it is the fault


for _name, _part, _says, _facts in (
    ("curves-roughly", "operations", "silu: 1 of 1 elements are wrong", {"harm": _of(Op.SILU, 1.001)}),
    ("writes-before-output", "operations", "was written outside the output", {"harm": _before_output}),
    ("packs-roughly", "packed", "step 0, linear: 1 of 67 elements are wrong", {"harm": _of(Op.LINEAR)}),
    ("counts-threads", "whole", "3 threads: other bits", {"harm": _with_threads}),
    ("counts-tokens", "tokens", "13 tokens, 1 threads: other bits", {"harm": functools.partial(_with_tokens, -2)}),
    ("chooses-by-tokens", "tokens", "13 tokens, 1 threads: other bits", {"harm": functools.partial(_with_tokens, -1)}),
    ("writes-behind-tokens", "tokens", "rows of other tokens were written", {"harm": _behind_tokens}),
    ("attends-roughly-to-tokens", "operations", "attention: 1 of", {"harm": _of_tokens}),
    ("sees-a-key-too-few", "operations", "attend_spans", {"harm": _short_of_a_span}),
    ("means-roughly", "operations", "mean_spans: 1 of", {"harm": _of(Op.MEAN_SPANS, 1.001)}),
    ("looks-late", "refused", "was refused after something was written", {"harm": _after_errors}),
    ("forks-badly", "forked", "in a process that was forked", {"harm": _in_forks}),
):
    program_fault(_name, f"EX-21/{_part}", _says)(functools.partial(ToyPrograms, **_facts))
program_fault("makes-tensors", "EX-21/quiet", "a run made tensors")(ToyPrograms)
_crashing = functools.partial(ToyPrograms, harm=_past_the_end)
program_fault("reads-past-the-end", "EX-21/pages", "ended by SIGSEGV", ends=Outcome.CRASH)(_crashing)
