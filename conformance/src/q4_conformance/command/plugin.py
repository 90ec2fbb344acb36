"""What environments that were installed before commands had entry points of their own name as the kit's plugin."""

from __future__ import annotations

from q4core import hookimpl


@hookimpl
def q4_layers() -> list[object]:
    """Return no layer type: the kit brings nothing to the library."""
    return []
