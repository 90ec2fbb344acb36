"""The packed layers of a model in q4-lm's cache of prepared models, from which later loads map them."""

from __future__ import annotations

import importlib.metadata
import json
from typing import TYPE_CHECKING, Any

import attrs
import torch

import q4core as q4
from q4_lm.prepared.model import export_layers, restore_layers
from q4_lm.prepared.opening import CachedModel
from q4_lm.prepared.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from q4_transformers.config import Q4Config
    from q4_transformers.places import Place

__all__ = ["LayerCache", "open_layers"]


@attrs.define
class LayerCache:
    """The cached layers of a model that is being loaded.

    Args:
        cached: The model's place in the cache.
        layers: The prepared layers there, over the mapped file, by what they are made of and which module they fill.
    """

    cached: CachedModel
    layers: dict[str, q4.Q4Linear]
    _is_whole: bool = attrs.field(init=False, default=True)

    def take(self, place: Place) -> q4.Q4Linear | None:
        """Return the prepared layer for a place, once; None where there is none."""
        found = self.layers.pop(_key(place), None)
        self._is_whole = self._is_whole and found is not None
        return found

    def store(self, model: Any, places: Iterable[Place]) -> str:
        """Write the layers of a loaded model, unless all of them come from it; return the state of the file."""
        if not self._is_whole:
            self.cached.write({_key(place): model.get_submodule(place.module) for place in places}, {})
        return self.cached.state


def _key(place: Place) -> str:
    return json.dumps(attrs.astuple(place))


def open_layers(files: Sequence[Path], model: Any, config: Q4Config, dtype: torch.dtype | None) -> LayerCache | None:
    """Return what the cache has of a model's packed layers; None where no cache is asked for.

    Args:
        files: The safetensors files of one folder that it is loaded from, which may have other files
            (``variant=``), or the GGUF file; not open yet, so that what is written is of them as they are now, or
            nothing is.
        model: The model, on the meta device.
        config: What is asked for.
        dtype: dtype of the activations.

    Raises:
        ConfigError: ``config.cache``, or the variables that it asks, are not legal.
    """
    store = open_store(config.cache)
    if store is None:
        return None
    asked = {
        "files": json.dumps(sorted(path.name for path in files)),
        "model": type(model).__name__,
        "dtype": str(dtype or torch.get_default_dtype()),
        "quantised": json.dumps([config.format, config.block_size, config.zero_points, config.modules_to_not_convert]),
    }
    software = {name: importlib.metadata.version(name) for name in ("q4-transformers", "transformers")}
    session, source = q4.Session(config.session_config()), files[0] if config.gguf is not None else files[0].parent
    cached = CachedModel(store, source, session, export_layers, restore_layers, asked=asked, software=software)
    with torch.device("cpu"):  # transformers calls under the meta device
        return LayerCache(cached, cached.open(lambda layers, *_: layers) or {})
