"""Shared code of the MXFP4 dialects whose codes and scales lie in rows next to each other.

Codes uint8 or int8 [N, K / 2], low nibble first, and scales [N, K / 32], each a power of two: a byte, or the float8
dtype of the same bits. The dialects differ in names, and in what else has these names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from q4_dialects.layer_keys import assumed_dtype, layer_keys, rank_problems, scalar_problems
from q4_dialects.nvfp4 import weight_of
from q4core import Dialect, LayerSchema, Packing, Problem, ScaleKind, WrittenLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from q4core import Catalogue, PackedWeight

__all__ = ["E8M0", "MX_BLOCK", "MxRows", "are_pair", "blocks_of"]

MX_BLOCK = 32
E8M0 = frozenset({torch.uint8, torch.float8_e8m0fnu})
_BYTES = E8M0 | {torch.int8}
_MATRIX = 2
_BYTES_FACT = "scale dtype"


def blocks_of(catalogue: Catalogue, codes: str, scale: str) -> int | None:
    """Return in-features per scale of codes [N, K / 2] and scales [N, G]; None where shapes don't say."""
    one, other = catalogue.get(codes), catalogue.get(scale)
    if one is None or other is None or len(one.shape) != _MATRIX or len(other.shape) != _MATRIX:
        return None
    columns, groups = one.shape[1] * 2, other.shape[1]
    return columns // groups if groups and one.shape[0] == other.shape[0] and columns % groups == 0 else None


def are_pair(catalogue: Catalogue, codes: str, scale: str) -> bool:
    """Return whether two tensors are integers, one of bytes at least; which of them is right, ``validate`` says."""
    dtypes = [info.dtype for info in map(catalogue.get, (codes, scale)) if info is not None]
    are_whole = all(dtype in _BYTES or not dtype.is_floating_point for dtype in dtypes)
    return len(dtypes) == len((codes, scale)) and are_whole and not _BYTES.isdisjoint(dtypes)


class MxRows(Dialect):
    """MXFP4 in two tensors of a module."""

    formats: ClassVar[frozenset[str]] = frozenset({"mxfp4"})
    numbers: ClassVar[Mapping[str, str]] = {"scale": "finite and not negative"}
    suffixes: ClassVar[Mapping[str, str]]
    """Role → suffix; ``qdata`` and ``scale`` must be there."""
    others: ClassVar[tuple[str, ...]] = ()
    """Suffixes of scales that are of something else."""
    code_dtype: ClassVar[torch.dtype] = torch.uint8
    scale_dtype: ClassVar[torch.dtype] = torch.uint8

    def layer(self, module: str, catalogue: Catalogue, *, named: bool, notes: tuple[str, ...] = ()) -> LayerSchema:
        """Return one layer, with what is wrong with its keys."""
        keys = layer_keys(module, self.suffixes, ("qdata", "scale"), catalogue)
        known = ("bias", *self.suffixes.values(), *self.others)
        codes = catalogue.get(keys["qdata"])
        is_matrix = codes is not None and len(codes.shape) == _MATRIX
        dtype, assumed = assumed_dtype(catalogue, torch.bfloat16)
        return LayerSchema(
            module=module,
            dialect=self.name,
            format="mxfp4",
            keys=keys,
            shape=(codes.shape[0], codes.shape[1] * 2) if codes is not None and is_matrix else None,
            block_size=MX_BLOCK,
            problems=(*catalogue.unknown_scales(module, known), *rank_problems(module, codes)),
            notes=(*notes, *assumed),
            extras=(("dtype", dtype),),
            named=named,
        )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys = layer.keys
        yield from self.expect(catalogue, keys["qdata"], dtypes={self.code_dtype}, shape=(None, None))
        rows, columns = layer.shape or (None, None)
        if columns is not None and columns % MX_BLOCK:
            yield Problem("shape", keys["qdata"], f"[N, K / 2] with K a multiple of {MX_BLOCK}", [rows, columns // 2])
        groups = None if columns is None else columns // MX_BLOCK
        yield from self.expect(catalogue, keys["scale"], dtypes=E8M0, shape=(rows, groups))
        yield from scalar_problems(catalogue, keys.get("activation_scale"))

    def stored_numbers(
        self, layer: LayerSchema, role: str, stored: torch.Tensor, catalogue: Catalogue
    ) -> torch.Tensor | None:
        """Return the powers of two that the bytes hold."""
        del layer, role, catalogue
        return stored.view(torch.float8_e8m0fnu) if stored.dtype in E8M0 else None

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight, all of it as views."""
        tensors = {role: load(key) for role, key in layer.keys.items()}
        scale, notes = tensors["scale"], layer.notes
        if scale.dtype != self.scale_dtype:
            notes = (*notes, self.stored_fact(_BYTES_FACT, str(scale.dtype).removeprefix("torch.")))
        return weight_of(
            layer,
            tensors["qdata"].view(torch.uint8),
            scale.view(torch.float8_e8m0fnu),
            scale_kind=ScaleKind.E8M0,
            packing=Packing.LOW_FIRST,
            activation_scale=tensors.get("activation_scale"),
            dtype=dict(layer.extras)["dtype"],
            notes=notes,
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the two tensors, and the activation scale where the dialect has one.

        Raises:
            DialectError: Another format, a last block that is not whole, or any feature.
        """
        self.check_writable(module, weight, activation_scale="activation_scale" in self.suffixes)
        scale_dtype = getattr(torch, self.read_fact(weight, _BYTES_FACT) or "", self.scale_dtype)
        tensors = {
            "qdata": self.row_bytes(weight, Packing.LOW_FIRST).view(self.code_dtype),
            "scale": weight.scale.view(scale_dtype),
        }
        if weight.activation_scale is not None:
            tensors["activation_scale"] = weight.activation_scale.to(torch.float32)
        return WrittenLayer(tensors={f"{module}.{self.suffixes[role]}": item for role, item in tensors.items()})
