"""``ToyDialect``: a right dialect of MXFP4, whole in one module, which ``Q4_PLUGIN_MODULES`` may name."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from q4core import (
    BUILTIN_FORMATS,
    Catalogue,
    Dialect,
    LayerSchema,
    PackedWeight,
    Packing,
    Problem,
    ScaleKind,
    WrittenLayer,
    hookimpl,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["BLOCK", "CODES", "SCALES", "ToyDialect", "q4_dialects"]

CODES, SCALES = "toy_codes", "toy_exponents"
BLOCK = 32
_MATRIX = 2


class ToyDialect(Dialect):
    """``<module>.toy_codes`` uint8 [N, K / 2], low nibble first, and ``<module>.toy_exponents`` uint8 [N, K / 32]."""

    name: ClassVar[str] = "toy-mxfp4"
    formats: ClassVar[frozenset[str]] = frozenset({"mxfp4"})

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module that has one of the two."""
        for module in catalogue.modules_with(CODES, SCALES):
            yield self.layer(catalogue, module)

    def layer(self, catalogue: Catalogue, module: str) -> LayerSchema:
        """Return one layer, with what is wrong with its keys."""
        codes = catalogue.get(f"{module}.{CODES}")
        known = codes is not None and len(codes.shape) == _MATRIX
        return LayerSchema(
            module=module,
            dialect=self.name,
            format="mxfp4",
            keys={"qdata": f"{module}.{CODES}", "scale": f"{module}.{SCALES}"},
            shape=(codes.shape[0], 2 * codes.shape[1]) if known and codes is not None else None,
            block_size=BLOCK,
            problems=self.unknown(catalogue, module),
        )

    def unknown(self, catalogue: Catalogue, module: str) -> tuple[Problem, ...]:
        """Return a problem for each scale-like key that it does not know."""
        return catalogue.unknown_scales(module, (CODES, SCALES, "bias"))

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        yield from self.expect(catalogue, layer.keys["qdata"], dtypes={torch.uint8}, shape=(None, None))
        blocks = (None, None) if layer.shape is None else (layer.shape[0], layer.shape[1] // BLOCK)
        yield from self.expect(catalogue, layer.keys["scale"], dtypes={torch.uint8}, shape=blocks)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight."""
        codes, scale = load(layer.keys["qdata"]), load(layer.keys["scale"])
        return PackedWeight(
            format=BUILTIN_FORMATS["mxfp4"],
            qdata=codes,
            scale=scale.view(torch.float8_e8m0fnu),
            out_features=codes.shape[0],
            in_features=2 * codes.shape[1],
            block_size=BLOCK,
            scale_kind=ScaleKind.E8M0,
            packing=Packing.LOW_FIRST,
            name=layer.module,
            dialect=self.name,
        )

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the two tensors."""
        self.check_writable(module, weight)
        scale = weight.scale if weight.scale.dtype is torch.uint8 else weight.scale.view(torch.uint8)
        codes = self.row_bytes(weight, Packing.LOW_FIRST)
        return WrittenLayer(tensors={f"{module}.{CODES}": codes, f"{module}.{SCALES}": scale})


@hookimpl
def q4_dialects() -> list[Dialect]:
    """Bring the dialect."""
    return [ToyDialect()]
