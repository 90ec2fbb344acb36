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

_VERSION = 1
_ALWAYS = ("qdata", "scale")
_NUMBERS = ("out_features", "in_features", "block_size", "nested_block_size")


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
        fields = tuple(name for name, _ in weight.tensors())
        return cls(fields=fields, **{name: getattr(weight, name) for name in _PLAIN_FIELDS})

    def build(self, tensors: Sequence[torch.Tensor], *, name: str | None = None) -> PackedWeight:
        """Return the weight that has these tensors, given in the order of ``fields``.

        Raises:
            WeightError: The tensors do not fit the spec.
        """
        if len(tensors) != len(self.fields):
            raise WeightError("weight", name="tensors", rule=f"{len(self.fields)} long", value=len(tensors), where=name)
        facts: dict[str, Any] = dict(zip(self.fields, tensors, strict=True))
        return PackedWeight(name=name, **facts, **{field: getattr(self, field) for field in _PLAIN_FIELDS})

    def to_json(self) -> str:
        """Return the spec as one line of JSON with sorted keys."""
        return json.dumps(
            {
                "version": _VERSION,
                "format": self.format.name,
                "scale_kind": self.scale_kind.value,
                "packing": self.packing.order.value,
                "packing_group": self.packing.group,
                "blocks": self.blocks.value,
                "dtype": str(self.dtype).removeprefix("torch."),
                "fields": list(self.fields),
                **{name: getattr(self, name) for name in _NUMBERS},
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

        def require(name: str, value: object, rule: str, *, is_met: bool) -> None:
            if not is_met:
                raise WeightError("weight spec", name=name, rule=rule, value=value, where=where)

        try:
            facts = json.loads(text)
            require("version", facts["version"], f"{_VERSION}", is_met=facts["version"] == _VERSION)
            fields = tuple(facts["fields"])
            is_whole = set(_ALWAYS) <= set(fields) <= set(TENSOR_FIELDS) and len(set(fields)) == len(fields)
            rule = f"names of tensor fields, each once, {' and '.join(_ALWAYS)} among them"
            require("fields", fields, rule, is_met=is_whole)
            dtype = getattr(torch, facts["dtype"])
            require("dtype", facts["dtype"], "a torch dtype", is_met=isinstance(dtype, torch.dtype))
            return cls(
                format=find_format(facts["format"], formats),
                scale_kind=ScaleKind(facts["scale_kind"]),
                packing=Packing(NibbleOrder(facts["packing"]), int(facts["packing_group"])),
                blocks=BlockOrder(facts["blocks"]),
                dtype=dtype,
                fields=fields,
                **{name: int(facts[name]) for name in _NUMBERS},
            )
        except WeightError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            rule = "the JSON that q4core writes"
            raise WeightError("weight spec", name="spec", rule=rule, value=text, where=where) from error


_PLAIN_FIELDS = tuple(field.name for field in attrs.fields(WeightSpec) if field.name != "fields")
