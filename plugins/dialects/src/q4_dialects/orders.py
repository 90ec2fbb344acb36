"""Act-order: in-features in groups by an index of each, against stored columns sorted by group.

Readers of GPTQ and compressed-tensors store ``g_idx`` [K], the group of each in-feature. ``PackedWeight`` has blocks of
adjacent columns and says which in-feature each of them is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4core import DialectError, pack_codes, unpack_codes

if TYPE_CHECKING:
    from q4core import PackedWeight, Packing

__all__ = ["group_of_inputs", "sorted_columns", "unsorted_columns"]

_CHUNK_BYTES = 1 << 22


def group_of_inputs(what: str, groups: torch.Tensor, block: int) -> torch.Tensor | None:
    """Return which in-feature each column is once columns are sorted by group; None where they are.

    Args:
        what: The layer, for messages.
        groups: The group of each in-feature [K], an integer.
        block: In-features in each group.

    Raises:
        DialectError: A group is out of range, or does not have that many in-features.
    """
    groups = groups.to(torch.int64)
    count = -(-groups.numel() // block)
    outside = (groups < 0) | (groups >= count)
    if bool(outside.any()):
        place = int(outside.nonzero()[0])
        rule = f"of groups 0 … {count - 1}"
        raise DialectError(what, name=f"order[{place}]", rule=rule, value=int(groups[place]))
    sizes = torch.bincount(groups, minlength=count)
    wanted = torch.full_like(sizes, block)
    wanted[-1] = groups.numel() - block * (count - 1)
    if not torch.equal(sizes, wanted):
        group = int((sizes != wanted).nonzero()[0])
        rule = f"of {int(wanted[group])} in-features in group {group}"
        raise DialectError(what, name="order", rule=rule, value=int(sizes[group]))
    order = torch.argsort(groups, stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order


def sorted_columns(qdata: torch.Tensor, order: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Return a copy of packed codes [N, P] with column ``order[j]`` at place j, some rows at a time."""
    rows = max(1, _CHUNK_BYTES // len(order))
    parts = (unpack_codes(part, packing)[:, order] for part in qdata.split(rows))
    return torch.cat([pack_codes(part, packing) for part in parts])


def unsorted_columns(weight: PackedWeight, packing: Packing) -> torch.Tensor:
    """Return packed codes with each column at the place of its in-feature: the inverse of ``sorted_columns``."""
    codes = weight.codes()
    if weight.input_permutation is not None:
        codes = torch.empty_like(codes).index_copy_(1, weight.input_permutation, codes)
    return pack_codes(codes, packing)
