"""The examples that learn reach what the documentation says, with four-bit weights as with float ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from matplotlib import image

import q4core as q4
from q4_nn import STELinear, pack_, ste_weight
from tests.support.limits import scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Record = Callable[[str, object], None]

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.training


def run(name: str, folder: Path, *arguments: object) -> str:
    """Run an example to its end, check its picture, and return what it printed."""
    picture = folder / "picture.png"
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments), "--picture", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=scaled(3600))
    assert done.returncode == 0, done.stderr
    pixels = image.imread(picture, format="png")
    assert pixels[..., :3].reshape(-1, 3).std(0).max() > 0.05
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """Return the number at each match of a pattern."""
    return [float(found) for found in re.findall(pattern, text)]


@pytest.mark.parametrize(("name", "least"), [("mlp_digits.py", 95.0), ("cnn_digits.py", 97.0)])
def test_digits(name: str, least: float, tmp_path: Path, record_property: Record) -> None:
    """Most held-back digits are right; means of five seeds of four-bit and float networks lie within one per cent."""
    shares = numbers(r"([\d.]+)% of the held-back digits right \(mean of 5 seeds", run(name, tmp_path))
    record_property("right_percent_of_float_and_packed", shares)
    assert len(shares) == 2
    assert min(shares) >= least
    assert abs(shares[0] - shares[1]) <= 1.0


@pytest.mark.parametrize(("name", "least"), [("snn_digits.py", 95.0), ("snn_events.py", 90.0)])
def test_spikes(name: str, least: float, tmp_path: Path, record_property: Record) -> None:
    """Most samples are right; NF4 synapses cost less than half a per cent of them, by the means of five seeds."""
    shares = numbers(r"([\d.]+)% of the test samples right \(mean of 5 seeds", run(name, tmp_path))
    record_property("right_percent_of_float_and_packed", shares)
    assert len(shares) == 2
    assert min(shares) >= least
    assert shares[1] >= shares[0] - 0.5


def test_text(tmp_path: Path, record_property: Record) -> None:
    """A recurrent network says more of the next byte than counts of pairs; four bits cost less than one per cent."""
    text = run("rnn_text.py", tmp_path)
    (pairs,) = numbers(r"counts of pairs: ([\d.]+)", text)
    dense, trained, packed = numbers(r"gru.*: ([\d.]+) nats per byte \(mean of 5 seeds", text)
    for name, value in (("pairs", pairs), ("float", dense), ("trained", trained), ("packed", packed)):
        record_property(f"{name}_nats_per_byte", value)
    assert max(dense, trained, packed) < pairs
    assert packed <= 1.01 * dense
    assert packed <= 1.01 * trained


def test_tiny_llama(tmp_path: Path, record_property: Record) -> None:
    """It learns to below 1.8 nats per byte, and packs to within three per cent of that; then it continues a text."""
    text = run("tiny_llama.py", tmp_path)
    trained, packed = numbers(r"([\d.]+) nats per byte", text)
    record_property("trained_nats_per_byte", trained)
    record_property("packed_nats_per_byte", packed)
    assert trained < 1.8
    assert abs(packed - trained) <= 0.03 * trained
    assert "A backend is " in text


def test_head_on_sentences(tmp_path: Path, record_property: Record) -> None:
    """On MiniLM's vectors the page of most paragraphs is found; four bits cost less than five per cent of them."""
    text = run("finetune_head.py", tmp_path)
    (cosine,) = numbers(r"mean cosine of nf4 to dense vectors: ([\d.]+)", text)
    dense, packed = numbers(r"([\d.]+)% of the held-back paragraphs right", text)
    record_property("cosine", cosine)
    record_property("right_percent_of_dense_and_packed", [dense, packed])
    assert cosine > 0.95
    assert min(dense, packed) > 50.0  # chance is a sixth
    assert abs(dense - packed) <= 5.0


def rows_of(weights: Iterable[torch.Tensor]) -> set[tuple[float, ...]]:
    """Return every out-feature of some matrices."""
    return {tuple(row) for weight in weights for row in weight.double().tolist()}


def test_what_a_packed_llama_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights are the trained ones bit for bit, and so are logits where weights are made dense for a product.

    Kernels add in another order: each y of theirs lies within what rounding may do to a sum of K float32 products,
    γ_K · Σ|x||w| with γ_K = K u / (1 - K u), u = 2⁻²⁴ (Higham, Accuracy and Stability of Numerical Algorithms, §3.1),
    and the rounding of the products' operands and of the bias-free result, three more.
    """
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import learning_data  # type: ignore[import-not-found]  # noqa: PLC0415  # the examples' own modules
    import tiny_llama  # type: ignore[import-not-found]  # noqa: PLC0415

    learned, held_back = learning_data.text()
    tokens = held_back[:64][None]
    seen = []

    def look(layer: q4.Q4Linear, given: tuple[torch.Tensor], y: torch.Tensor) -> None:
        x, w = given[0].double().flatten(0, -2), q4.dequantize(layer.packed_weight()).double()
        count = x.shape[-1] + 3
        bound = count * 2**-24 / (1 - count * 2**-24) * (x.abs() @ w.abs().T)
        seen.append(bool(((y.double().flatten(0, -2) - x @ w.T).abs() <= bound).all()))

    for path in ("dequant_matmul_only", "kernel_or_fallback"):
        model, _ = tiny_llama.train("nvfp4", 12, learned)
        layers = [layer for layer in model.modules() if isinstance(layer, STELinear)]
        with torch.no_grad():
            expected = model(tokens)
            trained = rows_of(ste_weight(layer.weight, format="nvfp4") for layer in layers)
        config = q4.SessionConfig(device="cpu", compute_path=path, activation_precision="exact")
        with q4.Session(config) as session, torch.no_grad():
            pack_(model, session)
            packed = [layer for layer in model.modules() if isinstance(layer, q4.Q4Linear)]
            assert len(layers) == 3 * 7
            assert rows_of(q4.dequantize(layer.packed_weight()) for layer in packed) == trained
            for layer in packed:
                layer.register_forward_hook(look)
            found = model(tokens)
            assert torch.equal(found, expected) or path != "dequant_matmul_only"
    assert len(seen) >= 2 * 3 * 4
    assert all(seen)
