"""Process of the ``q4`` command and of ``python -m q4_cli``, with the settings that must precede torch."""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings

__all__ = ["main"]

_INTERRUPTED = 130


def main() -> int:
    """Run the ``q4`` command with the arguments of the process, and return its exit status (see docs/cli.md)."""
    # Threads that spin while they wait take the cores from other processes: results/waiting.json.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Nothing here needs NumPy, of whose absence torch warns. Programs that import q4core see the warning.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:  # while torch loads there is nothing to unwind, and a traceback would not help
        signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))
    from q4_cli.app import run  # noqa: PLC0415  # loads torch, after the lines above

    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # what torch is made of ends with the process: a garbage collection over it takes long
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
