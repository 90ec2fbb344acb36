"""Random layers of single dialects, with their values: packed and decoded here by each dialect's formula, in numpy.

Shapes are odd where the dialect allows it; some blocks are all zero, some scales negative, huge or tiny.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BUILDERS", "FP8", "Layer"]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Array = np.ndarray[Any, Any]


@attrs.frozen(kw_only=True)
class Layer:
    """The tensors of the module ``proj``, what ``config.json`` says, and the values."""

    dialect: str
    tensors: dict[str, torch.Tensor]
    value: Array
    config: dict[str, Any]
    is_written: bool = True


def nibbles(codes: Array) -> Array:
    """Return bytes of two codes along the last axis, the first one low; an odd one has a zero after it."""
    codes = np.pad(codes, [*[(0, 0)] * (codes.ndim - 1), (0, codes.shape[-1] % 2)]).astype(np.uint8)
    return np.asarray(codes[..., 0::2] | (codes[..., 1::2] << 4))


def words(codes: Array, bits: int) -> Array:
    """Return int32 words of codes along the last axis, the first one lowest; the last word is filled with zeros."""
    each = 32 // bits
    codes = np.pad(codes, [(0, 0), (0, -codes.shape[1] % each)]).astype(np.uint32).reshape(len(codes), -1, each)
    found = np.zeros(codes.shape[:2], np.uint32)
    for place in range(each):
        found |= codes[:, :, place] << np.uint32(place * bits)
    return found.view(np.int32)


def rounded(numbers: Array, dtype: torch.dtype) -> tuple[torch.Tensor, Array]:
    """Return numbers in a dtype, and these as float32."""
    stored = torch.from_numpy(np.ascontiguousarray(numbers.astype(np.float32))).to(dtype)
    return stored, stored.to(torch.float32).numpy()


def some_scales(random: np.random.Generator, *shape: int, signed: bool = True) -> Array:
    """Return scales of which some are 0, some large or tiny, and some negative where that is legal."""
    scale = random.uniform(1e-3, 0.1, shape)
    kind = random.integers(0, 12, shape)
    scale = np.where(kind == 0, 0, np.where(kind == 1, 65504.0, np.where(kind == 2, 6e-8, scale)))
    return np.where(random.integers(0, 5, shape) == 0, -scale, scale) if signed else scale


def tensor(array: Array) -> torch.Tensor:
    """Return a tensor of its own memory."""
    return torch.from_numpy(np.ascontiguousarray(array))


def _bias(random: np.random.Generator, rows: int) -> dict[str, torch.Tensor]:
    return {"proj.bias": tensor(random.normal(size=rows).astype(np.float32))} if random.integers(2) else {}


def _ct(method: str = "compressed-tensors", **facts: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **facts}}


def compressed_tensors_int(seed: int, bits: int) -> Layer:
    """Return a layer in words of 32 bits, with zero points and an order of the in-features in some."""
    random = np.random.default_rng(seed)
    rows, groups, each = int(random.integers(1, 40)), int(random.integers(1, 5)), int(random.integers(5, 33))
    columns = groups * each
    codes = random.integers(0, 1 << bits, (rows, columns))
    scale, factor = rounded(some_scales(random, rows, groups), FLOATS[seed % 3])
    middle = np.full((rows, groups), 1 << (bits - 1))
    group = np.arange(columns) // each
    tensors = {
        "proj.weight_packed": tensor(words(codes, bits)),
        "proj.weight_scale": scale,
        "proj.weight_shape": torch.tensor([rows, columns]),
        **_bias(random, rows),
    }
    symmetric = bool(random.integers(2))
    if not symmetric:
        middle = random.integers(0, 1 << bits, (rows, groups))
        tensors["proj.weight_zero_point"] = tensor(words(middle.T, bits).T)
    order = int(random.integers(4))
    if order == 1:
        group = random.permutation(group)
    if order:
        stored = np.full(columns, -1) if order == 2 else group
        tensors["proj.weight_g_idx"] = tensor(stored.astype(np.int32))
    value = (codes - middle[:, group]).astype(np.float32) * factor[:, group]
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    config = _ct(format="pack-quantized", config_groups={"group_0": {"weights": weights}})
    return Layer(dialect=f"compressed-tensors-int{bits}", tensors=tensors, value=value, config=config)


def _mx(seed: int) -> tuple[np.random.Generator, Array, Array, Array]:
    random = np.random.default_rng(seed)
    rows, groups = int(random.integers(1, 40)), int(random.integers(1, 5))
    codes = random.integers(0, 16, (rows, groups * 32))
    scale = random.integers(100, 140, (rows, groups)).astype(np.uint8)
    scale[random.integers(0, 10, scale.shape) == 0] = 0
    scale[random.integers(0, 10, scale.shape) == 0] = 252
    codes[:, :32][random.integers(0, 2, rows) == 0] = 0
    factor = np.ldexp(np.float32(1), scale.astype(np.int32) - 127).astype(np.float32)
    return random, codes, scale, E2M1[codes] * factor.repeat(32, 1)


def compressed_tensors_mxfp4(seed: int) -> Layer:
    """Return a layer of compressed-tensors, or of AutoRound under the same keys."""
    random, codes, scale, value = _mx(seed)
    tensors = {"proj.weight_packed": tensor(nibbles(codes)), "proj.weight_scale": tensor(scale)}
    config = _ct(format="mxfp4-pack-quantized")
    if seed % 3 == 0:
        config = _ct("auto-round", data_type="mx_fp", packing_format="auto_round:llm_compressor")
    elif seed % 3 == 1:
        config = _ct(format="mixed-precision", config_groups={"g": {"format": "mxfp4-pack-quantized"}})
    tensors |= _bias(random, len(codes))
    return Layer(dialect="compressed-tensors-mxfp4", tensors=tensors, value=value, config=config)


def modelopt_mxfp4(seed: int, method: str = "modelopt") -> Layer:
    """Return a layer of ModelOpt or Quark, with scales in either dtype."""
    random, codes, scale, value = _mx(seed)
    stored = tensor(scale)
    tensors = {
        "proj.weight": tensor(nibbles(codes)),
        "proj.weight_scale": stored.view(torch.float8_e8m0fnu) if seed % 4 == 1 else stored,
        **_bias(random, len(codes)),
    }
    if method == "modelopt" and seed % 5 == 0:
        tensors["proj.input_scale"] = torch.tensor(0.25)
    config = _ct("modelopt", quant_algo="mxfp4") if method == "modelopt" and seed % 2 else {}
    config = _ct("quark") if method == "quark" else config
    is_written = method == "modelopt"
    return Layer(dialect=f"{method}-mxfp4", tensors=tensors, value=value, config=config, is_written=is_written)


def deepseek_mxfp4(seed: int) -> Layer:
    """Return an expert of DeepSeek-V4."""
    _, codes, scale, value = _mx(seed)
    tensors = {
        "proj.weight": tensor(nibbles(codes)).view(torch.int8),
        "proj.scale": tensor(scale).view(torch.float8_e8m0fnu),
    }
    config = {"expert_dtype": "fp4", **_ct("fp8")} if seed % 2 else {}
    return Layer(dialect="deepseek-mxfp4", tensors=tensors, value=value, config=config)


def modelopt_int4(seed: int) -> Layer:
    """Return a layer whose bytes hold two rows, with what AWQ and W4A8 add."""
    random = np.random.default_rng(seed)
    half, groups, each = int(random.integers(1, 20)), int(random.integers(1, 5)), int(random.integers(1, 40))
    rows, columns = half * 2, groups * each
    codes = random.integers(-8, 8, (rows, columns))
    scale, factor = rounded(some_scales(random, rows, groups), FLOATS[seed % 3])
    value = codes.astype(np.float32) * factor.repeat(each, 1)
    pairs = (codes[0::2] & 15) | ((codes[1::2] & 15) << 4)
    tensors = {"proj.weight": tensor(pairs.astype(np.uint8)), "proj.weight_scale": scale, **_bias(random, rows)}
    if random.integers(2):
        smooth, channel = rounded(random.uniform(0.5, 2, columns), FLOATS[(seed + 1) % 3])
        tensors["proj.pre_quant_scale"] = smooth
        value = value * channel
    algorithm = "W4A16_AWQ"
    if seed % 4 == 0:
        algorithm = "W4A8_AWQ"
        tensors |= {"proj.weight_scale_2": torch.tensor(0.125), "proj.input_scale": torch.tensor(0.5)}
    config = _ct("modelopt", quant_algo=algorithm) if seed % 2 else {}
    return Layer(dialect="modelopt-int4", tensors=tensors, value=value, config=config)


def gptqmodel_bitsandbytes(seed: int) -> Layer:
    """Return a layer of NF4 or FP4 under flat names; scales have one level or two."""
    random = np.random.default_rng(seed)
    rows, columns, block = int(random.integers(1, 30)), int(random.integers(1, 150)), int(2 ** random.integers(5, 8))
    total = rows * columns
    codes = random.integers(0, 16, total)
    kind, table = ("nf4", NF4) if seed % 2 else ("fp4", random.uniform(-1, 1, 16).astype(np.float32))
    count = -(-total // block)
    facts = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": [rows, columns]}
    tensors = {
        "proj.weight": tensor(nibbles(codes.reshape(1, -1))).reshape(-1, 1),
        "proj.weight_quant_map": tensor(table),
        **_bias(random, rows),
    }
    tensors["proj.weight"] = (tensors["proj.weight"] >> 4) | (tensors["proj.weight"] << 4)
    if seed % 4 < 2:
        scale = np.where(random.integers(0, 9, count) == 0, 0, random.uniform(1e-3, 1, count)).astype(np.float32)
        tensors["proj.weight_absmax"] = tensor(scale)
    else:
        first = random.integers(0, 256, count)
        levels, second = random.uniform(-1, 1, 256).astype(np.float32), random.uniform(0, 1, -(-count // 256))
        second = second.astype(np.float32)
        facts |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.625}
        scale = levels[first] * second[np.arange(count) // 256] + np.float32(0.625)
        tensors |= {
            "proj.weight_absmax": tensor(first.astype(np.uint8)),
            "proj.weight_nested_absmax": tensor(second),
            "proj.weight_nested_quant_map": tensor(levels),
        }
    tensors["proj.weight_quant_state"] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    value = (table[codes] * scale[np.arange(total) // block]).reshape(rows, columns)
    config = _ct("bitsandbytes", bits=4, format=kind) if seed % 3 else {}
    return Layer(dialect="gptqmodel-bitsandbytes", tensors=tensors, value=value, config=config)


def gemma(seed: int) -> Layer:
    """Return a layer, or an embedding, of 4 or 8 bits."""
    random = np.random.default_rng(seed)
    rows, columns = int(random.integers(1, 40)), 2 * int(random.integers(1, 40))
    is_embedding, is_int4 = seed % 3 == 0, bool(seed % 2)
    groups = 2 if is_embedding and columns % 4 == 0 else 1
    codes = random.integers(-8, 8, (rows, columns)) if is_int4 else random.integers(-128, 128, (rows, columns))
    scale = some_scales(random, rows, groups).astype(np.float32)
    stored = tensor(nibbles(codes + 8)) if is_int4 else tensor(codes.astype(np.int8))
    names = ("embedding_quantized", "embedding_scale") if is_embedding else ("weight", "weight_scale")
    tensors = {f"proj.{names[0]}": stored, f"proj.{names[1]}": tensor(scale)}
    if not is_embedding:
        tensors |= {"proj.input_activation_scale": torch.tensor(0.5 * (seed % 4 == 1))}
        tensors |= {"proj.output_activation_scale": torch.tensor(0.0)}
    value = codes.astype(np.float32) * scale.repeat(columns // groups, 1)
    config = _ct("gemma", num_bits=8, module_quant_configs={"proj": {"num_bits": 4}})
    return Layer(dialect="gemma", tensors=tensors, value=value, config=config, is_written=False)


def fp8(seed: int) -> Layer:
    """Return a layer of FP8, whose value is one rounding away."""
    random = np.random.default_rng(seed)
    rows, columns = int(random.integers(2, 300)), 2 * int(random.integers(1, 160))
    raw = random.integers(0, 256, (rows, columns)).astype(np.uint8)
    raw[(raw & 127) == 127] = 1  # no NaN
    codes = tensor(raw).view(torch.float8_e4m3fn)
    kind = ("tensor", "one", "vector", "channel", "group", "block", "inverse", "axes", "powers", "old")[seed % 10]
    shapes = {
        "tensor": (), "one": (1,), "vector": (rows,), "channel": (rows, 1), "group": (rows, 2), "old": (),
    }  # fmt: skip
    shape = shapes.get(kind, (-(-rows // 128), -(-columns // 128)))
    if kind == "powers":
        numbers = random.integers(100, 140, shape).astype(np.uint8)
        stored, factor = tensor(numbers).view(torch.float8_e8m0fnu), np.ldexp(np.float32(1), numbers.astype(int) - 127)
    else:
        stored, factor = rounded(np.abs(random.normal(size=shape)) / 16, FLOATS[seed % 3])
    suffix = {"inverse": "weight_scale_inv", "powers": "scale", "old": "scale_weight"}.get(kind, "weight_scale")
    stored = stored.reshape(shape[0], 1, shape[1], 1) if kind == "axes" else stored
    tensors = {"proj.weight": codes, f"proj.{suffix}": stored, **_bias(random, rows)}
    if seed % 2:
        tensors["proj.input_scale"] = torch.tensor(0.5)
    if len(factor.shape) == 2 and kind not in {"channel", "group"}:
        each = factor.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    elif kind == "group":
        each = factor.repeat(columns // 2, 1)
    else:
        each = np.broadcast_to(factor.reshape(-1, 1) if factor.size > 1 else factor.reshape(1, 1), (rows, columns))
    value = codes.to(torch.float32).numpy() * each.astype(np.float32)
    return Layer(dialect="fp8", tensors=tensors, value=value, config={})


BUILDERS: dict[str, Callable[[int], Layer]] = {
    "compressed-tensors-int4": lambda seed: compressed_tensors_int(seed, 4),
    "compressed-tensors-int8": lambda seed: compressed_tensors_int(seed, 8),
    "compressed-tensors-mxfp4": compressed_tensors_mxfp4,
    "modelopt-mxfp4": modelopt_mxfp4,
    "quark-mxfp4": lambda seed: modelopt_mxfp4(seed, "quark"),
    "deepseek-mxfp4": deepseek_mxfp4,
    "modelopt-int4": modelopt_int4,
    "gptqmodel-bitsandbytes": gptqmodel_bitsandbytes,
    "gemma": gemma,
}
FP8 = fp8
