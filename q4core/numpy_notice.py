"""Keeps torch's word that NumPy is missing from users of the ``q4`` command, which needs none.

torch gives that warning when it is imported, which the package does before its command line begins. Programs that
import q4core see it as torch gives it.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

__all__: list[str] = []

if Path(sys.argv[0] if sys.argv else "").stem == "q4" or "q4core.cli" in sys.orig_argv:
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
