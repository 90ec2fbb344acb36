"""The subject of dialects: one dialect, asked through catalogues of names and tensors."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from q4_conformance.outcome import FailureError, NotDeclaredError
from q4core import (
    BUILTIN_FORMATS,
    Catalogue,
    DialectError,
    LayerSchema,
    Problem,
    Q4Error,
    WeightError,
    WeightSpec,
    WrittenLayer,
    dialects,
    quantize,
)
from q4core.plugin_api import PLUGIN_FAULTS, describe_exception

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from q4core import Dialect, PackedWeight

_SHAPE = (16, 512)


@functools.cache
def samples(format_: str) -> tuple[tuple[str, PackedWeight], ...]:
    """Return weights of a format, quantised by the reference, under each of its scale kinds; the weights are shared."""
    kind = BUILTIN_FORMATS[format_]
    dense = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(11)) * 0.05
    found = []
    for scale_kind in sorted(kind.scale_kinds, key=lambda item: item.value):
        for dtype in (torch.bfloat16, torch.float32):
            try:
                weight = quantize(dense.to(dtype), format_, scale_kind=scale_kind)
            except Q4Error:  # a scale kind that the reference reads, and does not make
                continue
            found.append((f"{scale_kind.value}, {str(dtype).removeprefix('torch.')}", weight))
    return tuple(found)


class DialectSubject:
    """A dialect, itself or the name of one.

    Raises:
        LookupError: There is no dialect of that name.
    """

    def __init__(self, dialect: Dialect | str) -> None:
        if isinstance(dialect, str):
            known = {item.name: item for item in dialects()}
            if dialect not in known:
                raise LookupError(f"no dialect {dialect!r} is installed; there are {', '.join(known)}")
            dialect = known[dialect]
        self.dialect = dialect
        self.name = dialect.name

    def require_declared(self, format_: str) -> None:
        """Raise ``NotDeclaredError`` where the dialect does not claim to hold a format."""
        if format_ not in self.dialect.formats:
            raise NotDeclaredError(f"format {format_!r} is not declared")

    def find(self, catalogue: Catalogue) -> list[LayerSchema]:
        """Return every layer that the dialect finds."""
        return self._list("find", lambda: list(self.dialect.find(catalogue)), LayerSchema)

    def problems(self, layer: LayerSchema, catalogue: Catalogue) -> list[Problem]:
        """Return every problem of a layer: of its keys, missing ones among them, its dtypes and its shapes."""
        missing = [Problem("missing_key", key, "there") for key in layer.keys.values() if key not in catalogue]
        reported = self._list("validate", lambda: [*layer.problems, *self.dialect.validate(layer, catalogue)], Problem)
        return missing + reported

    def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PLUGIN_FAULTS as error:
            raise FailureError(f"{what} raised {describe_exception(error)}") from error

    def _list(self, what: str, call: Callable[[], list[Any]], kind: type) -> list[Any]:
        answers: list[Any] = self._ask(what, call)
        strange = [item for item in answers if not isinstance(item, kind)]
        if strange:
            raise FailureError(f"{what} gave {strange[0]!r}, which is no {kind.__name__}")
        return answers

    def read(self, layer: LayerSchema, tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
        """Return a layer's weight."""
        read = functools.partial(self.dialect.read, layer, tensors.__getitem__)
        weight: PackedWeight = self._ask(f"read of {layer.module!r}", read)
        return weight

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer | None:
        """Return a written layer, or None where the dialect refuses the weight by a typed error."""

        def write() -> WrittenLayer | None:
            with contextlib.suppress(DialectError, WeightError):
                return self.dialect.write(module, weight)
            return None

        layer: WrittenLayer | None = self._ask(f"write of {module!r}", write)
        return layer

    def catalogue(
        self, layers: Mapping[str, WrittenLayer], weight: PackedWeight, dense: Mapping[str, torch.Tensor]
    ) -> Catalogue:
        """Return a catalogue of layers, in each of which one weight was written, and of dense tensors, as a folder."""
        tensors = {**dense, **{key: item for layer in layers.values() for key, item in layer.tensors.items()}}
        metadata = self.dialect.merge_metadata(layers, list(dense))
        stated = self.dialect.quantization_config(dict.fromkeys(layers, WeightSpec.of(weight)), tuple(dense))
        return Catalogue(tensors, metadata=metadata, config={"quantization_config": stated})

    def written(self, format_: str) -> list[tuple[str, PackedWeight, WrittenLayer]]:
        """Return what the dialect writes of the samples of a format, in a module ``proj``, and that is something."""
        self.require_declared(format_)
        found = []
        for name, weight in samples(format_):
            layer = self.write("proj", weight)
            if layer is not None:
                found.append((name, weight, layer))
        if not found:
            raise NotDeclaredError(f"the dialect writes no weight of format {format_!r}")
        return found
