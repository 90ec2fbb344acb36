"""The 4-bit formats, their codebooks, and the scale kinds with their resolvers.

Every format is one of two forms, for out-feature n, in-feature k and block b = k // block_size::

    CODEBOOK:  w[n, k] = scale[n, b] * codebook[q[n, k]] + offset[n, b]
    INTEGER:   w[n, k] = (q[n, k] - zero[n, b]) * scale[n, b]

This module is the one place in the repository that defines codebooks; ``packing.py`` is the one for nibble order.

Reference:
    OCP Microscaling Formats (MX) v1.0 (E2M1, E8M0); OCP OFP8 (E4M3); Dettmers et al., QLoRA (NF4); ggml (Q4_0, Q4_1,
    Q8_0).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.errors import FormatError, closest_name
from q4core.formats.packing import Packing

if TYPE_CHECKING:
    from collections.abc import Iterable

_BYTE_BITS = 8
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""dtypes of dense weights, of x and of y: those whose results the self-probe can judge."""


class BlockOrder(enum.Enum):
    """Along what the blocks run."""

    ROW = "row"
    """Along a row of in-features; every row starts a block."""
    FLAT = "flat"
    """Over the flattened weight; a block may straddle rows (bitsandbytes with K not a multiple of the block)."""


class ScaleKind(enum.Enum):
    """How block scales are stored; ``resolve_levels`` gives each its meaning."""

    PLAIN = "plain"
    """float32, float16 or bfloat16 as it is."""
    E8M0 = "e8m0"
    """A power of two, 2^(byte - 127); byte 255 is NaN."""
    E4M3 = "e4m3"
    """A float8 e4m3 value without a second level."""
    E4M3_MUL = "e4m3_mul"
    """e4m3 × global (torchao, ModelOpt, ComfyUI)."""
    E4M3_DIV = "e4m3_div"
    """e4m3 ÷ global (compressed-tensors)."""
    DOUBLE_QUANT = "double_quant"
    """table[u8] × second absmax + mean (bitsandbytes)."""
    SUPER_BLOCK = "super_block"
    """u8 or i8 × one float of a super-block; offsets alike (ggml's K-quants and IQ4_XS)."""


class Form(enum.Enum):
    """Which of the two formulas a format follows."""

    CODEBOOK = "codebook"
    INTEGER = "integer"


def _in_order(items: frozenset[Any]) -> str:
    """Return the same text in every process, which a set's own is not: the names of plans are made of it."""
    return f"{{{', '.join(sorted(map(str, items)))}}}"


