"""The two simplified dialects: NF4 or FP4 as a trio of siblings, and single-level NVFP4 as a pair.

Neither says everything: the trio is silent about its nibble order, and both about the dtype that the weight had. What
is assumed is in the weight's ``notes``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs
import torch

from q4core.errors import DialectError
from q4core.formats import BUILTIN_FORMATS, FLOATS, BlockOrder, Packing, ScaleKind
from q4core.schema.catalogue import Catalogue, LayerSchema, Problem, TensorInfo
from q4core.schema.dialect import Dialect, WrittenLayer
from q4core.weight import Feature, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_TRIO = {"qdata": "weight", "scale": "absmax", "codebook": "quant_map"}
_ORDERS = {"high_first": Packing.HIGH_FIRST, "low_first": Packing.LOW_FIRST}
_DEFAULT_ORDER = "high_first"
_FORMAT_BY_FIRST_LEVEL = {-1.0: "nf4", 0.0: "fp4"}
_CODEBOOK_RULE = "a code book that starts with -1 (NF4) or 0 (FP4)"
_BLOCK = 16


def _shape_of(codes: TensorInfo | None) -> tuple[int, int] | None:
    """Return (N, K) from codes [N, K / 2], or None where they have another rank."""
    is_matrix = codes is not None and len(codes.shape) == 2  # noqa: PLR2004  # rows and bytes
    return (codes.shape[0], codes.shape[1] * 2) if codes is not None and is_matrix else None


def _dtype_of(catalogue: Catalogue) -> tuple[torch.dtype, tuple[str, ...]]:
    """Return the weight's dtype by ``config.json``, or float32 and a note that it is assumed."""
    if catalogue.dtype is not None:
        return catalogue.dtype, ()
    return torch.float32, ("dtype float32 assumed: the dialect does not say it",)


