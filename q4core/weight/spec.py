"""``WeightSpec``: everything about a ``PackedWeight`` but its tensors and its name; hashable, and exact as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4core.errors import WeightError
from q4core.formats import BlockOrder, Format, NibbleOrder, Packing, ScaleKind, find_format
from q4core.weight.packed import TENSOR_FIELDS, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["WeightSpec"]

_VERSION = 1
_ALWAYS = ("qdata", "scale")


@attrs.frozen(kw_only=True, cache_hash=True)
class WeightSpec:
    """The layout facts of a weight, with the names of the tensor fields that it has, in order."""

    format: Format
    out_features: int
    in_features: int
    block_size: int
    scale_kind: ScaleKind
    packing: Packing
    blocks: BlockOrder
    nested_block_size: int
    dtype: torch.dtype
    fields: tuple[str, ...]

    @classmethod
    def of(cls, weight: PackedWeight) -> WeightSpec:
        """Return the spec of a weight."""
        return cls(
            fields=tuple(name for name, _ in weight.tensors()),
            **{name: getattr(weight, name) for name in _PLAIN_FIELDS},
        )

    def build(self, tensors: Sequence[torch.Tensor], *, name: str | None = None) -> PackedWeight:
        """Return the weight that has these tensors, given in the order of ``fields``.

        Raises:
            WeightError: The tensors do not fit the spec.
        """
        if len(tensors) != len(self.fields):
            raise WeightError("weight", name="tensors", rule=f"{len(self.fields)} long", value=len(tensors), where=name)
        facts: dict[str, Any] = {field: getattr(self, field) for field in _PLAIN_FIELDS}
        facts.update(zip(self.fields, tensors, strict=True))
        return PackedWeight(name=name, **facts)

    def to_json(self) -> str:
        """Return the spec as one line of JSON with sorted keys."""
        return json.dumps(
            {
                "version": _VERSION,
                "format": self.format.name,
                "out_features": self.out_features,
                "in_features": self.in_features,
                "block_size": self.block_size,
                "scale_kind": self.scale_kind.value,
                "packing": self.packing.order.value,
                "packing_group": self.packing.group,
                "blocks": self.blocks.value,
                "nested_block_size": self.nested_block_size,
                "dtype": str(self.dtype).removeprefix("torch."),
                "fields": list(self.fields),
            },
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str, *, formats: Iterable[Format] = (), where: str | None = None) -> WeightSpec:
        """Return the spec that ``to_json`` wrote.

        Args:
            text: One JSON object.
            formats: Further formats (from plugins) to look among.
            where: What to name in an error.

        Raises:
            WeightError: The text is not such a spec.
        """
        try:
            facts = json.loads(text)
            if facts["version"] != _VERSION:
                raise WeightError(
                    "weight spec", name="version", rule=f"{_VERSION}", value=facts["version"], where=where
                )
            fields = tuple(facts["fields"])
            is_whole = set(_ALWAYS) <= set(fields) <= set(TENSOR_FIELDS)
            if not is_whole or len(set(fields)) != len(fields):
                rule = f"names of tensor fields, each once, {' and '.join(_ALWAYS)} among them"
                raise WeightError("weight spec", name="fields", rule=rule, value=fields, where=where)
            dtype = getattr(torch, facts["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise WeightError("weight spec", name="dtype", rule="a torch dtype", value=facts["dtype"], where=where)
            return cls(
                format=find_format(facts["format"], formats),
                out_features=int(facts["out_features"]),
                in_features=int(facts["in_features"]),
                block_size=int(facts["block_size"]),
                scale_kind=ScaleKind(facts["scale_kind"]),
                packing=Packing(NibbleOrder(facts["packing"]), int(facts["packing_group"])),
                blocks=BlockOrder(facts["blocks"]),
                nested_block_size=int(facts["nested_block_size"]),
                dtype=dtype,
                fields=fields,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, WeightError):
                raise
            raise WeightError(
                "weight spec", name="spec", rule="the JSON that q4core writes", value=text, where=where
            ) from error


_PLAIN_FIELDS = tuple(field.name for field in attrs.fields(WeightSpec) if field.name != "fields")
