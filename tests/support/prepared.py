"""Opening a model through a cache, and files of the cache that are changed behind its back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import q4core as q4
from q4_lm import LanguageModel
from q4_lm.prepared.container import Container, write_container

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = torch.tensor([[3, 7, 260, 11]])


def logits(path: Path, cache: Any, **options: Any) -> torch.Tensor:
    """Open a model through a cache and return what it computes of a few tokens."""
    with LanguageModel.open(path, q4.SessionConfig(**options), cache=cache) as model, torch.inference_mode():
        found: torch.Tensor = model.decoder(TOKENS)
        return found


def only_file(cache: Path) -> Path:
    """Return the one file of a cache."""
    (found,) = [path for path in cache.iterdir() if path.suffix == ".q4prep"]
    return found


def edited(path: Path, **header: Any) -> None:
    """Write a container again with parts of its header replaced, and right digests."""
    found = Container(path)
    tensors = [found.tensor(index).clone() for index in range(len(found))]
    write_container(path, {**found.header, **header}, tensors)
