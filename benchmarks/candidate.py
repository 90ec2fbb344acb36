"""``Candidate``: one thing that is timed, and how its answer is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

__all__ = ["OURS", "PEER", "YARDSTICK", "Calls", "Candidate", "WrongAnswerError"]

OURS, PEER, YARDSTICK = "ours", "peer", "yardstick"


class WrongAnswerError(RuntimeError):
    """What is timed computes something else, so its speed is meaningless."""


@attrs.frozen
class Calls:
    """What a candidate runs for one number of rows and threads."""

    turns: Sequence[Callable[[], object]]
    """Run one after another; each reads another copy of the weight."""
    answer: Callable[[], torch.Tensor] | None = None
    """y [M, N] of the first turn, once that has run; None where nothing is multiplied."""
    products: int = 1
    """Products that one turn computes."""


@attrs.frozen(eq=False)
class Candidate:
    """One thing that is timed.

    Args:
        name: What results call it.
        library: Whose it is; libraries have thread pools of their own, and are timed apart.
        role: ``OURS``, ``PEER`` or ``YARDSTICK``.
        format: The format of the weight.
        precision: What happens to activations: ``exact``, ``int8``, ``bf16`` or ``fp32``.
        weight_bytes: What one product reads of the weight.
        make: Returns the calls for x float32 [M, K], a number of threads, and whether one copy is to stay in the cache.
        reference: float64 [P, K]: the weight as its own library decodes it; rows P, 2P … of the weight repeat it.
        limit: The largest NMSE that the answer may have.
        most_rows: Rows of x beyond which it is not timed; None for no such end.
        operations: Of one product, where these do not follow from the problem.
    """

    name: str
    library: str
    role: str
    format: str
    precision: str
    weight_bytes: int
    make: Callable[[torch.Tensor, int, bool], Calls]
    reference: torch.Tensor | None = None
    limit: float = 1e-3
    most_rows: int | None = None
    operations: int | None = None

    def nmse(self, calls: Calls, x: torch.Tensor) -> float | None:
        """Run once and return the error of the answer, relative to the answer's power.

        Raises:
            WrongAnswerError: It is above the limit, or not a number.
        """
        calls.turns[0]()
        if calls.answer is None or self.reference is None:
            return None
        answer = calls.answer().double()
        expected = x.double() @ self.reference.T
        expected = expected.repeat(1, answer.shape[1] // expected.shape[1])
        error = float((answer - expected).square().sum() / expected.square().sum())
        if not error <= self.limit:
            message = f"{self.name}, {x.shape[0]} rows: NMSE must be at most {self.limit:g}, got {error:g}"
            raise WrongAnswerError(message)
        return error
