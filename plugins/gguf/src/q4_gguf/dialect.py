"""The dialect ``gguf``: what of a weight a GGUF file holds, for those who convert to one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs
import torch

from q4_gguf.forms import INTEGERS, form_of
from q4_gguf.ggml import PACKED_TYPES
from q4core import Dialect, ScaleKind, WrittenLayer, find_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from q4core import Catalogue, LayerSchema, PackedWeight, Problem

__all__ = ["GgufDialect"]

_EXPERT = re.compile(r"(.+exps)\.(0|[1-9]\d*)")


class GgufDialect(Dialect):
    """Checks and rounds weights for a GGUF file; its writer makes the bytes, and its reader finds layers."""

    name = "gguf"
    formats = frozenset({*(layout.format for layout in PACKED_TYPES.values()), *INTEGERS})
    recipes: Mapping[str, Mapping[str, Any]] = {
        "Q4_0": {"format": "q4_0"},
        "Q4_1": {"format": "q4_1"},
        "Q8_0": {"format": "q8_0"},
        "Q4_K": {"format": "q4_1", "scale_kind": ScaleKind.SUPER_BLOCK},
        "Q6_K": {"format": "q8_0", "scale_kind": ScaleKind.SUPER_BLOCK},
        "IQ4_NL": {"format": "iq4_nl"},
        "MXFP4": {"format": "mxfp4"},
    }
    """ggml's name of a type → the arguments of ``q4core.quantize`` that make weights of it."""

    def find(self, catalogue: Catalogue) -> Iterable[LayerSchema]:
        """Yield nothing: the reader of GGUF files finds their layers."""
        del catalogue
        return ()

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterable[Problem]:
        """Yield nothing, as ``find``."""
        del layer, catalogue
        return ()

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Refuse: the reader of GGUF files reads them."""
        del load
        raise self.refusal(layer.module, "file", "a GGUF file", "others")

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Check that a GGUF type holds a weight exactly; its bytes are the writer's.

        Raises:
            DialectError: None does; the message names what does not fit.
        """
        form_of(module, weight).check()
        return WrittenLayer(tensors={})

    @staticmethod
    def stack_of(module: str) -> tuple[str, int] | None:
        """Return the name of the tensor that holds a layer as one of several experts, and its number there."""
        found = _EXPERT.fullmatch(module)
        return None if found is None else (found[1], int(found[2]))

    def type_of(self, module: str, weight: PackedWeight) -> str:
        """Return ggml's name of the type that ``write`` found for a weight."""
        return form_of(module, weight).type_name

    def approximate(self, weight: PackedWeight) -> PackedWeight:
        """Return the weight with scales and offsets rounded to float16, and zero points as offsets."""
        changes: dict[str, Any] = {"activation_scale": None}
        is_nibble = weight.format.name == "int4"
        if weight.scale_kind is ScaleKind.PLAIN:
            changes["scale"] = weight.scale.to(torch.float16)
            if weight.offset is not None:
                changes["offset"] = weight.offset.to(torch.float16)
            if is_nibble and weight.zero is not None:
                offset = -(weight.zero.to(torch.float32) * weight.resolved_scale())
                changes |= {"format": find_format("q4_1"), "zero": None, "offset": offset.to(torch.float16)}
        found = attrs.evolve(weight, **changes)
        numbers = [tensor for tensor in (found.scale, found.offset) if tensor is not None and tensor.element_size() > 1]
        return found if all(bool(torch.isfinite(tensor).all()) for tensor in numbers) else weight
