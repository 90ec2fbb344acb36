"""Validation of ``quantize``'s arguments, before anything is computed where possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4_quantize.rules import MEANINGS, RULES
from q4_quantize.super_blocks import SUPER_BLOCKS, SUPER_SIZE
from q4core import BUILTIN_FORMATS, Form, InputError, NibbleOrder, Packing, ScaleKind
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from q4_quantize.coded import Coded
    from q4core import Format, Q4Error

_MOST_FEATURES = 2**31 - 1
_MOST_ELEMENTS = 1 << 40
_CODE_BITS = 8

_Rule = tuple[bool, str, str, object, "str | None"]
"""Whether the rule is met, the argument's name, the rule, the value, the hint."""


def require(kind: type[Q4Error], what: str, rules: Iterable[_Rule], where: str | None) -> None:
    """Raise an error of a kind for the first rule that is not met."""
    for is_met, name, rule, value, hint in rules:
        if not is_met:
            raise kind(what, name=name, rule=rule, value=value, where=where, hint=hint)


def check_dense(dense: torch.Tensor, where: str | None) -> None:
    """Refuse what is not a float matrix of a sensible size, by an ``InputError``."""
    require(InputError, "quantize", _dense_rules(dense), where)


def _dense_rules(dense: torch.Tensor) -> Iterator[_Rule]:
    yield isinstance(dense, torch.Tensor), "dense", "a tensor", type(dense).__name__, None
    hint: str | None = "Quantise each matrix of a stack by itself."
    yield dense.dim() == 2, "dense", "[N, K]", list(dense.shape), hint  # noqa: PLR2004  # [N, K]
    hint = "Convert it with .to(torch.float32)." if dense.is_floating_point() else None
    yield dense.dtype in FLOATS, "dense", f"of dtype {', '.join(map(str, FLOATS))}", dense.dtype, hint
    yield dense.layout is torch.strided, "dense", "a dense tensor", dense.layout, "Convert it with .to_dense()."
    yield not dense.is_meta, "dense", "on a device that holds data", "meta", "Load the weight first."
    for name, size in zip("NK", dense.shape, strict=True):
        yield 0 < size <= _MOST_FEATURES, name, "between 1 and 2^31 - 1", size, None
    yield dense.numel() <= _MOST_ELEMENTS, "N * K", "at most 2^40", dense.numel(), None


def check_finite(dense: torch.Tensor, where: str | None) -> None:
    """Refuse NaN and infinities, by an ``InputError`` that says how many there are and where the first is."""
    if torch.isfinite(torch.stack(dense.aminmax())).all():  # a NaN anywhere makes both extremes NaN
        return
    bad = ~torch.isfinite(dense)
    count, first = int(bad.sum()), divmod(int(bad.flatten().to(torch.uint8).argmax()), dense.shape[1])
    facts: dict[str, Any] = {"value": float(dense[first]), "count": count, "index": first, "where": where}
    hint = f"Replace what is not finite: {count} of {dense.numel()} values."
    raise InputError("quantize", name=f"dense{list(first)}", rule="finite", hint=hint, **facts)


def format_rules(chosen: Format) -> Iterator[_Rule]:
    """Yield what must hold of a format: its rule is known here, and writes codes that mean what the format's do."""
    yield chosen.rule in RULES, "rule of the format", f"one of {', '.join(RULES)}", chosen.rule, None
    like = BUILTIN_FORMATS[MEANINGS.get(chosen.rule, "nf4")]
    codebook = like.codebook if chosen.rule in MEANINGS else chosen.codebook
    meaning = (chosen.form, chosen.codebook, chosen.has_offset)
    is_met, rule = meaning == (like.form, codebook, like.has_offset), f"another: {chosen.rule} writes codes of {like}"
    yield is_met, "rule of the format", rule, chosen.rule, None


def block_of(chosen: Format, kind: ScaleKind) -> int:
    """Return the default block size."""
    is_super = kind is ScaleKind.SUPER_BLOCK
    return SUPER_BLOCKS.get(chosen.rule, chosen.block_size) if is_super else chosen.block_size


def choice_rules(  # noqa: PLR0913  # the choices of one call
    chosen: Format, block: int, kind: ScaleKind, packing: Packing, columns: int, *, symmetric: bool
) -> Iterator[_Rule]:
    """Yield what must hold of the choices for a format, and of K, which may not cut a block or a packed group."""
    legal, is_integer = chosen.block_sizes, chosen.form is Form.INTEGER
    is_super = kind is ScaleKind.SUPER_BLOCK and chosen.rule in SUPER_BLOCKS
    if is_super:
        legal = frozenset({SUPER_BLOCKS[chosen.rule]})
    is_count = isinstance(block, int) and not isinstance(block, bool) and block > 0
    rule = f"one of {', '.join(map(str, sorted(legal)))}" if legal else "a positive integer"
    yield is_count and (not legal or block in legal), "block_size", rule, block, None
    kinds = chosen.scale_kinds - (set() if is_super else {ScaleKind.SUPER_BLOCK})  # others are read alone
    rule = f"one of {', '.join(sorted(str(item) for item in kinds))}"
    yield kind in kinds, "scale_kind", rule, kind, None
    is_met = isinstance(packing, Packing) and packing.codes_per_byte * chosen.bits == _CODE_BITS
    yield is_met, "packing", f"of {chosen.bits}-bit codes", str(packing), None
    yield is_integer or not symmetric, "symmetric", "False: only int4 has zero points", symmetric, None
    if columns % block and chosen.has_flat_blocks:
        rule = f"low_first or high_first where K is not a multiple of {block}"
        yield packing.order is not NibbleOrder.HALF_SPLIT, "packing", rule, str(packing), None
        return
    block = SUPER_SIZE if is_super else block
    wider = -(-columns // block) * block
    hint = f"Pad each row with zeros to {wider} in-features, or use a format that allows any K: nf4, fp4 or int4."
    yield is_integer or not columns % block, "K", f"a multiple of the block size {block}", columns, hint
    rule = f"a multiple of {packing.group} for packing {packing}"
    yield not packing.group or not columns % packing.group, "K", rule, columns, None


def check_scales(coded: Coded, chosen: Format, where: str | None) -> None:
    """Refuse values so large that a scale or offset overflowed its dtype, by an ``InputError`` with the block."""
    for name in ("scale", "offset", "nested_scale", "nested_offset"):
        numbers = getattr(coded, name)
        if numbers is None or numbers.element_size() == 1:
            continue
        bad = (~torch.isfinite(numbers)).nonzero()
        if len(bad):
            which, rule = f"the {name} of block {bad[0].tolist()}", f"at most {torch.finfo(numbers.dtype).max}"
            facts = {"value": "infinity", "where": where, "hint": "The values there are too large."}
            raise InputError(f"quantize to {chosen}", name=which, rule=f"{rule} ({numbers.dtype})", **facts)
