"""The golden vectors: layers as public packages stored them, read from plain files without those packages' help."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from q4core import Catalogue

FOLDER = Path(__file__).parents[1] / "golden"
_MODULE = ("proj.", "proj_")
_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
}


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata; see the golden folder's README for the layout."""
    blob = path.read_bytes()
    size = int.from_bytes(blob[:8], "little")
    header: dict[str, Any] = json.loads(blob[8 : 8 + size])
    metadata: dict[str, str] = header.pop("__metadata__", {})
    tensors = {}
    for name, facts in header.items():
        begin, end = (8 + size + offset for offset in facts["data_offsets"])
        stored = torch.from_numpy(np.frombuffer(blob[begin:end], dtype=np.uint8).copy())
        tensors[name] = stored.view(_DTYPES[facts["dtype"]]).reshape(facts["shape"])
    return tensors, metadata


@attrs.frozen(eq=False, slots=False)
class Vector:
    """One golden layer, ``<folder>/<case>``, and its entry in ``manifest.json``."""

    name: str
    facts: dict[str, Any]

    @functools.cached_property
    def _content(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        return read_safetensors(FOLDER / f"{self.name}.safetensors")

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        """The layer's tensors, as they lie on disk for the module ``proj``."""
        return {key: tensor for key, tensor in self._content[0].items() if key.startswith(_MODULE)}

    def catalogue(self) -> Catalogue:
        """Return the layer with the file's metadata and the ``config.json`` that goes with it."""
        return Catalogue(self.stored, metadata=dict(self._content[1]), config=dict(self.facts["config"]))

    @property
    def expected(self) -> torch.Tensor:
        """The package's own dequantised weight, float32 [N, K]; in bfloat16 or float16 where it gives no other."""
        names = (f"expected.{dtype}" for dtype in ("float32", "bfloat16", "float16"))
        return next(self._content[0][name] for name in names if name in self._content[0])


@functools.cache
def golden_vectors() -> tuple[Vector, ...]:
    """Return every golden layer."""
    manifest = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))
    return tuple(Vector(name, facts) for name, facts in sorted(manifest.items()))
