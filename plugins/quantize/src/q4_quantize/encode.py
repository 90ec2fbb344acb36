"""Quantise: a dense weight into a ``PackedWeight``, bit-equal to the library that each format comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4_quantize import checks, rules
from q4_quantize.coded import Coded
from q4_quantize.double_quant import double_quantise
from q4_quantize.super_blocks import SUPER_SIZE
from q4core import BlockOrder, FormatError, PackedWeight, ScaleKind, find_format, pack_codes

if TYPE_CHECKING:
    from q4_quantize.rules import Rule
    from q4core import Format, Packing

_CHUNK_ELEMENTS = 1 << 19
_TWO_LEVELS = frozenset({ScaleKind.E4M3_MUL, ScaleKind.E4M3_DIV})


def quantize_reference(  # noqa: PLR0913  # the choices that a format leaves open
    dense: torch.Tensor,
    format: str | Format,  # noqa: A002  # the contract's name
    *,
    block_size: int | None = None,
    scale_kind: ScaleKind | None = None,
    packing: Packing | None = None,
    symmetric: bool = False,
    name: str | None = None,
) -> PackedWeight:
    """Quantise a dense weight by the rule of the library that the format comes from.

    Bytes are equal on CPU to those of bitsandbytes (nf4, fp4), torchao (nvfp4, mxfp4), gguf (q4_0, q4_1, q8_0) and,
    for float32 weights, compressed-tensors (nvfp4 with E4M3_DIV, int4). Super-blocks of q4_1 (Q4_K) and q8_0 (Q6_K) and
    iq4_nl are searched for as ggml does. bfloat16 and float16 are widened to
    float32 first, where compressed-tensors rounds in their own dtype. E4M3_MUL differs from torchao where no magnitude
    reaches 2.1e-33, because torchao's reciprocals overflow there.

    Args:
        dense: float32, bfloat16 or float16 [N, K], any strides, finite; it is only read.
        format: A built-in format, or one whose ``rule`` is among ``RULES``.
        block_size: In-features per scale. Defaults to the format's own; that of Q6_K is 16.
        scale_kind: How scales are stored. Defaults to the format's own; DOUBLE_QUANT is bitsandbytes' double
            quantisation, and SUPER_BLOCK is Q4_K for q4_1 and Q6_K for q8_0.
        packing: The nibble order. Defaults to the format's own.
        symmetric: For INTEGER formats: no zero points, code 8 stands for 0.
        name: The layer's name, for messages.

    Returns:
        The weight, on the device of ``dense``, with scales in the dtype that the dialect stores: absmax float32, e4m3,
        e8m0, ggml's float16, INT4's the dtype of ``dense``. nf4 and fp4 with K not a multiple of the block have FLAT
        blocks; int4 has a short last block.

    Raises:
        InputError: ``dense`` is not a finite float matrix, or holds values that the format's scales can't reach.
        FormatError: The format is unknown, or the block size, scale kind, packing or K is not legal for it.
    """
    chosen = find_format(format)
    checks.require(FormatError, f"quantize to {chosen}", checks.format_rules(chosen), name)
    checks.check_dense(dense, name)
    dense = dense.detach()
    rows, columns = dense.shape
    kind = chosen.scale_kind if scale_kind is None else scale_kind
    block = checks.block_of(chosen, kind) if block_size is None else block_size
    order = chosen.packing if packing is None else packing
    legal = checks.choice_rules(chosen, block, kind, order, columns, symmetric=symmetric)
    checks.require(FormatError, f"quantize to {chosen}", legal, name)
    blocks = BlockOrder.FLAT if chosen.has_flat_blocks and columns % block else BlockOrder.ROW
    checks.check_finite(dense, name)
    fields: dict[str, Any] = {}
    if kind in _TWO_LEVELS:
        least, greatest = dense.aminmax()
        fields["global_scale"] = rules.nvfp4_global_scale(torch.maximum(-least, greatest).to(torch.float32), kind)
    choices = rules.Choices(chosen, kind, dense.dtype, fields.get("global_scale"), symmetric)
    rule = rules.RULES[chosen.rule](choices)
    if blocks is BlockOrder.FLAT:
        coded = _encode_flat(dense.reshape(-1), block, chosen, order, rule)
    else:
        coded = _encode_rows(dense, SUPER_SIZE if kind is ScaleKind.SUPER_BLOCK else block, rule, order)
    checks.check_scales(coded, chosen, name)
    fields["scale"] = coded.scale
    if kind is ScaleKind.SUPER_BLOCK:
        levels = {"nested_scale": coded.nested_scale, "nested_offset": coded.nested_offset}
        fields |= {name: level.flatten() for name, level in levels.items() if level is not None}
        fields["nested_block_size"] = SUPER_SIZE // block
    if kind is ScaleKind.DOUBLE_QUANT:
        fields.update(double_quantise(coded.scale))
    return PackedWeight(
        format=chosen,
        qdata=coded.codes,
        out_features=rows,
        in_features=columns,
        block_size=block,
        scale_kind=kind,
        packing=order,
        blocks=blocks,
        offset=coded.offset,
        zero=coded.zero,
        dtype=dense.dtype,
        name=name,
        **fields,
    )


def _encode_rows(dense: torch.Tensor, block: int, rule: Rule, packing: Packing) -> Coded:
    """Return packed codes [N, P] and numbers [N, blocks]."""
    columns = dense.shape[1]
    whole = columns // block * block
    parts = []
    for piece in dense.split(max(1, _CHUNK_ELEMENTS // columns)):
        chunk = piece.to(torch.float32).contiguous()
        pieces = [rule(torch.unflatten(chunk[:, :whole], 1, (-1, block)))] if whole else []
        if whole < columns:
            pieces.append(rule(chunk[:, None, whole:]))
        codes = torch.cat([piece.codes.flatten(1) for piece in pieces], dim=1)
        parts.append(Coded.join(pack_codes(codes, packing), pieces, 1))
    return Coded.join(torch.cat([part.codes for part in parts]), parts, 0)


def _encode_flat(flat: torch.Tensor, block: int, form: Format, packing: Packing, rule: Rule) -> Coded:
    """Return packed codes [ceil(N * K / 2)] and numbers [ceil(N * K / block)] of the flattened weight."""
    whole = flat.numel() // block * block
    chunks = torch.unflatten(flat[:whole], 0, (-1, block)).split(max(1, _CHUNK_ELEMENTS // block))
    pieces = [rule(chunk.to(torch.float32)) for chunk in chunks]
    if whole < flat.numel():
        short = rules.absmax_rule(form, short=True) if form.rule == "absmax" else rule
        pieces.append(short(flat[None, whole:].to(torch.float32)))
    codes = torch.cat([piece.codes.reshape(-1) for piece in pieces])
    codes = torch.nn.functional.pad(codes, (0, codes.numel() % 2), value=rules.code_of_zero(form))
    return Coded.join(pack_codes(codes, packing), pieces, 0)
