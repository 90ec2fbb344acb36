"""Presentation of the command's answers: tables, names, numbers, JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import q4core as q4
from q4_cli.output import bytes_text, clean, print_table, to_plain

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.mark.parametrize("width", [20, 34, 44, 80])
def test_table_keeps_names_whole(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In a narrow terminal the last columns go, and it is said; then names go on in the next line, whole."""
    rows = [["model.layers.17.self_attn.q_proj", "nf4", "123,456"]]
    print_table(Console(width=width, file=sys.stdout), ("layer", "format", "bytes"), rows)
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    shown = [line for line in lines[2:] if not line.startswith("(")]
    assert "".join(line.split()[0] for line in shown if line.strip()).startswith(rows[0][0])
    for title, cell in zip(("layer", "format", "bytes")[1:], rows[0][1:], strict=True):
        assert (cell in text) is (title in lines[0])
        assert title in text
    assert (width < 34) is ("too narrow" in text)


def test_table_is_limited(capsys: pytest.CaptureFixture[str]) -> None:
    """A table of very many rows is cut, and says so."""
    print_table(Console(width=80, file=sys.stdout), ("layer",), [["x"]] * 2001)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2003
    assert lines[-1] == "… and 1 more; --json lists all"


def test_values_become_plain_json() -> None:
    """Enums, dtypes, sets, paths, attrs classes and NaN become what JSON can say."""
    plain = to_plain(
        {
            "enum": q4.ComputePath.AUTO,
            "dtype": torch.bfloat16,
            "set": {2, 1},
            "path": Path("a"),
            "nan": float("nan"),
            "device": torch.device("cpu"),
            "reason": q4.Reason(q4.ReasonCode.ARCH, "old"),
        }
    )
    assert plain == {
        "enum": "auto",
        "dtype": "bfloat16",
        "set": [1, 2],
        "path": "a",
        "nan": None,
        "device": "cpu",
        "reason": {"code": "arch", "message": "old"},
    }


def test_control_characters_are_written_out() -> None:
    """A name can't steer the terminal."""
    assert clean("a\x1b[31mb\tc\u202e") == "a\\x1b[31mb\\tc\\u202e"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 42, "12.0 TiB")]
)
def test_bytes_are_shown_in_binary_units(count: int, text: str) -> None:
    """Sizes are shown with one digit after the point."""
    assert bytes_text(count) == text
