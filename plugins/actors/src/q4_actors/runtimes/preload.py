"""Imports of the server of processes, done once, so that actors start at once and share them: plugins, too.

Plugins are imported and nothing of them is called, so no device is touched before a fork. The objects that exist then
are excluded from garbage collection, which would write to their pages in each process and so copy them.
"""

from __future__ import annotations

import contextlib
import gc
import sys

import q4_actors.runtimes.process_worker
import q4core as q4
from q4core.plugin_api import PLUGIN_FAULTS

sys.excepthook = q4_actors.runtimes.process_worker.note_cause
with contextlib.suppress(*PLUGIN_FAULTS):  # reported where they are used
    q4.default_registry().records()
gc.collect()
gc.freeze()
