"""The ggml type that holds a packed weight, and the weight's bytes in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch

from q4_gguf.ggml import ALIKE_TYPES, FACT, PACKED_TYPES, number_of
from q4_gguf.packing import block_bytes
from q4core import BlockOrder, Dialect, DialectError, ScaleKind, find_format

if TYPE_CHECKING:
    from collections.abc import Iterator

    from q4core import PackedWeight

__all__ = ["INTEGERS", "Form", "form_of"]

_OWN = tuple(name for name in PACKED_TYPES if name not in ALIKE_TYPES)
"""Types by which a form is recognised."""
INTEGERS = {"int4": ("Q4_0", "Q4_1"), "int8": ("Q8_0", None)}
"""Formats of integers → the type of those without zero points, and of those with."""
_LARGEST = {"Q5_0": 15, "Q5_1": 31, "Q2_K": 3, "Q3_K": 3, "Q5_K": 31, "Q6_K": 31, "TQ1_0": 1, "TQ2_0": 2}
"""Type → the greatest number that a code may stand for, of types whose codes have fewer bits than their format's."""
_LEAST = {"Q5_0": -16, "Q3_K": -4, "Q6_K": -32, "TQ1_0": -1, "TQ2_0": -1}
_SCALES = {
    "Q2_K": (0, 15), "Q3_K": (-32, 31), "Q4_K": (0, 63), "Q5_K": (0, 63), "Q6_K": (-128, 127), "IQ4_XS": (-32, 31),
}  # fmt: skip
"""Type → the least and the greatest scale of a block, of types with super-blocks; offsets have the same range."""
_CHUNK_ELEMENTS = 1 << 20
_HINT = "Quantise the layer again to a type that GGUF has: `q4 convert --requantize --format Q4_K`, for example."


def _refuse(module: str, name: str, rule: str, value: object, hint: str = _HINT) -> NoReturn:
    raise DialectError(f"gguf: layer {module!r}", name=name, rule=rule, value=value, hint=hint)


