"""Layers that share their x: fewer calls, the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_lm import build_decoder
from q4_lm.models.metadata import Metadata
from q4_nn import JoinedLinear, MultiHeadAttention
from q4_nn.blocks.place import Part, place_linears_

if TYPE_CHECKING:
    from pathlib import Path

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def attention(session: q4.Session, parts: dict[str, Part]) -> Any:
    """Return attention of 64 features, two heads and one key-value head over given matrices."""
    made = MultiHeadAttention(64, 4, 2)
    place_linears_(made, parts, session)
    return made


def alone(session: q4.Session, one: Part) -> q4.Q4Linear:
    """Return a layer over one of the matrices."""
    assert isinstance(one.weight, q4.PackedWeight)
    return session.linear(one.weight, one.bias)


def part(name: str, rows: int, bias: torch.Tensor | None = None, kind: str = "q4_0") -> Part:
    """Return a random matrix over 64 features."""
    return Part(name, q4.quantize(torch.randn(rows, 64), format=kind), bias)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("precision", ["exact", "int8"])
@pytest.mark.parametrize("last", ["q4_0", "q4_1"])
def test_joined_layers_give_the_same_numbers(rows: int, precision: str, last: str) -> None:
    """Each part is bit for bit what its layer gives alone, whether its neighbours have its format or another one."""
    parts = {name: part(name, 64 if name == "q_proj" else 32) for name in PROJECTIONS}
    parts["v_proj"] = part("v_proj", 32, kind=last)
    x = torch.randn(2, rows, 64)
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision=precision)) as session:
        joined = attention(session, parts).qkv_proj(x)
        expected = [alone(session, parts[name])(x) for name in PROJECTIONS]
    assert [each.shape for each in joined] == [each.shape for each in expected]
    assert all(map(torch.equal, joined, expected))


def test_only_neighbours_of_one_format_are_joined(tiny_llama: Path) -> None:
    """q and k (Q4_1) become one layer that is named after both; v (Q4_0) stays alone, and a dense matrix too."""
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        checkpoint = q4.open(tiny_llama)
        block: Any = build_decoder(checkpoint, session, Metadata(checkpoint.metadata, "tiny")).layers[0]
        names = [layer.name for layer in session.layers() if layer.name.startswith("blk.0")]
    assert (block.self_attn.qkv_proj.parts, block.mlp.gate_up_proj.parts) == (((64, 32), (32,)), ((96,), (96,)))
    assert (block.self_attn.q_proj, block.mlp.up_proj) == (None, None)
    expected = {"blk.0.attn_q+attn_k", "blk.0.attn_v", "blk.0.attn_output", "blk.0.ffn_gate", "blk.0.ffn_down"}
    assert set(names) == expected


def test_biases_are_joined_too() -> None:
    """Layers with biases are joined with their biases; one without a bias stays apart from one with."""
    parts = {"q_proj": part("q", 64, torch.randn(64)), "k_proj": part("k", 32, torch.randn(32))}
    parts["v_proj"] = part("v", 32)
    x = torch.randn(3, 64)
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        joined: JoinedLinear = attention(session, parts).qkv_proj
        assert joined.parts == ((64, 32), (32,))
        for one, y in zip(parts.values(), joined(x), strict=True):
            assert torch.equal(y, alone(session, one)(x))


def test_numbers_of_a_whole_matrix_keep_their_form() -> None:
    """Weights with a scale for the whole matrix are left apart: joined, it would have to become one for each row."""
    parts = {name: part(name, 64 if name == "q_proj" else 32, kind="nvfp4") for name in PROJECTIONS}
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        assert attention(session, parts).qkv_proj.parts == ((64,), (32,), (32,))


def test_dense_layers_keep_their_names() -> None:
    """Where none of the layers is packed, each stays where it is, over the very tensor that was given."""
    dense = {name: torch.randn(64 if name == "q_proj" else 32, 64) for name in PROJECTIONS}
    with q4.Session(q4.SessionConfig(device="cpu")) as session:
        made = attention(session, {name: Part(name, weight, None) for name, weight in dense.items()})
    assert made.qkv_proj is None
    assert all(getattr(made, name).weight.data_ptr() == weight.data_ptr() for name, weight in dense.items())
    assert not any(getattr(made, name).weight.requires_grad for name in PROJECTIONS)


def test_cross_attention_over_joined_layers() -> None:
    """Joined layers give queries of x and keys and values of the memory, as separate ones do."""
    parts = {name: part(name, 64 if name == "q_proj" else 32) for name in PROJECTIONS}
    x, memory = torch.randn(2, 3, 64), torch.randn(2, 5, 64)
    with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session:
        joined = attention(session, parts)
        apart = MultiHeadAttention(64, 4, 2)
        apart.o_proj = joined.o_proj
        for name, one in parts.items():
            setattr(apart, name, alone(session, one))
        assert torch.equal(joined(x, memory), apart(x, memory))
