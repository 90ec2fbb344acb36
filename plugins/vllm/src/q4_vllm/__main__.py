"""``python -m q4_vllm FILE.gguf FOLDER``: the folder that vLLM serves of a GGUF file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from q4_vllm.gguf import make_folder
from q4core import Q4Error

__all__ = ["main"]


def main() -> int:
    """Make the folder, and say how it is served; return 1 where it can't be made."""
    parser = argparse.ArgumentParser(
        prog="python -m q4_vllm", description="Make the folder that vLLM serves of a GGUF file."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a GGUF file, which the folder links to")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to make")
    options = parser.parse_args()
    try:
        folder = make_folder(options.file, options.folder)
    except (Q4Error, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"python -m vllm.entrypoints.openai.api_server --model {folder} --quantization q4\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
