"""NF4 and FP4 as bitsandbytes' ``Linear4bit`` saves them, and the simplified trio made of the same tensors.

The oracle is bitsandbytes' portable kernel, which gives the same bits on every CPU. Behind the public call the CPU
chooses another one; each case asserts that it agrees, but for the faults of version 0.50.2 that ``expected_of`` names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as portable_dequantize
from bitsandbytes.nn import Linear4bit, Params4bit
from case import DTYPE_NAMES, Case, all_codes, dense, edges

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = "bitsandbytes"


def _portable(weight: torch.Tensor, state: bnb.QuantState, dtype: torch.dtype) -> torch.Tensor:
    """Return the portable kernel's result [N, K]."""
    absmax = state.absmax
    if state.nested:
        absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
    codes = weight.view(torch.uint8).reshape(-1)
    return portable_dequantize(codes, absmax, state.code, state.blocksize, tuple(state.shape), dtype)


def expected_of(weight: torch.Tensor, state: bnb.QuantState, dtype: torch.dtype) -> torch.Tensor:
    """Return the portable kernel's result, after checking the public call where its kernels are sound."""
    result = _portable(weight, state, dtype)
    n, k = state.shape
    # With AVX-512 and K a multiple of 16, 0.50.2 reads block scales row by row: wrong where a block straddles rows.
    if k % state.blocksize == 0 or k % 16:
        state.dtype, stored = dtype, state.dtype
        public = bnb.dequantize_4bit(weight, state)
        state.dtype = stored
        agreed = result
        if dtype == torch.bfloat16 and k % 16 == 0 and bnb.has_avx512bf16():
            # There 0.50.2 narrows with VCVTNEPS2BF16, which takes every subnormal number for a zero of its sign.
            is_subnormal = _portable(weight, state, torch.float32).abs() < torch.finfo(torch.float32).tiny
            agreed = result.masked_fill(is_subnormal, 0.0)
        if not torch.equal(public, agreed):  # -0 is +0 here: the scalar kernel decodes FP4's code 8 as -0
            raise RuntimeError(f"bitsandbytes disagrees with itself for {state.quant_type} {(n, k)} {state.blocksize}")
    return result


def _layer(
    weight: torch.Tensor, kind: str, block: int, *, nested: bool, storage: torch.dtype, bias: bool
) -> Linear4bit:
    """Return a quantised ``Linear4bit`` that holds ``weight``."""
    n, k = weight.shape
    layer = Linear4bit(k, n, bias=bias, compress_statistics=nested, quant_type=kind, quant_storage=storage)
    layer.weight = Params4bit(
        weight.clone(),
        requires_grad=False,
        blocksize=block,
        compress_statistics=nested,
        quant_type=kind,
        quant_storage=storage,
        module=layer,
    )
    if bias:
        layer.bias = torch.nn.Parameter(torch.linspace(-1, 1, n).to(weight.dtype))
    return layer.to("cpu")


def _config(kind: str, *, nested: bool, storage: torch.dtype) -> dict[str, object]:
    return {
        "quantization_config": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": nested,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": str(storage).removeprefix("torch."),
            "llm_int8_skip_modules": None,
        }
    }


def _quantised(
    name: str,
    weight: torch.Tensor,
    kind: str,
    block: int,
    *,
    nested: bool = False,
    storage: torch.dtype = torch.uint8,
    bias: bool = False,
    notes: str = "",
) -> Case:
    layer = _layer(weight, kind, block, nested=nested, storage=storage, bias=bias)
    tensors = {f"proj.{key}": value.detach().contiguous() for key, value in layer.state_dict().items()}
    state = layer.weight.quant_state
    dtypes = dict.fromkeys((torch.float32, weight.dtype))
    return Case(
        dialect="bitsandbytes",
        name=name,
        format=kind,
        library=LIBRARY,
        tensors=tensors,
        expected={DTYPE_NAMES[dtype]: expected_of(layer.weight.data, state, dtype) for dtype in dtypes},
        shape=tuple(weight.shape),
        block=block,
        dtype=DTYPE_NAMES[weight.dtype],
        source=weight,
        config=_config(kind, nested=nested, storage=storage),
        notes=notes,
    )


def _stored(
    name: str, kind: str, absmax: torch.Tensor, n: int, k: int, *, state2: bnb.QuantState | None = None
) -> Case:
    """Return an enumeration: every code under the given block scales (64 each)."""
    codes = all_codes(absmax.numel(), 64).reshape(-1)
    packed = ((codes[::2] << 4) | codes[1::2]).reshape(-1, 1)
    state = bnb.QuantState(
        absmax=absmax,
        shape=torch.Size((n, k)),
        code=bnb.get_4bit_type(kind, device="cpu"),
        blocksize=64,
        quant_type=kind,
        dtype=torch.float32,
        offset=None if state2 is None else torch.tensor(0.7310585975646973),
        state2=state2,
    )
    tensors = {"proj.weight": packed}
    tensors.update({f"proj.weight.{key}": value for key, value in state.as_dict(packed=True).items()})
    return Case(
        dialect="bitsandbytes",
        name=name,
        format=kind,
        library=LIBRARY,
        tensors=tensors,
        expected={
            "float32": expected_of(packed, state, torch.float32),
            "bfloat16": expected_of(packed, state, torch.bfloat16),
        },
        shape=(n, k),
        block=64,
        dtype="float32",
        config=_config(kind, nested=state2 is not None, storage=torch.uint8),
        notes="every code under enumerated block scales",
    )


