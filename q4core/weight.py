"""``PackedWeight``: the one canonical in-memory weight, whatever dialect it was read from."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.errors import WeightError
from q4core.formats import BlockOrder, Form, Format, ScaleKind, resolve_levels
from q4core.packing import NibbleOrder, Packing, pack_codes, unpack_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Feature", "PackedWeight", "cat"]


class Feature(enum.Enum):
    """What a weight or a request needs beyond ``scale × codebook[q]``; a backend must declare each one it serves."""

    OFFSET = "offset"
    ZERO_POINT = "zero_point"
    FLOAT_ZERO_POINT = "float_zero_point"
    INPUT_CHANNEL_SCALE = "input_channel_scale"
    INPUT_PERMUTATION = "input_permutation"
    FLAT_BLOCKS = "flat_blocks"
    TAIL_BLOCK = "tail_block"
    """K is not a multiple of the block size: the last block of each row is short."""
    CUSTOM_CODEBOOK = "custom_codebook"
    ROW_GLOBAL_SCALE = "row_global_scale"
    """One global scale per out-feature instead of one per tensor."""
    GRADIENTS = "gradients"


def _cdiv(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _rebuild(fields: dict[str, Any]) -> PackedWeight:
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
            float16, bfloat16 (PLAIN); uint8 or the float8 dtype (E8M0, E4M3*); uint8 (DOUBLE_QUANT).
        out_features: N.
        in_features: K.
        block_size: In-features per scale.
        scale_kind: How ``scale`` is stored.
        packing: How codes share bytes.
        blocks: Along what blocks run.
        offset: Float, the shape of ``scale``, for formats with an offset.
        zero: Integer or float zero points, the shape of ``scale``, for INTEGER formats; None means 8 (symmetric).
        codebook: [2**bits] float32, where it differs from the format's own.
        global_scale: Float scalar, or [N], for E4M3_MUL and E4M3_DIV.
        nested_codebook: [256] float, for DOUBLE_QUANT.
        nested_scale: [ceil(scale.numel() / nested_block_size)] float, for DOUBLE_QUANT.
        nested_offset: Scalar float, for DOUBLE_QUANT.
        nested_block_size: Scales that share one entry of ``nested_scale``.
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

    def __attrs_post_init__(self) -> None:
        """Check every shape and dtype against the others, and work out the features."""
        _check(self)
        object.__setattr__(self, "features", frozenset(_features(self)))

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
        return _cdiv(self.in_features, self.block_size)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and side tensors, as stored."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors())

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
        return self.map_tensors(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))

    def resolved_scale(self) -> torch.Tensor:
        """Return float32 scales, shaped as ``scale``, exactly as the dialect's own library computes them."""
        return resolve_levels(
            self.scale_kind,
            self.scale,
            global_scale=self.global_scale,
            nested_codebook=self.nested_codebook,
            nested_scale=self.nested_scale,
            nested_offset=self.nested_offset,
            nested_block_size=self.nested_block_size,
        )

    def with_plain_scale(self) -> PackedWeight:
        """Return the weight with its scale levels collapsed into plain float32 (the same values, fewer levels)."""
        if self.scale_kind is ScaleKind.PLAIN:
            return self
        return attrs.evolve(self, scale=self.resolved_scale(), scale_kind=ScaleKind.PLAIN, **_NO_LEVELS)

    def codes(self) -> torch.Tensor:
        """Return the codes, one per byte: uint8 [N, K], or [N * K] for FLAT blocks."""
        codes = unpack_codes(self.qdata, self.packing)
        if self.blocks is BlockOrder.FLAT:
            return codes[: self.out_features * self.in_features]
        return codes.reshape(self.out_features, -1)[:, : self.in_features]

    def repack(self, packing: Packing) -> PackedWeight:
        """Return the weight with its codes in another packing.

        Raises:
            FormatError: K does not hold whole groups of the packing.
        """
        if packing == self.packing:
            return self
        codes = unpack_codes(self.qdata, self.packing)
        if self.blocks is BlockOrder.ROW:
            codes = codes.reshape(self.out_features, -1)
        return attrs.evolve(self, qdata=pack_codes(codes, packing), packing=packing)

    def narrow(self, dim: int, start: int, length: int) -> PackedWeight:
        """Return rows (``dim=0``) or in-features (``dim=1``) ``start … start + length``, as views where possible.

        Double-quantised scales whose second-level blocks would be cut are resolved to plain float32 (the same
        values).

        Raises:
            WeightError: The range is outside the weight, or cuts a block or a packed group.
        """
        total = self.shape[dim] if dim in {0, 1} else 0
        if dim not in {0, 1} or start < 0 or length < 1 or start + length > total:
            raise WeightError(
                self._label("narrow"),
                name="dim, start, length",
                rule=f"a range inside {self.shape}",
                value=(dim, start, length),
            )
        if self.blocks is BlockOrder.FLAT:
            raise WeightError(
                self._label("narrow"),
                name="blocks",
                rule="ROW",
                value=self.blocks.name,
                hint="Flat blocks straddle rows; dequantise and quantise again to cut such a weight.",
            )
        return self._narrow_rows(start, length) if dim == 0 else self._narrow_columns(start, length)

    def take_rows(self, rows: torch.Tensor) -> PackedWeight:
        """Return the weight of some rows, copied, in the order asked for; the values stay exactly the same.

        Double-quantised scales are resolved to plain float32, because their second-level blocks are cut.

        Args:
            rows: int64 [R], R ≥ 1, each in 0 … N - 1.

        Raises:
            WeightError: Blocks are FLAT, or there is no row.
        """
        if self.blocks is BlockOrder.FLAT or rows.dim() != 1 or not rows.numel():
            raise WeightError(
                self._label("take_rows"),
                name="rows, blocks",
                rule="a vector of at least one row, and ROW",
                value=(tuple(rows.shape), self.blocks.name),
            )
        weight = self.with_plain_scale() if self.scale_kind is ScaleKind.DOUBLE_QUANT else self
        index = rows.to(weight.device)
        changes: dict[str, Any] = {
            name: getattr(weight, name).index_select(0, index)
            for name in ("qdata", "scale", "offset", "zero")
            if getattr(weight, name) is not None
        }
        if weight.global_scale is not None and weight.global_scale.numel() > 1:
            changes["global_scale"] = weight.global_scale[index]
        return attrs.evolve(weight, out_features=rows.numel(), **changes)

    def _narrow_rows(self, start: int, length: int) -> PackedWeight:
        nested_cut = start * self.blocks_per_row % self.nested_block_size
        weight = self.with_plain_scale() if self.scale_kind is ScaleKind.DOUBLE_QUANT and nested_cut else self
        changes: dict[str, Any] = {
            name: getattr(weight, name)[start : start + length]
            for name in ("qdata", "scale", "offset", "zero")
            if getattr(weight, name) is not None
        }
        if weight.global_scale is not None and weight.global_scale.numel() > 1:
            changes["global_scale"] = weight.global_scale[start : start + length]
        if weight.scale_kind is ScaleKind.DOUBLE_QUANT and weight.nested_scale is not None:
            first = start * weight.blocks_per_row // weight.nested_block_size
            count = _cdiv(length * weight.blocks_per_row, weight.nested_block_size)
            changes["nested_scale"] = weight.nested_scale[first : first + count]
        return attrs.evolve(weight, out_features=length, **changes)

    def _narrow_columns(self, start: int, length: int) -> PackedWeight:
        per_byte = self.packing.codes_per_byte
        grouped = self.qdata.dim() == 3  # noqa: PLR2004  # [N, G, P]
        unit = self.qdata.shape[-1] * per_byte if grouped else max(self.packing.group, per_byte)
        step = max(self.block_size, unit)
        ends = start + length == self.in_features
        if start % step or (length % step and not ends) or self.input_permutation is not None:
            raise WeightError(
                self._label("narrow"),
                name="start and length",
                rule=f"multiples of {step} in a weight without input_permutation",
                value=(start, length),
            )
        weight = self.with_plain_scale() if self.scale_kind is ScaleKind.DOUBLE_QUANT else self
        divisor = unit if grouped else per_byte
        changes: dict[str, Any] = {
            "qdata": weight.qdata[:, start // divisor : _cdiv(start + length, divisor)],
        }
        first, last = start // self.block_size, _cdiv(start + length, self.block_size)
        for name in ("scale", "offset", "zero"):
            if getattr(weight, name) is not None:
                changes[name] = getattr(weight, name)[:, first:last]
        if weight.input_channel_scale is not None:
            changes["input_channel_scale"] = weight.input_channel_scale[start : start + length]
        return attrs.evolve(weight, in_features=length, **changes)

    def check_values(self) -> None:
        """Check that scales and side tensors hold legal numbers.

        Raises:
            WeightError: A scale, offset, zero point or global is not finite, or a scale is negative in a format that
                has none (ggml's scales may be negative); the message names the field and the first bad value.
        """
        checked: list[tuple[str, torch.Tensor, bool]] = []
        negative_allowed = self.format.name in _SIGNED_SCALE_FORMATS
        if self.scale_kind is ScaleKind.DOUBLE_QUANT:
            checked.append(("scale", self.resolved_scale(), True))
        else:
            signed = negative_allowed and self.scale_kind is ScaleKind.PLAIN
            bare = attrs.evolve(self, scale_kind=_ONE_LEVEL.get(self.scale_kind, self.scale_kind), global_scale=None)
            checked.append(("scale", bare.resolved_scale(), not signed))
        for name in ("offset", "zero", "codebook", "global_scale", "input_channel_scale", "activation_scale"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.is_floating_point():
                checked.append((name, tensor, name in {"global_scale", "activation_scale"}))
        for name, tensor, non_negative in checked:
            values = tensor.to(torch.float32)
            bad = ~torch.isfinite(values)
            if non_negative:
                bad |= values < 0
            if bool(bad.any()):
                position = tuple(int(i) for i in bad.nonzero()[0])
                rule = "finite and not negative" if non_negative else "finite"
                raise WeightError(
                    self._label("weight"),
                    name=f"{name}{list(position)}",
                    rule=rule,
                    value=float(values[position]),
                    where=self.dialect,
                    hint="The checkpoint is damaged, or it is read in the wrong dialect.",
                )

    def _label(self, what: str) -> str:
        return f"{what} of layer {self.name!r}" if self.name else what

    def __reduce__(self) -> tuple[Callable[..., PackedWeight], tuple[dict[str, Any]]]:
        """Pickle compact copies: torch would pickle the whole storage (the whole file) behind a view."""
        fields = {field.name: getattr(self, field.name) for field in attrs.fields(PackedWeight) if field.init}
        fields.update((name, _compact(tensor)) for name, tensor in self.tensors())
        return _rebuild, (fields,)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        """Copy the tensors, never the storage behind them."""
        copied = self.contiguous()
        memo[id(self)] = copied
        return copied

    def __repr__(self) -> str:
        """Return format, shape, block, scale kind, packing and device in one line."""
        name = f"{self.name!r}, " if self.name else ""
        return (
            f"PackedWeight({name}{self.format.name}, {self.out_features}×{self.in_features}, "
            f"block={self.block_size}, scale={self.scale_kind.value}, packing={self.packing}, device={self.device})"
        )


TENSOR_FIELDS = (
    "qdata",
    "scale",
    "offset",
    "zero",
    "codebook",
    "global_scale",
    "nested_codebook",
    "nested_scale",
    "nested_offset",
    "input_channel_scale",
    "input_permutation",
    "activation_scale",
)
_NO_LEVELS: dict[str, Any] = {
    "global_scale": None,
    "nested_codebook": None,
    "nested_scale": None,
    "nested_offset": None,
}
_SIGNED_SCALE_FORMATS = frozenset({"q4_0", "q4_1", "q8_0", "int4"})
_ONE_LEVEL = {ScaleKind.E4M3_MUL: ScaleKind.E4M3, ScaleKind.E4M3_DIV: ScaleKind.E4M3}
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_ZERO_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32})
_SCALE_DTYPES = {
    ScaleKind.PLAIN: _FLOATS,
    ScaleKind.E8M0: frozenset({torch.uint8, torch.float8_e8m0fnu}),
    ScaleKind.E4M3: frozenset({torch.uint8, torch.float8_e4m3fn}),
    ScaleKind.E4M3_MUL: frozenset({torch.uint8, torch.float8_e4m3fn}),
    ScaleKind.E4M3_DIV: frozenset({torch.uint8, torch.float8_e4m3fn}),
    ScaleKind.DOUBLE_QUANT: frozenset({torch.uint8}),
}
_MAX_FEATURES = 2**31 - 1