class SimpleNf4(Dialect):
    """``<module>.weight`` uint8 [N, K / 2], ``<module>.absmax`` float [N K / block], ``<module>.quant_map`` float [16].

    Blocks run over the flattened weight, as in bitsandbytes. The code book separates NF4 from FP4. The nibble order is
    bitsandbytes' (``high_first``) unless the option ``nibble_order`` says ``low_first``.
    """

    name: ClassVar[str] = "simple-nf4"
    formats: ClassVar[frozenset[str]] = frozenset({"nf4", "fp4"})
    options: ClassVar[frozenset[str]] = frozenset({"nibble_order"})
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite", "codebook": "finite"}

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with the trio, or with codes and one of the other two."""
        order = catalogue.options.get("nibble_order")
        if order is not None and order not in _ORDERS:
            raise DialectError(self.name, name="nibble_order", rule=f"one of {', '.join(_ORDERS)}", value=order)
        for module in catalogue.modules_with("absmax", "quant_map"):
            # "proj.weight" with an "absmax" below it is bitsandbytes' own dialect.
            if module.rpartition(".")[2] == "weight" or module in catalogue:
                continue
            keys = {role: f"{module}.{suffix}" for role, suffix in _TRIO.items()}
            codes = catalogue.get(keys["qdata"])
            is_trio = keys["scale"] in catalogue and keys["codebook"] in catalogue
            if is_trio or (codes is not None and codes.dtype == torch.uint8):
                yield self._layer(catalogue, module, keys, order)

    def _layer(self, catalogue: Catalogue, module: str, keys: dict[str, str], order: str | None) -> LayerSchema:
        problems = list(catalogue.unknown_scales(module, (*_TRIO.values(), "bias")))
        dtype, notes = _dtype_of(catalogue)
        if order is None:
            notes = (*notes, f"nibble order {_DEFAULT_ORDER} assumed: the dialect does not say it")
        table, kind = catalogue.load_small(keys["codebook"]), "nf4"
        if table is None or not table.numel() or table.dtype not in FLOATS:
            notes = (*notes, "format nf4 assumed: the code book was not read")
        else:
            first = float(table.reshape(-1)[0])
            kind = _FORMAT_BY_FIRST_LEVEL.get(first, kind)
            if first not in _FORMAT_BY_FIRST_LEVEL:
                problems.append(Problem("value", keys["codebook"], _CODEBOOK_RULE, first))
        shape, absmax = _shape_of(catalogue.get(keys["qdata"])), catalogue.get(keys["scale"])
        count = 0 if shape is None or absmax is None else absmax.numel
        return LayerSchema(
            module=module,
            dialect=self.name,
            format=kind,
            keys=keys,
            shape=shape,
            block_size=shape[0] * shape[1] // count if shape and count and shape[0] * shape[1] % count == 0 else None,
            problems=problems,
            notes=notes,
            extras=(("dtype", dtype), ("order", order or _DEFAULT_ORDER)),
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys = layer.keys
        yield from self.expect(catalogue, keys["qdata"], dtypes={torch.uint8}, shape=(None, None))
        yield from self.expect(catalogue, keys["scale"], dtypes=FLOATS, shape=(None,))
        yield from self.expect(catalogue, keys["codebook"], dtypes=FLOATS, shape=(16,))
        absmax, legal = catalogue.get(keys["scale"]), BUILTIN_FORMATS[layer.format].block_sizes
        if layer.shape is not None and absmax is not None and layer.block_size not in legal:
            total = layer.shape[0] * layer.shape[1]
            rule = f"N * K / block elements long for a block in {sorted(legal)} and N * K = {total}"
            yield Problem("shape", keys["scale"], rule, list(absmax.shape))

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight; blocks that do not straddle rows are stored by row."""
        codes, absmax, table = (load(layer.keys[role]) for role in _TRIO)
        rows, columns = codes.shape[0], codes.shape[1] * 2
        block = rows * columns // absmax.numel()
        name = _FORMAT_BY_FIRST_LEVEL.get(float(table[0]))
        if name is None:
            raise DialectError(self.name, name="codebook", rule=_CODEBOOK_RULE, value=float(table[0]))
        kind, by_row, extras = BUILTIN_FORMATS[name], columns % block == 0, dict(layer.extras)
        order = extras["order"]
        own = kind.codebook_tensor(table.device).view(torch.int32)
        is_own = table.dtype == torch.float32 and torch.equal(table.view(torch.int32), own)
        return PackedWeight(
            format=kind,
            qdata=codes if by_row else codes.reshape(-1),
            scale=absmax.view(rows, -1) if by_row else absmax,
            out_features=rows,
            in_features=columns,
            block_size=block,
            packing=_ORDERS[order],
            blocks=BlockOrder.ROW if by_row else BlockOrder.FLAT,
            codebook=None if is_own else table,
            dtype=extras["dtype"],
            name=layer.module,
            dialect=self.name,
            notes=layer.notes if order == _DEFAULT_ORDER else (*layer.notes, self.stored_fact("nibble_order", order)),
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the trio, in the nibble order that it was read in, or in bitsandbytes'.

        Raises:
            DialectError: Another format or scale kind, a short last block, or features beyond a code book.
        """
        self.check_writable(module, weight, features={Feature.FLAT_BLOCKS, Feature.CUSTOM_CODEBOOK})
        if weight.scale_kind is not ScaleKind.PLAIN:
            hint = "lossy=True (`q4 convert --requantize`) collapses the levels into one, which keeps every value."
            raise self.refusal(module, "scale_kind", "plain", weight.scale_kind.value, hint)
        rows, columns = weight.shape
        if columns % 2 or rows * columns % weight.block_size:
            rule = f"even, and N * K a multiple of the block size {weight.block_size}"
            raise self.refusal(module, "in_features", rule, columns)
        codes = self.flat_bytes(weight, _ORDERS[self.read_fact(weight, "nibble_order") or _DEFAULT_ORDER])
        table = weight.format.codebook_tensor(weight.device) if weight.codebook is None else weight.codebook
        tensors = (codes[: rows * columns // 2].reshape(rows, -1), weight.scale.reshape(-1), table)
        names = (f"{module}.{suffix}" for suffix in _TRIO.values())
        return WrittenLayer(tensors=dict(zip(names, tensors, strict=True)))

    def approximate(self, weight: PackedWeight) -> PackedWeight:
        """Collapse the scale levels, which keeps the values, and leave out the activation scale."""
        return attrs.evolve(weight.with_plain_scale(), activation_scale=None)


class SimpleNvfp4(Dialect):
    """``<module>.qdata`` uint8 [N, K / 2], low nibble first, and ``<module>.scale`` [N, K / 16]; no global scale.

    The same below ``<module>.weight.``. Scales are e4m3 bytes (dtype uint8 or float8_e4m3fn) or float16.
    """

    name: ClassVar[str] = "simple-nvfp4"
    formats: ClassVar[frozenset[str]] = frozenset({"nvfp4"})
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite and not negative"}

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with codes."""
        dtype, notes = _dtype_of(catalogue)
        for holder in catalogue.modules_with("qdata"):
            head, _, last = holder.rpartition(".")
            module, prefix = (head, "weight.") if last == "weight" and head else (holder, "")
            keys = {"qdata": f"{holder}.qdata", "scale": f"{holder}.scale"}
            yield LayerSchema(
                module=module,
                dialect=self.name,
                format="nvfp4",
                keys=keys,
                shape=_shape_of(catalogue.get(keys["qdata"])),
                block_size=_BLOCK,
                problems=catalogue.unknown_scales(module, (f"{prefix}qdata", f"{prefix}scale", "bias")),
                notes=notes,
                extras=(("dtype", dtype), ("prefix", prefix)),
            )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        key = layer.keys["qdata"]
        yield from self.expect(catalogue, key, dtypes={torch.uint8}, shape=(None, None))
        rows, columns = layer.shape or (None, None)
        codes = catalogue.get(key)
        if codes is not None and columns is not None and columns % _BLOCK:
            yield Problem("shape", key, f"[N, K / 2] with K a multiple of {_BLOCK}", list(codes.shape))
        blocks = None if columns is None else columns // _BLOCK
        legal = {torch.uint8, torch.float8_e4m3fn, torch.float16}
        yield from self.expect(catalogue, layer.keys["scale"], dtypes=legal, shape=(rows, blocks))

    def stored_numbers(
        self, layer: LayerSchema, role: str, stored: torch.Tensor, catalogue: Catalogue
    ) -> torch.Tensor | None:
        """Return the numbers of a tensor; bytes are e4m3."""
        numbers = stored.view(torch.float8_e4m3fn) if stored.dtype == torch.uint8 else stored
        return super().stored_numbers(layer, role, numbers, catalogue)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight."""
        codes, scale, extras = load(layer.keys["qdata"]), load(layer.keys["scale"]), dict(layer.extras)
        notes = (*layer.notes, self.stored_fact("prefix", extras["prefix"])) if extras["prefix"] else layer.notes
        return PackedWeight(
            format=BUILTIN_FORMATS["nvfp4"],
            qdata=codes,
            scale=scale,
            out_features=codes.shape[0],
            in_features=codes.shape[1] * 2,
            block_size=_BLOCK,
            scale_kind=ScaleKind.PLAIN if scale.dtype == torch.float16 else ScaleKind.E4M3,
            packing=Packing.LOW_FIRST,
            dtype=extras["dtype"],
            name=layer.module,
            dialect=self.name,
            notes=notes,
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the pair, under the prefix that it was read from.

        Raises:
            DialectError: Another format, a second scale level, scales of another dtype, or any feature.
        """
        self.check_writable(module, weight)
        if not _is_single_level(weight) and (weight.scale_kind, weight.scale.dtype) != (ScaleKind.PLAIN, torch.float16):
            found = f"{weight.scale_kind.value} of {str(weight.scale.dtype).removeprefix('torch.')}"
            hint = "lossy=True (`q4 convert --requantize`) collapses the levels into one float16 scale."
            raise self.refusal(module, "scale levels", "e4m3 without a global scale, or float16", found, hint)
        head = f"{module}.{self.read_fact(weight, 'prefix') or ''}"
        codes = self.row_bytes(weight, Packing.LOW_FIRST)
        return WrittenLayer(tensors={f"{head}qdata": codes, f"{head}scale": weight.scale})

    def approximate(self, weight: PackedWeight) -> PackedWeight:
        """Collapse the scale levels into float16, and leave out the activation scale."""
        weight = attrs.evolve(weight, activation_scale=None)
        if _is_single_level(weight):
            return weight
        plain = weight.with_plain_scale()
        return attrs.evolve(plain, scale=plain.scale.to(torch.float16))


def _is_single_level(weight: PackedWeight) -> bool:
    """Return whether scales are e4m3 without a global scale, or with one that is 1."""
    factor = weight.global_scale
    is_one = factor is not None and factor.numel() == 1 and float(factor) == 1.0
    return weight.scale_kind is ScaleKind.E4M3 or is_one


SIMPLE_DIALECTS: tuple[Dialect, ...] = (SimpleNf4(), SimpleNvfp4())
