"""Pages with calls of other libraries: theirs run as ours do, and what both say is equal is equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.pages import ROOT
from tests.support.snippets import run_page

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.peer


def both(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what their blocks of a page define, and ours."""
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    return run_page(page, folder, theirs=True), run_page(page, folder)


def test_bitsandbytes(tmp_path: Path) -> None:
    """from/bitsandbytes: dequantised weights are equal, and products up to the rounding of bfloat16 inputs."""
    pytest.importorskip("bitsandbytes")
    theirs, ours = both("from/bitsandbytes", tmp_path)
    assert torch.equal(theirs["back"], ours["back"])
    steps = 2.0**-8  # half a step of bfloat16, of x, of the weight, and of y
    size = torch.ones(3, 128) @ ours["back"].abs().T
    assert bool(((theirs["y"] - ours["y"]).abs() <= 3 * steps * size).all())


def test_snntorch(tmp_path: Path) -> None:
    """from/snntorch: spikes are equal, bit for bit."""
    pytest.importorskip("snntorch")
    theirs, ours = both("from/snntorch", tmp_path)
    assert theirs["spikes"].any()
    assert torch.equal(theirs["spikes"], ours["spikes"])
    assert theirs["recorded"].shape == ours["recorded"].shape


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_hugging_face(tmp_path: Path) -> None:
    """tutorials/huggingface-and-lora runs from its first line to its last."""
    run_page((ROOT / "docs/tutorials/huggingface-and-lora.md").read_text(encoding="utf-8"), tmp_path)
