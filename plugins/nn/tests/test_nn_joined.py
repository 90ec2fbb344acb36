"""Layers that share their x: fewer calls, the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_nn.weights import Weights

if TYPE_CHECKING:
    from pathlib import Path

QKV = {"blk.0.attn_q": 64, "blk.0.attn_k": 32, "blk.0.attn_v": 32}


def make(checkpoint: Any, session: q4.Session) -> Weights:
    """Return the weights of an opened file."""
    return Weights(checkpoint, session, where="tiny", dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_joined_layers_give_the_same_numbers(rows: int, precision: str, tiny_llama: Path) -> None:
    """Each part is bit for bit what its layer gives alone, whether its neighbours have its format or another one."""
    config = q4.SessionConfig(device="cpu", activation_precision=precision)
    checkpoint, x = q4.open(tiny_llama), torch.randn(2, rows, 64)
    for sizes in (QKV, {"blk.0.ffn_gate": 96, "blk.0.ffn_up": 96}):
        with q4.Session(config) as session:
            joined = make(checkpoint, session).joined(sizes, 64)(x)
            alone = [make(checkpoint, session).linear(name, size, 64)(x) for name, size in sizes.items()]
        assert [part.shape for part in joined] == [part.shape for part in alone]
        assert all(map(torch.equal, joined, alone))


def test_only_neighbours_of_one_format_are_joined(tiny_llama: Path) -> None:
    """q and k (Q4_1) become one layer that is named after both; v (Q4_0) stays alone, and a dense matrix too."""
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        weights = make(q4.open(tiny_llama), session)
        qkv, gate_up = weights.joined(QKV, 64), weights.joined({"blk.0.ffn_gate": 96, "blk.0.ffn_up": 96}, 64)
        assert (qkv.parts, gate_up.parts) == (((64, 32), (32,)), ((96,), (96,)))
        names = [layer.name for layer in session.layers()]
    assert names == ["blk.0.attn_q+attn_k", "blk.0.attn_v", "blk.0.ffn_gate"]


class Sides:
    """A checkpoint of three small matrices, with what a test puts beside them."""

    def __init__(self, weights: dict[str, q4.PackedWeight], dense: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.dense = dense

    def __iter__(self) -> Any:
        """Iterate over the names of packed weights."""
        return iter(self.weights)

    def __contains__(self, name: str) -> bool:
        """Return whether a packed weight is there."""
        return name in self.weights

    def __getitem__(self, name: str) -> q4.PackedWeight:
        """Return a packed weight."""
        return self.weights[name]


def test_biases_are_joined_too() -> None:
    """Layers with biases are joined with their biases; one without a bias stays apart from one with."""
    dense = {name: torch.randn(16, 64) for name in "abc"}
    packed = {name: q4.quantize(value, format="q4_0") for name, value in dense.items()}
    biases = {f"{name}.bias": torch.randn(16) for name in "ab"}
    x = torch.randn(3, 64)
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        layer = make(Sides(packed, biases), session).joined(dict.fromkeys("abc", 16), 64)
        assert layer.parts == ((16, 16), (16,))
        for name, y in zip("abc", layer(x), strict=True):
            assert torch.equal(y, session.linear(packed[name], biases.get(f"{name}.bias"))(x))


def test_numbers_of_a_whole_matrix_keep_their_form() -> None:
    """Weights with a scale for the whole matrix are left apart: joined, it would have to become one for each row."""
    packed = {name: q4.quantize(torch.randn(16, 64), format="nvfp4") for name in "ab"}
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        assert make(Sides(packed, {}), session).joined(dict.fromkeys("ab", 16), 64).parts == ((16,), (16,))