def _features(weight: PackedWeight) -> Iterator[Feature]:
    if weight.offset is not None:
        yield Feature.OFFSET
    if weight.zero is not None:
        yield Feature.FLOAT_ZERO_POINT if weight.zero.is_floating_point() else Feature.ZERO_POINT
    if weight.input_channel_scale is not None:
        yield Feature.INPUT_CHANNEL_SCALE
    if weight.input_permutation is not None:
        yield Feature.INPUT_PERMUTATION
    if weight.blocks is BlockOrder.FLAT:
        yield Feature.FLAT_BLOCKS
    elif weight.in_features % weight.block_size:
        yield Feature.TAIL_BLOCK
    if weight.codebook is not None:
        yield Feature.CUSTOM_CODEBOOK
    if weight.global_scale is not None and weight.global_scale.numel() > 1:
        yield Feature.ROW_GLOBAL_SCALE


def _check(weight: PackedWeight) -> None:
    def require(condition: bool, name: str, rule: str, value: object) -> None:  # noqa: FBT001  # reads as a sentence
        if not condition:
            raise WeightError(weight._label("weight"), name=name, rule=rule, value=value)  # noqa: SLF001  # own module

    rows, columns, block = weight.out_features, weight.in_features, weight.block_size
    for name, size in (("out_features", rows), ("in_features", columns)):
        require(isinstance(size, int) and 0 < size <= _MAX_FEATURES, name, "between 1 and 2^31 - 1", size)
    legal = weight.format.block_sizes
    require(
        isinstance(block, int) and block > 0 and (not legal or block in legal),
        "block_size",
        f"one of {sorted(legal)} for {weight.format}" if legal else "positive",
        block,
    )
    require(weight.qdata.dtype == torch.uint8, "qdata", "of dtype uint8", weight.qdata.dtype)
    per_byte = weight.packing.codes_per_byte
    require(per_byte * weight.format.bits == 8, "packing", f"of {weight.format.bits}-bit codes", str(weight.packing))  # noqa: PLR2004
    if weight.blocks is BlockOrder.FLAT:
        expected: tuple[int, ...] = (_cdiv(rows * columns, block),)
        stored = weight.qdata.numel() * per_byte
        require(
            weight.qdata.dim() == 1, "qdata", "of shape [ceil(N * K / 2)] for FLAT blocks", tuple(weight.qdata.shape)
        )
        require(stored >= rows * columns, "qdata", f"at least {rows * columns} codes long", stored)
        require(
            weight.packing.order is not NibbleOrder.HALF_SPLIT,
            "packing",
            "not HALF_SPLIT for FLAT blocks",
            "HALF_SPLIT",
        )
    else:
        expected = (rows, _cdiv(columns, block))
        shape = tuple(weight.qdata.shape)
        require(
            len(shape) in {2, 3} and shape[0] == rows,
            "qdata",
            f"of shape [{rows}, bytes] or [{rows}, groups, bytes]",
            shape,
        )
        stored = weight.qdata.numel() // rows * per_byte
        require(stored >= columns, "qdata", f"at least {columns} codes long in each row", stored)
        if weight.packing.group:
            unit = shape[-1] * per_byte
            require(
                unit % weight.packing.group == 0, "qdata", f"in whole groups of {weight.packing.group} codes", shape
            )
    require(
        weight.scale.dtype in _SCALE_DTYPES[weight.scale_kind],
        "scale",
        f"of a dtype that scale kind {weight.scale_kind.value} has",
        weight.scale.dtype,
    )
    for name in ("scale", "offset", "zero"):
        tensor = getattr(weight, name)
        if tensor is not None:
            require(tuple(tensor.shape) == expected, name, f"of shape {list(expected)}", list(tensor.shape))
    _check_side_tensors(weight, require)


