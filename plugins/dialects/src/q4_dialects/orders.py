"""Act-order: in-features in groups by an index of each, against stored columns sorted by group.

Readers of GPTQ and compressed-tensors store ``g_idx`` [K], the group of each in-feature. ``PackedWeight`` has blocks of
adjacent columns and says which in-feature each of them is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4_dialects.int_words import columns_in_order
from q4core import Dialect, DialectError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4core import PackedWeight, Packing

__all__ = ["group_of_columns", "order_of_columns", "order_problems", "unsorted_bytes"]


def order_problems(key: str, groups: torch.Tensor, count: int, block: int) -> Iterator[Problem]:
    """Yield what is wrong with the group of each in-feature: out of range, or groups of other sizes.

    Args:
        key: The index's name.
        groups: The group of each in-feature [K], an integer.
        count: How many groups there are.
        block: In-features in each of them; the last one may be short.
    """
    low, high = (int(extreme) for extreme in torch.aminmax(groups))
    if low < 0 or high >= count:
        yield Problem("value", key, f"group numbers in 0 … {count - 1}", low if low < 0 else high)
        return
    sizes = torch.bincount(groups, minlength=count).tolist()
    wanted = [block] * (count - 1) + [len(groups) - block * (count - 1)]
    if sizes != wanted:
        place = next(index for index, pair in enumerate(zip(sizes, wanted, strict=True)) if pair[0] != pair[1])
        yield Problem("value", key, f"{wanted[place]} in-features in group {place}", sizes[place])


def order_of_columns(
    dialect: Dialect, module: str, groups: torch.Tensor, count: int, block: int
) -> torch.Tensor | None:
    """Return which in-feature each column is once columns are sorted by group; None where they are.

    Args:
        dialect: Whose layer it is, for messages.
        module: The layer.
        groups: As for ``order_problems``, like the other two.
        count: How many groups there are.
        block: In-features in each of them.

    Raises:
        DialectError: A group is out of range, or does not have that many in-features.
    """
    problem = next(order_problems("groups", groups, count, block), None)
    if problem is not None:
        raise DialectError(dialect.name, name=problem.key, rule=problem.rule, value=problem.value, where=module)
    is_sorted = bool((groups[1:] >= groups[:-1]).all())
    return None if is_sorted else torch.argsort(groups.to(torch.int64), stable=True)


def group_of_columns(weight: PackedWeight) -> torch.Tensor:
    """Return the group of each in-feature, int32 [K]: the index as it is stored."""
    groups = torch.arange(weight.in_features, dtype=torch.int32) // weight.block_size
    if weight.input_permutation is None:
        return groups
    return torch.empty_like(groups).index_copy_(0, weight.input_permutation, groups)


def unsorted_bytes(weight: PackedWeight, packing: Packing) -> torch.Tensor:
    """Return packed codes [N, P] with each column at the place of its in-feature."""
    codes = Dialect.row_bytes(weight, packing)
    if weight.input_permutation is None:
        return codes
    return columns_in_order(codes, torch.argsort(weight.input_permutation), packing)
