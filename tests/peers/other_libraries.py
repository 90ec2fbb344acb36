"""Other libraries' 4-bit layers on the CPU, as functions that the conformance kit judges.

Each adapter hands a packed weight to a library the way the library's own files do: written in the library's dialect and
read by the library's loader. What is claimed is what the library says of itself; a weight that its files can't hold, or
a size that it says it does not take, is not declared, and counts for nothing.
"""

from __future__ import annotations

import functools
import importlib
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from benchmarks.int4pack import int4pack_operands

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["SUBJECTS", "Subject"]

_HALVES = (torch.bfloat16, torch.float16)
_EVERY = (torch.float32, *_HALVES)
_Limit = str | None


@attrs.frozen(kw_only=True)
class Subject:
    """One way to call a library.

    Args:
        name: As people call it.
        distribution: Whose version counts.
        formats: The formats that it computes in.
        function: ``fn(x, weight, bias) -> y``.
        claims: What it claims, as arguments of ``check_linear``.
        in_words: The same in words, and where it is said.
        modules: What it imports.
        rows: N of the cases' usual weight.
        is_by_cpu: Whether it picks a kernel by the CPU, so that its verdicts do not hold for another.
    """

    name: str
    distribution: str
    formats: tuple[str, ...]
    function: Callable[..., torch.Tensor]
    claims: Mapping[str, Any]
    in_words: str
    modules: tuple[str, ...] = ()
    rows: int = 48
    is_by_cpu: bool = False

    def load(self) -> None:
        """Import the library; where it is not installed, that is an error and no verdict."""
        for name in self.modules:
            _module(name)


@functools.cache
def _module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries' words about each other's versions, at import only
        return importlib.import_module(name)


@functools.cache
def _dialect(name: str) -> q4.Dialect:
    return next(dialect for dialect in q4.dialects() if dialect.name == name)


def _kept(make: Callable[[q4.PackedWeight, torch.dtype], Any]) -> Callable[[q4.PackedWeight, torch.dtype], Any]:
    """Let a weight be handed to the library once for each dtype, as a model is loaded once."""
    made: weakref.WeakKeyDictionary[q4.PackedWeight, dict[torch.dtype, Any]] = weakref.WeakKeyDictionary()

    def keep(weight: q4.PackedWeight, dtype: torch.dtype) -> Any:
        known = made.setdefault(weight, {})
        if dtype not in known:
            known[dtype] = make(weight, dtype)
        return known[dtype]

    return keep


def _written(dialect: str, weight: q4.PackedWeight, dtype: torch.dtype) -> q4.WrittenLayer:
    """Return the layer's tensors as the library's files have them, of a model whose own dtype is ``dtype``."""
    return _dialect(dialect).write("proj", attrs.evolve(weight, dtype=dtype))


def _unwritable(dialect: str, weight: q4.PackedWeight, dtype: torch.dtype) -> _Limit:
    """Return why the library's files can't hold a weight."""
    try:
        _written(dialect, weight, dtype)
    except q4.DialectError as error:
        return f"the library's files can't hold it: {error}"
    return None


# -- bitsandbytes


def _bitsandbytes_limit(weight: q4.PackedWeight, dtype: torch.dtype) -> _Limit:
    if weight.codebook is not None:
        return "code books other than the format's own are not claimed"
    return _unwritable("bitsandbytes", weight, dtype)


def _linear4bit_limit(weight: q4.PackedWeight, dtype: torch.dtype) -> _Limit:
    if weight.out_features % 32 and _module("bitsandbytes.functional").has_avx512bf16():
        return "with AVX512-BF16 the layer asserts that N is a multiple of 32"
    return _bitsandbytes_limit(weight, dtype)


