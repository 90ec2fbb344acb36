"""The subject of dialects: one dialect, asked through catalogues of names and tensors."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_conformance.oracle.weights import WeightRecipe
from q4_conformance.outcome import FailureError, NotDeclaredError
from q4core import (
    BUILTIN_FORMATS,
    Catalogue,
    DialectError,
    Feature,
    Form,
    LayerSchema,
    Problem,
    Q4Error,
    ScaleKind,
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


_VARIED = (
    {Feature.INPUT_CHANNEL_SCALE},
    {Feature.INPUT_PERMUTATION},
    {Feature.ZERO_POINT},
    {Feature.FLOAT_ZERO_POINT},
    {Feature.ZERO_POINT, Feature.INPUT_PERMUTATION},
    {Feature.ZERO_POINT, Feature.INPUT_CHANNEL_SCALE},
)
"""Features of random weights, with which integer codes are met; others are for kernels alone."""


@functools.cache
def samples(format_: str) -> tuple[tuple[str, PackedWeight], ...]:
    """Return weights of a format under each of its scale kinds, and where codes are integers with zero points and such.

    The reference quantises those that it can, and the others are random. The weights are shared.
    """
    kind = BUILTIN_FORMATS[format_]
    dense = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(11)) * 0.05
    found, (rows, columns) = [], _SHAPE
    for scale_kind in sorted(kind.scale_kinds, key=lambda item: item.value):
        drawn = functools.partial(WeightRecipe, format=kind, n=rows, k=columns, scale_kind=scale_kind)
        for dtype in (torch.bfloat16, torch.float32):
            label = f"{scale_kind.value}, {str(dtype).removeprefix('torch.')}"
            try:
                found.append((label, quantize(dense.to(dtype), format_, scale_kind=scale_kind)))
            except Q4Error:  # what the reference reads, and does not make
                if scale_kind is ScaleKind.PLAIN:
                    found.append((label, drawn(scale_dtype=dtype).build()))
        if kind.form is Form.INTEGER:
            for features in _VARIED:
                words = ", ".join(sorted(item.value for item in features))
                found.append((f"{scale_kind.value}, {words}", _in_order(drawn(features=features).build())))
        if kind.has_offset and scale_kind is ScaleKind.PLAIN:
            weight = drawn(scale_dtype=torch.bfloat16).build()
            found.append((f"{scale_kind.value}, offsets at a code", _at_codes(weight)))
    return tuple(found)


def _in_order(weight: PackedWeight) -> PackedWeight:
    """Return a weight whose in-features come in their order within each block, as files that name blocks alone do."""
    order = weight.input_permutation
    if order is None:
        return weight
    within = order.reshape(-1, weight.block_size).sort(dim=1).values
    return attrs.evolve(weight, input_permutation=within.reshape(-1))


def _at_codes(weight: PackedWeight) -> PackedWeight:
    """Return a weight with scales of four bits, and offsets that are 4, 6 or 7 of them, as zero points are codes."""
    mantissa, exponent = torch.frexp(weight.scale.abs().float())
    scale = torch.ldexp((mantissa * 16).round() / 16, exponent)
    codes = torch.tensor([4.0, 6.0, 7.0])[torch.arange(scale.numel()) % 3].reshape(scale.shape)
    return attrs.evolve(weight, scale=scale.to(weight.scale.dtype), offset=(-codes * scale).to(weight.scale.dtype))


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
