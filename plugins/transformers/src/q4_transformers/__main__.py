"""``python -m q4_transformers PROGRAM …``: a program whose ``from_pretrained`` loads by q4core."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from q4_transformers.registration import VARIABLE, take_over


def main() -> None:
    """Take over what the environment names, or all there is, and run a module by its name, or a script by its path."""
    words = sys.argv[1:]
    if not words or words[0] in {"-h", "--help"}:
        sys.exit(f"usage: [{VARIABLE}=NAME,…] python -m q4_transformers MODULE|SCRIPT.py [ARGUMENT …]")
    if not os.environ.get(VARIABLE):
        take_over()
    sys.argv = words
    if words[0].endswith(".py"):
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.path.insert(0, "")
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