def _check_side_tensors(weight: PackedWeight, require: Callable[[bool, str, str, object], None]) -> None:
    integer = weight.format.form is Form.INTEGER
    has_offset = weight.offset is not None
    require(
        has_offset == weight.format.has_offset,
        "offset",
        f"{'present' if weight.format.has_offset else 'absent'} for {weight.format}",
        has_offset,
    )
    require(weight.zero is None or integer, "zero", f"absent for {weight.format}", "present")
    wanted_global = weight.scale_kind in {ScaleKind.E4M3_MUL, ScaleKind.E4M3_DIV}
    has_global = weight.global_scale is not None
    require(
        has_global == wanted_global,
        "global_scale",
        f"{'present' if wanted_global else 'absent'} for scale kind {weight.scale_kind.value}",
        has_global,
    )
    nested = weight.scale_kind is ScaleKind.DOUBLE_QUANT
    for name in ("nested_codebook", "nested_scale", "nested_offset"):
        present = getattr(weight, name) is not None
        require(
            present == nested,
            name,
            f"{'present' if nested else 'absent'} for scale kind {weight.scale_kind.value}",
            present,
        )
    require(weight.nested_block_size > 0, "nested_block_size", "positive", weight.nested_block_size)
    sizes = {
        "codebook": (2**weight.format.bits,),
        "nested_codebook": (256,),
        "nested_scale": (_cdiv(weight.scale.numel(), weight.nested_block_size),),
        "nested_offset": (1,),
        "input_channel_scale": (weight.in_features,),
        "input_permutation": (weight.in_features,),
        "activation_scale": (1,),
        "global_scale": (1, weight.out_features),
    }
    for name, legal in sizes.items():
        tensor = getattr(weight, name)
        if tensor is None:
            continue
        require(
            tensor.dim() <= 1 and tensor.numel() in legal,
            name,
            f"a vector of {' or '.join(map(str, legal))}",
            list(tensor.shape),
        )
        if name == "input_permutation":
            require(tensor.dtype == torch.int64, name, "of dtype int64", tensor.dtype)
        else:
            require(tensor.dtype in _FLOATS, name, "of dtype float32, float16 or bfloat16", tensor.dtype)
    for name, legal_dtypes in (("offset", _FLOATS), ("zero", _FLOATS | _ZERO_INTEGERS)):
        tensor = getattr(weight, name)
        if tensor is not None:
            require(tensor.dtype in legal_dtypes, name, "of a float dtype (or an integer one for zero)", tensor.dtype)
    devices = {str(tensor.device) for _, tensor in weight.tensors()}
    require(len(devices) == 1, "tensors", "all on one device", sorted(devices))