def _bitsandbytes_tensors(weight: q4.PackedWeight, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tensors = dict(_written("bitsandbytes", weight, dtype).tensors)
    return tensors.pop("proj.weight"), {key.removeprefix("proj.weight."): value for key, value in tensors.items()}


@_kept
def _quant_state(weight: q4.PackedWeight, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    packed, sides = _bitsandbytes_tensors(weight, dtype)
    return packed, _module("bitsandbytes.functional").QuantState.from_dict(sides, "cpu")


def _matmul_4bit(
    x: torch.Tensor, weight: q4.PackedWeight, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    packed, state = _quant_state(weight, x.dtype)
    y: torch.Tensor = _module("bitsandbytes").matmul_4bit(x, packed, quant_state=state, bias=bias, out=out)
    return y


@_kept
def _linear4bit_layer(weight: q4.PackedWeight, dtype: torch.dtype) -> Any:
    nn = _module("bitsandbytes.nn")
    rows, columns = weight.shape
    layer = nn.Linear4bit(columns, rows, bias=False, compute_dtype=dtype, quant_type=weight.format.name)
    packed, sides = _bitsandbytes_tensors(weight, dtype)
    layer.weight = nn.Params4bit.from_prequantized(packed, {f"weight.{k}": v for k, v in sides.items()}, device="cpu")
    return layer.eval()


def _linear4bit(x: torch.Tensor, weight: q4.PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    layer = _linear4bit_layer(weight, x.dtype)
    if bias is None:
        layer.bias = None
    elif layer.bias is None or layer.bias.data_ptr() != bias.data_ptr():
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    with torch.no_grad():
        y: torch.Tensor = layer(x)
    return y


# -- torchao


@_kept
def _nvfp4_tensor(weight: q4.PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    dialect = _dialect("torchao-nvfp4-linear")
    written = _written(dialect.name, weight, dtype)
    metadata = dialect.merge_metadata({"proj": written}, ())
    support = _module("torchao.prototype.safetensors.safetensors_support")
    read, _ = support.unflatten_tensor_state_dict(dict(written.tensors), metadata)
    tensor: torch.Tensor = read["proj.weight"]
    return tensor


def _torchao_nvfp4(x: torch.Tensor, weight: q4.PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, _nvfp4_tensor(weight, x.dtype), bias)


# -- torch's int4 product, bare and inside torchao's tensor


def _int4_numbers(weight: q4.PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and what is added, float64 [N, groups], so that the weight is (code - 8) scale + added."""
    scale = weight.resolved_scale().double()
    zero = torch.full_like(scale, 8.0) if weight.zero is None else weight.zero.double()
    return scale, (8.0 - zero) * scale


def _int4_limit(weight: q4.PackedWeight, dtype: torch.dtype) -> _Limit:
    if weight.input_permutation is not None or weight.input_channel_scale is not None:
        return "the product takes no permutation and no scale of the in-features"
    if weight.out_features % 16 or weight.in_features % 2:
        return "torch says that N must be a multiple of 16 and K of 2"
    if weight.block_size not in {32, 64, 128, 256} or weight.in_features % weight.block_size:
        return "torch says that groups are 32, 64, 128 or 256 long and K a multiple of them"
    for numbers in _int4_numbers(weight):
        if not torch.equal(numbers.to(dtype).double(), numbers):
            return f"scales and zero points are stored in x's dtype, and {dtype} does not hold this weight's exactly"
    return None


@_kept
def _int4_operands(weight: q4.PackedWeight, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return int4pack_operands(weight.codes().to(torch.int32), *_int4_numbers(weight), dtype)


def _int4pack_mm(x: torch.Tensor, weight: q4.PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    del bias  # not claimed
    flat = x.reshape(-1, weight.in_features)
    packed, numbers = _int4_operands(weight, x.dtype)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu  # its only name
    try:
        y: torch.Tensor = product(flat, packed, weight.block_size, numbers)
    except RuntimeError as error:
        if "expect A to be contiguous" not in str(error):
            raise
        raise q4.InputError("_weight_int4pack_mm_for_cpu", name="x", rule="contiguous", value=x.stride()) from error
    return y.reshape(*x.shape[:-1], weight.out_features)


@_kept
def _int4_tensor(weight: q4.PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    module = _module("torchao.prototype.quantization.int4.int4_opaque_tensor")
    packed, numbers = _int4_operands(weight, dtype)
    tensor: torch.Tensor = module.Int4OpaqueTensor(packed, numbers, [1, weight.block_size], torch.Size(weight.shape))
    return tensor


def _torchao_int4(x: torch.Tensor, weight: q4.PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, _int4_tensor(weight, x.dtype), bias)


_ONCE = dict.fromkeys(_HALVES, 1)
SUBJECTS = (
    Subject(
        name="bitsandbytes `matmul_4bit`",
        distribution="bitsandbytes",
        formats=("nf4", "fp4"),
        function=_matmul_4bit,
        claims={
            "dtypes": _EVERY, "has_out": True, "has_gradients": True, "roundings": _ONCE, "limit": _bitsandbytes_limit,
        },
        in_words="x in float32, bfloat16 and float16. The weight is dequantised to x's dtype (one rounding of each "
        "weight in the 16-bit ones), then multiplied; `out=`; gradients to x.",
        modules=("bitsandbytes",),
        is_by_cpu=True,
    ),
    Subject(
        name="bitsandbytes `Linear4bit`, eval mode",
        distribution="bitsandbytes",
        formats=("nf4", "fp4"),
        function=_linear4bit,
        claims={"dtypes": _EVERY, "roundings": dict.fromkeys(_HALVES, 2), "limit": _linear4bit_limit},
        in_words="x in float32, bfloat16 and float16, `compute_dtype` that of x. In the 16-bit ones scales and weights "
        "are rounded to x's dtype (two roundings of each weight).",
        rows=64,
        modules=("bitsandbytes",),
        is_by_cpu=True,
    ),
    Subject(
        name="torchao `NVFP4Tensor`, weight only",
        distribution="torchao",
        formats=("nvfp4",),
        function=_torchao_nvfp4,
        claims={
            "dtypes": _EVERY, "roundings": _ONCE, "limit": functools.partial(_unwritable, "torchao-nvfp4-linear"),
        },
        in_words="x in float32, bfloat16 and float16. The weight is dequantised to x's dtype (one rounding of each "
        "weight in the 16-bit ones), then multiplied.",
        modules=("torchao.prototype.safetensors.safetensors_support",),
    ),
    Subject(
        name="torchao `Int4OpaqueTensor`, weight only",
        distribution="torchao",
        formats=("int4",),
        function=_torchao_int4,
        claims={"dtypes": _EVERY, "limit": _int4_limit},
        in_words="x in float32, bfloat16 and float16, scales and zero points in x's dtype.",
        modules=("torchao.prototype.quantization.int4.int4_opaque_tensor",),
    ),
    Subject(
        name="torch `aten._weight_int4pack_mm_for_cpu`",
        distribution="torch",
        formats=("int4",),
        function=_int4pack_mm,
        claims={"dtypes": _EVERY, "has_bias": False, "limit": _int4_limit},
        in_words="x [M, K] in float32, bfloat16 and float16, scales and zero points in x's dtype; no bias.",
    ),
)  # fmt: skip
"""Everything that is judged."""
