"""Stand-ins for libraries that only the peers' environment has, so that packages on them can be documented."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from sphinx.ext.autodoc.mock import MockFinder

__all__ = ["stand_in_for_transformers"]


class _Quantizers:
    """What q4_transformers looks at as it is imported."""

    @staticmethod
    def merge_quantization_configs() -> None:
        """Do nothing."""

    @staticmethod
    def supports_quant_method() -> None:
        """Do nothing."""


def stand_in_for_transformers() -> None:
    """Make transformers and PEFT importable, where they are not: each name of theirs is a class without contents."""
    if importlib.util.find_spec("transformers") is None:
        sys.meta_path.insert(0, MockFinder(["transformers", "peft"]))
        transformers: Any = importlib.import_module("transformers")
        transformers.__version__ = "5.0"
        auto: Any = importlib.import_module("transformers.quantizers.auto")
        auto.AutoHfQuantizer = _Quantizers
