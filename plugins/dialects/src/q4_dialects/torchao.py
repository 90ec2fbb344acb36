"""torchao NVFP4 and MXFP4, linear and swizzled, as ``flatten_tensor_state_dict`` puts them into safetensors.

``<module>._weight_qdata`` uint8 [N, K / 2], low nibble first; ``<module>._weight_scale`` e4m3 or e8m0, by row or in the
swizzled order; for NVFP4 an optional ``<module>._weight_per_tensor_scale`` that multiplies. The header's metadata holds
one JSON entry per tensor under ``<module>.weight`` and the list ``tensor_names``.

Experts are a parameter of any name, ``<module>._<name>_qdata`` uint8 [E, N, K / 2], with scales [E, …] and one number
for all or float32 [E, 1, 1]. Swizzled scales are those of the matrix [E * N, K]: a tile may hold rows of two experts.

Reference:
    torchao 0.18.0: prototype/mx_formats (NVFP4Tensor, MXTensor), prototype/safetensors.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch

from q4_dialects.experts import expert_layers, expert_of, has_experts, own_number
from q4_dialects.layer_keys import assumed_dtype
from q4_dialects.nvfp4 import E4M3, LEVEL_NUMBERS, multiplied_levels, number_problems, weight_of, with_multiplied_levels
from q4_dialects.swizzle import linear_from_swizzled, swizzled_from_linear, tiles, unpadded
from q4_dialects.torchao_entries import (
    DTYPES,
    FP4,
    REQUIRED,
    ROLES,
    entry_of,
    entry_problems,
    is_read,
    merged_entries,
    owned_keys,
    prefix_of,
)
from q4core import (
    Catalogue,
    Dialect,
    LayerSchema,
    PackedWeight,
    Packing,
    Problem,
    ScaleKind,
    WrittenLayer,
    find_format,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from q4core import WeightSpec

__all__ = ["TorchaoMxfp4Linear", "TorchaoMxfp4Swizzled", "TorchaoNvfp4Linear", "TorchaoNvfp4Swizzled"]


class _Torchao(Dialect):
    """What the four dialects share."""

    # transformers lets the metadata of one shard replace another's, and looks for every name in what is left.
    metadata_spans_shards: ClassVar[bool] = True
    numbers: ClassVar[Mapping[str, str]] = LEVEL_NUMBERS
    tensor_type: ClassVar[str]
    is_swizzled: ClassVar[bool]
    format_name: ClassVar[str]
    scale_dtype: ClassVar[torch.dtype]
    defaults: ClassVar[Mapping[str, Any]]
    """Defaults of the other fields of torchao's entry."""

    @property
    def block(self) -> int:
        """In-features per scale."""
        return find_format(self.format_name).block_size

    def scale_shape(self, rows: int, columns: int, *, swizzled: bool) -> tuple[int, int]:
        """Return the stored shape of the block scales of a weight [rows, columns]."""
        blocks = columns // self.block
        if not swizzled:
            return rows, blocks
        high, wide = tiles(rows, blocks)
        return 32 * high, 16 * wide

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each layer that the metadata names, and each that names, dtypes and shapes alone identify."""
        seen = set()
        owned = owned_keys(catalogue)
        for name, text in catalogue.metadata.items():
            entry = entry_of(text) if self.tensor_type in text else None
            if entry is None or entry["_type"] != self.tensor_type or not is_read(name, catalogue):
                continue
            seen.add(name)
            data = entry.get("_data")
            facts: dict[str, Any] = data if isinstance(data, dict) else {}
            if self.tensor_type == "MXTensor" and facts.get("elem_dtype") != FP4:
                continue  # 8-bit elements
            stated = facts.get("is_swizzled_scales")
            # A flag that is no truth value is reported once, by the linear dialect.
            if stated is self.is_swizzled or (not isinstance(stated, bool) and not self.is_swizzled):
                yield from self._layers(name, catalogue, entry, facts, owned.get(name, ()))
        for module in catalogue.modules_with("_weight_qdata", "_weight_scale"):
            name = f"{module}.weight"
            if name not in seen and entry_of(catalogue.metadata.get(name, "")) is None:
                yield from self._by_shape(name, catalogue)

    def _by_shape(self, name: str, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield the layers whose tensors alone identify them as this dialect's."""
        codes, scale = (catalogue.get(f"{prefix_of(name)}{role}") for role in REQUIRED)
        if scale is None or scale.dtype != self.scale_dtype or (codes is not None and codes.dtype != torch.uint8):
            return
        swizzled = False
        if codes is not None and len(codes.shape) in {2, 3}:
            *experts, rows, width = codes.shape
            swizzled = scale.shape == (*experts, *self.scale_shape(rows, width * 2, swizzled=True))
        if swizzled == self.is_swizzled:
            yield from self._layers(name, catalogue, None, {})

    def _layers(
        self,
        name: str,
        catalogue: Catalogue,
        entry: dict[str, Any] | None,
        facts: dict[str, Any],
        owned: Iterable[str] = (),
    ) -> Iterator[LayerSchema]:
        """Yield the one layer of a matrix, or one for each expert of the parameter ``name``."""
        prefix = prefix_of(name)
        named = entry.get("_tensor_data_names") if entry is not None else None
        wanted = {*REQUIRED, *(role for role, part in ROLES.items() if isinstance(named, list) and part in named)}
        roles = {role: part for role, part in ROLES.items() if self.format_name == "nvfp4" or role in REQUIRED}
        keys = {
            role: f"{prefix}{part}" for role, part in roles.items() if role in wanted or f"{prefix}{part}" in catalogue
        }
        codes = catalogue.get(keys["qdata"])
        module, _, parameter = name.rpartition(".")
        if parameter == "weight":
            known = ("bias", *(f"_weight_{part}" for part in roles.values()))
            problems = list(catalogue.unknown_scales(module, known))
        else:  # what else the module holds is its other parameters'
            rule = f"one that the dialect knows ({', '.join(sorted(roles.values()))})"
            legal = {f"{prefix}{part}" for part in roles.values()}
            problems = [Problem("unknown_key", key, rule) for key in owned if key not in legal]
        shape = None
        if codes is not None and len(codes.shape) in {2, 3}:
            shape = (codes.shape[-2], codes.shape[-1] * 2)
        dtype, notes = assumed_dtype(catalogue)
        if entry is None:
            notes = (*notes, "layout inferred from shapes alone: the file has no torchao metadata for this layer")
        else:
            problems += entry_problems(name, entry, keys, roles, self.block)
            found = facts.get("orig_dtype")
            stated = found.get("_data") if isinstance(found, dict) else None
            dtype, notes = DTYPES.get(stated if isinstance(stated, str) else "", dtype), ()
        layer = LayerSchema(
            module=name.removesuffix(".weight"),
            dialect=self.name,
            format=self.format_name,
            keys=keys,
            shape=shape,
            block_size=self.block,
            problems=problems,
            notes=notes,
            extras=(("dtype", dtype), ("entry", None if entry is None else catalogue.metadata[name])),
            named=entry is not None,
        )
        if codes is not None and has_experts(catalogue, keys["qdata"]):
            yield from expert_layers(layer, codes.shape[0], catalogue)
        else:
            yield layer

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield every problem of dtype and shape."""
        keys = layer.keys
        first = keys["qdata"] if keys["qdata"] in catalogue else keys["scale"]
        experts = catalogue.tensors[first].shape[:1] if has_experts(catalogue, first) else ()
        yield from self.expect(catalogue, keys["qdata"], dtypes={torch.uint8}, shape=(*experts, None, None))
        shape: tuple[int | None, int | None] = (None, None)
        if layer.shape is not None:
            rows, columns = layer.shape
            stored = [*experts, rows, columns // 2]
            if columns % self.block:
                rule = f"[N, K / 2] with K a multiple of {self.block}"
                yield Problem("shape", keys["qdata"], rule, stored)
            if self.is_swizzled and experts and tiles(experts[0] * rows, 1)[0] != experts[0] * tiles(rows, 1)[0]:
                rule = "[E, N, K / 2] where E * N rows fill as many tiles of 128 as E times N, as scales are swizzled"
                yield Problem("shape", keys["qdata"], rule, stored)
            shape = self.scale_shape(rows, columns, swizzled=self.is_swizzled)
        yield from self.expect(catalogue, keys["scale"], dtypes={self.scale_dtype}, shape=(*experts, *shape))
        yield from number_problems(layer, catalogue, experts=(*experts, 1, 1) if experts else None)

    def stored_numbers(
        self, layer: LayerSchema, role: str, stored: torch.Tensor, catalogue: Catalogue
    ) -> torch.Tensor | None:
        """Return the numbers of a tensor; the padding of swizzled scales holds none."""
        numbers = super().stored_numbers(layer, role, stored, catalogue)
        codes = catalogue.get(layer.keys["qdata"])
        if role != "scale" or not self.is_swizzled or numbers is None or layer.shape is None or codes is None:
            return numbers
        rows, columns = math.prod(codes.shape[:-1]), layer.shape[1]
        return unpadded(numbers, rows, columns // self.block)

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Return the weight; swizzled scales are put in order, which copies them."""
        tensors = {role: load(key) for role, key in layer.keys.items()}
        codes, scale = tensors["qdata"], tensors["scale"]
        expert = expert_of(layer)
        rows, columns = codes.shape[-2], codes.shape[-1] * 2
        if self.is_swizzled:
            scale = linear_from_swizzled(scale, rows, columns // self.block, rows * (expert or 0))
        elif expert is not None:
            scale = scale[expert]
        kind = ScaleKind.E8M0
        if self.format_name == "nvfp4":
            kind = ScaleKind.E4M3_MUL if "global_scale" in tensors else ScaleKind.E4M3
        extras = dict(layer.extras)
        weight = weight_of(
            layer,
            codes if expert is None else codes[expert],
            scale,
            scale_kind=kind,
            packing=Packing.LOW_FIRST,
            global_scale=own_number(tensors.get("global_scale"), expert),
            activation_scale=own_number(tensors.get("activation_scale"), expert),
            dtype=extras["dtype"],
        )
        if extras["entry"] in {None, self._entry(weight)}:
            return weight
        return attrs.evolve(weight, notes=(*layer.notes, self.stored_fact("torchao entry", extras["entry"])))

    def write(self, module: str, weight: PackedWeight) -> WrittenLayer:
        """Return the tensors and the metadata entry that ``unflatten_tensor_state_dict`` takes.

        An expert becomes a matrix of its own, ``<parameter>.<expert>.weight``, which reads as the same weight under the
        same name: one weight does not say what the others are, and layers are written one at a time.

        Raises:
            DialectError: Another format, scale levels that would have to be rounded, or any feature.
        """
        self.check_writable(module, weight, activation_scale=self.format_name == "nvfp4")
        if self.format_name == "nvfp4":
            scale, factor = multiplied_levels(self, module, weight)
        else:
            scale, factor = weight.scale.view(self.scale_dtype), None
        if self.is_swizzled:
            shape = self.scale_shape(*weight.shape, swizzled=True)
            scale = swizzled_from_linear(scale).view(shape)
        tensors = {"qdata": self.row_bytes(weight, Packing.LOW_FIRST), "scale": scale}
        for name, number in (("per_tensor_scale", factor), ("act_per_tensor_scale", weight.activation_scale)):
            if number is not None:
                tensors[name] = number if weight.dialect == self.name else number.to(torch.float32).reshape(())
        written = attrs.evolve(weight, global_scale=factor, scale_kind=_kind(factor)) if _is_nvfp4(weight) else weight
        return WrittenLayer(
            tensors={f"{module}._weight_{name}": tensor for name, tensor in tensors.items()},
            metadata={f"{module}.weight": self._entry(written, self.read_fact(weight, "torchao entry"))},
        )

    def _entry(self, weight: PackedWeight, read: str | None = None) -> str:
        """Return the metadata entry of a weight; the other facts of ``read``, the entry in its file, are preserved."""
        names = {"per_tensor_scale": weight.global_scale, "act_per_tensor_scale": weight.activation_scale}
        layout = {
            "is_swizzled_scales": self.is_swizzled,
            "block_size": self.block,
            "orig_dtype": {"_type": "torch.dtype", "_data": str(weight.dtype).removeprefix("torch.")},
        }
        found = entry_of(read) if read is not None else None
        facts = found["_data"] if found is not None and found["_type"] == self.tensor_type else self.defaults
        entry = {
            "_type": self.tensor_type,
            "_data": {**facts, **layout},
            "_tensor_data_names": [name for name, number in names.items() if number is not None] + list(REQUIRED),
        }
        return json.dumps(entry)

    def merge_metadata(self, layers: Mapping[str, WrittenLayer], dense: Iterable[str]) -> dict[str, str]:
        """Return the entries of layers and of plain tensors, and the list of their names."""
        return merged_entries(super().merge_metadata(layers, ()), dense)

    def approximate(self, weight: PackedWeight) -> PackedWeight:
        """Round the reciprocal of a global scale that divides."""
        if not _is_nvfp4(weight):
            return attrs.evolve(weight, activation_scale=None)
        return with_multiplied_levels(weight)

    def quantization_config(self, layers: Mapping[str, WeightSpec], unquantised: tuple[str, ...]) -> dict[str, Any]:
        """Return transformers' ``TorchAoConfig``."""
        del layers
        return {
            "quant_method": "torchao",
            "quant_type": {"default": self.workflow()},
            "modules_to_not_convert": list(unquantised) or None,
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }

    def workflow(self) -> dict[str, Any]:
        """Return torchao's configuration of the layers."""
        data = {"use_dynamic_per_tensor_scale": True}
        return {"_type": "NVFP4WeightOnlyConfig", "_version": 1, "_data": data}


def _is_nvfp4(weight: PackedWeight) -> bool:
    return weight.format.name == "nvfp4"


def _kind(factor: torch.Tensor | None) -> ScaleKind:
    return ScaleKind.E4M3 if factor is None else ScaleKind.E4M3_MUL


class _Nvfp4(_Torchao):
    """NVFP4."""

    formats: ClassVar[frozenset[str]] = frozenset({"nvfp4"})
    format_name: ClassVar[str] = "nvfp4"
    tensor_type: ClassVar[str] = "NVFP4Tensor"
    scale_dtype: ClassVar[torch.dtype] = E4M3
    defaults: ClassVar[Mapping[str, Any]] = {
        "is_swizzled_scales": False,
        "use_triton_kernel": False,
        "act_quant_kwargs": None,
    }


class _Mxfp4(_Torchao):
    """MXFP4."""

    formats: ClassVar[frozenset[str]] = frozenset({"mxfp4"})
    format_name: ClassVar[str] = "mxfp4"
    tensor_type: ClassVar[str] = "MXTensor"
    scale_dtype: ClassVar[torch.dtype] = torch.float8_e8m0fnu
    defaults: ClassVar[Mapping[str, Any]] = {
        "elem_dtype": FP4,
        "block_size": 32,
        "orig_dtype": None,
        "kernel_preference": {"_type": "KernelPreference", "_data": "EMULATED"},
        "act_quant_kwargs": None,
    }

    def workflow(self) -> dict[str, Any]:
        """Return torchao's configuration of the layers."""
        data = {
            "activation_dtype": FP4,
            "block_size": 32,
            "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
            "scaling_mode": {"_type": "ScaleCalculationMode", "_data": "RCEIL"},
            "weight_dtype": FP4,
        }
        return {"_type": "MXDynamicActivationMXWeightConfig", "_version": 1, "_data": data}


class TorchaoNvfp4Linear(_Nvfp4):
    """NVFP4 with scales by row."""

    name: ClassVar[str] = "torchao-nvfp4-linear"
    is_swizzled: ClassVar[bool] = False


class TorchaoNvfp4Swizzled(_Nvfp4):
    """NVFP4 with scales in the tensor cores' order."""

    name: ClassVar[str] = "torchao-nvfp4-swizzled"
    is_swizzled: ClassVar[bool] = True


class TorchaoMxfp4Linear(_Mxfp4):
    """MXFP4 with scales by row."""

    name: ClassVar[str] = "torchao-mxfp4-linear"
    is_swizzled: ClassVar[bool] = False


class TorchaoMxfp4Swizzled(_Mxfp4):
    """MXFP4 with scales in the tensor cores' order."""

    name: ClassVar[str] = "torchao-mxfp4-swizzled"
    is_swizzled: ClassVar[bool] = True
