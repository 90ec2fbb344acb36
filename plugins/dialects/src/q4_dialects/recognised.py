"""Layers of dialects that are known but not read: rejected by name, never read as dense tensors.

Each dialect is one row of the table. To support one, add a module for it to this package and delete its row here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs
import torch

from q4_dialects.fp8 import FP8_SCALES
from q4_dialects.look_alikes import MXINT4, is_e5m3, may_be_mxfp4, may_be_mxint4
from q4_dialects.modelopt_experts import FUSED, nvfp4_experts
from q4_dialects.mx_rows import MX_BLOCK, blocks_of
from q4_dialects.qweight_layouts import refused_layers
from q4_dialects.shared_keys import comfy_marker
from q4_dialects.torchao_entries import entry_of, is_read
from q4core import Catalogue, Dialect, DialectError, LayerSchema, PackedWeight, Problem
from q4core.plugin_api import FLOATS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

__all__ = ["Recognised"]

_E8M0 = frozenset({torch.uint8, torch.float8_e8m0fnu})
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_OTHER_FLOAT8 = _FLOAT8 - {torch.float8_e4m3fn}
_FP8_INPUTS = ("input_scale", "scale_input", "activation_scale", "comfy_quant")
_READ_BY_TORCHAO = {"NVFP4Tensor", "MXTensor", "Int4Tensor", "Int4TilePackedTo4dTensor"}


@attrs.frozen(kw_only=True)
class _Row:
    """The keys that identify a dialect: all of ``needs``, with these dtypes, and none of ``without``.

    Args:
        dialect: Its name.
        needs: Suffix → legal dtypes; an empty set allows every dtype.
        without: Suffixes that would make it another dialect.
        also: Further suffixes that belong to the layer.
    """

    dialect: str
    needs: dict[str, Collection[torch.dtype]]
    without: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


_INT32 = frozenset({torch.int32, torch.uint32})
_INT8 = frozenset({torch.int8})
_ROWS = (
    _Row(
        dialect="svdquant",
        needs={"qweight": _INT8, "wscales": ()},
        also=(
            *("wtscale", "wcscales", "smooth", "smooth_orig", "smooth_factor", "smooth_factor_orig"),
            *("lora_down", "lora_up", "proj_down", "proj_up"),
        ),
    ),
    _Row(dialect="nunchaku int4", needs={"qweight": _INT32, "wscales": (), "wzeros": ()}),
    _Row(
        dialect="exl2",
        needs={"q_weight": _INT32, "q_scale": ()},
        also=("q_scale_max", "q_groups", "q_group_map", "q_invperm", "q_perm"),
    ),
    _Row(dialect="qtip", needs={"trellis": (), "SU": ()}, also=("SV", "tlut", "rcp", "tp_rank", "scale", "Wscale")),
    _Row(dialect="qtip", needs={"trellis": (), "tlut": ()}, also=("td_product", "scale")),
    _Row(dialect="quip#", needs={"Qidxs": (), "SU": ()}, also=("SV", "Wscale", "codebook_id", "rescale_WH")),
    _Row(dialect="exl3", needs={"trellis": ()}, also=("suh", "svh", "su", "sv", "mcg", "mul1")),
    _Row(dialect="aqlm", needs={"codes": (), "codebooks": (), "scales": ()}),
    _Row(
        dialect="vptq",
        needs={"indices": (), "centroids.weight": ()},
        also=("res_centroids.weight", "outlier_centroids.weight", "weight_scale", "weight_bias", "perm"),
    ),
    *(
        _Row(
            dialect="quanto",
            needs={f"weight.{codes}": (), "weight._scale": ()},
            also=("weight._shift", "input_scale", "output_scale"),
        )
        for codes in ("_data", "_data._data")
    ),
    *(_Row(dialect="sinq", needs={"W_q": (), meta: ()}, also=("bias",)) for meta in ("meta", "meta.scale")),
    _Row(dialect="qqq", needs={"B": _INT32, "s_channel": ()}, also=("s_group", "workspace")),
    _Row(dialect="marlin", needs={"B": _INT32, "s": FLOATS}, also=("workspace",)),
    _Row(dialect="marlin-24", needs={"weight_packed": _INT32, "scale_packed": ()}, also=("meta", "weight_shape")),
    _Row(
        dialect="paroquant",
        needs={"weight": {torch.uint8}, "theta": (), "pairs": ()},
        also=("weight_scale", "channel_scales"),
    ),
    _Row(dialect="openai-mxfp4", needs={"blocks": {torch.uint8}, "scales": _E8M0}),
    _Row(
        dialect="int8",
        needs={"weight": _INT8, "weight_scale": FLOATS},
        without=("weight_scale_2",),
        also=("weight_zero_point", "input_scale"),
    ),
    _Row(dialect="bitsandbytes-int8", needs={"weight": _INT8, "SCB": ()}, also=("weight_format",)),
    _Row(
        dialect="tensorrt-llm-nvfp4",
        needs={"weight": (), "weights_block_scaling_factor": ()},
        also=(
            *("weights_block_scaling_factor_interleaved", "weights_global_scaling_factor"),
            *("activation_global_scaling_factor", "alpha"),
        ),
    ),
    *(
        _Row(dialect="fp8", needs={"weight": _OTHER_FLOAT8, suffix: ()}, without=("weight_scale_2",), also=_FP8_INPUTS)
        for suffix in FP8_SCALES
    ),
)


class Recognised(Dialect):
    """Names the layers of dialects that nothing here reads. Reads and writes none."""

    name: ClassVar[str] = "recognised-only"
    formats: ClassVar[frozenset[str]] = frozenset()

    def find(self, catalogue: Catalogue) -> Iterator[LayerSchema]:
        """Yield each layer of a known dialect that is not read, with the problem that says so."""
        seen: set[str] = set()
        for module, dialect, keys in (
            *_look_alikes(catalogue),
            *_comfyui_fp8(catalogue),
            *_by_table(catalogue),
            *refused_layers(catalogue),
            *_by_metadata(catalogue),
            *_fused_experts(catalogue),
        ):
            if module in seen:
                continue
            seen.add(module)
            rule = "in a dialect that is read; this one is known, but nothing here reads it yet"
            problem = Problem("unsupported", module, rule, dialect)
            named = dialect != MXINT4 or not may_be_mxfp4(catalogue)
            yield LayerSchema(
                module=module, dialect=dialect, format="unknown", keys=keys, problems=(problem,), named=named
            )

    def validate(self, layer: LayerSchema, catalogue: Catalogue) -> Iterator[Problem]:
        """Yield nothing: ``find`` has said it all."""
        del layer, catalogue
        return iter(())

    def read(self, layer: LayerSchema, load: Callable[[str], torch.Tensor]) -> PackedWeight:
        """Refuse.

        Raises:
            DialectError: Always.
        """
        del load
        raise DialectError(
            f"layer {layer.module!r}", name="dialect", rule="one that q4core can read", value=layer.dialect
        )


def _by_table(catalogue: Catalogue) -> Iterator[tuple[str, str, dict[str, str]]]:
    for row in _ROWS:
        first, *others = row.needs
        for module in catalogue.modules_with(others[-1] if others else first):  # fewer have it than have a weight
            stem = f"{module}."
            infos = [(catalogue.get(stem + suffix), dtypes) for suffix, dtypes in row.needs.items()]
            fits = all(info is not None and (not dtypes or info.dtype in dtypes) for info, dtypes in infos)
            is_other = any(stem + suffix in catalogue for suffix in row.without)
            is_other |= row.dialect == "int8" and catalogue.quantization_config.get("quant_method") == "gemma"
            if fits and not is_other:
                found = [suffix for suffix in (*row.needs, *row.also) if stem + suffix in catalogue]
                keys = {"qdata" if suffix == first else suffix: stem + suffix for suffix in found}
                yield module, row.dialect, keys


def _look_alikes(catalogue: Catalogue) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield what has the keys, dtypes and shapes of NVFP4 or MXFP4, and means something else."""
    is_mxint4 = may_be_mxint4(catalogue)
    for module in catalogue.modules_with("weight_packed"):
        keys = {"qdata": f"{module}.weight_packed", "scale": f"{module}.weight_scale"}
        if is_e5m3(module, catalogue):
            yield module, "nvfp4-e5m3", keys
        elif is_mxint4 and blocks_of(catalogue, *keys.values()) == MX_BLOCK:
            codes, scale = (catalogue.tensors[key] for key in keys.values())
            if codes.dtype == torch.uint8 and scale.dtype in _E8M0 and f"{module}.weight_global_scale" not in catalogue:
                yield module, MXINT4, keys


