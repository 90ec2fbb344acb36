"""torchao's names in a safetensors file: the JSON entry of each parameter in the header, and the keys of its parts.

Reference:
    torchao 0.18.0: prototype/safetensors.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import torch

from q4_dialects.experts import has_experts
from q4core import Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from q4core import Catalogue

__all__ = [
    "DTYPES",
    "FP4",
    "REQUIRED",
    "ROLES",
    "entry_of",
    "entry_problems",
    "is_read",
    "merged_entries",
    "owned_keys",
    "prefix_of",
]

ROLES = {
    "qdata": "qdata",
    "scale": "scale",
    "global_scale": "per_tensor_scale",
    "activation_scale": "act_per_tensor_scale",
}
REQUIRED = ("qdata", "scale")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FP4 = {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}


@functools.lru_cache(maxsize=4096)
def entry_of(text: str) -> dict[str, Any] | None:
    """Return the JSON entry of a tensor that torchao flattened, or None where a text is something else."""
    if '"_type"' not in text:
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("_type"), str) else None


def prefix_of(name: str) -> str:
    """Return the prefix of the parts of a parameter: ``a.weight`` → ``a._weight_``."""
    module, _, parameter = name.rpartition(".")
    return f"{module}._{parameter}_"


def is_read(name: str, catalogue: Catalogue) -> bool:
    """Return whether a parameter that the metadata names is one that is read: a ``weight``, or experts by any name."""
    module, _, parameter = name.rpartition(".")
    return bool(module) and (parameter == "weight" or has_experts(catalogue, f"{prefix_of(name)}qdata"))


def merged_entries(entries: Mapping[str, str], dense: Iterable[str]) -> dict[str, str]:
    """Return the metadata of a file: entries of layers, those of plain tensors, and the list of all their names."""
    merged = {**entries, **dict.fromkeys((name for name in dense if "." in name), json.dumps({"_type": "Tensor"}))}
    return {**merged, "tensor_names": json.dumps(list(merged))}


def owned_keys(catalogue: Catalogue) -> dict[str, list[str]]:
    """Return parameter → keys of its parts, legal or not; of two parameters the one with the longer name counts."""
    owned: dict[str, list[str]] = {}
    for key in catalogue.tensors if catalogue.metadata else ():
        module, _, last = key.rpartition(".")
        cut = last.rfind("_", 1) if last.startswith("_") else 0
        while cut > 1:
            name = f"{module}.{last[1:cut]}"
            if name in catalogue.metadata:
                owned.setdefault(name, []).append(key)
                break
            cut = last.rfind("_", 1, cut)
    return owned


def entry_problems(
    name: str, entry: Mapping[str, Any], keys: Mapping[str, str], roles: Collection[str], block: int
) -> Iterator[Problem]:
    """Yield what is wrong with a metadata entry.

    Args:
        name: The parameter.
        entry: What the metadata says of it.
        keys: Role → key of its parts.
        roles: The roles that its class has.
        block: In-features per scale of its class.
    """
    where = f"metadata {name}"
    data = entry.get("_data")
    facts = data if isinstance(data, dict) else {}
    names = entry.get("_tensor_data_names")
    legal = [ROLES[role] for role in roles]
    if not isinstance(names, list) or not set(REQUIRED) <= set(map(str, names)) <= set(legal):
        yield Problem("value", f"{where}._tensor_data_names", f"qdata, scale and others of {legal}", names)
    else:
        for role, key in keys.items():
            if ROLES[role] not in names:
                yield Problem("unknown_key", key, "one that the metadata's _tensor_data_names lists", names)
    if facts.get("block_size") != block:
        yield Problem("value", f"{where}.block_size", f"{block}", facts.get("block_size"))
    if not isinstance(facts.get("is_swizzled_scales"), bool):
        yield Problem("value", f"{where}.is_swizzled_scales", "true or false", facts.get("is_swizzled_scales"))
    dtype = facts.get("orig_dtype")
    if not isinstance(dtype, dict) or not isinstance(dtype.get("_data"), str) or dtype["_data"] not in DTYPES:
        yield Problem("value", f"{where}.orig_dtype", f"one of {', '.join(DTYPES)}", dtype)
