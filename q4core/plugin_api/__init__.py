"""Helpers for authors of plugins, besides the names of ``q4core`` itself.

A plugin imports the names of ``q4core`` and of this module, and nothing else of the core.
"""

from q4core.checkpoint.files import (
    is_there,
    map_privately,
    open_regular,
    parse_json,
    read_config,
    read_object,
    require_regular,
    unreadable,
)
from q4core.checkpoint.opening import find_layers
from q4core.checkpoint.staging import Staging, sync
from q4core.diagnostics.describe_exception import describe_exception
from q4core.diagnostics.events import emit, muted, note_fault, parse_log, warn_once
from q4core.errors import PLUGIN_FAULTS, closest_name, counted
from q4core.formats import FLOATS, cat_stored
from q4core.machine.cache_folder import cache_folder
from q4core.machine.torch_state import is_plain_call, on_device, outside_inference
from q4core.plugins.discovery import HOOKS, names_of_plugins
from q4core.schema import MARKER as DIALECT_KEY
from q4core.schema import dialect_of, find_dialect
from q4core.selection.cache import resolve_device
from q4core.selection.proofs import Proofs
from q4core.selection.result import emit_selection

__all__ = [
    "DIALECT_KEY",
    "FLOATS",
    "HOOKS",
    "PLUGIN_FAULTS",
    "Proofs",
    "Staging",
    "cache_folder",
    "cat_stored",
    "closest_name",
    "counted",
    "describe_exception",
    "dialect_of",
    "emit",
    "emit_selection",
    "find_dialect",
    "find_layers",
    "is_plain_call",
    "is_there",
    "map_privately",
    "muted",
    "names_of_plugins",
    "note_fault",
    "on_device",
    "open_regular",
    "outside_inference",
    "parse_json",
    "parse_log",
    "read_config",
    "read_object",
    "require_regular",
    "resolve_device",
    "sync",
    "unreadable",
    "warn_once",
]
