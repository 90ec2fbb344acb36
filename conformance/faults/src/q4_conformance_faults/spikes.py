"""Faults planted in a sparse product of spikes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from q4_conformance.outcome import Outcome
from q4_conformance_faults.fault import backend_fault
from q4_conformance_faults.programs import read_behind
from q4_conformance_faults.toy import ToyKernel

if TYPE_CHECKING:
    from torch import Tensor

    from q4core import Prepared

__all__ = ["ToySpikes"]


class ToySpikes(ToyKernel):
    """The toy's own product of rows of 0 and 1; it makes tensors, which is one of the faults."""

    def __init__(self, name: str = "toy-spikes") -> None:
        super().__init__(name, ops={"linear", "spikes"})

    def spike_limit(self, rows: int) -> float:
        """Return half: there is nothing to gain."""
        del rows
        return 0.5

    def spikes(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None) -> None:
        """Compute as if x were any."""
        self.linear(prepared, x.float(), out, bias=bias, path="gemv_w4a32")


@backend_fault("drops-a-spike", "EX-22/numbers", "row 0 of 5 has other bits alone")
class _Drops(ToySpikes):
    """Loses a little of a row that is computed alone."""

    def spikes(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None) -> None:
        super().spikes(prepared, x, out, bias=bias)
        if len(out) == 1:
            out *= 1 + 2**-22


backend_fault("makes-spikes-dense", "EX-22/quiet", "a call made tensors")(ToySpikes)


@backend_fault("reads-behind-spikes", "EX-22/pages", "ended by SIGSEGV", ends=Outcome.CRASH)
class _Behind(ToySpikes):
    """Reads one element too many."""

    def spikes(self, prepared: Prepared, x: Tensor, out: Tensor, *, bias: Tensor | None) -> None:
        super().spikes(prepared, x, out, bias=bias)
        read_behind(out)
