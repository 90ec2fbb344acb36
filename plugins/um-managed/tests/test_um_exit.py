"""What lives until the interpreter exits, longer than the modules it is made of."""

from __future__ import annotations

import subprocess
import sys

from tests.support.limits import scaled

SCRIPT = """
import sys
import types
import torch
from q4_um_managed import blocks, fences, lease, mapping, pool

sys.kept = blocks, fences, lease, mapping, pool  # whose names Python takes away at exit, as something holds them
driver = types.SimpleNamespace(record=lambda *_: 1, stream=lambda _: 0)
own = pool.Pool(driver, None, max_cached_bytes=0)
block = blocks.Block(address=4096, size=4096, device=0, is_pinned=True)
torch.kept = [  # taken away later: torch was imported before
    fences.Fence(driver, 1, 0),
    mapping.MappedMemory(torch.zeros(4), driver, 0, None),
    lease.Lease(own, block, 4096, None, 1),
]
"""


def test_what_outlives_its_module_prints_nothing() -> None:
    """Events, mapped memory and leases go silently at a program's exit, since no caller could catch the error."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=scaled(60), check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