def _same(values: Sequence[torch.Tensor | None]) -> bool:
    first = values[0]
    if first is None or any(value is None for value in values):
        return all(value is None for value in values)
    return all(value is not None and torch.equal(first, value) for value in values[1:])


def _check_joinable(weights: Sequence[PackedWeight]) -> None:
    if not weights:
        raise WeightError("cat", name="weights", rule="at least one weight", value=0)
    head = weights[0]
    for field in ("format", "in_features", "block_size", "scale_kind", "blocks", "dtype"):
        values = [getattr(weight, field) for weight in weights]
        if any(value != values[0] for value in values):
            raise WeightError("cat", name=field, rule="equal in all weights", value=[str(value) for value in values])
    if head.blocks is BlockOrder.FLAT:
        raise WeightError("cat", name="blocks", rule="ROW", value="FLAT")
    for field in ("codebook", "input_channel_scale", "input_permutation"):
        if not _same([getattr(weight, field) for weight in weights]):
            raise WeightError("cat", name=field, rule="equal in all weights", value="different tensors")


def cat(weights: Sequence[PackedWeight], *, name: str | None = None) -> PackedWeight:
    """Join weights along their out-features (fused q/k/v, gate/up); the values stay exactly the same.

    Globals that differ become one global per row; double-quantised scales are resolved to plain float32; static
    activation scales that differ are dropped, with a note.

    Args:
        weights: At least one; the same format, K, block size, scale kind and block order.
        name: The joined layer's name.

    Raises:
        WeightError: The weights differ in something that one weight can't hold twice.
    """
    _check_joinable(weights)
    head = weights[0]
    parts = [weight.with_plain_scale() if head.scale_kind is ScaleKind.DOUBLE_QUANT else weight for weight in weights]
    parts = [part.repack(head.packing) for part in parts]
    qdata = [part.qdata for part in parts]
    if any(data.dim() != qdata[0].dim() or data.shape[1:] != qdata[0].shape[1:] for data in qdata):
        qdata = [
            data.reshape(data.shape[0], -1)[:, : _cdiv(head.in_features, head.packing.codes_per_byte)] for data in qdata
        ]
    changes: dict[str, Any] = {"qdata": torch.cat(qdata)}
    for field in ("scale", "offset", "zero"):
        tensors = [getattr(part, field) for part in parts]
        if all(tensor is None for tensor in tensors):
            continue
        if any(tensor is None for tensor in tensors):
            raise WeightError("cat", name=field, rule="present in all weights or in none", value="present in some")
        changes[field] = torch.cat(tensors)
    if head.global_scale is not None and not _same([part.global_scale for part in parts]):
        changes["global_scale"] = torch.cat(
            [part.global_scale.reshape(-1).expand(part.out_features) for part in parts if part.global_scale is not None]
        )
    notes = tuple(dict.fromkeys(note for weight in weights for note in weight.notes))
    if not _same([part.activation_scale for part in parts]):
        changes["activation_scale"] = None
        notes = (*notes, "static activation scales differ and were dropped")
    rows = sum(part.out_features for part in parts)
    return attrs.evolve(parts[0], out_features=rows, name=name, notes=notes, **changes)
