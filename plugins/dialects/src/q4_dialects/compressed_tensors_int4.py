"""compressed-tensors INT4 and INT8 (``pack-quantized``).

``<module>.weight_packed`` int32 [N, ceil(K / 8)] of nibbles, or [N, ceil(K / 4)] of bytes, lowest first, so that its
bytes are the codes in order; code 8, or 128, is zero. ``weight_scale`` float [N, G], one column for each of G groups of
in-features, or one in all; ``weight_shape`` int64 [2] holds N and K; asymmetric layers have ``weight_zero_point`` int32
[ceil(N / 8), G], or [ceil(N / 4), G], packed along N, where the middle code is zero too.

``weight_g_idx`` int32 [K] (act-order) says which group each in-feature is in; -1 everywhere says that there is no such
order. Stored columns are sorted by group as they are read, which is the one copy.

Traps: both widths have the same keys, and only the stored shape, or ``num_bits`` of ``config.json``, says which it is.
Other widths are packed across words. Releases from 0.14 on no longer write ``weight_g_idx``.

Reference:
    compressed-tensors 0.20.0: compressors/pack_quantized, quantization/lifecycle/forward_helpers.py; 0.12.2 for
    weight_g_idx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from q4_dialects.compressed_tensors_config import config_entry, group_weights, transform_problems
from q4_dialects.int_words import columns_in_order
from q4_dialects.layer_keys import CACHE_SCALES, layer_keys, rank_problems
from q4_dialects.orders import group_of_columns, order_of_columns, unsorted_bytes
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
    pack_codes,
    unpack_codes,
)
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4core import WeightSpec

__all__ = ["CompressedTensorsInt4", "CompressedTensorsInt8"]

_SUFFIXES = {
    "qdata": "weight_packed",
    "scale": "weight_scale",
    "shape": "weight_shape",
    "zero": "weight_zero_point",
    "groups": "weight_g_idx",
}
_REQUIRED = ("qdata", "scale", "shape")
_WORD_BITS = 32
_WIDTHS = (4, 8)
_MATRIX = 2
_FEATURES = (Feature.ZERO_POINT, Feature.FLOAT_ZERO_POINT, Feature.TAIL_BLOCK, Feature.INPUT_PERMUTATION)
_SIZES = (torch.int64, torch.int32)
_SIZES_FACT = "weight_shape dtype"
_ORDER_FACT = "weight_g_idx"


class CompressedTensorsInt4(Dialect):
    """INT4 as compressed-tensors packs it, symmetric or not, in groups or one for each row."""

    name: ClassVar[str] = "compressed-tensors-int4"
    formats: ClassVar[frozenset[str]] = frozenset({"int4"})
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite"}
    bits: ClassVar[int] = 4

    @property
    def _in_word(self) -> int:
        return _WORD_BITS // self.bits

    @property
    def _packing(self) -> Packing:
        return Packing.LOW_FIRST if self.bits == _WIDTHS[0] else Packing.BYTES

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module of this width with codes in int32 words, or with the tensor that holds their shape."""
        named = catalogue.quantization_config.get("quant_method") == "compressed-tensors"
        for module in catalogue.modules_with("weight_packed", "weight_shape"):
            codes = catalogue.get(f"{module}.weight_packed")
            is_ours = (codes is not None and codes.dtype == torch.int32) or f"{module}.weight_shape" in catalogue
            is_other = f"{module}.scale_packed" in catalogue  # Marlin with 2:4 sparsity
            if is_ours and not is_other and self.bits in _widths(module, catalogue):
                yield self._layer(module, catalogue, named=named)

    def _layer(self, module: str, catalogue: Catalogue, *, named: bool) -> LayerSchema:
        required = (*_REQUIRED, *_stated_roles(catalogue))
        keys = layer_keys(module, _SUFFIXES, required, catalogue)
        problems = [
            *catalogue.unknown_scales(module, ("bias", *_SUFFIXES.values(), *CACHE_SCALES)),
            *transform_problems(module, catalogue),
            *rank_problems(module, catalogue.get(keys["qdata"])),
        ]
        shape = _stored_shape(catalogue.load_small(keys["shape"]))
        scale = catalogue.get(keys["scale"])
        problems += _width_problems(module, catalogue)
        return LayerSchema(
            module=module,
            dialect=self.name,
            format=f"int{self.bits}",
            keys=keys,
            shape=shape,
            block_size=None if shape is None or scale is None else _block_size(shape[1], scale.shape),
            problems=problems,
            named=named,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys, shape, in_word = layer.keys, layer.shape, self._in_word
        codes, scale = catalogue.get(keys["qdata"]), catalogue.get(keys["scale"])
        yield from self.expect(catalogue, keys["qdata"], dtypes={torch.int32}, shape=(None, None))
        yield from self.expect(catalogue, keys["shape"], dtypes=_SIZES, shape=(2,))
        stored = catalogue.load_small(keys["shape"])
        if stored is not None and stored.dtype in _SIZES and stored.shape == (2,) and shape is None:
            yield Problem("value", keys["shape"], "two sizes from 1", stored.tolist())
        rows = None
        if codes is not None and len(codes.shape) == _MATRIX:
            rows = codes.shape[0]
            if shape is not None and codes.shape != (shape[0], -(-shape[1] // in_word)):
                rule = f"[N, ceil(K / {in_word})] of the stored shape {list(shape)}"
                yield Problem("shape", keys["qdata"], rule, list(codes.shape))
        yield from self.expect(catalogue, keys["scale"], dtypes=FLOATS, shape=(rows, None))
        groups = None
        if scale is not None and len(scale.shape) == _MATRIX:
            groups = scale.shape[1]
            if shape is not None and groups and _block_size(shape[1], scale.shape) is None:
                yield Problem("shape", keys["scale"], f"[N, G] with G a divisor of K = {shape[1]}", list(scale.shape))
        words = None if rows is None else -(-rows // in_word)
        yield from self.expect(catalogue, keys.get("zero"), dtypes={torch.int32}, shape=(words, groups))
        columns = None if shape is None else shape[1]
        yield from self.expect(catalogue, keys.get("groups"), dtypes={torch.int32}, shape=(columns,))

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight, codes and scales as views; zero points are unpacked to a byte each.

        Where in-features have an order, codes are copied, sorted by group.

        Raises:
            DialectError: The order names a group that is not there, or groups of several sizes.
        """
        words, scale, sizes = (load(layer.keys[role]) for role in _REQUIRED)
        rows, columns = (int(size) for size in sizes)
        block = columns // scale.shape[1]
        zero = order = None
        if "zero" in layer.keys:
            packed = load(layer.keys["zero"]).T.contiguous().view(torch.uint8)
            zero = unpack_codes(packed, self._packing)[:, :rows].T.contiguous()
        notes = layer.notes
        if sizes.dtype != torch.int64:
            notes = (*notes, self.stored_fact(_SIZES_FACT, str(sizes.dtype).removeprefix("torch.")))
        codes = words.view(torch.uint8)
        if "groups" in layer.keys:
            groups = load(layer.keys["groups"])
            is_used = not bool((groups == -1).all())
            order = order_of_columns(self, layer.module, groups, scale.shape[1], block) if is_used else None
            if order is None:
                notes = (*notes, self.stored_fact(_ORDER_FACT, "in order" if is_used else "unused"))
        if order is not None:
            codes = columns_in_order(codes, order, self._packing)
        return PackedWeight(
            format=find_format(layer.format),
            qdata=codes,
            scale=scale,
            out_features=rows,
            in_features=columns,
            block_size=block,
            packing=self._packing,
            zero=zero,
            input_permutation=order,
            dtype=scale.dtype,
            name=layer.module,
            dialect=layer.dialect,
            notes=notes,
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors that ``PackedQuantizationCompressor.decompress`` takes.

        Raises:
            DialectError: Another format, several blocks in a row of which one is short, zero points that are no codes,
                or any other feature.
        """
        self.check_writable(module, weight, features=_FEATURES)
        rows, columns = weight.shape
        if weight.blocks_per_row > 1 and columns % weight.block_size:
            raise self.refusal(module, "block_size", f"a divisor of K = {columns}", weight.block_size)
        width = 4 * -(-columns // self._in_word)
        codes = weight.qdata
        if weight.input_permutation is not None:
            codes = unsorted_bytes(weight, self._packing)
        elif weight.packing != self._packing or codes.shape != (rows, width):  # else with what fills the last word
            codes = self.row_bytes(weight, self._packing)
        codes = torch.nn.functional.pad(codes, (0, width - codes.shape[1]))
        sizes = getattr(torch, self.read_fact(weight, _SIZES_FACT) or "int64")
        tensors = {
            "weight_packed": _words(codes),
            "weight_scale": weight.scale,
            "weight_shape": torch.tensor(weight.shape, dtype=sizes),
        }
        if weight.zero is not None:
            points = zero_codes(self, module, weight).T
            padded = torch.nn.functional.pad(points, (0, -rows % self._in_word))
            tensors["weight_zero_point"] = _words(pack_codes(padded, self._packing)).T.contiguous()
        stored = self.read_fact(weight, _ORDER_FACT)
        if weight.input_permutation is not None or stored is not None:
            groups = group_of_columns(weight)
            tensors["weight_g_idx"] = torch.full_like(groups, -1) if stored == "unused" else groups
        return WrittenLayer(tensors={f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return the package's ``QuantizationConfig``: a group for each kind of layer."""
        kinds: dict[tuple[int | None, bool, bool], list[str]] = {}
        for module, spec in layers.items():
            group = spec.block_size if spec.block_size < spec.in_features else None
            kind = group, "zero" not in spec.fields, "input_permutation" in spec.fields
            kinds.setdefault(kind, []).append(module)
        groups: dict[str, Any] = {}
        for (group, symmetric, has_order), modules in kinds.items():
            scheme = {
                "num_bits": self.bits,
                "type": "int",
                "symmetric": symmetric,
                "strategy": "channel" if group is None else "group",
                "group_size": group,
                "dynamic": False,
                **({"actorder": "group"} if has_order else {}),
            }
            groups[f"group_{len(groups)}"] = {
                "targets": ["Linear"] if len(kinds) == 1 else modules,
                "weights": scheme,
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        return config_entry("pack-quantized", groups, unquantised)


class CompressedTensorsInt8(CompressedTensorsInt4):
    """INT8 in the same words, as mixed checkpoints have it next to INT4."""

    name: ClassVar[str] = "compressed-tensors-int8"
    formats: ClassVar[frozenset[str]] = frozenset({"int8"})
    bits: ClassVar[int] = 8


def _stated_widths(catalogue: Catalogue) -> set[int]:
    """Return the widths of integers that ``config.json`` has for groups of layers."""
    found = (weights.get("num_bits") for weights in group_weights(catalogue) if weights.get("type", "int") == "int")
    return {bits for bits in found if isinstance(bits, int)}


def _fitting_widths(module: str, catalogue: Catalogue) -> list[int] | None:
    """Return the widths that explain the stored shape; None where it is not at hand."""
    shape = _stored_shape(catalogue.load_small(f"{module}.weight_shape"))
    codes = catalogue.get(f"{module}.weight_packed")
    if shape is None or codes is None or len(codes.shape) != _MATRIX:
        return None
    return [bits for bits in range(1, 9) if codes.shape[1] == -(-shape[1] * bits // _WORD_BITS)]


def _widths(module: str, catalogue: Catalogue) -> tuple[int, ...]:
    """Return the widths that a module can be read in: both where nothing decides, 4 where neither explains it."""
    fitting, stated = _fitting_widths(module, catalogue), _stated_widths(catalogue)
    wanted = tuple(bits for bits in _WIDTHS if not stated or bits in stated)
    if fitting is None:
        return wanted[:1] if not stated else wanted or _WIDTHS[:1]
    found = tuple(bits for bits in fitting if bits in wanted)
    return found or tuple(bits for bits in _WIDTHS if bits in fitting)[:1] or wanted[:1] or _WIDTHS[:1]


def _width_problems(module: str, catalogue: Catalogue) -> Iterator[Problem]:
    """Yield that codes have a width that is not read, or another than ``config.json`` says."""
    fitting, stated = _fitting_widths(module, catalogue), _stated_widths(catalogue)
    codes = catalogue.get(f"{module}.weight_packed")
    if codes is None or not fitting:
        if stated and not stated & set(_WIDTHS):
            rule = "of 4-bit or 8-bit codes to be read"
            yield Problem("unsupported", module, rule, f"{min(stated)}-bit codes")
        return
    agreed = [bits for bits in fitting if not stated or bits in stated]
    if not set(agreed or fitting) & set(_WIDTHS):
        rule = "of 4-bit or 8-bit codes to be read, int32 [N, ceil(K / 8)] or [N, ceil(K / 4)]"
        value = f"{(agreed or fitting)[0]}-bit codes {list(codes.shape)}"
        yield Problem("unsupported", module, rule, value)
    elif not agreed:
        rule = f"of {' or '.join(map(str, sorted(stated)))}-bit codes, as num_bits of config.json says"
        yield Problem("shape", f"{module}.weight_packed", rule, list(codes.shape))


def _stated_roles(catalogue: Catalogue) -> list[str]:
    """Return what ``config.json`` says that every group of layers has: zero points, an order of in-features."""
    weights = group_weights(catalogue)
    roles = {
        "zero": (item.get("symmetric") is False for item in weights),
        "groups": (item.get("actorder") in {"group", True} for item in weights),
    }
    return [role for role, stated in roles.items() if weights and all(stated)]


def _stored_shape(sizes: torch.Tensor | None) -> tuple[int, int] | None:
    """Return (N, K) as stored, or None where it is not at hand or no shape of a matrix."""
    if sizes is None or sizes.dtype not in _SIZES or sizes.shape != (2,):
        return None
    rows, columns = sizes.tolist()
    return (rows, columns) if min(rows, columns) > 0 else None


def _block_size(columns: int, scale: tuple[int, ...]) -> int | None:
    """Return in-features per scale [N, G], or None where K does not hold G whole groups."""
    if len(scale) != _MATRIX or not scale[1] or columns % scale[1]:
        return None
    return columns // scale[1]


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Return bytes [R, 4 * W] as int32 [R, W], a view where they lie so."""
    flat = codes.contiguous().reshape(-1)  # of which a single row or column may have any stride
    return (flat.clone() if flat.storage_offset() % 4 else flat).view(torch.int32).reshape(len(codes), -1)