def _comfyui_fp8(catalogue: Catalogue) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield the FP8 layers that a tensor or the header marks as ComfyUI's, which may be rotated, or in tiles."""
    for module in catalogue.modules_with(*FP8_SCALES):
        codes = catalogue.get(f"{module}.weight")
        if codes is not None and codes.dtype in _FLOAT8 and comfy_marker(module, catalogue) is not None:
            below = catalogue.children(module)
            keys = {suffix: f"{module}.{suffix}" for suffix in (*FP8_SCALES, *_FP8_INPUTS) if suffix in below}
            yield module, "comfyui fp8", {"qdata": f"{module}.weight", **keys}


def _by_metadata(catalogue: Catalogue) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield what torchao flattened and nothing here reads: other classes, 8-bit elements, other parameters."""
    for name, text in catalogue.metadata.items():
        entry = entry_of(text)
        if entry is None or entry["_type"] == "Tensor" or "_data" not in entry:
            continue
        module, _, parameter = name.rpartition(".")
        kind = entry["_type"]
        data = entry["_data"] if isinstance(entry["_data"], dict) else {}
        element = data.get("elem_dtype")
        is_fp4 = not isinstance(element, dict) or element.get("_data") == "float4_e2m1fn_x2"
        if kind in _READ_BY_TORCHAO and is_fp4 and is_read(name, catalogue):
            continue
        head = f"{module}._{parameter}_"
        found = [key for key in catalogue.children(module).values() if key.startswith(head)]
        layer = module if parameter == "weight" else name
        keys = {"qdata" if key == f"{head}qdata" else key.removeprefix(head): key for key in found}
        if keys:
            yield layer, f"torchao {kind}", keys


def _fused_experts(catalogue: Catalogue) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield ModelOpt's experts of formats that are not read; their scales are named after the parameter."""
    suffixes = ("_weight_scale", "_weight_scale_2", "_input_scale")
    read = set(nvfp4_experts(catalogue))
    for name in list(catalogue.tensors):
        if name.endswith(FUSED) and name not in read and f"{name}_weight_scale" in catalogue:
            keys = {suffix[1:]: name + suffix for suffix in suffixes if name + suffix in catalogue}
            yield name, "modelopt experts", {"qdata": name, **keys}
