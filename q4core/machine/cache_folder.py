"""Where this user's files that can be made again lie: ``Q4_CACHE``, or the system's folder for caches."""

from __future__ import annotations

import os
from pathlib import Path

from q4core.errors import ConfigError


def cache_folder(given: str = "auto") -> Path | None:
    """Return the folder of the cache, or None for no cache; none is made.

    Args:
        given: ``"off"``; a folder; or ``"auto"``: the folder in ``Q4_CACHE``, none where that is ``off``, and
            ``q4core`` in the user's cache folder (``XDG_CACHE_HOME``, ``~/.cache``) where it is not set.

    Raises:
        ConfigError: The folder is below the home folder of a user who has none.
    """
    if given == "auto":
        given = os.environ.get("Q4_CACHE") or "auto"
    if given == "off":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")  # noqa: PTH118  # expanded below
    try:
        return Path(given).expanduser() if given != "auto" else Path(home).expanduser() / "q4core"
    except RuntimeError:  # neither HOME nor an entry of this user, as in containers
        if given == "auto":
            return None
        raise ConfigError("cache", name="cache", rule="a folder; '~' is unknown here", value=given) from None
