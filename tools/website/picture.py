"""The picture of ``q4 explain`` on the site's first page: ``python -m tools.website.picture`` draws and stores it."""

from __future__ import annotations

import html
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

import q4core as q4

__all__ = ["COMMAND", "STORED", "draw", "run", "shown"]

STORED = Path(__file__).parents[2] / "docs" / "pictures" / "explain.svg"
COMMAND = "q4 explain model.safetensors --prove"
SHAPES = {"self_attn.q_proj": (576, 576), "self_attn.k_proj": (192, 576), "mlp.down_proj": (576, 1536)}
LAYERS, COLUMNS = 4, 96
_WHITE, _BLACK = (255, 255, 255), (22, 27, 34)
_COLOURS = [_BLACK, (255, 138, 128), (126, 211, 133), (240, 200, 90), (121, 184, 255), (210, 168, 255), (99, 216, 226)]
_THEME = TerminalTheme(_BLACK, (230, 237, 243), [*_COLOURS, _WHITE], [*_COLOURS, _WHITE])


def run(folder: Path) -> str:
    """Write a small checkpoint with a Llama's names, and return what the command prints of it, in colours."""
    torch.manual_seed(0)
    weights = {
        f"model.layers.{layer}.{name}": q4.quantize(torch.randn(shape), format="nf4")
        for layer in range(LAYERS)
        for name, shape in SHAPES.items()
    }
    q4.save_checkpoint(folder / "model.safetensors", weights, dialect="bitsandbytes")
    variables = {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "q4_cli", *COMMAND.split()[1:]]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def draw(printed: str) -> str:
    """Return the picture of a terminal with the command and what it printed."""
    console = Console(file=io.StringIO(), record=True, width=COLUMNS, legacy_windows=False)
    console.print(Text.assemble(("$ ", "green"), (COMMAND, "bold")))
    console.print(Text.from_ansi(printed.rstrip()))
    picture = console.export_svg(title="q4 explain", theme=_THEME, unique_id="explain")
    picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # fonts of another host
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


def shown(picture: str) -> list[str]:
    """Return the lines of text of a picture, each without the spaces at its ends."""
    lines: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in re.findall(r'<text [^>]*?x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', picture):
        lines.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\N{NO-BREAK SPACE}", " ")))
    return ["".join(text for _, text in sorted(parts)).strip() for _, parts in sorted(lines.items())]


def main() -> None:
    """Draw and store the picture."""
    with tempfile.TemporaryDirectory() as folder:
        STORED.write_text(draw(run(Path(folder))), encoding="utf-8")
    print(STORED)


if __name__ == "__main__":
    main()
