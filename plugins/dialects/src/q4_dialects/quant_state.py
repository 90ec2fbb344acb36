"""The JSON text of a bitsandbytes layer: block size, dtype, shape, and the second level of its scales.

Reference:
    bitsandbytes 0.50.2: functional.py (QuantState.as_dict, from_dict).
"""

from __future__ import annotations

import json
from typing import Any

import attrs
import torch

from q4core import find_format

__all__ = ["DTYPES", "BadStateError", "State", "parse"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MAX_FEATURES = 2**31 - 1
_MOST_FLOAT32 = 2**128


@attrs.frozen(kw_only=True)
class State:
    """What the JSON text of a layer says."""

    kind: str
    block_size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    nested_block_size: int | None = None
    nested_offset: float | None = None

    def text(self) -> str:
        """Return the JSON text as bitsandbytes writes it."""
        facts: dict[str, Any] = {
            "quant_type": self.kind,
            "blocksize": self.block_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
        }
        if self.nested_block_size is not None:
            facts["nested_blocksize"] = self.nested_block_size
            facts["nested_dtype"] = "float32"
            facts["nested_offset"] = self.nested_offset
        return json.dumps(facts)


class BadStateError(ValueError):
    """The JSON text breaks a rule; carries (rule, value)."""


def parse(stored: torch.Tensor, kind: str) -> State:
    """Return what a state tensor says.

    Raises:
        BadStateError: It is not what bitsandbytes writes for a layer of this kind.
    """

    def require(condition: bool, rule: str, value: object) -> None:  # noqa: FBT001  # reads as a sentence
        if not condition:
            raise BadStateError(rule, value)

    text = bytes(stored.reshape(-1).tolist())
    try:
        facts = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BadStateError("valid UTF-8 JSON", str(error)) from error
    names = {"quant_type", "blocksize", "dtype", "shape"}
    nested_names = {"nested_blocksize", "nested_dtype", "nested_offset"}
    require(isinstance(facts, dict), "a JSON object", facts)
    is_nested = bool(nested_names & set(facts))
    wanted = names | nested_names if is_nested else names
    require(set(facts) == wanted, f"JSON with exactly {', '.join(sorted(wanted))}", sorted(facts))
    require(facts["quant_type"] == kind, f"JSON with quant_type {kind!r}, as its key says", facts["quant_type"])
    block, shape, dtype = facts["blocksize"], facts["shape"], facts["dtype"]
    legal = find_format(kind).block_sizes
    require(type(block) is int and block in legal, f"JSON with a blocksize in {sorted(legal)}", block)
    require(isinstance(dtype, str) and dtype in DTYPES, f"JSON with a dtype in {', '.join(DTYPES)}", dtype)
    sizes: list[Any] = shape if isinstance(shape, list) else [None]
    is_shape = all(type(size) is int and 0 < size <= _MAX_FEATURES for size in sizes)
    require(is_shape and bool(sizes), "JSON with a shape of whole numbers from 1", shape)
    state = State(kind=kind, block_size=block, dtype=DTYPES[dtype], shape=tuple(sizes))
    if not is_nested:
        return state
    nested_block, offset = facts["nested_blocksize"], facts["nested_offset"]
    require(type(nested_block) is int and nested_block > 0, "JSON with a positive nested_blocksize", nested_block)
    require(facts["nested_dtype"] == "float32", "JSON with nested_dtype 'float32'", facts["nested_dtype"])
    is_number = isinstance(offset, (int, float)) and not isinstance(offset, bool) and abs(offset) < _MOST_FLOAT32
    require(is_number, "JSON with a finite nested_offset", offset)
    return attrs.evolve(state, nested_block_size=nested_block, nested_offset=float(offset))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