def _enumerations() -> Iterator[Case]:
    special = [
        0.0,
        1.0,
        3e38,
        1e-38,
        1e-42,
        65504.0,
        2.0**-24,
        0.1,
        1 / 3,
        448.0,
        2.0**-9,
        1e-45,
        6.0,
        0.3333,
        1e30,
        7.0,
    ]
    for kind in ("nf4", "fp4"):
        yield _stored(f"{kind}-all-codes", kind, torch.tensor(special), 8, 128)
    table = bnb.create_dynamic_map().float()
    second = bnb.QuantState(absmax=torch.tensor([0.6180339746, 3.0]), blocksize=256, code=table, dtype=torch.float32)
    levels = torch.cat((torch.arange(256), torch.arange(4))).to(torch.uint8)
    yield _stored("nf4-all-nested-levels", "nf4", levels, 65, 256, state2=second)


def _simple(case: Case) -> Case:
    """Return the trio ``weight``, ``absmax``, ``quant_map`` that holds the same layer."""
    n, k = case.shape
    return Case(
        dialect="simple-nf4",
        name=case.name,
        format=case.format,
        library=LIBRARY,
        tensors={
            "proj.weight": case.tensors["proj.weight"].reshape(n, k // 2),
            "proj.absmax": case.tensors["proj.weight.absmax"],
            "proj.quant_map": case.tensors["proj.weight.quant_map"],
        },
        expected=case.expected,
        shape=case.shape,
        block=case.block,
        dtype=case.dtype,
        source=case.source,
        notes="bitsandbytes' tensors under the simplified names; the high nibble is the even element",
    )


def cases() -> Iterator[Case]:
    """Yield every case of the two dialects."""
    bf16, f16 = torch.bfloat16, torch.float16
    for kind in ("nf4", "fp4"):
        single = _quantised(f"{kind}-b64", dense(f"bnb {kind} 1", 12, 128, bf16), kind, 64, bias=True)
        yield single
        yield _simple(single)
        other = _quantised(f"{kind}-b128-float32", dense(f"bnb {kind} 2", 8, 256), kind, 128)
        yield other
        yield _simple(other)
        yield _quantised(f"{kind}-b64-double", dense(f"bnb {kind} 3", 16, 128, bf16), kind, 64, nested=True)
        yield _quantised(f"{kind}-b64-float16", dense(f"bnb {kind} 4", 8, 64, f16), kind, 64)
        note = "K is no multiple of the block: blocks straddle rows"
        yield _quantised(f"{kind}-straddled", dense(f"bnb {kind} 5", 6, 96, bf16), kind, 64, notes=note)
        yield _quantised(f"{kind}-straddled-double", dense(f"bnb {kind} 6", 10, 40), kind, 64, nested=True, notes=note)
        yield _quantised(
            f"{kind}-short-rows", dense(f"bnb {kind} 7", 9, 32), kind, 128, notes="a block spans four rows"
        )
        note = "odd N*K: the last low nibble pads, the last block is short"
        yield _quantised(f"{kind}-odd", dense(f"bnb {kind} 8", 5, 33, bf16), kind, 64, notes=note)
        yield _quantised(f"{kind}-odd-double", dense(f"bnb {kind} 9", 7, 33), kind, 64, nested=True, notes=note)
        yield _quantised(f"{kind}-edges", edges(f"bnb {kind}", 64, 128), kind, 64, notes="zero, huge, subnormal blocks")
        yield _quantised(
            f"{kind}-edges-tail", edges(f"bnb {kind} tail", 64, 34)[:2], kind, 64, notes="a short zero block"
        )
    many = "258 blocks: two second-level blocks"
    yield _quantised("nf4-b64-double-two-levels", dense("bnb many", 129, 128, bf16), "nf4", 64, nested=True, notes=many)
    pruned = dense("bnb pruned 0", 24, 128, bf16)
    pruned[3:6] = 0.0
    note = "zero rows: 8 bits give their absmax back as a small negative number"
    yield _quantised("nf4-double-pruned-rows", pruned, "nf4", 64, nested=True, notes=note)
    for storage in (bf16, torch.float32):
        yield _quantised(
            f"nf4-storage-{DTYPE_NAMES[storage]}",
            dense(f"bnb storage {storage}", 8, 128, bf16),
            "nf4",
            64,
            storage=storage,
            notes="codes viewed as a float dtype",
        )
    yield from _enumerations()
