"""q4core: any 4-bit checkpoint loads, the fastest backend proven correct on this machine runs it, and says so.

The names below are the public contract; plugins and the conformance kit use nothing else. Importing loads no plugin and
touches no device and no network.
"""

from __future__ import annotations

from q4core import training
from q4core.api import (
    convert_checkpoint,
    dequantize,
    detect,
    detect_all,
    detect_or_fail,
    open,  # noqa: A004  # the contract's name: q4.open(path)
    quantize,
    save_checkpoint,
    validate,
)
