"""``PackedWeight`` itself: fields, views of them, copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.formats import BlockOrder, Format, Packing, ScaleKind, pack_codes, unpack_codes
from q4core.weight import invariants, slicing
from q4core.weight.feature import Feature, features_of
from q4core.weight.sending import Temporary, unwrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _rebuild(fields: dict[str, Any], dtypes: dict[str, torch.dtype]) -> PackedWeight:
    fields = {name: unwrapped(value) for name, value in fields.items()}
    fields.update((name, fields[name].view(dtype)) for name, dtype in dtypes.items())
    return PackedWeight(**fields)


@attrs.frozen(eq=False, kw_only=True, repr=False)
class PackedWeight:
    """A weight [N, K] in packed codes with its scales as stored.

    ``y[M, N] = x[M, K] @ w[N, K]ᵀ`` with ``w`` as in ``formats.py``; where the dialect has them, the effective weight
    also carries ``w[:, permutation[j]] = stored[:, j]`` and then ``w[:, k] *= input_channel_scale[k]``.

    Args:
        format: What the codes mean.
        qdata: uint8. ROW blocks: [N, P], or [N, G, P] for codes stored in groups between other data (ggml's blocks);
            FLAT blocks: [ceil(N * K / 2)]. Any strides: it may be a view of a mapped file.
        scale: Block scales as stored. ROW: [N, ceil(K / block_size)]; FLAT: [ceil(N * K / block_size)]. float32,
            float16, bfloat16 (PLAIN); uint8 or the float8 dtype (E8M0, E4M3*); uint8 (DOUBLE_QUANT); uint8 or int8
            (SUPER_BLOCK).
        out_features: N.
        in_features: K.
        block_size: In-features per scale.
        scale_kind: How ``scale`` is stored.
        packing: How codes share bytes.
        blocks: Along what blocks run.
        offset: Float, the shape of ``scale``, for formats with an offset; uint8 for SUPER_BLOCK.
        zero: Integer or float zero points, the shape of ``scale``, for INTEGER formats; None means the middle code, 8
            of 4 bits and 128 of 8 (symmetric).
        codebook: [2**bits] float32, where it differs from the format's own.
        global_scale: Float scalar, or [N], for E4M3_MUL and E4M3_DIV.
        nested_codebook: [256] float, for DOUBLE_QUANT.
        nested_scale: [ceil(scale.numel() / nested_block_size)] float, for DOUBLE_QUANT and SUPER_BLOCK; the latter's
            may be negative.
        nested_offset: Scalar float, for DOUBLE_QUANT; for SUPER_BLOCK with offsets float, the shape of
            ``nested_scale``: what multiplies ``offset``.
        nested_block_size: Scales that share one entry of ``nested_scale``; for SUPER_BLOCK a divisor of a row's.
        input_channel_scale: [K] float; multiplies the input.
        input_permutation: [K] int64; stored column j belongs to input feature ``input_permutation[j]``.
        activation_scale: Scalar float: the checkpoint's static activation scale (a multiplier).
        dtype: dtype of the weight before it was quantised; what ``dequantize`` gives by default.
        name: The layer's name, for messages.
        dialect: Name of the dialect that it was read from.
        notes: What was assumed while reading, for the record.

    Raises:
        WeightError: A shape or dtype contradicts the others; the message names the field and the rule.
    """

    format: Format
    qdata: torch.Tensor
    scale: torch.Tensor
    out_features: int
    in_features: int
    block_size: int
    scale_kind: ScaleKind = ScaleKind.PLAIN
    packing: Packing = Packing.LOW_FIRST
    blocks: BlockOrder = BlockOrder.ROW
    offset: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    codebook: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    nested_codebook: torch.Tensor | None = None
    nested_scale: torch.Tensor | None = None
    nested_offset: torch.Tensor | None = None
    nested_block_size: int = 256
    input_channel_scale: torch.Tensor | None = None
    input_permutation: torch.Tensor | None = None
    activation_scale: torch.Tensor | None = None
    dtype: torch.dtype = torch.float32
    name: str | None = None
    dialect: str | None = None
    notes: tuple[str, ...] = ()
    features: frozenset[Feature] = attrs.field(init=False)
    _checked: list[tuple[int, ...]] = attrs.field(init=False, factory=list)  # versions of the tensors; own and twins'

    def __attrs_post_init__(self) -> None:
        """Check every shape and dtype against the others, and work out the features."""
        invariants.check_structure(self)
        object.__setattr__(self, "features", frozenset(features_of(self)))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.out_features, self.in_features

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.qdata.device

    @property
    def blocks_per_row(self) -> int:
        """Scales per row of ROW blocks."""
        return -(-self.in_features // self.block_size)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and side tensors, as stored."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (field name, tensor) for every tensor that is present, in a fixed order."""
        for name in TENSOR_FIELDS:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedWeight:
        """Return a weight whose tensors are ``function`` of this one's."""
        changed: dict[str, Any] = {name: function(tensor) for name, tensor in self.tensors()}
        return attrs.evolve(self, **changed)

    def to(self, device: torch.device | str) -> PackedWeight:
        """Return the weight on another device; codes and scales keep their bytes."""
        return self.map_tensors(lambda tensor: tensor.to(device))

    def contiguous(self) -> PackedWeight:
        """Return a weight that owns contiguous copies of its tensors, independent of any mapped file."""
        return self.map_tensors(_copy)

    def resolved_scale(self, rows: slice | torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 block scales, shaped as ``scale[rows]``, as the dialect's own library computes them.

        Args:
            rows: Which rows' scales (for FLAT blocks: which blocks'), as a slice or an int64 vector; None for all.
        """
        return slicing.resolved_rows(self, slice(None) if rows is None else rows)

    def resolved_offset(self, rows: slice | torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the offsets of the blocks in a float dtype, shaped as ``offset[rows]``; None where there are none.

        Args:
            rows: As for ``resolved_scale``.
        """
        return slicing.resolved_offset(self, slice(None) if rows is None else rows)

    def with_plain_scale(self) -> PackedWeight:
        """Return the weight with its scale levels collapsed into plain float32 (the same values, fewer levels)."""
        if self.scale_kind is ScaleKind.PLAIN:
            return self
        scale, offset = self.resolved_scale(), self.resolved_offset()
        return attrs.evolve(self, scale=scale, offset=offset, scale_kind=ScaleKind.PLAIN, **_NO_LEVELS)

    def codes(self) -> torch.Tensor:
        """Return the codes, one per byte: uint8 [N, K], or [N * K] for FLAT blocks."""
        codes = unpack_codes(self.qdata, self.packing)
        if self.blocks is BlockOrder.FLAT:
            return codes[: self.out_features * self.in_features]
        return codes.reshape(self.out_features, -1)[:, : self.in_features]

    def repack(self, packing: Packing) -> PackedWeight:
        """Return the weight with its codes in another packing; rows are padded to whole groups where it has groups.

        Raises:
            WeightError: The packing holds codes of another width, or is HALF_SPLIT for FLAT blocks.
        """
        if packing == self.packing:
            return self
        # Flat codes keep their padding nibble, which bitsandbytes fills with a code of its own.
        codes = unpack_codes(self.qdata, self.packing) if self.blocks is BlockOrder.FLAT else self.codes()
        if packing.group:
            codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % packing.group))
        return attrs.evolve(self, qdata=pack_codes(codes, packing), packing=packing)

    def narrow(self, dim: int, start: int, length: int) -> PackedWeight:
        """Return rows (``dim=0``) or in-features (``dim=1``) ``start … start + length``, as views where possible.

        Two levels of scales become plain float32, the same values, where blocks of the second would be cut.

        Raises:
            WeightError: The range is outside the weight, or cuts a block or a packed group.
        """
        return slicing.narrow(self, dim, start, length)

    def cover(self, *, rows: range | None = None, columns: range | None = None) -> slicing.Cover:
        """Return the whole blocks that hold a range, as views where possible: for a part of a layer, cut anywhere.

        Columns go out to the next ends of a block, or of a super-block; all are there with ``input_permutation``, which
        spreads a range over all blocks. Of FLAT blocks, rows go back to the next one that begins a block, and columns
        are copied, into ROW blocks that divide the FLAT ones.

        Args:
            rows: Out-features, ``range(start, stop)``. Defaults to all.
            columns: In-features. Defaults to all.

        Returns:
            The blocks, and what a call pads x by and cuts of y.

        Raises:
            WeightError: A range is empty or outside the weight, or the format has no blocks so small that none
                straddles rows, for columns of FLAT blocks.
        """
        return slicing.cover(self, rows, columns)

    def take_rows(self, rows: torch.Tensor) -> PackedWeight:
        """Return the weight of some rows, copied, in the order asked for; see ``narrow`` for double quantisation.

        Args:
            rows: int64 [R], R ≥ 1, each in 0 … N - 1.

        Raises:
            WeightError: Blocks are FLAT, or ``rows`` is not such a vector.
        """
        return slicing.take_rows(self, rows)

    def check_values(self) -> None:
        """Check that scales and side tensors hold legal numbers; once, until a tensor is changed.

        Raises:
            WeightError: Something is not finite; a block scale of NVFP4 or MXFP4 is negative; a global divisor is not
                positive; or ``input_permutation`` is not a permutation. The message names the field and the first bad
                value.
        """
        if any(tensor.is_inference() for _, tensor in self.tensors()):  # their changes are not counted
            invariants.check_values(self)
            return
        versions = [tuple(tensor._version for _, tensor in self.tensors())]  # noqa: SLF001  # torch's documented counter of in-place changes
        if self._checked != versions:
            invariants.check_values(self)
            self._checked[:] = versions

    def relabelled(self, **labels: Any) -> PackedWeight:
        """Return the weight over the same tensors with another ``name``, ``dialect``, ``notes`` or ``dtype``.

        Unlike ``attrs.evolve`` it checks nothing again.
        """
        twin = object.__new__(PackedWeight)
        for field in attrs.fields(PackedWeight):
            object.__setattr__(twin, field.name, labels.get(field.name, getattr(self, field.name)))
        return twin

    def label(self, what: str) -> str:
        """Return ``what``, with the layer's name where it has one, for messages."""
        return f"{what} of layer {self.name!r}" if self.name else what

    def __reduce__(self) -> tuple[Callable[..., PackedWeight], tuple[dict[str, Any], dict[str, torch.dtype]]]:
        """Pickle compact copies: torch would pickle the whole storage (the whole file) behind a view.

        Float8 tensors go as bytes, because torch can't read the pickles that it writes of them.
        """
        fields = {field.name: getattr(self, field.name) for field in attrs.fields(PackedWeight) if field.init}
        dtypes = {name: tensor.dtype for name, tensor in self.tensors() if tensor.dtype in _FLOAT8}
        for name, tensor in self.tensors():
            stored = tensor.view(torch.uint8) if name in dtypes else tensor
            is_compact = stored.untyped_storage().nbytes() == stored.nbytes
            fields[name] = stored if is_compact else Temporary(_copy(stored))
        return _rebuild, (fields, dtypes)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:  # the caller notes the copy in its memo
        """Copy the tensors, never the storage behind them."""
        return self.contiguous()

    def __repr__(self) -> str:
        """Return format, shape, block, scale kind, packing and device in one line."""
        name = f"{self.name!r}, " if self.name else ""
        return (
            f"PackedWeight({name}{self.format.name}, {self.out_features}×{self.in_features}, "
            f"block={self.block_size}, scale={self.scale_kind.value}, packing={self.packing}, device={self.device})"
        )


TENSOR_FIELDS = tuple(field.name for field in attrs.fields(PackedWeight) if "torch.Tensor" in str(field.type))
"""Names of the fields that hold tensors, in the order in which they are declared."""
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e8m0fnu})
_NO_LEVELS: dict[str, Any] = dict.fromkeys(("global_scale", "nested_codebook", "nested_scale", "nested_offset"))
