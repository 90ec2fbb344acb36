"""The faults planted in the toy dialect."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, ClassVar

import attrs
import torch

from q4_conformance_faults.fault import DialectFault
from q4_conformance_faults.toy_dialect import CODES, SCALES, ToyDialect
from q4core import (
    Catalogue,
    Dialect,
    LayerSchema,
    PackedWeight,
    Packing,
    Problem,
    WrittenLayer,
    dialects,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["DIALECT_FAULTS"]


class SwapsNibbles(ToyDialect):
    """Writes the high nibble first, and reads the low one first."""

    name: ClassVar[str] = "fault-swaps-nibbles"

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        layer = super().write(module, weight)
        codes = self.row_bytes(weight, Packing.HIGH_FIRST)
        return attrs.evolve(layer, tensors={**layer.tensors, f"{module}.{CODES}": codes})


class ClampsScales(ToyDialect):
    """Writes no exponent below 2^-5."""

    name: ClassVar[str] = "fault-clamps-scales"

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        layer = super().write(module, weight)
        scale = layer.tensors[f"{module}.{SCALES}"].clamp(min=122)
        return attrs.evolve(layer, tensors={**layer.tensors, f"{module}.{SCALES}": scale})


class WritesItsProcess(ToyDialect):
    """Writes beside each layer a number that no two writings share."""

    name: ClassVar[str] = "fault-writes-its-process"
    _counter = itertools.count(os.getpid())

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        for layer in super().find(catalogue):
            yield attrs.evolve(layer, keys={**layer.keys, "stamp": f"{layer.module}.toy_stamp"})

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        layer = super().write(module, weight)
        stamp = torch.tensor([next(self._counter)])
        return attrs.evolve(layer, tensors={**layer.tensors, f"{module}.toy_stamp": stamp})


class ClaimsBytes(ToyDialect):
    """Takes any matrix of bytes for its codes."""

    name: ClassVar[str] = "fault-claims-bytes"

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        yield from super().find(catalogue)
        for module in catalogue.modules_with("weight"):
            info = catalogue.get(f"{module}.weight")
            if info is not None and info.dtype == torch.uint8:
                yield attrs.evolve(self.layer(catalogue, module), keys={"qdata": f"{module}.weight"})


class TellsFirst(ToyDialect):
    """Stops at the first problem."""

    name: ClassVar[str] = "fault-tells-the-first-problem"

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        for problem in super().validate(layer, catalogue):
            yield problem
            return


class BlamesCodes(ToyDialect):
    """Tells that something is wrong, and always names the codes."""

    name: ClassVar[str] = "fault-blames-the-codes"

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        for problem in super().validate(layer, catalogue):
            yield attrs.evolve(problem, key=layer.keys["qdata"])


class AssumesScales(ToyDialect):
    """Takes scales that are not there for 1.0."""

    name: ClassVar[str] = "fault-assumes-missing-scales"

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        for layer in super().find(catalogue):
            there = {role: key for role, key in layer.keys.items() if role == "qdata" or key in catalogue}
            yield attrs.evolve(layer, keys=there)

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        if "scale" in layer.keys:
            yield from super().validate(layer, catalogue)


class IgnoresUnknown(ToyDialect):
    """Passes over scale keys that it does not know."""

    name: ClassVar[str] = "fault-ignores-unknown-scales"

    def unknown(self, catalogue: Catalogue, module: str) -> tuple[Problem, ...]:
        del catalogue, module
        return ()


class ReadsShapesBlindly(ToyDialect):
    """Takes for granted that codes have two dimensions."""

    name: ClassVar[str] = "fault-reads-shapes-blindly"

    def layer(self, catalogue: Catalogue, module: str) -> LayerSchema:
        info = catalogue.tensors.get(f"{module}.{CODES}")
        shape = None if info is None else (info.shape[0], 2 * info.shape[1])
        return attrs.evolve(super().layer(catalogue, module), shape=shape)


class NeedsData(ToyDialect):
    """Looks at the scales' values in order to find a layer."""

    name: ClassVar[str] = "fault-needs-data-to-find"

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        for layer in super().find(catalogue):
            if catalogue.held(layer.keys["scale"]) is not None:
                yield layer


class FindsOne(ToyDialect):
    """Finds the first layer alone."""

    name: ClassVar[str] = "fault-finds-one-layer"

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        for layer in super().find(catalogue):
            yield layer
            return


class SwapsForeign(ToyDialect):
    """Takes the codes of a weight that another dialect has read for codes with the high nibble first."""

    name: ClassVar[str] = "fault-swaps-foreign-nibbles"

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        layer = super().write(module, weight)
        if weight.dialect in {None, "", self.name}:
            return layer
        codes = layer.tensors[f"{module}.{CODES}"]
        return attrs.evolve(layer, tensors={**layer.tensors, f"{module}.{CODES}": (codes << 4) | (codes >> 4)})


class RightTrio(Dialect):
    """The simplified NF4 trio under another name; planted faults override single methods."""

    formats: ClassVar[frozenset[str]] = frozenset({"nf4", "fp4"})

    @property
    def trio(self) -> Dialect:
        """The dialect that does the work."""
        return next(item for item in dialects() if item.name == "simple-nf4")

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield what the trio finds."""
        for layer in self.trio.find(catalogue):
            yield attrs.evolve(layer, dialect=self.name)

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterable[Problem]:
        """Yield the trio's problems."""
        return self.trio.validate(layer, catalogue)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight."""
        return self.trio.read(layer, load)

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the three tensors."""
        return self.trio.write(module, weight)


class MisreadsTrio(RightTrio):
    """Reads the simplified NF4 trio low nibble first, and writes it as it has read it."""

    name: ClassVar[str] = "fault-misreads-the-trio"

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        return attrs.evolve(super().read(layer, load), packing=Packing.LOW_FIRST)

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        return super().write(module, attrs.evolve(weight, packing=Packing.HIGH_FIRST))


class AssumesBlocks(RightTrio):
    """Takes every block for one of 32, whatever the shapes say."""

    name: ClassVar[str] = "fault-assumes-blocks-of-32"

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        for layer in super().find(catalogue):
            yield attrs.evolve(layer, block_size=32)


DIALECT_FAULTS: tuple[DialectFault, ...] = tuple(
    DialectFault(name=make.name, make=make, caught_by=case, says=says)
    for make, case, says in (
        (SwapsNibbles, "EX-11/round/mxfp4", "differs in its codes"),
        (ClampsScales, "EX-11/round/mxfp4", "differs in its scales"),
        (WritesItsProcess, "EX-11/round/mxfp4", "other bytes of proj.toy_stamp"),
        (ClaimsBytes, "TC-03/foreign", "bytes: claims"),
        (TellsFirst, "TC-03/validate/mxfp4", "is not told"),
        (BlamesCodes, "TC-03/validate/mxfp4", "['proj.toy_exponents'] is not told"),
        (AssumesScales, "TC-03/validate/mxfp4", "toy_exponents is missing, and nothing is told"),
        (IgnoresUnknown, "TC-03/validate/mxfp4", "a scale key that nobody knows is passed over"),
        (ReadsShapesBlindly, "TC-03/validate/mxfp4", "find raised IndexError"),
        (NeedsData, "TC-02/detect/mxfp4", "from names and shapes: found []"),
        (FindsOne, "TC-02/detect/mxfp4", "found ['proj']"),
        (AssumesBlocks, "TC-01/detect/nf4", "block 32"),
        (SwapsForeign, "EX-11/convert/mxfp4", "differs in its codes"),
        (MisreadsTrio, "EX-11/golden/nf4", "values are not the package's"),
    )
)
