"""The contract of dialects, which find their layers, say what is wrong with them, read them and write them."""

from __future__ import annotations

import abc
import json
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from q4core.errors import DialectError, WeightError, closest_name
from q4core.formats import BlockOrder, Packing, pack_codes
from q4core.schema.catalogue import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    import torch

    from q4core.schema.catalogue import Catalogue, LayerSchema
    from q4core.weight import Feature, PackedWeight, WeightSpec


@attrs.frozen(kw_only=True)
class WrittenLayer:
    """What a dialect writes for one layer: tensors by key, and header metadata to merge (text by key)."""

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] = attrs.field(factory=dict)


class Dialect(abc.ABC):
    """One on-disk dialect. Subclasses are stateless; one instance serves every file."""

    name: ClassVar[str]
    formats: ClassVar[frozenset[str]]
    """Names of the formats that the dialect can hold."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Names of the reader options that the dialect understands."""
    shares_keys: ClassVar[bool] = False
    """Another dialect uses the same keys: a file on its own is marked with the dialect's name."""
    metadata_spans_shards: ClassVar[bool] = False
    """The dialect's own readers want the metadata of the whole checkpoint in every shard."""
    config_names: ClassVar[tuple[str, ...]] = ("quantization_config",)
    """Under what names ``config.json`` holds what ``quantization_config`` returns."""
    numbers: ClassVar[Mapping[str, str]] = {}
    """Role → what its numbers must be: "finite", "finite and not negative" or "finite and positive". They are checked
    where the tensors are at hand, also where others are wrong. What is not listed is checked as a weight."""

    @abc.abstractmethod
    def find(self, catalogue: Catalogue) -> Iterable[LayerSchema]:
        """Yield every layer that looks like this dialect's, complete or not; none that is another dialect's.

        Where keys are missing, or scale keys unknown, the layer's ``problems`` say so.
        """

    @abc.abstractmethod
    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterable[Problem]:
        """Yield *every* problem of dtype and shape (``layer.problems``, and those of values, are the caller's)."""

    def find_dense(self, catalogue: Catalogue) -> Iterable[LayerSchema]:
        """Yield each module whose weight is not one of ours, and is decoded into a dense tensor, such as FP8."""
        del catalogue
        return ()

    def read_dense(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the bfloat16 [N, K] of a layer from ``find_dense``; its name is the key of the role ``"qdata"``."""
        del load
        raise self.refusal(layer.module, "dialect", "one that decodes dense tensors", self.name)

    def stored_numbers(
        self, layer: LayerSchema, role: str, stored: torch.Tensor, catalogue: Catalogue
    ) -> torch.Tensor | None:
        """Return the numbers that the tensor of one of the ``numbers`` roles holds; None where it holds others.

        The layer may be incomplete, and the tensor of any dtype and shape; the others are in the catalogue.
        """
        del layer, role, catalogue
        return stored if stored.is_floating_point() else None

    @abc.abstractmethod
    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight of a layer without problems; tensors are used as they are (views of the file), not copied.

        Raises:
            WeightError, DialectError: The values contradict the dialect.
        """

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors and metadata that hold ``weight`` in this dialect, exactly.

        Raises:
            DialectError: The dialect can't express the weight's format, levels or features.
        """
        del weight
        raise self.refusal(module, "dialect", "one that q4core can write", self.name)

    def approximate(self, weight: PackedWeight) -> PackedWeight:
        """Return the nearest weight that ``write`` takes, for a caller who allows a loss; itself where none is near."""
        return weight

    def merge_metadata(self, layers: Mapping[str, WrittenLayer], dense: Iterable[str]) -> dict[str, str]:
        """Return one file's header metadata, given what ``write`` gave by module, and the names of the other tensors.

        These are the layers and tensors of the file; of all files, if metadata spans shards.
        """
        del dense
        return {key: text for layer in layers.values() for key, text in layer.metadata.items()}

    def quantization_config(
        self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]
    ) -> dict[str, Any] | None:
        """Return what the dialect's own readers look for in ``config.json``, or None where they need nothing.

        ``layers`` has the layout of each layer that was written, by module; the matrices of the modules in
        ``unquantised`` were written as dense tensors.
        """
        del layers, unquantised
        return None

    def refusal(self, module: str, name: str, rule: str, value: object, hint: str | None = None) -> DialectError:
        """Return the error that says what of a layer the dialect can't express."""
        return DialectError(f"{self.name}: layer {module!r}", name=name, rule=rule, value=value, hint=hint)

    def check_writable(
        self, module: str, weight: PackedWeight, *, features: Collection[Feature] = (), activation_scale: bool = False
    ) -> None:
        """Check that a weight has only features that the dialect can express, a static activation scale included.

        Raises:
            DialectError: The dialect can't express the format or something else; the message names it.
        """
        if weight.format.name not in self.formats:
            raise self.refusal(module, "format", f"one of {', '.join(sorted(self.formats))}", weight.format.name)
        excess = sorted(feature.words for feature in weight.features - set(features))
        if excess:
            rule = f"among {', '.join(sorted(item.words for item in features)) or 'none'}"
            raise self.refusal(module, "features", rule, ", ".join(excess))
        if weight.activation_scale is not None and not activation_scale:
            hint = "lossy=True (`q4 convert --requantize`) leaves the static activation scale out."
            raise self.refusal(module, "activation_scale", "absent", float(weight.activation_scale), hint)

    @staticmethod
    def row_bytes(weight: PackedWeight, packing: Packing) -> torch.Tensor:
        """Return the codes of ROW blocks as uint8 [N, ceil(K / 2)] in a packing, without a copy where they are that.

        Raises:
            WeightError: Blocks are FLAT.
            FormatError: K does not hold whole groups of the packing.
        """
        if weight.blocks is BlockOrder.FLAT:
            raise WeightError("row_bytes", name="blocks", rule="ROW", value="FLAT")
        width = -(-weight.in_features // packing.codes_per_byte)
        qdata = weight.qdata
        if qdata.dim() == 2 and qdata.shape[1] == width:  # noqa: PLR2004  # [N, bytes]
            if packing == weight.packing:
                return qdata
            if {packing, weight.packing} == {Packing.LOW_FIRST, Packing.HIGH_FIRST} and not weight.in_features % 2:
                return (qdata >> 4) | (qdata << 4)
        return pack_codes(weight.codes(), packing)

    @staticmethod
    def flat_bytes(weight: PackedWeight, packing: Packing) -> torch.Tensor:
        """Return the codes of the flattened weight as uint8 [ceil(N * K / 2)] in a packing."""
        if weight.blocks is BlockOrder.FLAT:
            return weight.qdata if packing == weight.packing else pack_codes(weight.codes(), packing)
        if weight.in_features % 2:
            return pack_codes(weight.codes().reshape(-1), packing)
        return Dialect.row_bytes(weight, packing).reshape(-1)

    @staticmethod
    def stored_fact(key: str, value: Any) -> str:
        """Return a note for ``PackedWeight.notes`` that keeps a stored detail, any JSON value, for the writer."""
        return f"stored {key}: {json.dumps(value)}"

    @staticmethod
    def read_fact(weight: PackedWeight, key: str) -> Any:
        """Return the detail that ``stored_fact`` noted, or None."""
        head = f"stored {key}: "
        return next((json.loads(note[len(head) :]) for note in weight.notes if note.startswith(head)), None)

    @staticmethod
    def expect(
        catalogue: Catalogue, key: str | None, *, dtypes: Collection[torch.dtype], shape: Iterable[int | None]
    ) -> Iterator[Problem]:
        """Yield what is wrong with dtype and shape of a tensor, if it is there; a size of None may be any from 1."""
        info = None if key is None else catalogue.get(key)
        if key is None or info is None:
            return
        if info.dtype not in dtypes:
            names = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            yield Problem("dtype", key, f"of dtype {names}", str(info.dtype).removeprefix("torch."))
        wanted = tuple(shape)
        fits = (size > 0 if legal is None else size == legal for size, legal in zip(info.shape, wanted, strict=False))
        if len(wanted) != len(info.shape) or not all(fits):
            sizes = ", ".join("any" if size is None else str(size) for size in wanted)
            yield Problem("shape", key, f"of shape [{sizes}]", list(info.shape))


def dialect_of(layer: LayerSchema, dialects: Iterable[Dialect]) -> Dialect:
    """Return the dialect that found a layer, also one that only decodes it."""
    return next((own for own in dialects if own.name == layer.dialect), None) or find_dialect(layer.dialect, dialects)


def find_dialect(name: str, dialects: Iterable[Dialect]) -> Dialect:
    """Return a dialect by name; those that hold no format, and only recognise layers, can't be asked for.

    Raises:
        DialectError: No such dialect; the message lists the ones there are, and the closest.
    """
    known = {dialect.name: dialect for dialect in dialects if dialect.formats}
    if isinstance(name, str) and name in known:
        return known[name]
    close = closest_name(name, known, cutoff=0.4)
    hint = f"Did you mean {close!r}?" if close else "Install the plugin that brings it; see `q4 doctor`."
    rule = f"one of {', '.join(sorted(known))}"
    raise DialectError("dialect", name="dialect", rule=rule, value=name, hint=hint, closest=close)
