"""Layers of ``MatMulNBits`` and ``GatherBlockQuantized``: how their initializers are found, checked and read.

``B`` uint8 [N, C, G * bits / 8] of C = ceil(K / G) blocks, lowest bits first; ``scales`` [N, C] or flat;
``zero_points`` uint8 [N, ceil(C * bits / 8)] packed likewise, or floats [N, C], or absent, which means
2 ** (bits - 1). W[n, k] = (q - z) * scale. The last block of a row is filled up to G codes. An embedding of
``GatherBlockQuantized`` with uint8 ``data`` [V, K * bits / 8] is stored the same way.

Traps: ``accuracy_level`` 4 lets ONNX Runtime round inputs to 8 bits, which is noted. ``g_idx`` (act-order) has codes in
the inputs' order with scattered groups; only one that says no more than G is read. ``weight_prepacked`` codes are in
the order of one kernel.

Oracle: onnxruntime 1.31.1, com.microsoft.MatMulNBits and GatherBlockQuantized on CPUs: the same bits, but for zero
points that are floats, where it computes q * scale - z * scale, for 4 bits alone.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import attrs
import torch

from q4core import LayerSchema, PackedWeight, Packing, Problem, find_format, unpack_codes
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4_onnx.model import Model, Node
    from q4_onnx.tensors import Tensor

__all__ = ["READ", "layer_of", "module_of", "packed_inputs", "weight_of"]

_DIALECT = "onnx"
_MATMUL, _GATHER = "MatMulNBits", "GatherBlockQuantized"
READ = {_MATMUL: ("B", "scales", "zero_points", "g_idx"), _GATHER: ("data", "scales", "zero_points")}
"""Operators that are read → names of their inputs, without the one that is not packed."""
_ROLES = ("qdata", "scale", "zero", "groups")
_FORMATS = {4: ("int4", Packing.LOW_FIRST), 8: ("int8", Packing.BYTES)}
_LEAST_BLOCK = 16
_MATRIX = 2
_MOST = 2**31 - 1
_ENDS = re.compile(r"(_Q\d+(G\d+)?|_quant(ized)?|_qweight|_packed)$")
_KIND = re.compile(r"[./_]?(weight|MatMul|Gather)$")
_ANONYMOUS = "onnx::"
_EXACT_LEVELS = (0, 1)
_LEVELS = {2: "float16", 3: "bfloat16", 4: "int8"}


@attrs.frozen
class _Parts:
    """The initializers of a node by role, and what its attributes say."""

    tensors: Mapping[str, Tensor]
    rows: int
    columns: int
    bits: int
    block: int

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.columns // self.block)


def module_of(node: Node, key: str) -> str:
    """Return a layer's name: that of its codes without what marks them; where that is a number, the node's."""
    names = [key, node.name, *node.outputs]
    chosen = next((name for name in names if name and not name.startswith(_ANONYMOUS)), key)
    name = _ENDS.sub("", chosen)
    for _ in range(2):  # a.MatMul.weight
        name = _KIND.sub("", name) or name
    return name.strip("/.").replace("/", ".") or chosen


def layer_of(
    node: Node, model: Model, origin: Callable[[str], str], load: Callable[[str], torch.Tensor]
) -> LayerSchema | Problem:
    """Return the layer of a node, or why it can't be read.

    Args:
        node: One of the operators that are read.
        model: Its model.
        origin: Returns the initializer that a name is another shape of, or the name.
        load: Loads an initializer.
    """
    given = [origin(name) for name in packed_inputs(node)]
    keys = {role: key for role, key in zip(_ROLES, given, strict=False) if key}
    module = module_of(node, keys.get("qdata", ""))
    for role, name in zip(_ROLES[:2], READ[node.operator], strict=False):
        if role not in keys:
            return Problem("missing_key", module, f"of a node with its input {name}", node.operator)
    for key in keys.values():
        if key not in model.tensors:
            return Problem("unsupported", module, f"of initializers, which {key} is not", node.operator)
    tensors = {role: model.tensors[key] for role, key in keys.items()}
    found = _parts(node, module, tensors)
    if isinstance(found, Problem):
        return found
    problem = next(_problems(node, found, keys, load), None)
    if problem is not None:
        return problem
    level = node.numbers.get("accuracy_level", 0)
    stated = _LEVELS.get(level, f"level {level}")
    notes = (
        ()
        if level in _EXACT_LEVELS
        else (f"ONNX Runtime may round this layer's inputs to {stated}; here they are as given",)
    )
    own = {role: key for role, key in keys.items() if role != "groups"}
    return LayerSchema(
        module=module,
        dialect=_DIALECT,
        format=_FORMATS[found.bits][0],
        keys=own,
        shape=(found.rows, found.columns),
        block_size=found.block,
        notes=notes,
        extras=(("operator", node.operator), ("node", node.name), ("output", (*node.outputs, "")[0])),
        named=True,
        nbytes=sum(tensors[role].nbytes for role in own),
    )


def packed_inputs(node: Node) -> tuple[str, ...]:
    """Return the names of a node's packed inputs, in the order of ``READ``."""
    if node.operator == _MATMUL:
        return node.inputs[1:5]
    return (*node.inputs[:1], *node.inputs[2:4])


def _parts(node: Node, module: str, tensors: Mapping[str, Tensor]) -> _Parts | Problem:
    """Return the sizes that attributes and shapes say."""
    numbers, codes = node.numbers, tensors["qdata"]
    bits, block = numbers.get("bits", 4), numbers.get("block_size", 128 if node.operator == _GATHER else 0)
    refusal = next(_refusals(node, module, codes, bits, block), None)
    if refusal is not None:
        return refusal
    if node.operator == _MATMUL:
        rows, columns = numbers.get("N", 0), numbers.get("K", 0)
    else:
        rows = codes.shape[0]
        columns = codes.numel // max(rows, 1) * 8 // bits
    if not 0 < rows <= _MOST or not 0 < columns <= _MOST:
        return Problem("value", module, f"of N and K from 1 to {_MOST}", [rows, columns])
    return _Parts(tensors, rows, columns, bits, block)


