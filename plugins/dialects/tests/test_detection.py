"""What 1,400 generated modules of every dialect, and of the dialects that look like them, are taken for; none wrongly.

The layouts are written here from the owners' definitions: names, dtypes and shapes, as a header has them, and the
numbers of those small tensors alone that say how a layer is stored.
"""

from __future__ import annotations

import collections
import json
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import torch

import q4core as q4

if TYPE_CHECKING:
    from collections.abc import Callable

EACH = 20
I8, U8, I16, I32, U32, I64 = torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint32, torch.int64
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
NAMES = ("proj", "model.layers.3.mlp.up_proj", "h.0.attn.c_attn", "lm_head", "block.7.experts.12.w1")
Rng = np.random.Generator


@attrs.frozen
class Case:
    """A module: its tensors by suffix (a tensor, or dtype and shape), what the file says, and what it must be.

    Args:
        tensors: Suffix after the module's name and a dot; one that begins with an underscore follows the name itself.
        reading: Dialect, format and shape.
        config: ``config.json``.
        metadata: Parameter → the entry of torchao, or another key with its text.
        candidates: The dialects that all fit: an error must name them, and each can be chosen.
        refused: The name under which the module must be refused.
        experts: How many modules the tensors hold; 0 where they are one.
    """

    tensors: dict[str, Any]
    reading: tuple[str, str, tuple[int, int]] | None = None
    config: dict[str, Any] = attrs.field(factory=dict)
    metadata: dict[str, str] = attrs.field(factory=dict)
    candidates: tuple[str, ...] = ()
    refused: str = ""
    experts: int = 0


def sizes(random: Rng, rows: int = 1, columns: int = 1, most: int = 40) -> tuple[int, int]:
    """Return N and K: multiples of two numbers, every fourth time equal."""
    if random.integers(4) == 0:
        size = int(np.lcm(rows, columns)) * int(random.integers(1, 5))
        return size, size
    return rows * int(random.integers(1, most)), columns * int(random.integers(1, most))


def method(name: str, **facts: Any) -> dict[str, Any]:
    """Return a config of one method, or of the text model of several."""
    return {"quantization_config": {"quant_method": name, **facts}}


