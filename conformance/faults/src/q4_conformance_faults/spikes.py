"""Faults planted in a sparse product of spikes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.outcome import Outcome
from q4_conformance_faults.fault import backend_fault
from q4_conformance_faults.programs import read_behind
from q4_conformance_faults.toy import ToyKernel
from q4core import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from q4core import Prepared

__all__ = ["ToySpikes"]


class ToySpikes(ToyKernel):
    """Adds columns up by the toy's own product of rows of 0 and 1; that makes tensors, which is one of the faults."""

    def __init__(self, name: str = "toy-spikes") -> None:
        super().__init__(name, ops={"linear", "spikes"})

    def spike_limit(self, rows: int) -> float:
        """Return half: there is nothing to gain."""
        del rows
        return 0.5

    def spikes(self, prepared: Prepared, columns: Tensor, starts: Tensor, out: Tensor, *, bias: Tensor | None) -> None:
        """Refuse wrong columns, then compute."""
        self.refuse(columns, starts, self.own(prepared).meta.in_features)
        x = torch.zeros((len(out), self.own(prepared).meta.in_features))
        for row in range(len(out)):
            x[row, columns[starts[row] : starts[row + 1]]] = 1
        self.linear(prepared, x, out, bias=bias, path="gemv_w4a32")

    def refuse(self, columns: Tensor, starts: Tensor, width: int) -> None:
        """Raise where a column is out of range or does not rise."""
        for first, last in zip(starts.tolist(), starts[1:].tolist(), strict=False):
            row = columns[first:last]
            if ((row < 0) | (row >= width)).any() or (row.diff() <= 0).any():
                raise InputError("spikes", name="columns", rule="rising in range", value=row.tolist())


@backend_fault("drops-a-spike", "EX-22/numbers", "row 0 of 5 has other bits alone")
class _Drops(ToySpikes):
    """Loses a little of a row that stands beside no other."""

    def spikes(self, prepared: Prepared, columns: Tensor, starts: Tensor, out: Tensor, *, bias: Tensor | None) -> None:
        super().spikes(prepared, columns, starts, out, bias=bias)
        if len(out) == 1:
            out *= 1 + 2**-22


@backend_fault("takes-any-column", "EX-22/refused", "were taken")
class _TakesAny(ToySpikes):
    """Looks at the range of columns alone."""

    def refuse(self, columns: Tensor, starts: Tensor, width: int) -> None:
        super().refuse(columns.unique(), starts.new_tensor([0, columns.unique().numel()]), width)


backend_fault("makes-spikes-dense", "EX-22/quiet", "a call made tensors")(ToySpikes)


@backend_fault("reads-behind-spikes", "EX-22/pages", "ended by SIGSEGV", ends=Outcome.CRASH)
class _Behind(ToySpikes):
    """Reads one element too many."""

    def spikes(self, prepared: Prepared, columns: Tensor, starts: Tensor, out: Tensor, *, bias: Any) -> None:
        super().spikes(prepared, columns, starts, out, bias=bias)
        read_behind(out)
