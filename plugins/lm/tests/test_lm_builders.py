"""A tiny random Llama, from its file to logits, against a plain float64 model that shares no code with ours."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import attrs
import gguf
import numpy as np
import pytest
import torch

import q4_lm.plugin
import q4core as q4
from q4_lm import Architecture, LanguageModel, TransformerConfig, architectures, build_decoder
from q4_lm.models.gguf import ARCHITECTURES
from q4_lm.models.metadata import Metadata
from q4_lm.prepared.opening import CacheWarning
from tests.support.checkpoints import retype

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = q4.SessionConfig(device="cpu", activation_precision=q4.ActivationPrecision.EXACT)
TOKENS = [5, 100, 267, 0, 33, 33, 7, 250, 1, 64, 12]


class PlainLlama:
    """A Llama in numpy, float64.

    Weights are dequantised by ``gguf``, q and k rows put back into their first order, halves turned, heads repeated.
    """

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.fields = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors: dict[str, np.ndarray] = {
            t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float64).reshape([int(n) for n in t.shape][::-1])
            for t in reader.tensors
        }

    def number(self, name: str) -> float:
        """Return a hyper-parameter."""
        value = self.fields[f"llama.{name}"]
        return float(value)

    def unpermuted(self, name: str, heads: int) -> np.ndarray:
        """Return q or k rows in their first order: of each head, first the even ones, then the odd ones."""
        rows = self.tensors[name]
        result: np.ndarray = rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        return result

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """Return x normalised."""
        epsilon = self.number("attention.layer_norm_rms_epsilon")
        result: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * self.tensors[name]
        return result

    def turn(self, x: np.ndarray) -> np.ndarray:
        """Return x [T, heads, d] turned by halves."""
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None] * self.number("rope.freq_base") ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return logits [T, V]."""
        heads, kv_heads = int(self.number("attention.head_count")), int(self.number("attention.head_count_kv"))
        x = self.tensors["token_embd.weight"][tokens]
        visible = np.tril(np.ones((len(tokens), len(tokens)), bool))
        for layer in range(int(self.number("block_count"))):
            at = f"blk.{layer}"
            y = self.norm(x, f"{at}.attn_norm.weight")
            q = self.turn((y @ self.unpermuted(f"{at}.attn_q.weight", heads).T).reshape(len(y), heads, -1))
            k = self.turn((y @ self.unpermuted(f"{at}.attn_k.weight", kv_heads).T).reshape(len(y), kv_heads, -1))
            v = (y @ self.tensors[f"{at}.attn_v.weight"].T).reshape(len(y), kv_heads, -1)
            k, v = (np.repeat(item, heads // kv_heads, 1) for item in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
            scores = np.exp(np.where(visible, scores, -np.inf) - scores.max(-1, keepdims=True))
            mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(len(y), -1)
            x = x + mixed @ self.tensors[f"{at}.attn_output.weight"].T
            y = self.norm(x, f"{at}.ffn_norm.weight")
            gate = y @ self.tensors[f"{at}.ffn_gate.weight"].T
            y = gate / (1 + np.exp(-gate)) * (y @ self.tensors[f"{at}.ffn_up.weight"].T)
            x = x + y @ self.tensors[f"{at}.ffn_down.weight"].T
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        result: np.ndarray = self.norm(x, "output_norm.weight") @ head.T
        return result


def relative_error(result: torch.Tensor, expected: np.ndarray) -> float:
    """Return the greatest difference over the greatest value."""
    return float(np.abs(result.double().numpy() - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("fixture", ["tiny_llama", "untied_llama"])
def test_logits(fixture: str, request: pytest.FixtureRequest) -> None:
    """Logits of the whole model equal the plain model's to float32 rounding, with a tied head and with its own."""
    path = request.getfixturevalue(fixture)
    with LanguageModel.open(path, CONFIG) as model, torch.inference_mode():
        result = model.decoder(torch.tensor([TOKENS]), model.decoder.make_cache(16))[0]
    assert relative_error(result, PlainLlama(path).logits(TOKENS)) < 1e-5


def test_pieces_give_the_same_logits(tiny_llama: Path) -> None:
    """A prompt at once, in pieces and token by token gives the same logits; ``last_only`` gives the last of them."""
    with LanguageModel.open(tiny_llama, CONFIG) as model, torch.inference_mode():
        whole = model.decoder(torch.tensor([TOKENS]), model.decoder.make_cache(16))
        for cuts in ([3, 4, 4], [1] * len(TOKENS), [10, 1]):
            cache = model.decoder.make_cache(16)
            parts = [model.decoder(piece[None], cache) for piece in torch.tensor(TOKENS).split(cuts)]
            assert relative_error(torch.cat(parts, 1), whole.double().numpy()) < 1e-5
        last = model.decoder(torch.tensor([TOKENS]), model.decoder.make_cache(16), last_only=True)
        assert relative_error(last, whole[:, -1:].double().numpy()) < 1e-5


def test_batch(tiny_llama: Path) -> None:
    """Sequences of a batch do not see one another."""
    with LanguageModel.open(tiny_llama, CONFIG) as model, torch.inference_mode():
        pair = torch.tensor([TOKENS, TOKENS[::-1]])
        both = model.decoder(pair, model.decoder.make_cache(16, batch=2))
        for index in range(2):
            alone = model.decoder(pair[index : index + 1], model.decoder.make_cache(16))
            assert relative_error(both[index], alone[0].double().numpy()) < 1e-5


def test_bfloat16(tiny_llama: Path) -> None:
    """In bfloat16 activations, logits and cache are bfloat16, and the error is bfloat16's."""
    config = q4.SessionConfig(
        device="cpu", activation_precision=q4.ActivationPrecision.EXACT, compute_dtype=torch.bfloat16
    )
    with LanguageModel.open(tiny_llama, config) as model, torch.inference_mode():
        cache = model.decoder.make_cache(16)
        result = model.decoder(torch.tensor([TOKENS]), cache)[0]
        assert (result.dtype, cache.keys.dtype) == (torch.bfloat16, torch.bfloat16)
    assert relative_error(result, PlainLlama(tiny_llama).logits(TOKENS)) < 0.1


@pytest.mark.parametrize(
    "tokens",
    [torch.tensor([[268]]), torch.tensor([[-1]]), torch.tensor([1]), torch.ones(1, 1), torch.ones(1, 17).long()],
)
def test_bad_tokens(tokens: torch.Tensor, tiny_llama: Path) -> None:
    """Numbers that are no tokens, wrong shapes and dtypes, and more tokens than the cache holds are refused."""
    with LanguageModel.open(tiny_llama, CONFIG) as model, pytest.raises(q4.InputError, match="tokens must be"):
        model.decoder(tokens, model.decoder.make_cache(16))


@pytest.mark.parametrize("capacity", [0, 49])
def test_cache_within_the_context(capacity: int, tiny_llama: Path) -> None:
    """A cache has room for at least one position and at most the model's context."""
    with LanguageModel.open(tiny_llama, CONFIG) as model, pytest.raises(q4.InputError, match="from 1 to 48"):
        model.decoder.make_cache(capacity)


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_norm.weight"]
)
def test_missing_tensor(name: str, write_llama: Any) -> None:
    """A missing tensor is named, with the file."""
    path = write_llama(leave_out=name)
    with pytest.raises(q4.CheckpointError, match="must be present") as caught:
        LanguageModel.open(path, CONFIG)
    assert (caught.value.name, caught.value.where) == (f"tensor {name!r}", str(path))


def test_tensor_of_an_unread_type(write_llama: Any) -> None:
    """A tensor that is there, but in a type that is not read, is named with its type and not called missing."""
    path = write_llama()
    retype(path, {"blk.1.attn_v.weight": 133})
    with pytest.raises(q4.CheckpointError, match="of a ggml type that dialect gguf reads") as caught:
        LanguageModel.open(path, CONFIG)
    assert (caught.value.name, caught.value.value) == ("tensor 'blk.1.attn_v.weight'", "Q6_0 of ik_llama.cpp")


def test_a_split_model_opens_from_any_part(tmp_path: Path, write_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any part opens the whole model, and a part that changed makes what was cached of it stale."""
    whole = LanguageModel.open(write_llama(), CONFIG, cache="off")
    monkeypatch.setattr(gguf, "GGUFWriter", functools.partial(gguf.GGUFWriter, split_max_tensors=8))
    write_llama()
    parts = sorted(tmp_path.glob("*-of-*.gguf"))
    assert len(parts) > 2
    tokens = torch.arange(12)[None]
    with torch.inference_mode():
        expected = whole.decoder(tokens)
        for path in (parts[0], parts[-1]):
            with LanguageModel.open(path, CONFIG, cache=tmp_path / "cache") as model:
                assert torch.equal(model.decoder(tokens), expected)
    assert len([*(tmp_path / "cache").rglob("*.*")]) >= 2
    os.utime(parts[1])
    with pytest.warns(CacheWarning, match=r"is stale: source \(.*-00002-of-"):
        LanguageModel.open(parts[0], CONFIG, cache=tmp_path / "cache").close()


def test_file_that_describes_no_model(tmp_path: Path) -> None:
    """A checkpoint without an architecture is refused with a word about what can answer."""
    path = tmp_path / "layer.safetensors"
    q4.save_checkpoint(path, {"proj": q4.quantize(torch.randn(8, 64), format="nf4")}, dialect="simple-nf4")
    with pytest.raises(q4.CheckpointError, match="does not say which model its layers make up") as caught:
        LanguageModel.open(path, CONFIG)
    assert caught.value.where == str(path)
    assert "GGUF" in str(caught.value.hint)
    assert "config.json and tokenizer.json next to the weights" in str(caught.value.hint)


def test_unknown_tensor(write_llama: Any) -> None:
    """A tensor that the builder does not know is an error: its model computes something that we would not."""
    with pytest.raises(q4.CheckpointError, match=r"blk\.0\.attn_gate"):
        LanguageModel.open(write_llama(extra=True), CONFIG)


METADATA: dict[str, tuple[Any, str]] = {
    "general.architecture": ("lama", "Did you mean 'llama'"),
    "llama.block_count": (0, "from 1 to"),
    "llama.embedding_length": (96, r"of shape \[268, 96\], which the model's sizes ask for"),
    "llama.feed_forward_length": (64, r"of shape \[64, 64\]"),
    "llama.attention.head_count": (6, "a divisor of the 64 features"),
    "llama.attention.head_count_kv": (3, "a divisor of the 4 heads"),
    "llama.attention.key_length": (32, r"value_length|of shape \[128, 64\]"),
    "llama.attention.layer_norm_rms_epsilon": (float("nan"), "finite"),
    "llama.rope.freq_base": (-1.0, "greater than 0"),
    "llama.rope.dimension_count": (15, "even and at most 16"),
    "llama.rope.scaling.type": ("dynamic", "'none', 'linear', 'yarn' or 'longrope'"),
    "llama.expert_count": (8, "expert_used_count.* must be present"),
    "llama.vocab_size": (267, r"of shape \[267, 64\]"),
    "llama.context_length": ("many", "a whole number"),
}


@pytest.mark.parametrize("key", METADATA)
def test_bad_metadata(key: str, tiny_llama: Path) -> None:
    """A hyper-parameter that is out of range, not supported, or at odds with a tensor is refused by name and rule."""
    value, message = METADATA[key]
    checkpoint = q4.open(tiny_llama)
    values = {**checkpoint.metadata, key: value}
    with q4.Session(CONFIG) as session, pytest.raises(q4.CheckpointError, match=message) as caught:
        build_decoder(checkpoint, session, Metadata(values, "tiny.gguf"))
    assert caught.value.where == "tiny.gguf"


def test_missing_metadata(tiny_llama: Path) -> None:
    """A hyper-parameter without a default that is missing is named."""
    checkpoint = q4.open(tiny_llama)
    values = {key: value for key, value in checkpoint.metadata.items() if key != "llama.block_count"}
    with q4.Session(CONFIG) as session, pytest.raises(q4.CheckpointError, match="must be present") as caught:
        build_decoder(checkpoint, session, Metadata(values, "tiny.gguf"))
    assert caught.value.name == "metadata 'llama.block_count'"


def test_absurd_context_costs_nothing(tiny_llama: Path) -> None:
    """A context of two thousand million positions is only a number until a cache is made."""
    checkpoint = q4.open(tiny_llama)
    values = {**checkpoint.metadata, "llama.context_length": 2**31 - 1}
    with q4.Session(CONFIG) as session:
        decoder = build_decoder(checkpoint, session, Metadata(values, "tiny.gguf"))
        assert decoder.make_cache(4).nbytes == 2 * 2 * 2 * 4 * 16 * 4


def test_linear_rope_scaling(tiny_llama: Path) -> None:
    """Linear scaling stretches positions: with factor 1 nothing changes, with 2 the logits do."""
    checkpoint = q4.open(tiny_llama)
    results = []
    with q4.Session(CONFIG) as session, torch.inference_mode():
        for factor in (1.0, 2.0):
            extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": factor}
            decoder = build_decoder(checkpoint, session, Metadata({**checkpoint.metadata, **extra}, "tiny.gguf"))
            results.append(decoder(torch.tensor([TOKENS]), decoder.make_cache(16))[0])
    expected = PlainLlama(tiny_llama).logits(TOKENS)
    assert relative_error(results[0], expected) < 1e-5
    assert relative_error(results[1], expected) > 1e-2


def test_a_plugin_brings_an_architecture(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new architecture is one object that a plugin gives to ``q4_architectures``."""

    class Plugin:
        @q4.hookimpl
        def q4_architectures(self) -> list[Architecture]:
            return [attrs.evolve(ARCHITECTURES[0], name="llama-again")]

    registry = q4.Registry([("lm", q4_lm.plugin), ("more", Plugin())])
    monkeypatch.setattr("q4_lm.models.architecture.default_registry", lambda: registry)
    assert set(architectures()) == {"bert", *(item.name for item in ARCHITECTURES), "llama-again"}
    checkpoint = q4.open(tiny_llama)
    values = {**checkpoint.metadata, "general.architecture": "llama-again"}
    values |= {key.replace("llama.", "llama-again."): value for key, value in values.items()}
    with q4.Session(CONFIG) as session:
        assert len(build_decoder(checkpoint, session, Metadata(values, "tiny.gguf")).layers) == 2


def test_a_header_is_read_once(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening asks the architecture for its config once, not again for each who needs it."""
    calls = []
    own = next(item for item in ARCHITECTURES if item.name == "llama")

    def config(*arguments: Any) -> Any:
        calls.append(arguments)
        return own.config(*arguments)

    monkeypatch.setattr("q4_lm.models.architecture.architectures", lambda: {"llama": attrs.evolve(own, config=config)})
    LanguageModel.open(tiny_llama, CONFIG, cache="off").close()
    assert len(calls) == 1


def test_an_encoder_is_refused_by_its_own_name(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the architecture that the file has."""
    own = next(item for item in ARCHITECTURES if item.name == "llama")
    encoder = attrs.evolve(
        own, name="ours", config=lambda *_: TransformerConfig(hidden_size=8, intermediate_size=8, causal=False)
    )
    monkeypatch.setattr("q4_lm.models.architecture.architectures", lambda: {"llama": encoder})
    checkpoint = q4.open(tiny_llama)
    with q4.Session(CONFIG) as session, pytest.raises(q4.CheckpointError, match=r"encoder gives no text.*'ours'"):
        build_decoder(checkpoint, session, Metadata(checkpoint.metadata, "tiny.gguf"))