@attrs.frozen
class Form:
    """A packed weight as one of ggml's types.

    Args:
        module: The layer's name, for messages.
        weight: The weight.
        type_name: ggml's name of the type.
    """

    module: str
    weight: PackedWeight
    type_name: str

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        _, kind = number_of(self.type_name)
        return self.weight.in_features // kind.block_size * kind.block_bytes

    def rows(self) -> Iterator[torch.Tensor]:
        """Yield the bytes of the rows, some rows at a time: uint8 [rows, bytes], contiguous.

        Raises:
            DialectError: Codes, scales or offsets do not fit into the bits of the type.
        """
        _, kind = number_of(self.type_name)
        for start, part in self._pieces():
            codes, fields = self._codes(part, start), self._fields(part, start)
            blocks = codes.reshape(part.out_features, part.in_features // kind.block_size, -1)
            yield block_bytes(self.type_name, blocks, fields).flatten(1).contiguous()

    def check(self) -> None:
        """Check what ``rows`` does, and make no bytes."""
        for start, part in self._pieces():
            self._fields(part, start)
            if self.type_name in _LARGEST:
                self._codes(part, start)

    def _pieces(self) -> Iterator[tuple[int, PackedWeight]]:
        count = self.weight.out_features
        step = max(1, _CHUNK_ELEMENTS // self.weight.in_features)
        for start in range(0, count, step):
            yield start, self.weight.narrow(0, start, min(step, count - start))

    def _codes(self, part: PackedWeight, start: int) -> torch.Tensor:
        """Return the codes, one per byte."""
        codes = part.codes().cpu()
        if part.format.name == "int8":
            codes = codes ^ part.format.middle
        self._check_codes(codes, start)
        return codes

    def _fields(self, part: PackedWeight, start: int) -> dict[str, torch.Tensor]:
        """Return the numbers of the blocks, as ``block_bytes`` takes them."""
        layout, (_, kind) = PACKED_TYPES[self.type_name], number_of(self.type_name)
        rows, blocks = part.out_features, part.in_features // kind.block_size
        fields: dict[str, torch.Tensor] = {}
        for name in layout.parts:
            numbers = self._offsets(part) if name == "offset" and part.zero is not None else getattr(part, name)
            numbers = numbers.cpu()
            if name.startswith("nested_"):
                numbers = self._half(name, numbers.reshape(rows, blocks), start)
                fields[name] = -numbers if name == "nested_offset" else numbers
            elif numbers.element_size() == 1:
                fields[name] = numbers.reshape(rows, blocks, -1)
                self._check_scales(name, fields[name], start)
            else:
                spread = numbers.repeat_interleave(part.block_size // layout.block_size, dim=1)
                fields[name] = self._half(name, spread[:, :blocks], start)
        return fields

    @staticmethod
    def _offsets(part: PackedWeight) -> torch.Tensor:
        """Return offsets that mean the same as zero points."""
        if part.zero is None:  # pragma: no cover  # asked for with zero points alone
            raise TypeError("no zero points")
        return -(part.zero.to(torch.float32) * part.resolved_scale())

    def _half(self, name: str, numbers: torch.Tensor, start: int) -> torch.Tensor:
        """Return numbers as float16, in which the file has them."""
        halves = numbers.to(torch.float16)
        if halves.dtype == numbers.dtype:
            return halves
        is_bad = halves.to(numbers.dtype) != numbers
        if is_bad.any():
            row, block = is_bad.nonzero()[0].tolist()
            rule = "a number that float16 has"
            if name == "offset" and self.weight.zero is not None:
                name, rule = "zero", f"such that {rule} is minus its product with the scale"
            self._fail(f"{name}[{start + row}, {block}]", rule, float(numbers[row, block]))
        return halves

    def _fail(self, name: str, rule: str, value: object) -> NoReturn:
        _refuse(self.module, name, f"{rule}, for GGUF's {self.type_name}", value)

    def _check_codes(self, codes: torch.Tensor, start: int) -> None:
        """Refuse a code that stands for a number which the type does not reach."""
        largest = _LARGEST.get(self.type_name)
        if largest is None:
            return
        least = _LEAST.get(self.type_name, 0)
        book = find_format(PACKED_TYPES[self.type_name].format).codebook_tensor()
        is_bad = ((book < least) | (book > largest))[codes.int()]
        if is_bad.any():
            row, column = is_bad.nonzero()[0].tolist()
            rule = f"the code of a number in {least} … {largest}"
            self._fail(f"code[{start + row}, {column}]", rule, int(codes[row, column]))

    def _check_scales(self, name: str, numbers: torch.Tensor, start: int) -> None:
        if self.type_name not in _SCALES:
            return
        least, largest = _SCALES[self.type_name]
        is_bad = (numbers < least) | (numbers > largest)
        if is_bad.any():
            row, block, within = is_bad.nonzero()[0].tolist()
            place = block * numbers.shape[-1] + within
            rule = f"in {least} … {largest}"
            self._fail(f"{name}[{start + row}, {place}]", rule, int(numbers[row, block, within]))


def form_of(module: str, weight: PackedWeight) -> Form:
    """Return a weight as the ggml type that holds it exactly.

    A weight that was read from a GGUF file has the type that it had there, but for Q8_1, which becomes Q8_0.

    Args:
        module: The layer's name, for messages.
        weight: The weight.

    Raises:
        DialectError: No type holds it; the message names what does not fit. Codes and scales out of a type's reach are
            found when the bytes are made.
    """
    _check_features(module, weight)
    name = _type_of(module, weight)
    _, kind = number_of(name)
    if weight.in_features % kind.block_size:
        _refuse(module, "K", f"a multiple of {kind.block_size}, the elements of a block of {name}", weight.in_features)
    return Form(module, weight, name)


def _check_features(module: str, weight: PackedWeight) -> None:
    if weight.blocks is BlockOrder.FLAT:
        _refuse(module, "blocks", "along rows, as GGUF's are", "flat")
    for field in ("input_permutation", "input_channel_scale"):
        if getattr(weight, field) is not None:
            _refuse(module, field, "absent, as GGUF has no place for it", "present")
    if weight.activation_scale is not None:
        hint = "lossy=True (`q4 convert --requantize`) leaves it out."
        _refuse(module, "activation_scale", "absent, as GGUF has no place for it", "present", hint)
    if weight.codebook is not None and not torch.equal(
        weight.codebook.to("cpu", torch.float32), weight.format.codebook_tensor()
    ):
        _refuse(module, "codebook", f"{weight.format}'s own, as GGUF has no place for another", "another")
    if weight.global_scale is not None and weight.global_scale.numel() > 1:
        _refuse(module, "global_scale", "a single number", list(weight.global_scale.shape))


def _type_of(module: str, weight: PackedWeight) -> str:
    noted = Dialect.read_fact(weight, FACT)
    for name in ([noted] if noted in PACKED_TYPES else []) + [*_OWN]:
        if _is_of(weight, name):
            return "Q8_0" if name == "Q8_1" else name
    if weight.format.name in INTEGERS and weight.scale_kind is ScaleKind.PLAIN:
        plain, shifted = INTEGERS[weight.format.name]
        middle, zero = weight.format.middle, weight.zero
        found = plain if zero is None or bool((zero == middle).all()) else shifted
        if found is None:
            _refuse(module, "zero", f"absent or {middle} throughout, as in GGUF's {plain}", "others")
        if weight.block_size % 32 == 0:
            return found
    known = {PACKED_TYPES[name].format for name in _OWN} | {*INTEGERS}
    if weight.format.name not in known:
        _refuse(module, "format", f"one that GGUF has ({', '.join(sorted(known))})", weight.format.name)
    rule = "those of a GGUF type (a multiple of 32, a super-block of 256)"
    value = f"{weight.block_size}, {weight.scale_kind.value}"
    _refuse(module, "block_size and scale_kind", f"{rule} for {weight.format}", value)


def _is_of(weight: PackedWeight, name: str) -> bool:
    """Return whether a type has a weight's format, its kind of scales, and blocks that make up the weight's."""
    layout, (_, kind) = PACKED_TYPES[name], number_of(name)
    kinds = {layout.scale_kind} | ({ScaleKind.E4M3_MUL} if name == "NVFP4" else set())
    if weight.format.name != layout.format or weight.scale_kind not in kinds:
        return False
    if weight.scale_kind is ScaleKind.PLAIN:
        return weight.block_size % layout.block_size == 0
    nested: Any = kind.block_size // layout.block_size if weight.scale_kind is ScaleKind.SUPER_BLOCK else None
    return weight.block_size == layout.block_size and nested in {None, weight.nested_block_size}
