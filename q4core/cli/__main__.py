"""``python -m q4core.cli`` is ``q4``."""

from __future__ import annotations

import sys

from q4core.cli import main

if __name__ == "__main__":
    sys.exit(main())
