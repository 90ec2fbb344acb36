"""How the command's answers are shown: tables, names, numbers, JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import q4core as q4
from q4core.cli.output import clean, to_plain
from q4core.cli.table import Column, bytes_text, elide, print_table

pytestmark = pytest.mark.usefixtures("own_directory")


def test_table_drops_columns_and_keeps_the_ends_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    """In a narrow terminal whole columns go, and it is said; then names lose part of their beginning."""
    columns = [Column("layer", elastic=True), Column("extra", drop=1), Column("bytes", "right")]
    rows = [["model.layers.17.self_attn.q_proj", "something long", "123,456"]]
    print_table(Console(width=40, file=sys.stdout), columns, rows)
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 40
    assert "17.self_attn.q_proj" in narrow
    assert "(too narrow for: extra)" in narrow
    print_table(Console(width=30, file=sys.stdout), columns, rows)
    narrower = capsys.readouterr().out
    assert max(map(len, narrower.splitlines())) <= 30
    assert "mod….self_attn.q_proj" in narrower
    print_table(Console(width=80, file=sys.stdout), columns, rows)
    wide = capsys.readouterr().out
    assert "model.layers.17.self_attn.q_proj  something long" in wide


@pytest.mark.parametrize("width", range(2, 40))
def test_elide_keeps_to_its_width(width: int) -> None:
    """A shortened name never exceeds its width, counts wide characters twice, and starts and ends as before."""
    for name in ("model.layers.17.self_attn.q_proj", "模型.层.十七.注意力.投影", "x"):
        short = elide(name, width)
        assert Console().measure(short).maximum <= width
        assert short == name or "…" in short


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
def test_bytes_are_told_in_binary_units(count: int, text: str) -> None:
    """Sizes are told with one digit after the point."""
    assert bytes_text(count) == text
