"""The contract of backends that run programs: arguments and result of ``bind_program``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from q4_programs.program import Program
    from q4_programs.sparse import SparseWeight
    from q4core import Prepared, Segment

__all__ = ["BoundLayer", "Runner", "RunsPrograms", "Turns"]


@attrs.frozen(eq=False)
class BoundLayer:
    """A packed layer of a program, as its backend prepared it; or synapses, a ``SparseWeight``.

    Args:
        prepared: The weight; of synapses themselves.
        bias: [N] of float32, or None.
        segments: Paths by number of rows.
        module: The layer itself, a ``Q4Linear``: ``forward(x, out=out)`` and ``rows(index)`` serve the reference, which
            runs layers of every backend.
    """

    prepared: Prepared | SparseWeight
    bias: torch.Tensor | None
    segments: tuple[Segment, ...]
    module: Any = None


class Turns(Protocol):
    """What happens between the rounds of a run, such as waiting for what others computed.

    Attributes:
        address: Of ``int32_t turn(void *context, int64_t round, int64_t rounds)`` in C, which does the same and returns
            0 to go on, and of its context.
    """

    address: tuple[int, int]

    def __call__(self, number: int, rounds: int, /) -> bool:
        """Return whether a run goes on: called before each of its rounds, from 0, and with ``rounds`` after the last.

        Everything of the round before is written.
        """
        ...


class Runner(Protocol):
    """A bound program.

    One with an attribute ``takes_turns`` that is True takes a third argument, ``turns``: a ``Turns`` that it calls
    between rounds, and that may end the run. Others are called round by round.
    """

    def __call__(self, rounds: int = 1, given: Sequence[torch.Tensor] = ()) -> Sequence[int] | None:
        """Run every step, in their order, for some rounds; the program's clock is one more after each.

        ``given`` has a tensor for each given buffer, in their order, checked: a contiguous one of its size that is used
        in the place of the buffer in all rounds, or [rounds, size] with contiguous rows, of which each round has one.
        It is left out where there are none.

        What a step gives depends on what it reads alone, to the bit: neither on the number of threads nor on the steps
        round it. All but the reference allocate nothing.

        Returns:
            None, or of each step how many rows of x had outliers, as ``linear`` does.

        Raises:
            InputError: A token, a position, the clock or the number of tokens is out of range. Nothing has been
                written.
        """
        ...


class RunsPrograms(Protocol):
    """The method of a backend that declares the op ``"program"``.

    It declares ``"sparse"`` as well for programs with sparse synapses, and ``"tokens"`` for those of several tokens.
    One that declares ``"spiking"`` instead of the first is given programs of spiking networks alone.
    """

    def bind_program(self, program: Program, buffers: Sequence[torch.Tensor], layers: Sequence[BoundLayer]) -> Runner:
        """Return what runs a program over buffers.

        Args:
            program: Checked.
            buffers: One flat tensor for each buffer of the program, scratch ones too, which are 64-byte aligned and may
                share memory where no step needs both. They keep address and size as long as the runner is used; the
                core looks at that. Those that stand for given ones are neither read nor written by a run that has
                others in their place, or may be used to copy them.
            layers: The packed layers, all prepared by this backend (by any, for the reference).

        Raises:
            PrepareError: The backend can't run this program.
        """
        ...
