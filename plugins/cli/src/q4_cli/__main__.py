"""Process of the ``q4`` command and of ``python -m q4_cli``, with the settings that must precede torch."""

from __future__ import annotations

import os
import sys
import warnings

from q4_cli.loading import quiet_interrupt

__all__ = ["main"]


def main() -> int:
    """Run the ``q4`` command with the arguments of the process, and return its exit status (see docs/cli.md)."""
    # Threads that spin while they wait take the cores from other processes: results/waiting.json.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Nothing here needs NumPy, of whose absence torch warns. Programs that import q4core see the warning.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    with quiet_interrupt():
        from q4_cli.app import run  # noqa: PLC0415  # after the lines above

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
