"""Rules of ggml's types that search for their scales: Q4_K, Q6_K and IQ4_NL.

A block's step (and minimum) is the best of several by weighted least squares; large values weigh more. Those of a
super-block are then integers times one float16, and each integer is the best of its neighbours, with codes chosen anew.

Reference:
    ggml's ``quantize_row_q4_K_ref``, ``quantize_row_q6_K_ref`` and ``quantize_row_iq4_nl_ref``, whose candidates these
    are; their errors are no larger, and their bytes differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4_quantize.coded import Coded

if TYPE_CHECKING:
    from collections.abc import Callable

    from q4core import Format

__all__ = ["SUPER_BLOCKS", "SUPER_SIZE", "iq4_nl_rule", "q4_k_rule", "q6_k_rule"]

SUPER_SIZE = 256
"""Values of a super-block."""
SUPER_BLOCKS = {"q4_1": 32, "q8_0": 16}
"""Rule of a format with super-blocks → values per scale."""
_Q4_BLOCK, _Q4_STEPS, _LARGEST_SCALE = 32, 15, 63
_Q6_BLOCK, _Q6_LEAST, _Q6_LARGEST, _LARGEST_Q6_SCALE = 16, -32, 31, 127
_NEAR = (-1, 0, 1)
_MOST_EXPONENT = 100


def _ratio(top: torch.Tensor, bottom: torch.Tensor) -> torch.Tensor:
    """Return a quotient; 0 where it is not finite."""
    found = top / bottom
    return torch.where(torch.isfinite(found), found, 0.0)


def _normalised(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks of magnitudes below 1, whose squares are in reach, and the power of two [..., 1] taken out."""
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(largest).exponent.clamp(-_MOST_EXPONENT, _MOST_EXPONENT)
    factor = torch.ldexp(torch.ones_like(largest), exponent)
    return blocks / factor, factor


