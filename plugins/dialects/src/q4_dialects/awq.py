"""AWQ as AutoAWQ and AutoRound store it: the GEMM and the GEMV layout.

GEMM: ``<module>.qweight`` int32 [K, N / 8]; ``qzeros`` int32 [G, N / 8]; ``scales`` float [G, N]. The codes of a word
are the columns 0, 2, 4, 6, 1, 3, 5, 7 of its eight, the lowest bits first. GEMV: ``qweight`` int32 [N, K / 8], codes in
order; ``qzeros`` int32 [N, Z] in order along the groups; ``scales`` [N, 8 Z], with zeros after the last group.
W[n, k] = (q - z) * s, and zero points are stored as they are.

Traps: the keys are GPTQ's, and shapes decide (qweight_layouts.py). The padding of GEMV hides the number of groups, so
that the group size is the config's, or the one usual size that makes this Z. GEMV_FAST has float zero points.

Oracle: autoawq 0.2.9, utils/packing_utils.dequantize_gemm; modules/linear/gemv.py from_linear.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from q4_dialects.int_words import from_words_along_rows, interleaved_from_rows, rows_from_interleaved
from q4_dialects.qweight_config import stated_by
from q4_dialects.qweight_layouts import AWQ, AWQ_GEMV, NIBBLES, modules_of, side_problems
from q4_dialects.zero_points import zero_codes
from q4core import (
    Catalogue,
    Dialect,
    DialectError,
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

__all__ = ["Awq", "AwqGemv"]

_SUFFIXES = {"qdata": "qweight", "scale": "scales", "zero": "qzeros"}
_BITS = 4
_MIDDLE = 8
_MATRIX = 2
_GEMV_GROUPS = (128, 64, 32)
_FEATURES = (Feature.ZERO_POINT, Feature.FLOAT_ZERO_POINT)
_INT32 = frozenset({torch.int32})


class Awq(Dialect):
    """The GEMM layout."""

    name: ClassVar[str] = "awq"
    formats: ClassVar[frozenset[str]] = frozenset({"int4"})
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite"}

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module of this layout."""
        for module in modules_of(catalogue, AWQ):
            yield self._layer(module, catalogue)

    def _layer(self, module: str, catalogue: Catalogue) -> LayerSchema:
        keys = {role: f"{module}.{suffix}" for role, suffix in _SUFFIXES.items()}
        codes, scales, zeros = (_matrix(catalogue, keys[role]) for role in _SUFFIXES)
        stated = stated_by(catalogue, module)
        problems = list(side_problems(catalogue, module))
        if f"{module}.g_idx" in catalogue:
            problems.append(Problem("unknown_key", f"{module}.g_idx", "absent: AWQ has no order of the in-features"))
            keys["groups"] = f"{module}.g_idx"
        per_word = scales[1] // codes[1] if codes and scales and codes[1] else NIBBLES
        if per_word == NIBBLES // 2:
            problems.append(Problem("unsupported", module, "of 4-bit codes to be read", "8-bit AWQ"))
        rows = scales[1] if scales else NIBBLES * codes[1] if codes else NIBBLES * zeros[1] if zeros else None
        block = None
        if codes and scales and codes[0] and scales[0] and codes[0] % scales[0] == 0:
            block = codes[0] // scales[0]
        return LayerSchema(
            module=module,
            dialect=self.name,
            format="int4",
            keys=keys,
            shape=(rows, codes[0]) if rows and codes and codes[0] else None,
            block_size=block,
            problems=problems,
            named=stated.layout == AWQ,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape, and what config says that is not so."""
        keys = layer.keys
        codes, scales, zeros = (_matrix(catalogue, keys[role]) for role in _SUFFIXES)
        words = codes[1] if codes and codes[1] else zeros[1] if zeros and zeros[1] else None
        rows = None if words is None else NIBBLES * words
        groups = scales[0] if scales and scales[0] else None
        yield from self.expect(catalogue, keys["qdata"], dtypes=_INT32, shape=(None, None))
        yield from self.expect(catalogue, keys["scale"], dtypes=FLOATS, shape=(None, rows))
        yield from self.expect(catalogue, keys["zero"], dtypes=_INT32, shape=(groups, words))
        if codes and codes[0] and groups and layer.block_size is None:
            rule = f"[G, N] with G a divisor of K = {codes[0]}"
            yield Problem("shape", keys["scale"], rule, [groups, rows])
        yield from _config_problems(layer, catalogue)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight: codes in rows of bytes, zero points a byte each."""
        words, scale, zeros = (load(layer.keys[role]) for role in _SUFFIXES)
        zero = from_words_along_rows(zeros)
        return PackedWeight(
            format=find_format("int4"),
            qdata=rows_from_interleaved(words),
            scale=scale.T.contiguous(),
            out_features=scale.shape[1],
            in_features=words.shape[0],
            block_size=words.shape[0] // scale.shape[0],
            packing=Packing.LOW_FIRST,
            zero=None if bool((zero == _MIDDLE).all()) else zero,
            dtype=scale.dtype,
            name=layer.module,
            dialect=layer.dialect,
            notes=layer.notes,
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the three tensors.

        Raises:
            DialectError: Another format, N no multiple of 8, zero points that are no codes, or any other feature.
        """
        self.check_writable(module, weight, features=_FEATURES)
        rows, columns = weight.shape
        if rows % NIBBLES:
            raise self.refusal(module, "out_features", f"a multiple of {NIBBLES}", rows)
        zeros = pack_codes(zero_codes(self, module, weight), Packing.LOW_FIRST)
        tensors = {
            "qweight": interleaved_from_rows(self.row_bytes(weight, Packing.LOW_FIRST), columns),
            "qzeros": interleaved_from_rows(zeros, weight.blocks_per_row),
            "scales": weight.scale.T.contiguous(),
        }
        return WrittenLayer(tensors={f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return AutoAWQ's entry.

        Raises:
            DialectError: Layers have several group sizes; the entry has one for all.
        """
        return _config_entry(self, layers, unquantised, "gemm")


class AwqGemv(Dialect):
    """The GEMV layout."""

    name: ClassVar[str] = "awq-gemv"
    formats: ClassVar[frozenset[str]] = frozenset({"int4"})
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite"}

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module of this layout."""
        for module in modules_of(catalogue, AWQ_GEMV):
            stated = stated_by(catalogue, module)
            keys = {role: f"{module}.{suffix}" for role, suffix in _SUFFIXES.items()}
            codes, _, zeros = (_matrix(catalogue, keys[role]) for role in _SUFFIXES)
            columns = NIBBLES * codes[1] if codes and codes[1] else None
            group = stated.group_size
            sizes = (columns or 0,) if group == -1 else (group,) if group else _GEMV_GROUPS
            fitting = [size for size in sizes if columns and zeros and size > 0 and _width(columns, size) == zeros[1]]
            block = fitting[0] if fitting else None
            yield LayerSchema(
                module=module,
                dialect=self.name,
                format="int4",
                keys=keys,
                shape=(codes[0], columns) if codes and codes[0] and columns else None,
                block_size=block,
                problems=tuple(side_problems(catalogue, module)),
                notes=() if group or block is None else (f"group size {block} assumed: no config says it",),
                named=stated.layout == AWQ_GEMV,
            )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys = layer.keys
        codes, _, zeros = (_matrix(catalogue, keys[role]) for role in _SUFFIXES)
        rows = codes[0] if codes and codes[0] else None
        words = zeros[1] if zeros and zeros[1] else None
        yield from self.expect(catalogue, keys["qdata"], dtypes=_INT32, shape=(None, None))
        yield from self.expect(catalogue, keys["zero"], dtypes=_INT32, shape=(rows, None))
        scales = None if words is None else NIBBLES * words
        yield from self.expect(catalogue, keys["scale"], dtypes=FLOATS, shape=(rows, scales))
        if layer.shape is not None and words is not None and layer.block_size is None:
            group = stated_by(catalogue, layer.module).group_size
            rule = f"as wide as groups of {group} of K = {layer.shape[1]} make it" if group else "as groups make it"
            yield Problem("shape", keys["zero"], rule, [rows, words])
        yield from _config_problems(layer, catalogue, has_groups=False)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight; codes are a view of what is stored.

        Raises:
            DialectError: There are scales after the last group, so that the groups are smaller.
        """
        words, scale, zeros = (load(layer.keys[role]) for role in _SUFFIXES)
        rows, columns = words.shape[0], NIBBLES * words.shape[1]
        block = layer.block_size or columns
        groups = -(-columns // block)
        if bool(scale[:, groups:].any()):
            rule = f"zero after the last of {groups} groups of {block}"
            raise DialectError(self.name, name="scales", rule=rule, value="others", where=layer.module)
        zero = unpack_codes(zeros.contiguous().view(torch.uint8), Packing.LOW_FIRST)[:, :groups].contiguous()
        return PackedWeight(
            format=find_format("int4"),
            qdata=words.view(torch.uint8),
            scale=scale[:, :groups].contiguous(),
            out_features=rows,
            in_features=columns,
            block_size=block,
            packing=Packing.LOW_FIRST,
            zero=None if bool((zero == _MIDDLE).all()) else zero,
            dtype=scale.dtype,
            name=layer.module,
            dialect=layer.dialect,
            notes=layer.notes,
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the three tensors, padded as the library's kernel wants them.

        Raises:
            DialectError: Another format, a K or a group size that the layout does not have, zero points that are no
                codes, or any other feature.
        """
        self.check_writable(module, weight, features=_FEATURES)
        rows, columns = weight.shape
        if weight.block_size not in _GEMV_GROUPS:
            rule = f"one of {', '.join(map(str, sorted(_GEMV_GROUPS)))}"
            raise self.refusal(module, "block_size", rule, weight.block_size)
        width = _width(columns, weight.block_size)
        padding = (0, NIBBLES * width - weight.blocks_per_row)
        zeros = torch.nn.functional.pad(zero_codes(self, module, weight), padding)
        tensors = {
            "qweight": self.row_bytes(weight, Packing.LOW_FIRST).contiguous().reshape(-1).view(torch.int32),
            "qzeros": pack_codes(zeros, Packing.LOW_FIRST).reshape(-1).view(torch.int32),
            "scales": torch.nn.functional.pad(weight.scale, padding),
        }
        return WrittenLayer(tensors={f"{module}.{suffix}": tensor.view(rows, -1) for suffix, tensor in tensors.items()})

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return AutoAWQ's entry.

        Raises:
            DialectError: Layers have several group sizes; the entry has one for all.
        """
        return _config_entry(self, layers, unquantised, "gemv")


def _config_entry(
    dialect: Dialect, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...], version: str
) -> dict[str, Any]:
    sizes = {spec.block_size if spec.block_size < spec.in_features else -1 for spec in layers.values()}
    if len(sizes) > 1:
        sizes = {spec.block_size for spec in layers.values()}  # one group of K may be of the size of the others
    if len(sizes) > 1:
        counts = collections.Counter(spec.block_size for spec in layers.values())
        found = ", ".join(f"{size} ({count} layers)" for size, count in sorted(counts.items()))
        raise DialectError(dialect.name, name="group_size", rule="one for all layers", value=found)
    return {
        "quant_method": "awq",
        "bits": _BITS,
        "group_size": sizes.pop(),
        "zero_point": True,
        "version": version,
        "modules_to_not_convert": list(unquantised) or None,
    }


def _config_problems(layer: LayerSchema, catalogue: Catalogue, *, has_groups: bool = True) -> Iterator[Problem]:
    """Yield what the config says of a layer that is not so."""
    stated = stated_by(catalogue, layer.module)
    if stated.bits not in {None, _BITS}:
        yield Problem("value", layer.keys["qdata"], f"of {stated.bits}-bit codes, as the config says", "4 bits")
    if not has_groups or layer.shape is None or layer.block_size is None or not stated.group_size:
        return
    wanted = layer.shape[1] if stated.group_size < 0 else stated.group_size
    if wanted != layer.block_size:
        rule = f"in groups of {wanted}, as the config's group_size says"
        yield Problem("value", layer.keys["scale"], rule, f"groups of {layer.block_size}")


def _matrix(catalogue: Catalogue, key: str) -> tuple[int, int] | None:
    """Return the two sizes of a matrix, or None."""
    info = catalogue.get(key)
    return None if info is None or len(info.shape) != _MATRIX else (info.shape[0], info.shape[1])


def _width(columns: int, group: int) -> int:
    """Return the words in a row of GEMV's zero points, as AutoAWQ pads them for its kernel."""
    words = -(-(columns // group) // NIBBLES)
    multiple = {64: 2, 32: 4}.get(group, 1)
    return -(-words // multiple) * multiple
