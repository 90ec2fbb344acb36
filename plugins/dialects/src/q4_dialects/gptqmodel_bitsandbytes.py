"""GPTQModel's bitsandbytes NF4 and FP4: the same tensors under flat names.

``<module>.weight`` as in bitsandbytes.py, and next to it ``weight_absmax``, ``weight_quant_map``,
``weight_quant_state`` (the JSON text, whose ``quant_type`` says which format it is), ``weight_nested_absmax`` and
``weight_nested_quant_map``.

Traps: the state's key does not name the format, unlike bitsandbytes' own. 8-bit layers of the same method have
``weight_scb``, and are no 4-bit layers.

Reference:
    gptqmodel 7.7.0: nn_modules/qlinear/bitsandbytes.py (BitsAndBytesLinear).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from q4_dialects.bitsandbytes import BitsAndBytes
from q4core import Catalogue, LayerSchema, PackedWeight, Problem, WrittenLayer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from q4core import WeightSpec

__all__ = ["GptqModelBitsAndBytes"]

_STATE = "weight_quant_state"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_FLAT = (*(f"weight_{part}" for part in _PARTS), _STATE)
_KINDS = ("fp4", "nf4")


class GptqModelBitsAndBytes(BitsAndBytes):
    """NF4 and FP4 under GPTQModel's names."""

    name: ClassVar[str] = "gptqmodel-bitsandbytes"

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each module with any of the side tensors."""
        for module in catalogue.modules_with(*_FLAT):
            part, names = _dotted(module, catalogue)
            for layer in self._layers(f"{module}.weight", part):
                keys = {role: names.get(key, _flat(key)) for role, key in layer.keys.items()}
                problems = tuple(_renamed(problem, names) for problem in layer.problems)
                yield attrs.evolve(layer, keys=keys, problems=problems)

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        part, names = _dotted(layer.module, catalogue)
        theirs = {key: dotted for dotted, key in names.items()}
        keys = {role: theirs.get(key, f"{key} (missing)") for role, key in layer.keys.items()}
        for problem in super().validate(attrs.evolve(layer, keys=keys), part):
            yield _renamed(problem, names)

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors that ``BitsAndBytesLinear`` loads.

        Raises:
            DialectError: As for bitsandbytes.
        """
        written = super().write(module, weight)
        return WrittenLayer(tensors={_flat(key): tensor for key, tensor in written.tensors.items()})

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return GPTQModel's entry."""
        theirs, specs = super().quantization_config(layers, unquantised), list(layers.values())
        return {
            "quant_method": "bitsandbytes",
            "bits": 4,
            "format": theirs["bnb_4bit_quant_type"],
            "block_size": specs[0].block_size,
            "compress_statistics": theirs["bnb_4bit_use_double_quant"],
        }


def _flat(key: str) -> str:
    """Return GPTQModel's name of a tensor, given bitsandbytes'."""
    holder, mark, part = key.rpartition(".weight.")
    if not mark:
        return key
    return f"{holder}.{_STATE if part.startswith('quant_state.') else f'weight_{part}'}"


def _dotted(module: str, catalogue: Catalogue) -> tuple[Catalogue, dict[str, str]]:
    """Return a module's tensors under bitsandbytes' names, and these names → GPTQModel's."""
    names = {}
    for suffix, key in catalogue.children(module).items():
        part = suffix.removeprefix("weight_")
        dotted = f"weight.{part}" if suffix != part and part in _PARTS else suffix
        if suffix == _STATE:
            dotted = f"weight.quant_state.bitsandbytes__{_kind(key, catalogue)}"
        names[f"{module}.{dotted}"] = key
    tensors = {dotted: catalogue.tensors[key] for dotted, key in names.items()}

    def load(name: str) -> torch.Tensor:
        stored = catalogue.load_small(names[name])
        if stored is None:
            raise KeyError(name)
        return stored

    can_load = catalogue.load is not None or any(catalogue.held(key) is not None for key in names.values())
    facts: dict[str, Any] = {"config": catalogue.config, "load": load if can_load else None}
    return Catalogue(tensors, **facts), names


def _kind(key: str, catalogue: Catalogue) -> str:
    """Return the format that the JSON text states, or else ``config.json``; ``nf4`` where neither is at hand."""
    stored = catalogue.load_small(key)
    stated: object = catalogue.quantization_config.get("format")
    if stored is not None:
        try:
            facts = json.loads(bytes(stored.reshape(-1).tolist()))
            stated = facts.get("quant_type", stated) if isinstance(facts, dict) else stated
        except (ValueError, TypeError, RecursionError):  # the reader says what is wrong with it
            pass
    return stated if isinstance(stated, str) and stated in _KINDS else "nf4"


def _renamed(problem: Problem, names: Mapping[str, str]) -> Problem:
    return attrs.evolve(problem, key=names.get(problem.key, _flat(problem.key)))
