"""``RankLayers``: the packed layers of one worker, prepared, or mapped from q4-lm's cache of prepared models."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import q4core as q4

__all__ = ["RankLayers"]


class RankLayers:
    """The packed layers of a worker for activations of one dtype.

    Where q4-lm is installed, the first worker of a rank writes them to its cache, and later ones map that file: all
    processes share its memory. ``Q4_CACHE`` names the cache's folder, or is ``off``.

    Args:
        source: The folder, or the GGUF file, of the weights.
        session: What layers are prepared under.
        place: What the layers of a rank depend on besides: its number, and how many share the model.

    Raises:
        ConfigError: ``Q4_CACHE`` or ``Q4_CACHE_LIMIT`` is not legal.
    """

    def __init__(self, source: Path, session: q4.Session, place: Mapping[str, str]) -> None:
        self.session = session
        self._made: dict[str, q4.Q4Linear] = {}
        self._stored: dict[str, q4.Q4Linear] = {}
        self._cached = _cached(source, session, place)
        if self._cached is not None:
            self._stored = self._cached.open(lambda layers, *_: layers) or {}

    def find(self, key: str) -> q4.Q4Linear | None:
        """Return what the cache has of a key, which says all that a layer is cut from; or None."""
        return self._stored.get(key)

    def make(self, key: str, weight: q4.PackedWeight, name: str) -> q4.Q4Linear:
        """Return a layer over a weight, prepared; it is stored under the key.

        Raises:
            BackendUnavailableError: No backend prepares it.
        """
        layer = self._made[key] = self.session.linear(weight, name=name)
        return layer

    def finish(self) -> None:
        """Write the layers to the cache, unless all of them came from it; a warning says why it can't be written."""
        if self._cached is not None and self._made:
            self._cached.write({**self._stored, **self._made}, {})


def _cached(source: Path, session: q4.Session, place: Mapping[str, str]) -> Any:
    """Return the place of a rank's layers in the cache; None without q4-lm, or where no cache is asked for."""
    try:
        names = ("opening", "model", "store")
        opening, model, store = (importlib.import_module(f"q4_lm.prepared.{name}") for name in names)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "q4_lm":
            raise
        return None
    found = store.open_store()
    if found is None:
        return None
    software = {"q4-vllm": importlib.metadata.version("q4-vllm")}
    return opening.CachedModel(
        found, source, session, model.export_layers, model.restore_layers, asked=place, software=software
    )