@attrs.frozen(cache_hash=True)
class Format:
    """A weight format: what its codes mean.

    Args:
        name: Lower-case name, such as ``"nf4"``.
        form: Which formula applies.
        bits: 4 or 8.
        block_size: Default number of in-features per scale.
        codebook: Value of each code for CODEBOOK: 2**bits float32 numbers. Empty for INTEGER.
        scale_kinds: The scale kinds that the format is stored with.
        block_sizes: Legal block sizes; empty allows every positive one.
        has_offset: Whether the format stores an offset for each block.
        packing: How its codes share bytes unless asked for otherwise. Defaults to BYTES for 8 bits, else LOW_FIRST.
        scale_kind: How its scales are stored unless asked for otherwise. Defaults to PLAIN, else the first by name.
        has_flat_blocks: Whether blocks run on over rows where K is not a multiple of the block size.
        has_signed_scales: Whether a plain scale may be negative: steps of ggml and INT4 are, and so is an absmax near
            zero once bitsandbytes' second level is resolved.
        rule: Name of the rule that turns dense numbers into codes and scales; a plugin's quantizer has it. Those of
            q4-quantize are absmax, e2m1, q4_0, q4_1, q8_0, iq4_nl and affine. Defaults to none: nothing quantises so.

    Raises:
        FormatError: The codebook has another length, or packing or scale kind contradict the other facts.
    """

    name: str
    form: Form
    bits: int
    block_size: int
    codebook: tuple[float, ...] = attrs.field(default=(), repr=False)
    scale_kinds: frozenset[ScaleKind] = attrs.field(default=frozenset({ScaleKind.PLAIN}), repr=_in_order)
    block_sizes: frozenset[int] = attrs.field(default=frozenset(), repr=_in_order)
    has_offset: bool = False
    packing: Packing = attrs.field(default=attrs.Factory(lambda self: self._own_packing(), takes_self=True), repr=False)
    scale_kind: ScaleKind = attrs.field(
        default=attrs.Factory(lambda self: self._own_scale_kind(), takes_self=True), repr=False
    )
    has_flat_blocks: bool = attrs.field(default=False, repr=False)
    has_signed_scales: bool = attrs.field(default=True, repr=False)
    rule: str = attrs.field(default="", repr=False)

    def __attrs_post_init__(self) -> None:
        """Check the facts against each other."""
        wanted, what = 2**self.bits if self.form is Form.CODEBOOK else 0, f"format {self.name!r}"
        if (found := len(self.codebook)) != wanted:
            raise FormatError(what, name="codebook", rule=f"{wanted} values long", value=found)
        if self.packing.codes_per_byte * self.bits != _BYTE_BITS:
            raise FormatError(what, name="packing", rule=f"of {self.bits}-bit codes", value=str(self.packing))
        if self.scale_kind not in self.scale_kinds:
            rule = f"one of its scale kinds {_in_order(self.scale_kinds)}"
            raise FormatError(what, name="scale_kind", rule=rule, value=str(self.scale_kind))
        if self.has_flat_blocks and self.form is not Form.CODEBOOK:
            raise FormatError(what, name="has_flat_blocks", rule="False without a codebook", value=True)

    def _own_packing(self) -> Packing:
        return Packing.BYTES if self.bits == _BYTE_BITS else Packing.LOW_FIRST

    def _own_scale_kind(self) -> ScaleKind:
        return min(self.scale_kinds, key=lambda kind: (kind is not ScaleKind.PLAIN, kind.value))

    @property
    def middle(self) -> int:
        """The code that stands for zero where an INTEGER format has no zero point: 8 of 4 bits, 128 of 8."""
        return 1 << (self.bits - 1)

    def codebook_tensor(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a fresh tensor [2**bits] of the codebook."""
        return torch.tensor(self.codebook, dtype=dtype, device=device)

    def __str__(self) -> str:
        """Return the name."""
        return self.name


_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4_HALF = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
_FP4 = (*_FP4_HALF, 0.0, *(-value for value in _FP4_HALF[1:]))  # code 8 is +0 in bitsandbytes
_E2M1_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_E2M1_HALF, *(-value for value in _E2M1_HALF))  # code 8 is -0
_NIBBLES = tuple(map(float, range(16)))
_SIGNED_NIBBLES = tuple(map(float, range(-8, 8)))
_SIGNED_BYTES = tuple(map(float, (*range(128), *range(-128, 0))))
_BYTES = tuple(map(float, range(256)))
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_PLAIN, _E8M0 = frozenset({ScaleKind.PLAIN}), frozenset({ScaleKind.E8M0})
_GGML_SCALES = frozenset({ScaleKind.PLAIN, ScaleKind.SUPER_BLOCK})
_GGML = Packing.half_split(32)
_BNB: dict[str, Any] = {
    "scale_kinds": frozenset({ScaleKind.PLAIN, ScaleKind.DOUBLE_QUANT}),
    "block_sizes": frozenset({32, 64, 128, 256, 512, 1024, 2048, 4096}),
    "packing": Packing.HIGH_FIRST,
    "has_flat_blocks": True,
    "rule": "absmax",
}
_NVFP4_SCALES = frozenset({ScaleKind.E4M3, ScaleKind.E4M3_MUL, ScaleKind.E4M3_DIV, ScaleKind.PLAIN})
_BY_16, _BY_32 = frozenset({16}), frozenset({32})

BUILTIN_FORMATS: dict[str, Format] = {
    item.name: item
    for item in (
        Format("nf4", Form.CODEBOOK, 4, 64, _NF4, **_BNB),
        Format("fp4", Form.CODEBOOK, 4, 64, _FP4, **_BNB),
        Format(
            "nvfp4", Form.CODEBOOK, 4, 16, _E2M1, _NVFP4_SCALES, _BY_16, scale_kind=ScaleKind.E4M3_MUL,
            has_signed_scales=False, rule="e2m1",
        ),
        Format("mxfp4", Form.CODEBOOK, 4, 32, _E2M1, _E8M0, _BY_32, has_signed_scales=False, rule="e2m1"),
        Format("q4_0", Form.CODEBOOK, 4, 32, _SIGNED_NIBBLES, _GGML_SCALES, packing=_GGML, rule="q4_0"),
        Format("q4_1", Form.CODEBOOK, 4, 32, _NIBBLES, _GGML_SCALES, has_offset=True, packing=_GGML, rule="q4_1"),
        Format("iq4_nl", Form.CODEBOOK, 4, 32, _IQ4_NL, _GGML_SCALES, packing=_GGML, rule="iq4_nl"),
        Format("int4", Form.INTEGER, 4, 128, rule="affine"),
        Format("int8", Form.INTEGER, 8, 128),
        Format("q8_0", Form.CODEBOOK, 8, 32, _SIGNED_BYTES, _GGML_SCALES, rule="q8_0"),
        Format("q8_affine", Form.CODEBOOK, 8, 32, _BYTES, _GGML_SCALES, has_offset=True),
    )
}  # fmt: skip


def find_format(name: str | Format, extra: Iterable[Format] = ()) -> Format:
    """Return a format by name.

    Args:
        name: The name, or a ``Format``, which is returned as it is.
        extra: Further formats (from plugins) to look among.

    Raises:
        FormatError: No such format; the message lists the ones there are.
    """
    if isinstance(name, Format):
        return name
    known = {item.name: item for item in extra} | BUILTIN_FORMATS
    if isinstance(name, str) and name.lower() in known:
        return known[name.lower()]
    close = closest_name(name, known)
    hint = f"Did you mean {close!r}?" if close else None
    raise FormatError("format", name="format", rule=f"one of {', '.join(sorted(known))}", value=name, hint=hint)


def resolve_levels(  # noqa: PLR0913  # the levels of a scale, as stored
    kind: ScaleKind,
    scale: torch.Tensor,
    *,
    global_scale: torch.Tensor | None = None,
    nested_codebook: torch.Tensor | None = None,
    nested_scale: torch.Tensor | None = None,
    nested_offset: torch.Tensor | None = None,
    nested_block_size: int = 256,
) -> torch.Tensor:
    """Return the float32 block scales that a dialect's own library computes from the levels as stored.

    Args:
        kind: The scale kind.
        scale: Stored scales, any shape; the first axis is out-features where ``global_scale`` is [N]. Those of E8M0 and
            E4M3 are bytes, of dtype uint8 or the float8 dtype.
        global_scale: Scalar or [N] float, for E4M3_MUL and E4M3_DIV.
        nested_codebook: [256] float, for DOUBLE_QUANT.
        nested_scale: [ceil(numel / nested_block_size)] float, for DOUBLE_QUANT; blocks run over the flattened scales.
            For SUPER_BLOCK one for each scale.
        nested_offset: Scalar float, for DOUBLE_QUANT.
        nested_block_size: Number of scales that share one entry of ``nested_scale``.

    Returns:
        float32, the shape of ``scale``. Each operation is rounded to float32 once, in the library's order.

    Raises:
        FormatError: A level that the kind needs is missing.
    """

    def stored(name: str, level: torch.Tensor | None) -> torch.Tensor:
        if level is None:
            raise FormatError(f"scale kind {kind.value}", name=name, rule="present")
        return level.to(torch.float32)

    if kind is ScaleKind.DOUBLE_QUANT:
        table, second = stored("nested_codebook", nested_codebook), stored("nested_scale", nested_scale)
        flat = scale.reshape(-1)
        index = torch.arange(flat.numel(), device=flat.device) // nested_block_size
        # Multiply, then add, each rounded to float32: bitsandbytes' order, without a fused multiply-add.
        product = table[flat.to(torch.int64)] * second[index]
        return (product + stored("nested_offset", nested_offset)).reshape(scale.shape)
    if kind is ScaleKind.PLAIN:
        return scale.to(torch.float32)
    if kind is ScaleKind.SUPER_BLOCK:
        return scale.to(torch.float32) * stored("nested_scale", nested_scale).reshape(scale.shape)
    if kind is ScaleKind.E8M0:
        return scale.view(torch.float8_e8m0fnu).to(torch.float32)
    values = scale.view(torch.float8_e4m3fn).to(torch.float32)
    if kind is ScaleKind.E4M3:
        return values
    total = stored("global_scale", global_scale)
    total = total.reshape(-1, *([1] * (scale.dim() - 1))) if total.numel() > 1 else total.reshape(())
    return total * values if kind is ScaleKind.E4M3_MUL else values / total
