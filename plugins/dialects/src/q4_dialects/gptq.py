"""GPTQ, versions 1 and 2, as AutoGPTQ, GPTQModel and AutoRound store it.

``<module>.qweight`` [ceil(K / c), N] in words of c codes along K, the lowest bits first; ``scales`` float [G, N];
``qzeros`` [G, ceil(N / c)], packed along N; ``g_idx`` int32 [K], which AutoRound may leave out, names the group of each
in-feature. Words are int32, or int8, int16, int64 (``pack_dtype``). W[n, k] = (q - z) * scales[g_idx[k], n].

Traps: version 1 stores z - 1, subtracted from the packed *word*, so that a z of 0 borrows from the code above it.
Version 2 stores z, under the same keys. AutoRound stores either, under a third name. Only the config, or zero points
that are all in the middle, decide between the two. With ``desc_act`` the in-features of a group are scattered: here the
columns are sorted by group, and ``input_permutation`` says where they belong. AWQ's keys are the same:
qweight_layouts.py.

Oracle: gptqmodel 7.7.0, TorchLinear.dequantize_weight after convert_gptq_v1_to_v2_format_module; auto-round 0.16.1,
auto_round_extension.torch.qlinear_torch and qlinear_torch_zp.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from q4_dialects.int_words import columns_in_order, from_columns, pack_along_rows, to_columns, unpack_along_rows
from q4_dialects.orders import group_of_columns, order_of_columns, order_problems, unsorted_bytes
from q4_dialects.qweight_config import PACK_DTYPES, Stated, Zeros, stated_by
from q4_dialects.qweight_layouts import GPTQ, modules_of, side_problems
from q4_dialects.zero_points import zero_codes
from q4core import (
    Catalogue,
    Dialect,
    Feature,
    LayerSchema,
    PackedWeight,
    Packing,
    Problem,
    WrittenLayer,
    find_format,
)
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4core import WeightSpec

__all__ = ["Gptq", "GptqV2"]

_SUFFIXES = {"qdata": "qweight", "scale": "scales", "zero": "qzeros"}
_GROUPS = "g_idx"
_FORMATS = {4: "int4", 8: "int8"}
_PACKINGS = {4: Packing.LOW_FIRST, 8: Packing.BYTES}
_WIDTHS = (4, 8, 2, 3, 5, 6, 7)
_POWERS = (16, 32, 64, 128, 256, 512, 1024)
"""Group sizes of these libraries."""
_MATRIX = 2
_FEATURES = (Feature.ZERO_POINT, Feature.FLOAT_ZERO_POINT, Feature.TAIL_BLOCK, Feature.INPUT_PERMUTATION)
_WORD_FACT = "pack_dtype"
_MIDDLES = {0x77: Zeros.WORDS, 0x7F: Zeros.WORDS, 0x88: Zeros.PLAIN, 0x80: Zeros.PLAIN}
"""The byte that symmetric layers of 4 or 8 bits are full of → how their zero points are stored."""


class _GptqWords(Dialect):
    """What both versions have in common."""

    formats: ClassVar[frozenset[str]] = frozenset(_FORMATS.values())
    shares_keys: ClassVar[bool] = True
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite"}
    zeros: ClassVar[Zeros]
    """How zero points are stored that the dialect writes."""
    others: ClassVar[frozenset[Zeros]]
    """How they are stored in the other version."""
    form: ClassVar[str]
    """``checkpoint_format`` in the config."""

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module of this layout whose zero points config, or their values, give to this version."""
        for module in modules_of(catalogue, GPTQ):
            stated = stated_by(catalogue, module)
            zeros = stated.zeros if stated.zeros is not None else _zeros_by_value(catalogue, module)
            if zeros not in self.others:
                yield self._layer(module, catalogue, stated, zeros)

    def _layer(self, module: str, catalogue: Catalogue, stated: Stated, zeros: Zeros | None) -> LayerSchema:
        below = catalogue.children(module)
        keys = {role: f"{module}.{suffix}" for role, suffix in _SUFFIXES.items()}
        if _GROUPS in below or stated.method == "gptq":
            keys["groups"] = f"{module}.{_GROUPS}"
        sizes = _Sizes(catalogue, keys, stated)
        problems = list(side_problems(catalogue, module))
        notes = () if stated.layout == GPTQ or zeros is None else (f"zero points taken for {zeros.value}: all alike",)
        if sizes.bits not in _FORMATS:
            rule = "of 4-bit or 8-bit codes to be read"
            problems.append(Problem("unsupported", module, rule, f"{sizes.bits}-bit GPTQ"))
        return LayerSchema(
            module=module,
            dialect=self.name,
            format=_FORMATS.get(sizes.bits, "int4"),
            keys=keys,
            shape=None if sizes.rows is None or sizes.columns is None else (sizes.rows, sizes.columns),
            block_size=sizes.block,
            problems=problems,
            notes=notes,
            extras=(("bits", sizes.bits), ("zeros", zeros or self.zeros)),
            named=stated.zeros is not None,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape, and what config says that is not so."""
        keys, stated = layer.keys, stated_by(catalogue, layer.module)
        sizes = _Sizes(catalogue, keys, stated)
        bits, rows, columns, groups = sizes.bits, sizes.rows, sizes.columns, sizes.groups
        legal = {stated.pack_dtype} if stated.pack_dtype is not None else set(PACK_DTYPES.values())
        per_word = sizes.word_bits
        lines = None if columns is None else -(-columns * bits // per_word)
        yield from self.expect(catalogue, keys["qdata"], dtypes=legal, shape=(lines, rows))
        yield from self.expect(catalogue, keys["scale"], dtypes=FLOATS, shape=(None, rows))
        codes, zeros = catalogue.get(keys["qdata"]), catalogue.get(keys["zero"])
        if zeros is not None:
            same = {codes.dtype} & legal if codes is not None else legal
            own_bits = 8 * zeros.dtype.itemsize
            words = None if rows is None else -(-rows * bits // own_bits)
            yield from self.expect(catalogue, keys["zero"], dtypes=same or legal, shape=(groups, words))
        yield from self.expect(catalogue, keys.get("groups"), dtypes={torch.int32}, shape=(columns,))
        if columns is not None and groups is not None and sizes.block is None:
            rule = f"[G, N] with G groups of K = {columns}"
            yield Problem("shape", keys["scale"], rule, [groups, rows])
        if stated.bits is not None and stated.bits != bits and codes is not None:
            yield Problem("value", keys["qdata"], f"of {stated.bits}-bit codes, as the config says", f"{bits} bits")
        if stated.group_size and columns is not None and groups is not None:
            count = 1 if stated.group_size < 0 else -(-columns // stated.group_size)
            if count != groups:
                rule = f"[{count}, N], as the config's group_size {stated.group_size} says"
                yield Problem("value", keys["scale"], rule, [groups, rows])
        order = catalogue.load_small(keys["groups"]) if "groups" in keys else None
        if order is not None and order.dtype == torch.int32 and order.shape == (columns,) and groups and sizes.block:
            yield from order_problems(keys["groups"], order, groups, sizes.block)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight: codes in rows, sorted by group where they were not; zero points a byte each.

        Raises:
            DialectError: ``g_idx`` does not give each group as many in-features as the others.
        """
        extras = dict(layer.extras)
        bits, zeros = extras["bits"], extras["zeros"]
        packing, words = _PACKINGS[bits], load(layer.keys["qdata"])
        scale = load(layer.keys["scale"])
        rows, block = words.shape[1], layer.block_size
        columns, order = words.shape[0] * 8 * words.dtype.itemsize // bits, None
        if "groups" in layer.keys:
            groups = load(layer.keys["groups"])
            columns = len(groups)
            order = order_of_columns(self, layer.module, groups, len(scale), block or columns)
        codes = to_columns(words)
        if order is not None:
            codes = columns_in_order(codes, order, packing)
        zero = unpack_along_rows(_plus_one(load(layer.keys["zero"]), bits, zeros), rows, packing)
        if zeros is Zeros.CODES:
            zero = _next(zero)
        notes, dtype = layer.notes, words.dtype
        if dtype != torch.int32:
            notes = (*notes, self.stored_fact(_WORD_FACT, str(dtype).removeprefix("torch.")))
        return PackedWeight(
            format=find_format(layer.format),
            qdata=codes,
            scale=scale.T.contiguous(),
            out_features=rows,
            in_features=columns,
            block_size=block or columns,
            packing=packing,
            zero=None if bool((zero == find_format(layer.format).middle).all()) else zero,
            input_permutation=order,
            dtype=scale.dtype,
            name=layer.module,
            dialect=layer.dialect,
            notes=notes,
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the four tensors; ``g_idx`` is written, too, where it says no more than the group size.

        Raises:
            DialectError: Another format, zero points that are no codes, scales that are no plain numbers, or any other
                feature.
        """
        self.check_writable(module, weight, features=_FEATURES)
        rows, bits = weight.out_features, weight.format.bits
        packing, dtype = _PACKINGS[bits], PACK_DTYPES[self.read_fact(weight, _WORD_FACT) or "int32"]
        per_word = 8 * dtype.itemsize // bits
        if rows % per_word:
            raise self.refusal(module, "out_features", f"a multiple of {per_word}", rows)
        zeros = pack_along_rows(zero_codes(self, module, weight), dtype, packing)
        if self.zeros is Zeros.WORDS:
            zeros = zeros - _ones(dtype, bits)
        tensors = {
            "qweight": from_columns(unsorted_bytes(weight, packing), dtype),
            "qzeros": zeros,
            "scales": weight.scale.T.contiguous(),
            _GROUPS: group_of_columns(weight),
        }
        return WrittenLayer(tensors={f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return the libraries' entry; what differs from the commonest group size and width goes to ``dynamic``."""
        kinds = {
            module: (spec.format.bits, spec.block_size if spec.block_size < spec.in_features else -1)
            for module, spec in layers.items()
        }
        bits, group = collections.Counter(kinds.values()).most_common(1)[0][0]
        dynamic: dict[str, Any] = {
            f"+:^{re.escape(module)}$": {"bits": own[0], "group_size": own[1]}
            for module, own in kinds.items()
            if own != (bits, group)
        }
        dynamic |= {f"-:^{re.escape(module)}$": {} for module in unquantised}
        entry = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "desc_act": any("input_permutation" in spec.fields for spec in layers.values()),
            "sym": all("zero" not in spec.fields for spec in layers.values()),
            "lm_head": "lm_head" in layers,
            "checkpoint_format": self.form,
            "pack_dtype": "int32",
        }
        return {**entry, "dynamic": dynamic} if dynamic else entry


class Gptq(_GptqWords):
    """Version 1: zero points are stored one less."""

    name: ClassVar[str] = "gptq"
    zeros: ClassVar[Zeros] = Zeros.WORDS
    others: ClassVar[frozenset[Zeros]] = frozenset({Zeros.PLAIN})
    form: ClassVar[str] = "gptq"


class GptqV2(_GptqWords):
    """Version 2: zero points are stored as they are."""

    name: ClassVar[str] = "gptq-v2"
    zeros: ClassVar[Zeros] = Zeros.PLAIN
    others: ClassVar[frozenset[Zeros]] = frozenset({Zeros.WORDS, Zeros.CODES})
    form: ClassVar[str] = "gptq_v2"


class _Sizes:
    """What shapes say of a layer, which may be damaged: None where nothing does.

    Args:
        catalogue: Where to look.
        keys: Role → key.
        stated: What the config says, where shapes leave it open.
    """

    def __init__(self, catalogue: Catalogue, keys: Mapping[str, str], stated: Stated) -> None:
        codes, scales, zeros = (catalogue.get(keys[role]) for role in _SUFFIXES)
        order = catalogue.get(keys["groups"]) if "groups" in keys else None
        q, s, z = (
            None if info is None or len(info.shape) != _MATRIX else info.shape for info in (codes, scales, zeros)
        )
        self.word_bits = 32 if codes is None else 8 * codes.dtype.itemsize
        self.rows = next((shape[1] for shape in (s, q) if shape is not None and shape[1]), None)
        columns = None if order is None or len(order.shape) != 1 or not order.numel else order.numel
        own_bits = 32 if zeros is None else 8 * zeros.dtype.itemsize
        fitting = [
            bits
            for bits in _WIDTHS
            if (q is None or columns is None or q[0] == -(-columns * bits // self.word_bits))
            and (z is None or self.rows is None or z[1] == -(-self.rows * bits // own_bits))
        ]
        self.bits: int = stated.bits if stated.bits in fitting else (*fitting, 4)[0]
        if columns is None and q is not None and q[0]:
            columns = q[0] * self.word_bits // self.bits
        self.columns = columns
        self.groups = None if s is None or not s[0] else s[0]
        self.block = self._block(stated.group_size)

    def _block(self, stated: int | None) -> int | None:
        """Return in-features per group: what the config says, where it fits, else what shapes leave."""
        columns, groups = self.columns, self.groups
        if columns is None or groups is None:
            return None
        if groups == 1:
            return columns
        exact = [columns // groups] if columns % groups == 0 else []
        sizes = ([stated] if stated and stated > 0 else []) + exact + list(_POWERS)
        return next((size for size in sizes if -(-columns // size) == groups), None)


def _zeros_by_value(catalogue: Catalogue, module: str) -> Zeros | None:
    """Return how zero points are stored that are all in the middle, as symmetric layers have them; else None."""
    words = catalogue.load_small(f"{module}.qzeros")
    if words is None or words.dtype not in PACK_DTYPES.values() or not words.numel():
        return None
    low, high = (int(extreme) for extreme in torch.aminmax(words))
    different = set(low.to_bytes(words.dtype.itemsize, "little", signed=True))
    return _MIDDLES.get(different.pop()) if low == high and len(different) == 1 else None


def _ones(dtype: torch.dtype, bits: int) -> int:
    """Return the word in which each code is 1."""
    return sum(1 << place for place in range(0, 8 * dtype.itemsize, bits))


def _plus_one(words: torch.Tensor, bits: int, zeros: Zeros) -> torch.Tensor:
    """Return packed zero points with 1 added to each word's codes, carries and all, where words were lowered."""
    return words + _ones(words.dtype, bits) if zeros is Zeros.WORDS else words


def _next(codes: torch.Tensor) -> torch.Tensor:
    """Return codes + 1, in int32 where a byte can't hold that."""
    top = bool((codes == 255).any())  # noqa: PLR2004  # a byte's largest
    return codes.to(torch.int32) + 1 if top else codes + 1
