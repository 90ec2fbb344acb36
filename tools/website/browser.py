"""The browser that looks at the built site."""

from __future__ import annotations

import os
import shutil

__all__ = ["VARIABLE", "find_chromium"]

VARIABLE = "CHROMIUM"
"""Environment variable: the browser to take."""


def find_chromium() -> str | None:
    """Return the path of Chromium or Chrome: what the variable names, or the first on the path; None without one."""
    names = (os.environ.get(VARIABLE), "chromium", "chromium-browser", "google-chrome")
    return next(filter(None, (shutil.which(name) for name in names if name)), None)
