"""Saved models are the same models: every bit, in a fresh process too, or an error that names what differs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import q4core as q4
from q4_lm import build_transformer, load_model, save_model
from q4_nn import build, build_cnn, build_mlp, build_rnn, convert_linears_, describe, pack_, to_ste_
from tests.support.interpreter import run_interpreter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

EXACT = q4.SessionConfig(device="cpu", activation_precision="exact")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}
LONG = {"kind": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_context": 16}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: build_mlp([12, 64, 3], format="nf4"),  # the first layer's x is filled up
    "cnn": lambda: build_cnn([1, 8, 8], [4, 8], 3, format="q4_0"),
    "rnn": lambda: build_rnn(16, 32, cell="lstm", num_layers=2, format="mxfp4"),
    "float": lambda: build_mlp([8, 8, 3]).bfloat16(),
    "decoder": lambda: build_transformer(**SIZES, attention_bias=True, qk_norm=True, rope_scaling=LONG),
    "tied": lambda: build_transformer(**SIZES, tie_word_embeddings=True),
    "encoder": lambda: build_transformer(**SIZES, causal=False, norm="layer", positions="learned"),
    "block": lambda: build({"layers": [{"type": "block", "hidden_size": 64, "num_heads": 4, "intermediate_size": 96}]}),
}
FRESH = """
import sys, torch, q4core as q4
from q4_lm import load_model
with q4.Session(q4.SessionConfig(device="cpu", activation_precision="exact")) as session, torch.no_grad():
    model = load_model(sys.argv[1], session)
    x = torch.load(sys.argv[2])
    y = model(x)
    torch.save((y, dict(model.state_dict())), sys.argv[3])
