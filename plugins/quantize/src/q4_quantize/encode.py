"""Quantise: a dense weight into a ``PackedWeight``, bit-equal to the library that each format comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q4core.codec import checks, rules
from q4core.errors import FormatError
from q4core.formats import BUILTIN_FORMATS, BlockOrder, Format, Packing, ScaleKind, find_format, pack_codes
from q4core.weight import PackedWeight

if TYPE_CHECKING:
    from q4core.codec.rules import Coded, Rule

_CHUNK_ELEMENTS = 1 << 19
_DEFAULT_KINDS = {"nvfp4": ScaleKind.E4M3_MUL, "mxfp4": ScaleKind.E8M0}
_TWO_LEVELS = frozenset({ScaleKind.E4M3_MUL, ScaleKind.E4M3_DIV})


def quantize(  # noqa: PLR0913  # the choices that a format leaves open
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
    for float32 weights, compressed-tensors (nvfp4 with E4M3_DIV, int4). bfloat16 and float16 are widened to
    float32 first, where compressed-tensors rounds in their own dtype. E4M3_MUL differs from torchao where no magnitude
    reaches 2.1e-33, because torchao's reciprocals overflow there.

    Args:
        dense: float32, bfloat16 or float16 [N, K], any strides, finite; it is only read.
        format: One of the eight built-in formats.
        block_size: In-features per scale; None for the format's own.
        scale_kind: How scales are stored. None for E4M3_MUL (nvfp4), E8M0 (mxfp4), PLAIN (the others); DOUBLE_QUANT is
            bitsandbytes' double quantisation.
        packing: The nibble order; None for the format's own.
        symmetric: For int4: no zero points, code 8 stands for 0.
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
    if BUILTIN_FORMATS.get(chosen.name) != chosen:
        known = ", ".join(BUILTIN_FORMATS)
        raise FormatError("quantize", name="format", rule=f"one of {known}", value=chosen.name, where=name)
    checks.check_dense(dense, name)
    dense = dense.detach()
    rows, columns = dense.shape
    block = chosen.block_size if block_size is None else block_size
    kind = _DEFAULT_KINDS.get(chosen.name, ScaleKind.PLAIN) if scale_kind is None else scale_kind
    order = chosen.default_packing() if packing is None else packing
    legal = checks.choice_rules(chosen, block, kind, order, columns, symmetric=symmetric)
    checks.require(FormatError, f"quantize to {chosen}", legal, name)
    blocks = BlockOrder.FLAT if chosen.name in checks.FLAT_FORMATS and columns % block else BlockOrder.ROW
    checks.check_finite(dense, name)
    fields: dict[str, Any] = {}
    if kind in _TWO_LEVELS:
        least, greatest = dense.aminmax()
        fields["global_scale"] = rules.nvfp4_global_scale(torch.maximum(-least, greatest).to(torch.float32), kind)
    if blocks is BlockOrder.FLAT:
        coded = _encode_flat(dense.reshape(-1), block, chosen, order)
    else:
        by_format: dict[str, Rule] = {
            "nf4": rules.absmax_rule(chosen),
            "fp4": rules.absmax_rule(chosen),
            "nvfp4": rules.nvfp4_rule(kind, fields.get("global_scale")),
            "mxfp4": rules.mxfp4_rule,
            "q4_0": rules.q4_0_rule,
            "q4_1": rules.q4_1_rule,
            "q8_0": rules.q8_0_rule,
            "int4": rules.int4_rule(dense.dtype, symmetric=symmetric),
        }
        coded = _encode_rows(dense, block, by_format[chosen.name], order)
    checks.check_scales(coded, chosen, name)
    fields["scale"] = coded.scale
    if kind is ScaleKind.DOUBLE_QUANT:
        fields.update(rules.double_quantise(coded.scale))
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
        parts.append(rules.Coded.join(pack_codes(codes, packing), pieces, 1))
    return rules.Coded.join(torch.cat([part.codes for part in parts]), parts, 0)


def _encode_flat(flat: torch.Tensor, block: int, form: Format, packing: Packing) -> Coded:
    """Return packed codes [ceil(N * K / 2)] and numbers [ceil(N * K / block)] of NF4 or FP4."""
    whole = flat.numel() // block * block
    rule = rules.absmax_rule(form)
    chunks = torch.unflatten(flat[:whole], 0, (-1, block)).split(max(1, _CHUNK_ELEMENTS // block))
    pieces = [rule(chunk.to(torch.float32)) for chunk in chunks]
    if whole < flat.numel():
        pieces.append(rules.absmax_rule(form, short=True)(flat[None, whole:].to(torch.float32)))
    codes = torch.cat([piece.codes.reshape(-1) for piece in pieces])
    codes = torch.nn.functional.pad(codes, (0, codes.numel() % 2), value=rules.code_of_zero(form))
    return rules.Coded.join(pack_codes(codes, packing), pieces, 0)
