"""Masks and positions of transformers, as the padding on the left of each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["find_padding"]

_OWN_MASK, _OWN_POSITIONS = "a mask of its own", "positions of its own"


def find_padding(
    mask: Any, positions: Iterable[Any], length: int, shape: tuple[int, int], windows: Sequence[int | None]
) -> list[int] | str:
    """Return how many positions of each sequence are padding, or why no program computes what is asked for.

    Args:
        mask: What a decoder of transformers takes: None, [B, S], bool [B, 1, T, S], or a dict of such.
        positions: Those of the tokens, int64 [B or 1, T], where they are given: those after the padding count from 0.
        length: Positions of the cache.
        shape: Sequences and tokens, B and T.
        windows: How many positions each layer sees, or None.
    """
    batch, count = shape
    end = length + count
    masks = [] if _hides_nothing(mask, (batch, end)) else [*_masks(mask, windows)]
    given = [item for item in positions if item is not None]
    if any(item.shape[-1] != count or item.numel() not in {count, count * batch} for item in given):
        return _OWN_POSITIONS
    padding = [0] * batch
    if masks:
        padding = _padding(masks[0][0], [item for item in given if item.numel() == count * batch], end, batch)
        if not all(0 <= item < end for item in padding):
            return _OWN_MASK
        if not all(_says(item, padding, length, shape, seen) for item, seen in masks):
            return _OWN_MASK
    if any(padding) and not given:
        return "positions that count the padding"
    for item in given:
        for row, own in zip(padding, item.view(-1, count).expand(batch, -1).tolist(), strict=True):
            if own[max(0, row - length) :] != [*range(max(0, length - row), end - row)]:
                return _OWN_POSITIONS
    return padding


def _masks(mask: Any, windows: Sequence[int | None]) -> Iterator[tuple[Any, set[int | None]]]:
    """Yield each mask, and of which windows it may be."""
    every: set[int | None] = {None, *windows}
    kinds: dict[str, set[int | None]] = {"full_attention": {None}, "sliding_attention": every - {None}}
    for name, item in mask.items() if isinstance(mask, dict) else [("", mask)]:
        if item is not None:
            yield item, kinds.get(name, every)


def _hides_nothing(mask: Any, shape: tuple[int, int]) -> bool:
    return isinstance(mask, torch.Tensor) and mask.shape == shape and bool(mask.all())


def _padding(mask: Any, positions: Sequence[torch.Tensor], end: int, batch: int) -> list[int]:
    """Return what the mask of tokens, the positions of the last ones, or what these see say of the padding."""
    if not isinstance(mask, torch.Tensor):
        return [-1]
    if mask.dim() == 2:  # noqa: PLR2004  # [B, S]
        return (mask.shape[1] - (mask != 0).sum(1)).tolist()
    if positions:
        return (end - 1 - positions[0].view(batch, -1)[:, -1]).tolist()
    if mask.dim() != 4 or mask.dtype is not torch.bool:  # noqa: PLR2004  # [B, 1, T, S]
        return [-1]
    found = mask[:, 0, -1].int().argmax(-1).tolist()
    return found * batch if len(found) == 1 else found


def _says(
    mask: Any, padding: Sequence[int], length: int, shape: tuple[int, int], windows: Iterable[int | None]
) -> bool:
    """Return whether a mask hides nothing but padding, later positions, and those before one of some windows."""
    batch, count = shape
    if not isinstance(mask, torch.Tensor):
        return False
    first, end = torch.tensor(padding)[:, None], length + count
    if mask.dim() == 2:  # noqa: PLR2004  # [B, S]
        return mask.shape == (batch, end) and torch.equal(mask != 0, torch.arange(end) >= first)
    if mask.dim() != 4 or mask.dtype is not torch.bool or mask.shape[1:3] != (1, count):  # noqa: PLR2004  # [B, 1, T, S]
        return False
    if len(mask) not in {1, batch}:
        return False
    seen = mask.shape[3]
    keys, queries = torch.arange(seen) + max(0, end - seen), torch.arange(length, end)[:, None]
    past = (keys <= queries) & (keys >= first[..., None])
    counts = queries >= first[..., None]  # what padding sees is of no effect
    return any(
        not bool(((mask[:, 0] ^ (past if window is None else past & (keys > queries - window))) & counts).any())
        for window in windows
    )