def some(random: Rng, *choices: Any) -> Any:
    """Return one of the choices."""
    return choices[int(random.integers(len(choices)))]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _words(random: Rng) -> tuple[dict[str, Any], int, int, int]:
    """Return GPTQ's tensors with any word and group, N and K."""
    word, group = some(random, I8, I16, I32, I32, I32, I64), some(random, 32, 64, 128)
    each = 2 * word.itemsize
    n, k = sizes(random, 16, group, 12)
    groups = k // group
    if random.integers(4) == 0:
        groups, group = 1, k
    elif random.integers(4) == 0:  # the last group is short
        k += 16
        groups += 1
    tensors = {
        "qweight": (word, (-(-k // each), n)),
        "qzeros": (word, (groups, -(-n // each))),
        "scales": (some(random, F16, BF16), (groups, n)),
    }
    return tensors, n, k, group


def gptq(random: Rng) -> Case:
    """Return version 1: by config, of AutoRound, or with zero points that are all alike and no config."""
    tensors, n, k, group = _words(random)
    reading = ("gptq", "int4", (n, k))
    kind = random.integers(3)
    if kind == 0:
        tensors["g_idx"] = (I32, (k,))
        return Case(tensors, reading, method("gptq", bits=4, group_size=group, desc_act=True))
    if kind == 1:
        packing = some(random, "auto_round:auto_gptq", "auto_round:gptq")
        return Case(tensors, reading, method("auto-round", bits=4, group_size=group, packing_format=packing))
    dtype, shape = tensors["qzeros"]
    tensors["qzeros"] = torch.full(shape, 0x77, dtype=U8).repeat(1, dtype.itemsize).view(dtype)
    tensors["g_idx"] = (I32, (k,))
    return Case(tensors, reading)


def gptq_v2(random: Rng) -> Case:
    """Return version 2: by config, or of AutoRound."""
    tensors, n, k, group = _words(random)
    if random.integers(2):
        tensors["g_idx"] = (I32, (k,))
        return Case(
            tensors, ("gptq-v2", "int4", (n, k)), method("gptq", bits=4, group_size=group, checkpoint_format="gptq_v2")
        )
    packing = some(random, "auto_round", "auto_round:gptqmodel")
    return Case(
        tensors, ("gptq-v2", "int4", (n, k)), method("auto-round", bits=4, group_size=group, packing_format=packing)
    )


def gptq_of_either_version(random: Rng) -> Case:
    """Return a layer whose version nothing says."""
    tensors, _, k, _ = _words(random)
    return Case(tensors | {"g_idx": (I32, (k,))}, candidates=("gptq", "gptq-v2"))


def awq(random: Rng) -> Case:
    """Return the GEMM layout, often square, without a config or with one, which may be AutoRound's or wrong."""
    group = some(random, 32, 64, 128)
    n, k = sizes(random, 8, group, 12)
    groups = some(random, k // group, k // group, 1)
    tensors = {"qweight": (I32, (k, n // 8)), "qzeros": (I32, (groups, n // 8)), "scales": (F16, (groups, n))}
    group = k // groups
    config = some(
        random,
        {},
        method("awq", bits=4, group_size=group, version="gemm"),
        method("auto-round", bits=4, group_size=group, packing_format="auto_round:auto_awq"),
    )
    return Case(tensors, ("awq", "int4", (n, k)), config)


def awq_gemv(random: Rng) -> Case:
    """Return the GEMV layout, padded for its group size."""
    group = some(random, 32, 64, 128)
    n, k = sizes(random, 8, group, 12)
    wide = _up(-(-(k // group) // 8), {64: 2, 32: 4}.get(group, 1))
    tensors = {"qweight": (I32, (n, k // 8)), "qzeros": (I32, (n, wide)), "scales": (F16, (n, 8 * wide))}
    return Case(tensors, ("awq-gemv", "int4", (n, k)), method("awq", bits=4, group_size=group, version="gemv"))


def bitsandbytes(random: Rng) -> Case:
    """Return NF4 or FP4 of any size, with scales of one level or two, stored as bytes or floats."""
    n, k = sizes(random)
    kind, block, dtype = some(random, "nf4", "fp4"), some(random, 64, 128, 4096), some(random, U8, U8, BF16, F32)
    facts: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
    blocks = -(-n * k // block)
    tensors: dict[str, Any] = {
        "weight": (dtype, (_up(-(-n * k // 2), dtype.itemsize) // dtype.itemsize, 1)),
        "weight.absmax": (F32, (blocks,)),
        "weight.quant_map": (F32, (16,)),
    }
    if -(-n * k // 2) % dtype.itemsize:
        tensors["weight"] = (U8, (-(-n * k // 2), 1))
    if random.integers(2):
        facts |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
        tensors |= {"weight.absmax": (U8, (blocks,)), "weight.nested_absmax": (F32, (-(-blocks // 256),))}
        tensors["weight.nested_quant_map"] = (F32, (256,))
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = _json(facts)
    return Case(tensors, ("bitsandbytes", kind, (n, k)), some(random, {}, method("bitsandbytes", load_in_4bit=True)))


def gptqmodel_bitsandbytes(random: Rng) -> Case:
    """Return the flat names of gptqmodel."""
    n, k = sizes(random)
    kind, block = some(random, "nf4", "fp4"), some(random, 64, 128)
    facts = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": [n, k]}
    tensors = {
        "weight": (U8, (-(-n * k // 2), 1)),
        "weight_absmax": (F32, (-(-n * k // block),)),
        "weight_quant_map": (F32, (16,)),
        "weight_quant_state": _json(facts),
    }
    return Case(tensors, ("gptqmodel-bitsandbytes", kind, (n, k)), method("bitsandbytes", bits=4, format=kind))


def comfyui(random: Rng) -> Case:
    """Return ComfyUI's NVFP4, marked in the header or by a tensor, or known by padded scales alone."""
    n, k = sizes(random, 16, 16)
    tensors: dict[str, Any] = {
        "weight": (U8, (n, k // 2)),
        "weight_scale": (E4M3, (_up(n, 128), _up(k // 16, 4))),
        "weight_scale_2": (F32, ()),
    }
    if random.integers(2):
        tensors["comfy_quant"] = _json({"format": "nvfp4"})
        return Case(tensors, ("comfyui-nvfp4", "nvfp4", (n, k)))
    marks = {"_quantization_metadata": json.dumps({"layers": {"MODULE": {"format": "nvfp4"}}})}
    return Case(tensors, ("comfyui-nvfp4", "nvfp4", (n, k)), metadata=marks)


def modelopt_nvfp4(random: Rng) -> Case:
    """Return ModelOpt's NVFP4: named by the config, or by rows of scales that fill no tile."""
    n, k = sizes(random, 1, 16)
    tensors: dict[str, Any] = {
        "weight": (U8, (n, k // 2)),
        "weight_scale": (E4M3, (n, k // 16)),
        "weight_scale_2": (F32, ()),
    }
    if random.integers(2):
        tensors["input_scale"] = (F32, ())
    config = method("modelopt", quant_algo=some(random, "NVFP4", "MIXED_PRECISION"))
    is_plain = n % 128 or k % 64
    return Case(tensors, ("modelopt-nvfp4", "nvfp4", (n, k)), some(random, {}, config) if is_plain else config)


def nvfp4_of_whole_tiles(random: Rng) -> Case:
    """Return NVFP4 whose scales have both shapes, and no config: ModelOpt's or ComfyUI's."""
    n, k = sizes(random, 128, 64, 6)
    tensors = {"weight": (U8, (n, k // 2)), "weight_scale": (E4M3, (n, k // 16)), "weight_scale_2": (F32, ())}
    return Case(tensors, candidates=("comfyui-nvfp4", "modelopt-nvfp4"))


def modelopt_int4(random: Rng) -> Case:
    """Return ModelOpt's INT4, two rows in a byte, with what AWQ and W4A8 add."""
    half, k = sizes(random, 1, some(random, 32, 64, 128), 12)
    groups = some(random, k // 32, 1) if k % 32 == 0 else 1
    tensors: dict[str, Any] = {
        "weight": (U8, (half, k)),
        "weight_scale": (some(random, F16, BF16, F32), (2 * half, groups)),
    }
    if random.integers(2):
        tensors["pre_quant_scale"] = (F16, (k,))
    if random.integers(2):
        tensors |= {"weight_scale_2": (F32, ()), "input_scale": (F32, ())}
    return Case(tensors, ("modelopt-int4", "int4", (2 * half, k)), method("modelopt", quant_algo="W4A16_AWQ"))


def _mx(random: Rng, codes: str, scale: str, dtype: torch.dtype = U8) -> tuple[dict[str, Any], tuple[int, int]]:
    n, k = sizes(random, 1, 32)
    return {codes: (dtype, (n, k // 2)), scale: (some(random, U8, E8M0), (n, k // 32))}, (n, k)


def modelopt_mxfp4(random: Rng) -> Case:
    """Return ModelOpt's MXFP4."""
    tensors, shape = _mx(random, "weight", "weight_scale")
    return Case(
        tensors, ("modelopt-mxfp4", "mxfp4", shape), method("modelopt", quant_algo=some(random, "mxfp4", "MXFP4"))
    )


def quark_mxfp4(random: Rng) -> Case:
    """Return Quark's MXFP4, which has the same tensors."""
    tensors, shape = _mx(random, "weight", "weight_scale")
    return Case(tensors, ("quark-mxfp4", "mxfp4", shape), method("quark"))


def compressed_tensors_mxfp4(random: Rng) -> Case:
    """Return compressed-tensors' MXFP4: of its own config, of a mixed one, or of AutoRound."""
    tensors, shape = _mx(random, "weight_packed", "weight_scale")
    own = "mxfp4-pack-quantized"
    config = some(
        random,
        method("compressed-tensors", format=own),
        method("compressed-tensors", format="mixed-precision", config_groups={"g": {"format": own}}),
        method("auto-round", data_type="mx_fp", packing_format="auto_round:llm_compressor"),
    )
    return Case(tensors, ("compressed-tensors-mxfp4", "mxfp4", shape), config)


def mxfp4_or_mxint4(random: Rng) -> Case:
    """Return the same tensors without a config."""
    tensors, _ = _mx(random, "weight_packed", "weight_scale")
    return Case(tensors, candidates=("compressed-tensors-mxfp4", "mxint4"))


def deepseek_mxfp4(random: Rng) -> Case:
    """Return an expert of DeepSeek-V4."""
    tensors, shape = _mx(random, "weight", "scale", I8)
    tensors["scale"] = (E8M0, tensors["scale"][1])
    return Case(tensors, ("deepseek-mxfp4", "mxfp4", shape), some(random, {}, {"expert_dtype": "fp4", **method("fp8")}))


def compressed_tensors_nvfp4(random: Rng) -> Case:
    """Return compressed-tensors' NVFP4."""
    n, k = sizes(random, 1, 16)
    tensors: dict[str, Any] = {
        "weight_packed": (U8, (n, k // 2)),
        "weight_scale": (E4M3, (n, k // 16)),
        "weight_global_scale": (F32, (1,)),
    }
    if random.integers(2):
        tensors["input_global_scale"] = (F32, (1,))
    config = some(random, {}, method("compressed-tensors", format="nvfp4-pack-quantized"))
    return Case(tensors, ("compressed-tensors-nvfp4", "nvfp4", (n, k)), config)


def _packed(random: Rng, bits: int) -> Case:
    each = 32 // bits
    groups = int(random.integers(1, 5))
    n, k = sizes(random, 1, groups)
    k += groups * (32 // groups + 1)  # tiny layers fill one word in either width
    tensors: dict[str, Any] = {
        "weight_packed": (I32, (n, -(-k // each))),
        "weight_scale": (some(random, F16, BF16, F32), (n, groups)),
        "weight_shape": torch.tensor([n, k]),
    }
    symmetric = bool(random.integers(2))
    if not symmetric:
        tensors["weight_zero_point"] = (I32, (-(-n // each), groups))
    if random.integers(3) == 0:
        tensors["weight_g_idx"] = (I32, (k,))
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    config = method("compressed-tensors", format="pack-quantized", config_groups={"g": {"weights": weights}})
    return Case(tensors, (f"compressed-tensors-int{bits}", f"int{bits}", (n, k)), some(random, {}, config))


def gpt_oss(random: Rng) -> Case:
    """Return gpt-oss' experts, or a matrix."""
    n, k = sizes(random, 1, 32)
    experts = some(random, (), (3,), (1,))
    tensors = {"_blocks": (U8, (*experts, n, k // 32, 16)), "_scales": (U8, (*experts, n, k // 32))}
    return Case(tensors, ("gpt-oss-mxfp4", "mxfp4", (n, k)), some(random, {}, method("mxfp4")), experts=sum(experts))


def gemma(random: Rng) -> Case:
    """Return a layer or an embedding of 4 or 8 bits."""
    n, k = sizes(random, 1, 2)
    is_int4, is_embedding = bool(random.integers(2)), bool(random.integers(2))
    stored = (U8, (n, k // 2)) if is_int4 else (I8, (n, k))
    names = ("embedding_quantized", "embedding_scale") if is_embedding else ("weight", "weight_scale")
    tensors: dict[str, Any] = {names[0]: stored, names[1]: (F32, (n, 1))}
    if not is_embedding:
        tensors |= {"input_activation_scale": (F32, ()), "output_activation_scale": (F32, ())}
    config = method("gemma", num_bits=4 if is_int4 else 8)
    return Case(tensors, ("gemma", "int4" if is_int4 else "q8_0", (n, k)), config)


def hqq(random: Rng) -> Case:
    """Return HQQ along either axis, with groups that may cross rows."""
    axis, group = int(random.integers(2)), some(random, 32, 64)
    n, k = sizes(random, 8, 16, 20)
    n = _up(n, 2 * group // int(np.gcd(k, group)))
    rows, columns = (n * k // group, group) if axis else (group, n * k // group)
    tensors = {
        "W_q": (U8, (rows // 2, columns)),
        "scale": (F16, (rows, 1) if axis else (1, columns)),
        "zero": (F16, (rows, 1) if axis else (1, columns)),
        "shape": torch.tensor([n, k]),
        "nbits": torch.tensor(4, dtype=I32),
        "group_size": torch.tensor(group, dtype=I32),
        "axis": torch.tensor(axis, dtype=I32),
        "packing": _bytes("4bit_u8"),
        "unpack_view_dtype": _bytes("torch.uint8"),
        "compute_dtype": _bytes("torch.float16"),
        "view_as_float": torch.tensor(0, dtype=U8),
    }
    return Case(tensors, ("hqq", "int4", (n, k)), some(random, {}, method("hqq", quant_config={})))


def mlx(random: Rng) -> Case:
    """Return MLX's affine codes, MXFP4 or NVFP4, of a matrix or experts, with its config."""
    mode, bits, group, name = some(
        random, ("affine", 4, 64, "q4_1"), ("affine", 4, 32, "q4_1"), ("affine", 8, 64, "q8_affine"),
        ("mxfp4", 4, 32, "mxfp4"), ("nvfp4", 4, 16, "nvfp4"),
    )  # fmt: skip
    n, k = sizes(random, 1, 64)
    experts = some(random, (), (), (2,))
    tensors = {"weight": (U32, (*experts, n, k * bits // 32)), "scales": (U8, (*experts, n, k // group))}
    if mode == "affine":
        sides = (some(random, F16, BF16, F32), (*experts, n, k // group))
        tensors |= {"scales": sides, "biases": sides}
    entry = {"bits": bits, "group_size": group, **({"mode": mode} if mode != "affine" or random.integers(2) else {})}
    config = {"quantization": entry, "quantization_config": entry}
    return Case(tensors, ("mlx", name, (n, k)), config, experts=sum(experts))


def mlx_of_any_width(random: Rng) -> Case:
    """Return MLX's affine codes without a config: 4 bits in groups of 64, or 8 bits in groups of 32."""
    n, k = sizes(random, 1, 64)
    sides = (F16, (n, k // 64))
    tensors = {"weight": (U32, (n, k // 8)), "scales": sides, "biases": sides}
    return Case(tensors, candidates=("mlx_bits",))


def _entry(kind: str, names: list[str], **facts: Any) -> str:
    return json.dumps({"_type": kind, "_data": facts, "_tensor_data_names": names})


def _torchao(random: Rng, form: str, *, swizzled: bool) -> Case:
    block, dtype = (16, E4M3) if form == "nvfp4" else (32, E8M0)
    n, k = sizes(random, 16, block)
    experts = some(random, (), (), (2,))
    if experts and swizzled:
        n = _up(n, 128)
    scale = (*experts, 32 * -(-n // 128), 16 * -(-k // (4 * block))) if swizzled else (*experts, n, k // block)
    names = ["qdata", "scale"]
    tensors = {"_weight_qdata": (U8, (*experts, n, k // 2)), "_weight_scale": (dtype, scale)}
    if form == "nvfp4" and random.integers(2):
        tensors["_weight_per_tensor_scale"] = (F32, (*experts, 1, 1) if experts else ())
        names.append("per_tensor_scale")
    element = {"elem_dtype": {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}} if form == "mxfp4" else {}
    kind = "NVFP4Tensor" if form == "nvfp4" else "MXTensor"
    origin = {"_type": "torch.dtype", "_data": "bfloat16"}
    entry = _entry(kind, names, is_swizzled_scales=swizzled, block_size=block, orig_dtype=origin, **element)
    order = "swizzled" if swizzled else "linear"
    dotted = {f".{suffix}": item for suffix, item in tensors.items()}
    metadata = {"MODULE.weight": entry, "tensor_names": '["MODULE.weight"]'}
    return Case(dotted, (f"torchao-{form}-{order}", form, (n, k)), metadata=metadata, experts=sum(experts))


def torchao_int4(random: Rng) -> Case:
    """Return torchao's plain Int4Tensor."""
    group = some(random, 32, 64, 128)
    n, k = sizes(random, 1, group, 12)
    sides = (BF16, (k // group, n))
    tensors = {"._weight_qdata": (I8, (n, k // 2)), "._weight_scale": sides, "._weight_zero_point": sides}
    active = {"_type": "torch.dtype", "_data": "bfloat16"}
    entry = _entry(
        "Int4Tensor", ["qdata", "scale", "zero_point"], block_size=[1, group], shape=[n, k], activation_dtype=active
    )
    return Case(tensors, ("torchao-int4", "q4_1", (n, k)), metadata={"MODULE.weight": entry})


def torchao_int4_tiles(random: Rng) -> Case:
    """Return torchao's tile-packed tensor, padded."""
    group = some(random, 32, 64, 128)
    n, k = sizes(random, 1, group, 12)
    rows, columns = _up(n, 8), _up(k, 1024)
    tensors = {
        "._weight_qdata": (I32, (rows // 8, columns // 128, 32, 4)),
        "._weight_scale_and_zero": (BF16, (columns // group, rows, 2)),
    }
    entry = _entry("Int4TilePackedTo4dTensor", ["qdata", "scale_and_zero"], block_size=[1, group], shape=[n, k])
    return Case(tensors, ("torchao-int4-tile-packed", "q4_1", (n, k)), metadata={"MODULE.weight": entry})


def simple_nf4(random: Rng) -> Case:
    """Return the trio of siblings."""
    n, k = sizes(random, 8, 64)
    book = torch.linspace(-1, 1, 16)
    tensors = {"weight": (U8, (n, k // 2)), "absmax": (F32, (n * k // 64,)), "quant_map": book}
    return Case(tensors, ("simple-nf4", "nf4", (n, k)))


def simple_nvfp4(random: Rng) -> Case:
    """Return the pair of siblings, with scales in either dtype."""
    n, k = sizes(random, 1, 16)
    return Case(
        {"qdata": (U8, (n, k // 2)), "scale": (some(random, U8, F16), (n, k // 16))},
        ("simple-nvfp4", "nvfp4", (n, k)),
    )


def fp8(random: Rng) -> Case:
    """Return FP8 with scales of a tensor, of rows or of blocks, which is decoded."""
    n, k = sizes(random, 2, 2)
    tensors = {"weight": (E4M3, (n, k))}
    suffix, shape = some(
        random, ("weight_scale", ()), ("weight_scale", (n, 1)), ("weight_scale_inv", (-(-n // 128), -(-k // 128)))
    )
    return Case(tensors | {suffix: (F32, shape)}, ("fp8", "fp8", (n, k)))


def _json(facts: Any) -> torch.Tensor:
    return _bytes(json.dumps(facts))


def _bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=U8)


READ: dict[str, Callable[[Rng], Case]] = {
    "awq": awq,
    "awq-gemv": awq_gemv,
    "bitsandbytes": bitsandbytes,
    "comfyui-nvfp4": comfyui,
    "compressed-tensors-int4": lambda random: _packed(random, 4),
    "compressed-tensors-int8": lambda random: _packed(random, 8),
    "compressed-tensors-mxfp4": compressed_tensors_mxfp4,
    "compressed-tensors-nvfp4": compressed_tensors_nvfp4,
    "deepseek-mxfp4": deepseek_mxfp4,
    "fp8": fp8,
    "gemma": gemma,
    "gpt-oss-mxfp4": gpt_oss,
    "gptq": gptq,
    "gptq-v2": gptq_v2,
    "gptqmodel-bitsandbytes": gptqmodel_bitsandbytes,
    "hqq": hqq,
    "mlx": mlx,
    "modelopt-int4": modelopt_int4,
    "modelopt-mxfp4": modelopt_mxfp4,
    "modelopt-nvfp4": modelopt_nvfp4,
    "quark-mxfp4": quark_mxfp4,
    "simple-nf4": simple_nf4,
    "simple-nvfp4": simple_nvfp4,
    "torchao-int4": torchao_int4,
    "torchao-int4-tile-packed": torchao_int4_tiles,
    "torchao-mxfp4-linear": lambda random: _torchao(random, "mxfp4", swizzled=False),
    "torchao-mxfp4-swizzled": lambda random: _torchao(random, "mxfp4", swizzled=True),
    "torchao-nvfp4-linear": lambda random: _torchao(random, "nvfp4", swizzled=False),
    "torchao-nvfp4-swizzled": lambda random: _torchao(random, "nvfp4", swizzled=True),
}
AMBIGUOUS: dict[str, Callable[[Rng], Case]] = {
    "gptq of either version": gptq_of_either_version,
    "nvfp4 of whole tiles": nvfp4_of_whole_tiles,
    "mxfp4 or mxint4": mxfp4_or_mxint4,
    "mlx of any width": mlx_of_any_width,
}


def _mxint4(random: Rng) -> Case:
    tensors, _ = _mx(random, "weight_packed", "weight_scale")
    return Case(tensors, None, method("auto-round", data_type="mx_int", packing_format="auto_round"), refused="mxint4")


def _e5m3(random: Rng) -> Case:
    n, k = sizes(random, 1, 16)
    tensors = {"weight_packed": (U8, (n, k // 2)), "weight_scale": (U8, (n, k // 16))}
    config = some(random, {}, method("compressed-tensors", format="nvfp4-e5m3-pack-quantized"))
    return Case(tensors, None, config, refused="nvfp4-e5m3")


def _paroquant(random: Rng) -> Case:
    n, k = sizes(random, 8, 128, 6)
    tensors = (
        awq(random).tensors if random.integers(2) else {"weight": (U8, (n, k // 2)), "weight_scale": (U8, (n, k // 32))}
    )
    sides = {"theta": (F16, (8, k // 2)), "pairs": (I16, (8, k)), "channel_scales": (F16, (1, k))}
    return Case(tensors | sides, None, some(random, {}, method("paroquant", bits=4)), refused="paroquant")


def _marlin(random: Rng) -> Case:
    n, k = sizes(random, 64, 128, 6)
    if random.integers(2):
        return Case({"B": (I32, (k // 16, 2 * n)), "s": (F16, (k // 128, n))}, refused="marlin")
    tensors = {"qweight": (I32, (k // 16, 2 * n)), "scales": (F16, (k // 128, n))}
    return Case(tensors, None, some(random, {}, method("gptq", bits=4, checkpoint_format="marlin")), refused="marlin")


def _bitblas(random: Rng) -> Case:
    n, k = sizes(random, 16, 128, 6)
    tensors = {"qweight": (I8, (n, k // 2)), "scales": (F16, (n, k // 128)), "qzeros": (I8, (k // 128, n // 2))}
    return Case(tensors, None, method("gptq", bits=4, checkpoint_format="bitblas"), refused="bitblas")


def _gemv_fast(random: Rng) -> Case:
    n, k = sizes(random, 8, 128, 6)
    wide = 8 * -(-(k // 128) // 8)
    tensors = {"qweight": (I16, (n // 4, k)), "qzeros": (F16, (wide, n)), "scales": (F16, (wide, n))}
    return Case(tensors, None, some(random, {}, method("awq", version="gemv_fast")), refused="awq-gemv-fast")


def _of_keys(refused: str, *layouts: dict[str, Any], **facts: Any) -> Callable[[Rng], Case]:
    """Return a maker of a dialect with keys of its own; "n" and "k" in shapes are sizes."""

    def make(random: Rng) -> Case:
        n, k = sizes(random, 128, 128, 6)
        chosen = layouts[int(random.integers(len(layouts)))]
        known = {"n": n, "k": k}
        tensors = {
            suffix: (dtype, tuple(size if isinstance(size, int) else known[size] for size in shape))
            for suffix, (dtype, *shape) in chosen.items()
        }
        return Case(tensors, None, dict(facts), refused=refused)

    return make


LOOK_ALIKES: dict[str, Callable[[Rng], Case]] = {
    "mxint4": _mxint4,
    "nvfp4-e5m3": _e5m3,
    "paroquant": _paroquant,
    "marlin": _marlin,
    "bitblas": _bitblas,
    "awq-gemv-fast": _gemv_fast,
    "exl2": _of_keys("exl2", {"q_weight": (I32, 16, "n"), "q_scale": (I32, 4, 8), "q_invperm": (I16, "k")}),
    "exl3": _of_keys("exl3", {"trellis": (I16, 8, 8, 64), "suh": (F16, "k"), "svh": (F16, "n")}),
    "qtip": _of_keys("qtip", {"trellis": (I16, 8, 64), "SU": (F16, "k"), "SV": (F16, "n")}),
    "vptq": _of_keys("vptq", {"indices": (I32, 1, "n", 8), "centroids.weight": (F16, 1, 256)}),
    "sinq": _of_keys("sinq", {"W_q": (U8, "n", "k"), "meta": (U8, 128)}),
    "svdquant": _of_keys(
        "svdquant", {"qweight": (I8, "n", "k"), "wscales": (F16, 4, "n"), "lora_down": (F16, "k", 32)}
    ),
    "fp-quant": _of_keys(
        "fp-quant",
        {"qweight": (U8, "n", "k"), "scales": (U8, "n", 4), "forward_hadamard_matrix": (BF16, 32, 32)},
    ),
    "aqlm": _of_keys(
        "aqlm", {"codes": (I8, "n", 16, 1), "codebooks": (F16, 1, 256, 1, 8), "scales": (F16, "n", 1, 1, 1)}
    ),
    "comfyui fp8": _of_keys(
        "comfyui fp8", {"weight": (E4M3, "n", "k"), "weight_scale": (F32,), "comfy_quant": (U8, 9)}
    ),
    "fp8": _of_keys("fp8", {"weight": (E5M2, "n", "k"), "weight_scale": (F32,)}),
    "unexplained": _of_keys(
        "unexplained",
        {"codes": (U8, "n", "k"), "block_scale": (F16, "n", 4)},
        {"packed": (I32, "n", 16), "scales_of_tomorrow": (F16, "n", 1)},
        {"weight": (I32, "n", 16), "weight_scales": (F16, "n", 1)},
    ),
}
"""Name → makers of what is refused under it, or called unexplained."""


SIDES: dict[str, Any] = {
    "weight_scale_of_tomorrow": (F32, ()),
    "weight_zeros": (F16, (4,)),
    "svdquant_lora_a": (F16, (8, 8)),
    "input_perm": (I32, (8,)),
    "theta": (F16, (8, 8)),
    "hadamard_matrix": (F16, (32, 32)),
    "rotation": (F16, (32, 32)),
}
"""Unknown scales, orders, rotations and side matrices: whatever has one means something that no dialect says."""


def _stored(case: Case, module: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tensors by name, and what the file and its config say."""
    stored = {}
    for suffix, item in case.tensors.items():
        name = f"{module}{suffix}" if suffix[0] in "_." else f"{module}.{suffix}"
        stored[name] = item if isinstance(item, torch.Tensor) else q4.TensorInfo(*item)
    stored |= {f"{module}.bias": q4.TensorInfo(F16, (8,)), "norm.weight": q4.TensorInfo(F16, (8,))}
    metadata = {key.replace("MODULE", module): text.replace("MODULE", module) for key, text in case.metadata.items()}
    return stored, {"config": case.config, "metadata": metadata}


def _judge_reading(case: Case, module: str) -> None:
    """The module has one reading, the right one, with and without ``dialect=``."""
    assert case.reading is not None
    stored, facts = _stored(case, module)
    schema = q4.detect_or_fail(stored, **facts) if case.reading[0] != "fp8" else q4.detect(stored, **facts)
    assert schema is not None
    assert (schema.unsupported, q4.validate(schema, stored, **facts)) == ((), ())
    found = {key: (layer.dialect, layer.format, layer.shape) for key, layer in schema.layers.items()}
    if case.reading[0] == "fp8":
        assert found == {}
        assert {key: layer.dialect for key, layer in schema.decoded.items()} == {f"{module}.weight": "fp8"}
        return
    modules = [f"{module}.{number}" for number in range(case.experts)] or [module]
    assert found == dict.fromkeys(modules, case.reading)
    assert not set(schema.dense) - {f"{module}.bias", "norm.weight"}
    assert q4.detect_or_fail(stored, dialect=case.reading[0], **facts).dialects == case.reading[:1]


def _judge_ambiguity(case: Case, module: str) -> None:
    """The error names every candidate, and each that is a dialect can be chosen."""
    stored, facts = _stored(case, module)
    with pytest.raises(q4.SchemaError) as caught:
        q4.detect_or_fail(stored, **facts)
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == ("ambiguous", module)
    assert all(name in str(problem) for name in case.candidates)
    for name in {*case.candidates} & {*READ}:
        assert q4.detect_or_fail(stored, dialect=name, **facts).dialects == (name,)


def _judge_refusal(case: Case, module: str) -> None:
    """The module is listed under its name, and none of its tensors is dense."""
    stored, facts = _stored(case, module)
    with pytest.raises(q4.SchemaError):
        q4.detect_or_fail(stored, **facts)
    schema = q4.detect(stored, **facts)
    assert schema is not None
    (problem,) = schema.unsupported
    assert problem.key == module
    assert case.refused in {problem.code, str(problem.value), *str(problem.value).split()}
    assert (dict(schema.layers), {*schema.dense} - {f"{module}.bias", "norm.weight"}) == ({}, set())


def _judge_side(case: Case, module: str) -> None:
    """A tensor that no dialect knows makes an error that names it, or the dialect that it belongs to."""
    stored, facts = _stored(case, module)
    schema = q4.detect(stored, **facts)
    assert schema is not None
    problems = (*q4.validate(schema, stored, **facts), *schema.unsupported)
    assert any(problem.key in {module, f"{module}.{[*case.tensors][-1]}"} for problem in problems)


def test_every_generated_module_is_what_it_is() -> None:
    """Of each dialect 20, with the right format and shape; look-alikes and what fits several are errors by name."""
    wrong: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    strange = {f"{name} with {side}": (make, side) for name, make in READ.items() for side in SIDES}
    for place, (judge, makers) in enumerate(
        (
            (_judge_reading, READ),
            (_judge_ambiguity, AMBIGUOUS),
            (_judge_refusal, LOOK_ALIKES),
            (_judge_side, {name: _with_side(*pair) for name, pair in strange.items()}),
        )
    ):
        for number, (name, make) in enumerate(makers.items()):
            for seed in range(EACH if judge is not _judge_side else 2):
                random = np.random.default_rng([place, number, seed])
                counts[name.partition(" with ")[0]] += 1
                try:
                    judge(make(random), some(random, *NAMES))
                except (AssertionError, q4.Q4Error, ValueError, pytest.fail.Exception) as error:
                    wrong.append(f"{name} {seed}: {error}"[:600])
    assert wrong == []
    assert counts.total() >= 1000
    assert min(counts.values()) >= 10
    known = {dialect.name for dialect in q4.dialects()} - {"recognised-only"}
    assert known == {*READ}, "a dialect that no module is generated for"


def _with_side(make: Callable[[Rng], Case], side: str) -> Callable[[Rng], Case]:
    def changed(random: Rng) -> Case:
        case = make(random)
        return attrs.evolve(case, tensors={**case.tensors, side: SIDES[side]})

    return changed