"""


def sample(name: str) -> torch.Tensor:
    """Return what a model takes."""
    torch.manual_seed(1)
    if name in {"rnn", "decoder", "tied", "encoder"}:
        return torch.randint(0, 16, (2, 9))
    shapes = {"mlp": (5, 12), "cnn": (2, 1, 8, 8), "float": (5, 8), "block": (2, 7, 64)}
    return torch.randn(shapes[name]).to(torch.bfloat16 if name == "float" else torch.float32)


def same(found: Any, expected: Any) -> bool:
    """Say whether tensors are of one dtype and have the same bytes."""
    return (
        found.dtype == expected.dtype
        and torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        if found.dim()
        else bool(found == expected)
    )


def packed(name: str, session: q4.Session) -> nn.Module:
    """Return a model that is packed, but for the one of floats alone."""
    torch.manual_seed(0)
    model = MODELS[name]()
    if name != "float":
        if name in {"decoder", "tied", "encoder", "block"}:
            to_ste_(model, "nvfp4" if name == "encoder" else "q4_0", skip=("lm_head",) * (name == "decoder"))
        pack_(model, session)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_the_same_model(name: str, tmp_path: Path) -> None:
    """A packed or float model gives the same bits again, and the same state, and is saved as the same files."""
    x = sample(name)
    with q4.Session(EXACT) as session, torch.no_grad():
        model = packed(name, session)
        file = save_model(model, tmp_path / "model")
        again = load_model(tmp_path / "model", session)
        assert save_model(again, tmp_path / "again").read_bytes() == file.read_bytes()
        own, found = model.state_dict(), again.state_dict()
        assert [*own] == [*found]
        assert all(same(found[key], own[key]) for key in own)
        assert same(again(x), model(x))
        assert not again.training
        if isinstance(model, nn.Sequential):
            assert describe(again) == describe(model)


@pytest.mark.parametrize("name", ["cnn", "tied"])
def test_a_fresh_process_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    """What a fresh process makes of the files computes the same."""
    x = sample(name)
    torch.save(x, tmp_path / "x.pt")
    with q4.Session(EXACT) as session, torch.no_grad():
        model = packed(name, session)
        save_model(model, tmp_path / "model")
        arguments = [str(tmp_path / item) for item in ("model", "x.pt", "y.pt")]
        run_interpreter(["-c", FRESH, *arguments], check=True)
        y, state = torch.load(tmp_path / "y.pt")
        assert same(y, model(x))
        assert all(same(state[key], value) for key, value in model.state_dict().items())


def test_converted_and_gguf_models(tiny_llama: Path, untied_llama: Path, tmp_path: Path) -> None:
    """Models from files, with packed embeddings and heads, and converted models can be saved; numbers stay."""
    tokens = torch.tensor([[5, 100, 267, 0, 33]])
    with q4.Session(EXACT) as session, torch.no_grad():
        for path in (tiny_llama, untied_llama):
            model: Any = load_model(path, session)
            model.divide_frequencies(torch.linspace(1, 4, 8))
            expected = model(tokens)
            save_model(model, tmp_path / "llama")
            assert same(load_model(tmp_path / "llama", session)(tokens), expected)
        half = q4.SessionConfig(device="cpu", activation_precision="exact", compute_dtype=torch.bfloat16)
        with q4.Session(half) as other:
            model = load_model(tiny_llama, other)
            save_model(model, tmp_path / "half")
            assert same(load_model(tmp_path / "half", session)(tokens), model(tokens))
        model = build_mlp([64, 64, 3])
        convert_linears_(model, format="q4_1", session=session)
        save_model(model, tmp_path / "mlp")
        assert same(load_model(tmp_path / "mlp", session)(torch.ones(2, 64)), model(torch.ones(2, 64)))


def test_a_model_that_goes_on_training(tmp_path: Path) -> None:
    """A description says what trains in four bits and is saved with its masters; a config does not, and is refused."""
    model = to_be = build_mlp([64, 8], format="nf4")
    save_model(model, tmp_path / "mlp")
    found = load_model(tmp_path / "mlp")
    assert describe(found) == describe(to_be)
    assert all(same(value, model.state_dict()[key]) for key, value in found.state_dict().items())
    decoder = build_transformer(**SIZES)
    to_ste_(decoder, "nf4")
    with pytest.raises(q4.InputError, match="pack_ the model first"):
        save_model(decoder, tmp_path / "decoder")
    assert not (tmp_path / "decoder").exists()


def test_weights_of_another_model(tmp_path: Path) -> None:
    """Every tensor that is missing, not expected or of another shape is named."""
    with q4.Session(EXACT) as session:
        model = build_mlp([64, 32, 3], format="nf4")
        pack_(model, session)
        save_model(model, tmp_path / "one")
        facts = json.loads((tmp_path / "one" / "config.json").read_text())
        linear = {"type": "linear", "in_features": 64, "out_features": 16, "bias": False}
        facts["description"] = {"layers": [linear, {"type": "rms_norm", "normalized_shape": 16}]}
        (tmp_path / "one" / "config.json").write_text(json.dumps(facts))
        with pytest.raises(q4.CheckpointError, match="of different models") as caught:
            load_model(tmp_path / "one", session)
        for part in ("1.weight is missing", "0.bias is unexpected", "2.weight is unexpected", "[32, 64], not [16, 64]"):
            assert part in str(caught.value)
        facts["description"] = {"layers": [7]}
        (tmp_path / "one" / "config.json").write_text(json.dumps(facts))
        with pytest.raises(q4.CheckpointError, match="description"):
            load_model(tmp_path / "one", session)


def test_an_older_file_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that can't be saved leaves what was there; so does a disk that fails."""
    save_model(build_mlp([8, 3]), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(q4.ConfigError, match="made by"):
        save_model(nn.Sequential(nn.Linear(8, 3)), tmp_path)
    model = build_transformer(**SIZES)
    model.extra = nn.Linear(2, 2)
    with pytest.raises(q4.CheckpointError, match=r"extra\.weight is unexpected"):
        save_model(model, tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(q4.CheckpointError, match="No space left"):
        save_model(build_mlp([4, 2]), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_head_that_a_tied_folder_denies(tmp_path: Path) -> None:
    """A dense head in a folder whose config ties it is refused: the model would pass over it."""
    save_model(MODELS["tied"](), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"] + 1
    save_file(tensors, file)
    with q4.Session(EXACT) as session, pytest.raises(q4.CheckpointError, match=r"lm_head\.weight is unexpected"):
        load_model(tmp_path, session)
