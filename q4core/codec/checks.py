"""What ``quantize`` refuses, before it computes anything where that can be known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4core.errors import FormatError, InputError
from q4core.formats import FLOATS, BlockOrder, Form, Format, NibbleOrder, Packing, ScaleKind

if TYPE_CHECKING:
    from q4core.codec.rule import Coded

__all__ = ["check_choices", "check_columns", "check_dense", "check_finite", "check_scales"]

_MOST_FEATURES = 2**31 - 1
_MOST_ELEMENTS = 1 << 40
_CHUNK_ELEMENTS = 1 << 22
_CODE_BITS = 8


def check_dense(dense: torch.Tensor, where: str | None) -> None:
    """Refuse what is not a float matrix of a sensible size.

    Raises:
        InputError: It is not.
    """
    if not isinstance(dense, torch.Tensor):
        raise InputError("quantize", name="dense", rule="a tensor", value=type(dense).__name__, where=where)
    if dense.dim() != 2:  # noqa: PLR2004  # [N, K]
        each = "Quantise each matrix of a stack by itself."
        raise InputError("quantize", name="dense", rule="[N, K]", value=list(dense.shape), where=where, hint=each)
    if dense.dtype not in FLOATS:
        rule = f"of dtype {', '.join(map(str, FLOATS))}"
        hint = "Convert it with .to(torch.float32)." if dense.is_floating_point() else None
        raise InputError("quantize", name="dense", rule=rule, value=dense.dtype, where=where, hint=hint)
    if dense.layout is not torch.strided:
        hint = "Convert it with .to_dense()."
        raise InputError("quantize", name="dense", rule="a dense tensor", value=dense.layout, where=where, hint=hint)
    if dense.is_meta:
        hint = "Load the weight first."
        raise InputError(
            "quantize", name="dense", rule="on a device that holds data", value="meta", where=where, hint=hint
        )
    rows, columns = dense.shape
    for name, size in (("N", rows), ("K", columns)):
        if not 0 < size <= _MOST_FEATURES:
            raise InputError("quantize", name=name, rule="between 1 and 2^31 - 1", value=size, where=where)
    if rows * columns > _MOST_ELEMENTS:
        raise InputError("quantize", name="N * K", rule="at most 2^40", value=rows * columns, where=where)


def check_finite(dense: torch.Tensor, where: str | None) -> None:
    """Refuse NaN and infinities.

    Raises:
        InputError: There are some; the message gives how many, and where the first is.
    """
    count = 0
    first: tuple[int, int] | None = None
    step = max(1, _CHUNK_ELEMENTS // dense.shape[1])
    for start in range(0, dense.shape[0], step):
        bad = ~torch.isfinite(dense[start : start + step])
        count += int(bad.sum())
        if first is None and count:
            row, column = bad.nonzero()[0].tolist()
            first = (start + row, column)
    if first is not None:
        raise InputError(
            "quantize",
            name=f"dense[{first[0]}, {first[1]}]",
            rule="finite",
            value=float(dense[first]),
            where=where,
            hint=f"{count} of {dense.numel()} values are not finite.",
            count=count,
            index=first,
        )


def check_choices(  # noqa: PLR0913  # the choices of one call
    chosen: Format, block: int, kind: ScaleKind, packing: Packing, *, symmetric: bool, where: str | None
) -> None:
    """Refuse a block size, scale kind, packing or symmetry that the format does not have.

    Raises:
        FormatError: One of them.
    """
    what = f"quantize to {chosen}"
    legal = chosen.block_sizes
    if isinstance(block, bool) or not isinstance(block, int) or block < 1 or (legal and block not in legal):
        rule = f"one of {', '.join(map(str, sorted(legal)))}" if legal else "a positive integer"
        raise FormatError(what, name="block_size", rule=rule, value=block, where=where)
    if kind not in chosen.scale_kinds:
        rule = f"one of {', '.join(sorted(str(item) for item in chosen.scale_kinds))}"
        raise FormatError(what, name="scale_kind", rule=rule, value=kind, where=where)
    if not isinstance(packing, Packing) or packing.codes_per_byte * chosen.bits != _CODE_BITS:
        raise FormatError(what, name="packing", rule=f"of {chosen.bits}-bit codes", value=str(packing), where=where)
    if symmetric and chosen.form is not Form.INTEGER:
        raise FormatError(what, name="symmetric", rule="False: only int4 has zero points", value=symmetric, where=where)


def check_columns(  # noqa: PLR0913  # the facts of one row
    chosen: Format, block: int, columns: int, packing: Packing, blocks: BlockOrder, where: str | None
) -> None:
    """Refuse K that cuts a block or a packed group.

    Raises:
        FormatError: It does; the message says what would do.
    """
    what = f"quantize to {chosen}"
    if blocks is BlockOrder.FLAT:
        if packing.order is NibbleOrder.HALF_SPLIT:
            rule = f"low_first or high_first where K is not a multiple of {block}"
            raise FormatError(what, name="packing", rule=rule, value=str(packing), where=where)
        return
    if columns % block and chosen.form is not Form.INTEGER:
        hint = (
            f"Pad each row with zeros to {-(-columns // block) * block} in-features, "
            "or use a format that allows any K: nf4, fp4 or int4."
        )
        raise FormatError(
            what, name="K", rule=f"a multiple of the block size {block}", value=columns, where=where, hint=hint
        )
    if packing.group and columns % packing.group:
        raise FormatError(
            what, name="K", rule=f"a multiple of {packing.group} for packing {packing}", value=columns, where=where
        )


def check_scales(coded: Coded, chosen: Format, where: str | None) -> None:
    """Refuse values so large that a scale or offset overflowed the dtype that it is stored in.

    Raises:
        InputError: There are some; the message names the first block.
    """
    for name, numbers in (("scale", coded.scale), ("offset", coded.offset)):
        if numbers is None or numbers.element_size() == 1:
            continue
        bad = ~torch.isfinite(numbers)
        if bool(bad.any()):
            block = bad.nonzero()[0].tolist()
            raise InputError(
                f"quantize to {chosen}",
                name=f"the {name} of block {block}",
                rule=f"at most {torch.finfo(numbers.dtype).max} ({numbers.dtype})",
                value="infinity",
                where=where,
                hint="The values there are too large for this format.",
            )
