"""Random packed weights, built from random bytes and scales, never through a quantiser.

A ``WeightRecipe`` is plain data: it can be printed, compared, and built again from its seed. Every nibble is random,
the ones that pad a row as well, so that a kernel that reads beyond K computes something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from q4core import BUILTIN_FORMATS, BlockOrder, Feature, Form, Format, PackedWeight, Packing, ScaleKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_GGML_HEADER_BYTES = {"q4_0": 2, "q4_1": 4, "iq4_nl": 2, "q8_0": 2, "mxfp4": 1, "nvfp4": 4}
"""Bytes before the codes of a block in ggml's layout, which grouped codes are laid out like."""
_SCALE_DTYPES = {
    **dict.fromkeys(("q4_0", "q4_1", "iq4_nl", "q8_0", "q8_affine"), torch.float16),
    **dict.fromkeys(("int4", "int8"), torch.bfloat16),
}


def _usual_scale_dtype(kind: Format) -> torch.dtype:
    return _SCALE_DTYPES.get(kind.name, torch.float32)


def _to_format(value: str | Format) -> Format:
    return BUILTIN_FORMATS[value] if isinstance(value, str) else value


def _to_features(items: Iterable[Feature]) -> frozenset[Feature]:
    return frozenset(items)


@attrs.frozen(kw_only=True)
class WeightRecipe:
    """What a random weight is like.

    Args:
        format: Name of the format, or a ``Format``.
        n: Out-features.
        k: In-features.
        seed: Equal recipes with equal seeds give equal bytes.
        scale_kind: One of the format's.
        packing: Defaults to the format's own.
        block_size: Defaults to the format's own.
        features: OFFSET and TAIL_BLOCK follow from the format and K; the others are as asked for.
        is_grouped: Codes [N, G, P] as a strided view between other bytes, as ggml's blocks lie in a file.
        has_edges: The first rows hold what a kernel may get wrong: zero scales, one zero block, subnormal and large
            scales, codes of negative zero.
        has_coarse_channels: Input channel scales are powers of two, so that activations on a grid exist.
        is_misaligned: The codes start at an odd byte of their storage.
        activation_scale: The checkpoint's static activation scale; None for none.
        scale_dtype: dtype in which plain scales, offsets and float zero points are stored. Defaults to the format's
            usual one.
    """

    format: Format = attrs.field(converter=_to_format)
    n: int = 48
    k: int = 256
    seed: int = 0
    scale_kind: ScaleKind = ScaleKind.PLAIN
    packing: Packing = attrs.field(default=attrs.Factory(lambda self: self.format.packing, takes_self=True))
    block_size: int = attrs.field(default=attrs.Factory(lambda self: self.format.block_size, takes_self=True))
    features: frozenset[Feature] = attrs.field(default=frozenset(), converter=_to_features)
    is_grouped: bool = False
    has_edges: bool = False
    has_coarse_channels: bool = False
    is_misaligned: bool = False
    activation_scale: float | None = None
    scale_dtype: torch.dtype = attrs.field(
        default=attrs.Factory(lambda self: _usual_scale_dtype(self.format), takes_self=True)
    )

    @property
    def label(self) -> str:
        """A short text that distinguishes recipes."""
        words = [self.format.name, self.scale_kind.value, str(self.packing).replace(":", "")]
        words.append(f"{self.n}x{self.k}b{self.block_size}")
        words += sorted(feature.value for feature in self.features)
        flags = ("is_grouped", "has_edges", "has_coarse_channels", "is_misaligned")
        words += [flag.split("_", 1)[1] for flag in flags if getattr(self, flag)]
        if self.activation_scale is not None:
            words.append(f"activation{self.activation_scale:.3g}")
        if self.scale_dtype != _usual_scale_dtype(self.format):
            words.append(f"scale_{str(self.scale_dtype).removeprefix('torch.')}")
        return "-".join([*words, f"s{self.seed}"])

    @property
    def is_flat(self) -> bool:
        """Whether blocks run over the flattened weight."""
        return Feature.FLAT_BLOCKS in self.features

    def build(self) -> PackedWeight:
        """Return the weight.

        Raises:
            FormatError, WeightError: The recipe asks for what no weight can be.
        """
        random = np.random.default_rng([self.seed, self.n, self.k, sum(self.format.name.encode())])
        blocks = -(-self.k // self.block_size)
        shape = (-(-self.n * self.k // self.block_size),) if self.is_flat else (self.n, blocks)
        fields: dict[str, Any] = draw_scales(self, shape, random)
        fields["qdata"] = self._codes(random)
        fields |= self._sides(shape, random)
        return PackedWeight(
            format=self.format,
            out_features=self.n,
            in_features=self.k,
            block_size=self.block_size,
            scale_kind=self.scale_kind,
            packing=self.packing,
            nested_block_size=_super_size(blocks) if self.scale_kind is ScaleKind.SUPER_BLOCK else 256,
            blocks=BlockOrder.FLAT if self.is_flat else BlockOrder.ROW,
            name=self.label,
            **fields,
        )

    def _codes(self, random: np.random.Generator) -> torch.Tensor:
        per_byte = self.packing.codes_per_byte
        if self.is_flat:
            shape: tuple[int, ...] = (-(-self.n * self.k // per_byte),)
        elif self.is_grouped:
            shape = (self.n, -(-self.k // self.block_size), self.block_size // per_byte)
        else:
            unit = self.packing.group or per_byte
            shape = (self.n, -(-self.k // unit) * unit // per_byte)
        values = random.integers(0, 256, size=shape, dtype=np.uint8)
        if self.has_edges and not self.is_flat and self.format.bits == 4:  # noqa: PLR2004  # two nibbles of 8 each
            values[min(4, self.n - 1)] = 0x88
        return self._laid_out(values)

    def _laid_out(self, values: NDArray[np.uint8]) -> torch.Tensor:
        """Place the bytes as a view into a larger storage, where the recipe asks for one."""
        start = 1 if self.is_misaligned else 0
        header = _GGML_HEADER_BYTES.get(self.format.name, 2) if self.is_grouped else 0
        stored = np.full((*values.shape[:-1], values.shape[-1] + header), 0xA5, dtype=np.uint8)
        stored[..., header:] = values
        storage = torch.full((stored.size + start,), 0x5A, dtype=torch.uint8)
        view = storage[start:].view(stored.shape)
        view.copy_(torch.from_numpy(stored))
        return view[..., header:]

    def _sides(self, shape: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
        sides: dict[str, torch.Tensor] = {}
        levels = 2**self.format.bits
        if self.format.form is Form.INTEGER and Feature.ZERO_POINT in self.features:
            sides["zero"] = torch.from_numpy(random.integers(0, levels, size=shape, dtype=np.uint8))
        if self.format.form is Form.INTEGER and Feature.FLOAT_ZERO_POINT in self.features:
            sides["zero"] = torch.from_numpy(random.uniform(0, levels - 1, size=shape)).to(self.scale_dtype)
        if Feature.CUSTOM_CODEBOOK in self.features:
            sides["codebook"] = torch.from_numpy(np.sort(random.uniform(-1, 1, size=levels))).to(torch.float32)
        if Feature.INPUT_CHANNEL_SCALE in self.features:
            values = np.ldexp(1.0, random.integers(-2, 3, size=self.k))
            if not self.has_coarse_channels:
                values = values * random.uniform(1.0, 2.0, size=self.k)
            sides["input_channel_scale"] = torch.from_numpy(values).to(torch.float32)
        if Feature.INPUT_PERMUTATION in self.features:
            sides["input_permutation"] = torch.from_numpy(random.permutation(self.k))
        if self.activation_scale is not None:
            sides["activation_scale"] = torch.tensor(self.activation_scale, dtype=torch.float32)
        return sides


_SIGNED = frozenset({"q4_0", "q4_1", "iq4_nl", "q8_0", "q8_affine"})
"""ggml's formats, whose block scales may be negative."""
_MIDDLES = {4: (2.0, 13.0), 8: (16.0, 60.0)}
"""Bits → codes near which an offset's zero lies; no float16 holds the large edge scale times larger ones."""
_LARGE = 2.0**10
"""The largest edge scale: sums of a few thousand such terms are far from overflow in float32."""


def _edges(values: NDArray[Any], zero: Any, tiny: Any, large: Any) -> None:
    """Write the rows that a kernel may get wrong: all blocks zero, one block zero, tiny, large."""
    if values.ndim == 1:  # flat blocks: spread over the weight
        for place, value in enumerate((zero, tiny, large)):
            values[place % values.shape[0]] = value
        return
    rows = values.shape[0]
    values[0] = zero
    values[1 % rows, values.shape[1] // 2] = zero
    values[2 % rows] = tiny
    values[3 % rows] = large


def _plain(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
    values = np.exp(random.uniform(np.log(0.004), np.log(0.25), size=shape))
    if recipe.format.name in _SIGNED:
        values *= random.choice([-1.0, 1.0], size=shape)
    if recipe.has_edges:
        smallest = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-135}
        _edges(values, 0.0, smallest[recipe.scale_dtype], _LARGE)
    fields = {"scale": torch.from_numpy(values).to(recipe.scale_dtype)}
    if recipe.format.has_offset:
        # About minus the middle of the codes, as a quantiser would have it, so that the two terms nearly cancel.
        offset = -values * random.uniform(*_MIDDLES[recipe.format.bits], size=shape)
        fields["offset"] = torch.from_numpy(offset).to(recipe.scale_dtype)
    return fields


def _e8m0(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
    values = random.integers(127 - 9, 127 - 1, size=shape, dtype=np.uint8)
    if recipe.has_edges:
        _edges(values, 0, 1, 127 + 10)  # the smallest is 2^-127, a float32 subnormal; there is no zero
    return {"scale": torch.from_numpy(values)}


def _e4m3_bytes(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.uint8]:
    # Six or seven exponents with every mantissa: wide enough to show, not so wide that few blocks drown the others.
    low, high = (0x08, 0x40) if recipe.scale_kind is ScaleKind.E4M3 else (0x40, 0x78)
    values = random.integers(low, high, size=shape, dtype=np.uint8)
    if recipe.has_edges:
        _edges(values, 0, 1, 0x7E)
    return values


def _e4m3(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
    scale = torch.from_numpy(_e4m3_bytes(recipe, shape, random)).view(torch.float8_e4m3fn)
    if recipe.scale_kind is ScaleKind.E4M3:
        return {"scale": scale}
    size = recipe.n if Feature.ROW_GLOBAL_SCALE in recipe.features else ()
    factor = random.uniform(0.7, 1.4, size=size) * 2.0**-9
    total = factor if recipe.scale_kind is ScaleKind.E4M3_MUL else 1.0 / factor
    return {"scale": scale, "global_scale": torch.from_numpy(np.asarray(total)).to(torch.float32)}


def _double_quant(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
    values = random.integers(0, 256, size=shape, dtype=np.uint8)
    nested = 256
    blocks = -(-values.size // nested)
    mean = 0.11
    table = np.sort(np.append(random.uniform(-1.0, 1.0, size=254), [-1.0, 1.0]))
    # The second absmax stays below the mean, so that no resolved scale is negative.
    second = random.uniform(0.5, 0.99, size=blocks) * mean
    if recipe.has_edges:
        second[:] = mean
        _edges(values, 0, 1, 255)  # -1 x the mean + the mean is 0; the next is next to it, the last twice the mean
    return {
        "scale": torch.from_numpy(values),
        "nested_codebook": torch.from_numpy(table).to(torch.float32),
        "nested_scale": torch.from_numpy(second).to(torch.float32),
        "nested_offset": torch.tensor(mean, dtype=torch.float32),
    }


def _super_size(blocks: int) -> int:
    """Return how many of a row's blocks share a super-block: 8 or 16 in ggml's, fewer where these do not divide."""
    return next(size for size in (8, 4, 3, 2, 1) if blocks % size == 0)


def _super_block(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
    second = random.choice([-1.0, 1.0], size=(shape[0], shape[1] // _super_size(shape[1])))
    second *= np.exp(random.uniform(np.log(0.0005), np.log(0.004), size=second.shape))
    if recipe.has_edges:
        second[2 % len(second)], second[3 % len(second)] = 2.0**-24, _LARGE / 64
    fields = {"nested_scale": torch.from_numpy(second.reshape(-1)).to(torch.float16)}
    scale: NDArray[Any]
    if recipe.format.has_offset:  # 6 bits each, as in Q4_K and Q5_K
        scale = random.integers(4, 64, size=shape, dtype=np.uint8)
        offset = random.integers(4, 64, size=shape, dtype=np.uint8)
        middle = sum(_MIDDLES[recipe.format.bits]) / 2
        third = -second * middle * random.uniform(0.9, 1.1, size=second.shape)
        fields["nested_offset"] = torch.from_numpy(third.reshape(-1)).to(torch.float16)
    else:  # signed, 6 bits in IQ4_XS and 8 in Q6_K
        scale = random.integers(1, 64, size=shape, dtype=np.int8) * random.choice([-1, 1], size=shape).astype(np.int8)
    if recipe.has_edges:
        _edges(scale, 0, 1, 63)
    fields["scale"] = torch.from_numpy(scale)
    if recipe.format.has_offset:
        fields["offset"] = torch.from_numpy(offset)
    return fields


_DRAWS = {
    ScaleKind.PLAIN: _plain,
    ScaleKind.E8M0: _e8m0,
    ScaleKind.E4M3: _e4m3,
    ScaleKind.E4M3_MUL: _e4m3,
    ScaleKind.E4M3_DIV: _e4m3,
    ScaleKind.DOUBLE_QUANT: _double_quant,
    ScaleKind.SUPER_BLOCK: _super_block,
}


def draw_scales(recipe: WeightRecipe, shape: tuple[int, ...], random: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return the scale fields of a ``PackedWeight``: ``scale`` of that shape, its levels, and ``offset`` where due."""
    return _DRAWS[recipe.scale_kind](recipe, shape, random)
