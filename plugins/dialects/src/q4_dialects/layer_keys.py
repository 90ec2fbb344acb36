"""Keys of a module, the facts that dialects infer from them, and checks that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from q4core import Problem

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from q4core import Catalogue, TensorInfo

__all__ = ["CACHE_SCALES", "assumed_dtype", "layer_keys", "rank_problems", "scalar_problems"]

CACHE_SCALES = ("k_scale", "v_scale", "q_scale")
"""Suffixes of scales of the key and value cache, which are not of the weight."""


def layer_keys(
    module: str, suffixes: Mapping[str, str], required: Collection[str], catalogue: Catalogue
) -> dict[str, str]:
    """Return role → key of the required tensors of a module, and of the others that are there."""
    below = catalogue.children(module)
    return {role: f"{module}.{suffix}" for role, suffix in suffixes.items() if role in required or suffix in below}


def assumed_dtype(catalogue: Catalogue, assumed: torch.dtype = torch.float32) -> tuple[torch.dtype, tuple[str, ...]]:
    """Return the model's dtype by ``config.json``, or another and a note that it is assumed."""
    if catalogue.dtype is not None:
        return catalogue.dtype, ()
    name = str(assumed).removeprefix("torch.")
    return assumed, (f"dtype {name} assumed: neither the dialect nor config.json says it",)


def rank_problems(module: str, codes: TensorInfo | None) -> Iterator[Problem]:
    """Yield that codes of 3 dimensions are not read."""
    if codes is not None and len(codes.shape) == 3:  # noqa: PLR2004  # experts
        yield Problem("unsupported", module, "of 2 dimensions to be read", list(codes.shape))


def scalar_problems(
    catalogue: Catalogue, key: str | None, *, experts: tuple[int, ...] | None = None
) -> Iterator[Problem]:
    """Yield what is wrong with a tensor that must be one float32 number, of shape [] or [1].

    Args:
        catalogue: Where to look.
        key: The tensor's name.
        experts: The shape of one number for each expert, where that is legal too.
    """
    info = None if key is None else catalogue.get(key)
    if key is None or info is None:
        return
    if info.dtype != torch.float32:
        yield Problem("dtype", key, "of dtype float32", str(info.dtype).removeprefix("torch."))
    legal = {(), (1,), *(() if experts is None else (experts,))}
    if info.shape not in legal:
        also = "" if experts is None else f" or {list(experts)}"
        yield Problem("shape", key, f"of shape [] or [1]{also}", list(info.shape))