def _refusals(node: Node, module: str, codes: Tensor, bits: int, block: int) -> Iterator[Problem]:
    """Yield why a node's codes are not read, whatever their sizes."""
    if codes.dtype is not torch.uint8:
        yield Problem("unsupported", module, "of uint8 codes to be read", f"{node.operator} of {codes.type_name}")
    if bits not in _FORMATS:
        yield Problem("unsupported", module, "of 4-bit or 8-bit codes to be read", f"{bits}-bit {node.operator}")
    if node.numbers.get("weight_prepacked"):
        value = f"{node.operator} with weight_prepacked {node.numbers['weight_prepacked']}"
        yield Problem("unsupported", module, "of codes in ONNX's order, not in one kernel's", value)
    if block < _LEAST_BLOCK or block > _MOST or block & (block - 1):
        yield Problem("value", module, f"in blocks of a power of two from {_LEAST_BLOCK}", block)
    is_table = node.operator == _MATMUL or (len(codes.shape) >= _MATRIX and not node.numbers.get("gather_axis", 0))
    if not is_table or (node.operator == _GATHER and not _is_last(node.numbers.get("quantize_axis", 1), codes)):
        value = f"{node.operator} along others"
        yield Problem("unsupported", module, "of rows that are quantised along their last axis to be read", value)


def _is_last(axis: int, codes: Tensor) -> bool:
    """Return whether blocks run along rows; codes may have been [V, blocks, bytes] before they were reshaped."""
    return axis in {-1, 1, len(codes.shape) - 1}


def _problems(
    node: Node, parts: _Parts, keys: Mapping[str, str], load: Callable[[str], torch.Tensor]
) -> Iterator[Problem]:
    """Yield what is wrong with the initializers of a layer."""
    tensors, rows, blocks = parts.tensors, parts.rows, parts.blocks
    codes, scale, zero = tensors["qdata"], tensors["scale"], tensors.get("zero")
    width = blocks * parts.block * parts.bits // 8
    if parts.columns % parts.block and node.operator == _GATHER:  # its rows are not filled up
        width = -(-parts.columns * parts.bits // 8)
    if codes.shape[:1] != (rows,) or codes.numel != rows * width:
        rule = f"of shape [{rows}, …] and {rows * width} bytes"
        yield Problem("shape", keys["qdata"], rule, list(codes.shape))
    if scale.dtype not in FLOATS:
        yield Problem("dtype", keys["scale"], "float32, float16 or bfloat16", scale.type_name)
    if not _is_matrix(scale, rows, blocks):
        yield Problem("shape", keys["scale"], f"of shape [{rows}, {blocks}]", list(scale.shape))
    if zero is not None:
        columns = blocks if zero.dtype in FLOATS else -(-blocks * parts.bits // 8)
        if zero.dtype not in FLOATS and zero.dtype is not torch.uint8:
            yield Problem("dtype", keys["zero"], "uint8 or a float", zero.type_name)
        if not _is_matrix(zero, rows, columns):
            yield Problem("shape", keys["zero"], f"of shape [{rows}, {columns}]", list(zero.shape))
    if "groups" in tensors and not _is_plain(load(keys["groups"]), parts):
        rule = "of groups of adjacent inputs to be read, as g_idx is deprecated"
        yield Problem("unsupported", keys["groups"], rule, f"{_MATMUL} with g_idx")


def _is_matrix(tensor: Tensor, rows: int, columns: int) -> bool:
    """Return whether a tensor is [R, C], with sizes of 1 in it or not, or flat."""
    sizes = tuple(size for size in tensor.shape if size != 1)
    return sizes in {tuple(size for size in (rows, columns) if size != 1), (rows * columns,)} or (
        rows * columns == 1 and not sizes
    )


def _is_plain(groups: torch.Tensor, parts: _Parts) -> bool:
    """Return whether an index of groups says no more than the block size."""
    count = groups.numel()
    if groups.dtype != torch.int32 or count not in {parts.columns, parts.blocks * parts.block}:
        return False
    return torch.equal(groups.reshape(-1).to(torch.int64), torch.arange(count) // parts.block)


def weight_of(layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
    """Return the weight of a layer: codes as a view, zero points unpacked to a byte each.

    Args:
        layer: What ``layer_of`` returned.
        load: Loads an initializer.
    """
    rows, columns = layer.shape or (0, 0)
    block = layer.block_size or columns
    kind, blocks = find_format(layer.format), -(-columns // block)
    packing = _FORMATS[kind.bits][1]
    codes, scale = load(layer.keys["qdata"]).view(rows, -1), load(layer.keys["scale"])
    zero = load(layer.keys["zero"]).view(rows, -1) if "zero" in layer.keys else None
    if zero is not None and zero.dtype == torch.uint8:
        zero = unpack_codes(zero, packing)[:, :blocks].contiguous()
        zero = None if bool((zero == kind.middle).all()) else zero
    return PackedWeight(
        format=kind,
        qdata=codes[:, : -(-columns // packing.codes_per_byte)],
        scale=scale.view(rows, blocks),
        out_features=rows,
        in_features=columns,
        block_size=block,
        packing=packing,
        zero=zero,
        dtype=scale.dtype,
        name=layer.module,
        dialect=layer.dialect,
        notes=layer.notes,
    )
