"""The faults planted in the toy dialect."""
# ruff: noqa: ARG002, D102 - a fault looks at some of what it is given; ToyDialect documents what is overridden

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, ClassVar

import attrs
import torch

from q4_conformance_faults.fault import dialect_fault
from q4_conformance_faults.toy_dialect import CODES, SCALES, ToyDialect
from q4core import Catalogue, Dialect, LayerSchema, PackedWeight, Packing, Problem, WrittenLayer, dialects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor


@dialect_fault("swaps-nibbles", "EX-11/round/mxfp4", "differs in its codes")
class SwapsNibbles(ToyDialect):
    """Writes the high nibble first, and reads the low one first."""

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        layer = super().write(module, weight)
        codes = self.row_bytes(weight, Packing.HIGH_FIRST)
        return attrs.evolve(layer, tensors={**layer.tensors, f"{module}.{CODES}": codes})


@dialect_fault("clamps-scales", "EX-11/round/mxfp4", "differs in its scales")
class ClampsScales(ToyDialect):
    """Writes no exponent below 2^-5."""

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        layer = super().write(module, weight)
        scale = layer.tensors[f"{module}.{SCALES}"].clamp(min=122)
        return attrs.evolve(layer, tensors={**layer.tensors, f"{module}.{SCALES}": scale})


@dialect_fault("writes-its-process", "EX-11/round/mxfp4", "other bytes of proj.toy_stamp")
class WritesItsProcess(ToyDialect):
    """Adds to each layer a number that no two writings share."""

    _counter = itertools.count(os.getpid())

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        for layer in super().find(catalogue):
            yield attrs.evolve(layer, keys={**layer.keys, "stamp": f"{layer.module}.toy_stamp"})

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        layer = super().write(module, weight)
        stamp = torch.tensor([next(self._counter)])
        return attrs.evolve(layer, tensors={**layer.tensors, f"{module}.toy_stamp": stamp})


@dialect_fault("claims-bytes", "TC-03/foreign", "bytes: claims")
class ClaimsBytes(ToyDialect):
    """Takes any matrix of bytes for its codes."""

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        yield from super().find(catalogue)
        for module in catalogue.modules_with("weight"):
            info = catalogue.get(f"{module}.weight")
            if info is not None and info.dtype == torch.uint8:
                yield attrs.evolve(self.layer(catalogue, module), keys={"qdata": f"{module}.weight"})


@dialect_fault("reports-the-first-problem", "TC-03/validate/mxfp4", "is not reported")
class ReportsFirst(ToyDialect):
    """Stops at the first problem."""

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        yield from itertools.islice(super().validate(layer, catalogue), 1)


@dialect_fault("blames-the-codes", "TC-03/validate/mxfp4", "['proj.toy_exponents'] is not reported")
class BlamesCodes(ToyDialect):
    """Reports that something is wrong, and always names the codes."""

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        for problem in super().validate(layer, catalogue):
            yield attrs.evolve(problem, key=layer.keys["qdata"])


@dialect_fault("assumes-missing-scales", "TC-03/validate/mxfp4", "toy_exponents is missing, and nothing is reported")
class AssumesScales(ToyDialect):
    """Takes scales that are not there for 1.0."""

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        for layer in super().find(catalogue):
            there = {role: key for role, key in layer.keys.items() if role == "qdata" or key in catalogue}
            yield attrs.evolve(layer, keys=there)

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        if "scale" in layer.keys:
            yield from super().validate(layer, catalogue)


@dialect_fault("ignores-unknown-scales", "TC-03/validate/mxfp4", "an unknown scale key is passed over")
class IgnoresUnknown(ToyDialect):
    """Passes over scale keys that it does not know."""

    def unknown(self, catalogue: Catalogue, module: str) -> tuple[Problem, ...]:
        return ()


@dialect_fault("reads-shapes-blindly", "TC-03/validate/mxfp4", "find raised IndexError")
class ReadsShapesBlindly(ToyDialect):
    """Takes for granted that codes have two dimensions."""

    def layer(self, catalogue: Catalogue, module: str) -> LayerSchema:
        info = catalogue.tensors.get(f"{module}.{CODES}")
        shape = None if info is None else (info.shape[0], 2 * info.shape[1])
        return attrs.evolve(super().layer(catalogue, module), shape=shape)


@dialect_fault("needs-data-to-find", "TC-02/detect/mxfp4", "from names and shapes: found []")
class NeedsData(ToyDialect):
    """Looks at the scales' values in order to find a layer."""

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        for layer in super().find(catalogue):
            if catalogue.held(layer.keys["scale"]) is not None:
                yield layer


@dialect_fault("finds-one-layer", "TC-02/detect/mxfp4", "found ['proj']")
class FindsOne(ToyDialect):
    """Finds the first layer alone."""

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        yield from itertools.islice(super().find(catalogue), 1)


@dialect_fault("swaps-foreign-nibbles", "EX-11/convert/mxfp4", "differs in its codes")
class SwapsForeign(ToyDialect):
    """Takes the codes of a weight that another dialect has read for codes with the high nibble first."""

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

    def read(self, layer: LayerSchema, load: Callable[[str], Tensor]) -> PackedWeight:
        """Return the weight."""
        return self.trio.read(layer, load)

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the three tensors."""
        return self.trio.write(module, weight)


@dialect_fault("misreads-the-trio", "EX-11/golden/nf4", "values are not the package's")
class MisreadsTrio(RightTrio):
    """Reads the simplified NF4 trio low nibble first, and writes it as it has read it."""

    def read(self, layer: LayerSchema, load: Callable[[str], Tensor]) -> PackedWeight:
        return attrs.evolve(super().read(layer, load), packing=Packing.LOW_FIRST)

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        return super().write(module, attrs.evolve(weight, packing=Packing.HIGH_FIRST))


@dialect_fault("assumes-blocks-of-32", "TC-01/detect/nf4", "block 32")
class AssumesBlocks(RightTrio):
    """Takes every block for one of 32, against the shapes."""

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        for layer in super().find(catalogue):
            yield attrs.evolve(layer, block_size=32)
