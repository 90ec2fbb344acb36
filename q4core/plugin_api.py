"""Helpers for authors of plugins, beside the names of ``q4core`` itself.

A plugin imports the names of ``q4core`` and of this module, and nothing else of the core.
"""

from q4core.errors import PLUGIN_FAULTS, closest_name
from q4core.events import emit
from q4core.faults import said as describe_exception
from q4core.floats import FLOATS

__all__ = [
    "FLOATS",
    "PLUGIN_FAULTS",
    "closest_name",
    "describe_exception",
    "emit",
]