def _stored(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return numbers such that those times ``factor`` are float16's."""
    return (values * factor).to(torch.float16).to(torch.float32) / factor


class _Best:
    """The candidates of least error so far, one for each block."""

    def __init__(self) -> None:
        self._error: torch.Tensor | None = None
        self.found: tuple[torch.Tensor, ...] = ()

    def offer(self, error: torch.Tensor, *candidate: torch.Tensor) -> None:
        """Take a candidate, tensors [...] or [..., values], for the blocks where its error [...] is smaller."""
        if self._error is None:
            self._error, self.found = error, candidate
            return
        is_less = error < self._error
        self._error = torch.where(is_less, error, self._error)
        self.found = tuple(
            torch.where(is_less if new.dim() == error.dim() else is_less[..., None], new, old)
            for new, old in zip(candidate, self.found, strict=True)
        )


def _error(blocks: torch.Tensor, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return (weights * (blocks - values).square()).sum(-1)


def q4_k_rule(supers: torch.Tensor) -> Coded:
    """Return Q4_K of super-blocks [..., 256]: 16 equal steps from a minimum that is not above zero."""
    supers, factor = _normalised(supers)
    blocks = torch.unflatten(supers, -1, (-1, _Q4_BLOCK))
    weights = blocks.square().mean(-1, keepdim=True).sqrt() + blocks.abs()
    step, least = _affine_search(blocks, weights)
    outer, outer_least = (_stored(part.amax(-1, keepdim=True) / _LARGEST_SCALE, factor) for part in (step, -least))
    first, second = (
        _ratio(part, whole).round().clamp(0, _LARGEST_SCALE) for part, whole in ((step, outer), (-least, outer_least))
    )
    best = _Best()
    for one in _NEAR:
        for other in _NEAR:
            scale, offset = ((part + by).clamp(0, _LARGEST_SCALE) for part, by in ((first, one), (second, other)))
            size, low = (outer * scale)[..., None], (outer_least * offset)[..., None]
            codes = _ratio(blocks + low, size).round().clamp(0, _Q4_STEPS)
            best.offer(_error(blocks, weights, codes * size - low), scale, offset, codes)
    scale, offset, codes = (part.to(torch.uint8) for part in best.found)
    nested, nested_offset = ((part * factor)[..., 0].to(torch.float16) for part in (outer, -outer_least))
    return Coded(
        codes.flatten(-2),
        scale.flatten(-2),
        offset=offset.flatten(-2),
        nested_scale=nested,
        nested_offset=nested_offset,
    )


def _affine_search(blocks: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return step and minimum of each block: those of 21 ranges' codes, fitted by least squares, of least error."""
    low, high = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True)
    total, first, second = weights.sum(-1), (weights * blocks).sum(-1), (weights * blocks.square()).sum(-1)
    best = _Best()
    for steps in torch.linspace(_Q4_STEPS - 1, _Q4_STEPS + 1, 21).tolist():
        codes = _ratio((blocks - low) * steps, high - low).round().clamp(0, _Q4_STEPS)
        weighted = weights * codes
        of_codes, of_squares, of_both = weighted.sum(-1), (weighted * codes).sum(-1), (weighted * blocks).sum(-1)
        free = total * of_squares - of_codes.square()
        step = _ratio(total * of_both - first * of_codes, free)
        least = torch.where(free == 0, _ratio(first, total), _ratio(of_squares * first - of_codes * of_both, free))
        is_above = least > 0
        step = torch.where(is_above, _ratio(of_both, of_squares), step).clamp(min=0)
        least = torch.where(is_above, 0.0, least)
        error = (
            second + step.square() * of_squares + least.square() * total
            + 2 * (step * least * of_codes - step * of_both - least * first)
        )  # fmt: skip
        best.offer(error, step, least)
    step, least = best.found
    return step, least


def q6_k_rule(supers: torch.Tensor) -> Coded:
    """Return Q6_K of super-blocks [..., 256]: −32 … 31 steps, which may be negative."""
    supers, factor = _normalised(supers)
    blocks = torch.unflatten(supers, -1, (-1, _Q6_BLOCK))
    weights = blocks.square()

    def choose(inverse: torch.Tensor) -> torch.Tensor:
        return (blocks * inverse).round().clamp(_Q6_LEAST, _Q6_LARGEST)

    step = _symmetric_search(blocks, weights, choose, [-_Q6_LEAST + number / 10 for number in range(-9, 10)])
    extreme = step.gather(-1, step.abs().argmax(-1, keepdim=True))
    outer = _stored(extreme / -(_LARGEST_Q6_SCALE + 1), factor)
    first = _ratio(step, outer).round()
    best = _Best()
    for by in _NEAR:
        scale = (first + by).clamp(-_LARGEST_Q6_SCALE - 1, _LARGEST_Q6_SCALE)
        size = (outer * scale)[..., None]
        codes = _ratio(blocks, size).round().clamp(_Q6_LEAST, _Q6_LARGEST)
        best.offer(_error(blocks, weights, codes * size), scale, codes)
    scale, codes = (part.to(torch.int8) for part in best.found)
    nested = (outer * factor)[..., 0].to(torch.float16)
    return Coded(codes.view(torch.uint8).flatten(-2), scale.flatten(-2), nested_scale=nested)


def _symmetric_search(
    blocks: torch.Tensor,
    weights: torch.Tensor,
    choose: Callable[[torch.Tensor], torch.Tensor],
    candidates: list[float],
) -> torch.Tensor:
    """Return the step of each block, signed, of least weighted error.

    Args:
        blocks: [..., values].
        weights: As ``blocks``.
        choose: The inverse of a step [..., 1] → the values, in steps, that are nearest to the block's.
        candidates: What the value of largest magnitude is, negated, in steps.
    """
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    best = _Best()
    for candidate in candidates:
        values = choose(_ratio(torch.full_like(extreme, -candidate), extreme))
        weighted = weights * values
        both, square = (weighted * blocks).sum(-1), (weighted * values).sum(-1)
        step = _ratio(both, square)
        best.offer(-step * both, step)
    return best.found[0]


def iq4_nl_rule(form: Format) -> Callable[[torch.Tensor], Coded]:
    """Return the rule of IQ4_NL: the nearest of its values, times a step that may be negative."""
    book = form.codebook_tensor()
    midpoints = (book[:-1] + book[1:]) / 2

    def rule(blocks: torch.Tensor) -> Coded:
        blocks, factor = _normalised(blocks)
        weights = blocks.square()
        table, bounds = book.to(blocks.device), midpoints.to(blocks.device)

        def choose(inverse: torch.Tensor) -> torch.Tensor:
            return table[torch.bucketize(blocks * inverse, bounds)]

        lowest = -form.codebook[0]
        found = _symmetric_search(blocks, weights, choose, [lowest + number for number in range(-7, 8)])
        step = _stored(found[..., None], factor)
        codes = torch.bucketize(_ratio(blocks, step), bounds)
        return Coded(codes.to(torch.uint8), (step * factor)[..., 0].to(torch.float16))

    return rule
