"""Block scales below zero, which 8 bits make of an absmax near zero next to an outlier: everything works with them."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
import torch

import q4core as q4
from tests.support.samples import bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FORMATS = ["nf4", "fp4"]
K = 128


def _weight(form: str = "nf4", columns: int = K) -> q4.PackedWeight:
    """Return a double-quantised weight whose near-zero blocks decode to an absmax below zero."""
    dense = torch.full((8, columns), 0.01)
    dense[0, 0] = 50.0
    weight = q4.quantize(dense, form, scale_kind=q4.ScaleKind.DOUBLE_QUANT, name="proj")
    assert float(weight.resolved_scale().min()) < 0
    return weight


@pytest.fixture
def session() -> Iterator[q4.Session]:
    """A session on the CPU that computes exactly."""
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as made:
        yield made


CUTS: dict[str, Callable[[q4.PackedWeight], q4.PackedWeight]] = {
    "cat": lambda weight: q4.cat([weight, weight]),
    "rows": lambda weight: weight.narrow(0, 3, 4),
    "columns": lambda weight: weight.narrow(1, 64, 64),
    "take_rows": lambda weight: weight.take_rows(torch.tensor([5, 0, 5])),
    "one level": lambda weight: weight.with_plain_scale(),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_weight_runs_with_the_values_that_it_had(cut: str, form: str, session: q4.Session) -> None:
    """Cutting, joining and resolving the two levels keep values below zero, and the result runs."""
    weight = _weight(form)
    part = CUTS[cut](weight)
    dense = q4.dequantize(weight)
    expected = {
        "cat": lambda: torch.cat([dense, dense]),
        "rows": lambda: dense[3:7],
        "columns": lambda: dense[:, 64:],
        "take_rows": lambda: dense[[5, 0, 5]],
        "one level": lambda: dense,
    }[cut]()
    part.check_values()
    assert torch.equal(bits(q4.dequantize(part)), bits(expected))
    x = torch.eye(part.in_features)
    assert torch.equal(session.linear(part)(x), expected.T)


@pytest.mark.parametrize("form", FORMATS)
def test_a_layer_moves_and_is_copied(form: str, session: q4.Session) -> None:
    """``.to(dtype)``, pickling and ``state_dict`` rebuild the layer from what its backend holds."""
    layer = session.linear(_weight(form))
    x = torch.eye(K)
    expected = layer(x)
    again = session.linear(q4.quantize(torch.ones(8, K), form, scale_kind=q4.ScaleKind.DOUBLE_QUANT))
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)  # noqa: S301  # our own bytes
    assert torch.equal(layer.to(torch.bfloat16)(x.bfloat16()), expected.bfloat16())


@pytest.mark.parametrize("columns", [K, 48], ids=["row blocks", "flat blocks"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dialect", ["simple-nf4", "bitsandbytes"])
def test_what_is_written_can_be_read(dialect: str, form: str, columns: int, tmp_path: Path) -> None:
    """A file with scales below zero, of one level or two, opens again and gives the same values."""
    weight = _weight(form, columns)
    for number, layer in enumerate((weight, weight.with_plain_scale())):
        path = tmp_path / f"{number}.safetensors"
        q4.save_checkpoint(path, {"proj": layer}, dialect=dialect, lossy=True)
        read = q4.open(path)["proj"]
        assert torch.equal(bits(q4.dequantize(read, torch.float32)), bits(q4.dequantize(weight)))
