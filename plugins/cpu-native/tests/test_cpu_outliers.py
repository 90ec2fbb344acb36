"""Outliers of rounded activations: exact themselves, and what the others give is as it is without them."""

from __future__ import annotations

import pytest
import torch

import q4core as q4
from q4_cpu_native import CpuNative
from tests.support.cpu_layers import layer_on, random_weight

COLUMNS, PLACE = 1024, 137
ROWS = (1, 60)
"""Rows of x: of the kernels for few, and of those for many."""


def _weight(format_: str, rows: int = 72, columns: int = COLUMNS) -> q4.PackedWeight:
    return random_weight(format_, rows, columns)


def _usual(rows: int, columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))


def _error(y: torch.Tensor, x: torch.Tensor, others: torch.Tensor, decoded: torch.Tensor) -> tuple[float, float]:
    """Return the squared error over what the others give, and the least that rounding y to float32 leaves of it."""
    exact, size = x.double() @ decoded.T, (others.double() @ decoded.T).square().mean()
    errors = (y.double() - exact).square().mean(), (exact.float().double() - exact).square().mean()
    return float(errors[0] / size), float(errors[1] / size)


@pytest.mark.parametrize("format_", sorted(CpuNative.capabilities.formats))
@pytest.mark.parametrize("value", [20.0, 1e4, 1e6])
def test_others_keep_their_precision(backend: CpuNative, format_: str, value: float) -> None:
    """Next to one feature of any size the others err by 1e-8 of their square, and by the rounding of y to float32."""
    weight = _weight(format_)
    decoded = q4.dequantize(weight, torch.float64)
    layer = layer_on(backend, weight, "int16")
    for rows in ROWS:
        x = _usual(rows)
        others = x.clone()
        x[:, PLACE], others[:, PLACE] = value, 0.0
        error, rounding = _error(layer(x), x, others, decoded)
        assert error <= 1e-8 + 2 * rounding


@pytest.mark.parametrize("format_", ["nf4", "q4_0", "q8_0"])
def test_a_feature_without_weight_changes_nothing(backend: CpuNative, format_: str) -> None:
    """Where the weights of the outlier are 0, y is what the others give, to 1e-8, whatever the outlier."""
    dense = torch.randn(40, COLUMNS, generator=torch.Generator().manual_seed(1))
    dense[:, PLACE] = 0.0
    weight = q4.quantize(dense, format_)
    decoded = q4.dequantize(weight, torch.float64)
    x = _usual(3)
    x[:, PLACE] = 1e6
    assert _error(layer_on(backend, weight, "int16")(x), x, x, decoded)[0] <= 1e-8


@pytest.mark.parametrize("values", [(1e5,) * 6, (1e6, 1e4, 1e3, 1e2), (1e5, -1e5)])
def test_several_outliers_of_a_block(backend: CpuNative, values: tuple[float, ...]) -> None:
    """Up to six of 32 in-features are outliers, of one size or of many."""
    weight = _weight("nf4")
    x = _usual(5)
    others = x.clone()
    for place, value in zip(range(64, 96, 4), values, strict=False):
        x[:, place], others[:, place] = value, 0.0
    decoded = q4.dequantize(weight, torch.float64)
    error, rounding = _error(layer_on(backend, weight, "int16")(x), x, others, decoded)
    assert error <= 1e-8 + 2 * rounding


def test_int8_outliers_cost_the_others_nothing(backend: CpuNative) -> None:
    """In int8 the others err as they do without the outlier, by 1e-4 of their square."""
    weight = _weight("q4_0")
    x = _usual(4)
    others = x.clone()
    x[:, PLACE], others[:, PLACE] = 1e4, 0.0
    decoded = q4.dequantize(weight, torch.float64)
    assert _error(layer_on(backend, weight, "int8")(x), x, others, decoded)[0] <= 1e-4


@pytest.mark.parametrize("precision", ["int16", "int8"])
@pytest.mark.parametrize("format_", sorted(CpuNative.capabilities.formats))
def test_bits_depend_on_the_row_alone(backend: CpuNative, format_: str, precision: str) -> None:
    """A row has the same bits alone, among others and on several threads; rows without outliers keep theirs."""
    weight = _weight(format_, 200, 960)
    layer = layer_on(backend, weight, precision)
    x = _usual(61, 960)
    before = layer(x)
    x[7, 3], x[7, 500], x[40, 959] = 1e3, -1e5, 1e6
    y = layer(x)
    assert all(torch.equal(y[row], layer(x[row : row + 1])[0]) for row in (0, 7, 40))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(layer(x), y)
    finally:
        torch.set_num_threads(threads)
    same = torch.tensor([row not in {7, 40} for row in range(61)])
    assert torch.equal(y[same], before[same])


@pytest.mark.parametrize("format_", ["nf4", "q4_0", "q8_0"])
def test_any_number_of_columns_may_have_outliers(backend: CpuNative, format_: str) -> None:
    """Rows with outliers in hundreds of columns, some of them 2048 apart, have the bits that they have alone."""
    columns = 4352
    layer = layer_on(backend, _weight(format_, 32, columns), "int8")
    x = _usual(61, columns)
    for row in range(61):
        x[row, torch.arange(16) * 64 + row] = 1e3
    x[::2, 7], x[1::3, 7 + 2048], x[5, 7 + 4096] = 1e4, -1e4, 1e5
    y = layer(x)
    assert all(torch.equal(y[row], layer(x[row : row + 1])[0]) for row in (0, 1, 4, 5, 59, 60))


def test_too_many_outliers_are_computed_exactly(backend: CpuNative) -> None:
    """A row with more outliers than two of each 32 in-features and eight has the bits of the exact path."""
    weight = _weight("nf4")
    x = _usual(3)
    x[1].view(-1, 32)[:, :3] *= 1e3
    y, exact = layer_on(backend, weight, "int16")(x), layer_on(backend, weight, "exact")(x)
    assert torch.equal(y[1], exact[1])
    assert not torch.equal(y[0], exact[0])


@pytest.mark.parametrize("precision", ["int16", "int8"])
def test_rows_with_outliers_are_reported(backend: CpuNative, precision: str) -> None:
    """A layer's record counts them, in plain and in compiled calls' path alike; the exact path has none."""
    weight = _weight("nf4")
    layer, exact = layer_on(backend, weight, precision), layer_on(backend, weight, "exact")
    x = _usual(4)
    layer(x)
    assert layer.diagnostics().outlier_rows == 0
    assert "outliers" not in str(layer.diagnostics())
    x[1, 0] = x[3, 700] = 1e4
    layer(x), exact(x)
    layer(x.requires_grad_())
    assert layer.diagnostics().outlier_rows == layer.diagnostics().to_dict()["outlier_rows"] == 4
    assert "outliers in 4 rows of x" in str(layer.diagnostics())
    assert exact.diagnostics().outlier_rows == 0
