"""Hooks: a layer type, and architectures of model files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from q4core import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from q4_lm.exchange.gguf_to_hf import HfFolder
    from q4_lm.exchange.hf_to_gguf import GgufModel
    from q4_lm.models.architecture import Architecture
    from q4_nn import LayerType
    from q4core import Checkpoint

__all__ = ["q4_architectures", "q4_layers"]


@hookimpl
def q4_architectures() -> list[Architecture]:
    """Return the architectures of GGUF files."""
    from q4_lm.models.gguf import ARCHITECTURES  # noqa: PLC0415  # not before it is needed
    from q4_lm.models.gguf_bert import BERT  # noqa: PLC0415  # as above

    ways: dict[str, Any] = {"to_folder": _to_folder, "from_folder": _from_folder, "is_storable": True}
    return [*(attrs.evolve(item, **ways) for item in ARCHITECTURES), BERT]


def _to_folder(checkpoint: Checkpoint) -> HfFolder:
    from q4_lm.exchange.gguf_to_hf import to_hf_folder  # noqa: PLC0415  # for `q4 convert` alone

    return to_hf_folder(checkpoint)


def _from_folder(checkpoint: Checkpoint, home: Path) -> GgufModel:
    from q4_lm.exchange.hf_to_gguf import to_gguf  # noqa: PLC0415  # as above

    return to_gguf(checkpoint, home)


@hookimpl
def q4_layers() -> list[LayerType]:
    """Return the layer type ``block``."""
    from q4_lm.models.block import BLOCK  # noqa: PLC0415  # not before it is needed

    return [BLOCK]
