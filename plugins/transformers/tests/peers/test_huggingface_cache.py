"""Packed layers of transformers' models in the cache: mapped when a model is loaded again, with the same numbers."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from huggingface_adapters import OLDER_NAME, adapter_gradients, with_adapters
from huggingface_models import IDS, UNTIED, dense_model, logits, packed
from safetensors.torch import load_file, save_file

import q4_transformers
import q4core as q4
from q4_lm.prepared.container import Container, write_container
from q4_lm.prepared.opening import CacheWarning
from q4_transformers import Q4Config
from q4_transformers.quantizer import Q4Quantizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers"), OLDER_NAME]

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},  # biases next to the packed weights
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4},  # transposed matrices
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def _spread(model: Any) -> None:
    """Move all parameters from their initial values, of which many are zero or one."""
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.fixture
def dense(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that saves a random dense model."""

    def write(kind: str = "Llama", name: str = "dense") -> Path:
        dense_model(kind, change=_spread, **UNTIED, **FAMILIES[kind]).save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that loads a folder, quantised by default in NF4, through a cache of the test's own."""

    def load_folder(
        folder: Path, state: str, dtype: torch.dtype = torch.float32, variant: str | None = None, **options: Any
    ) -> Any:
        config = Q4Config(**{"format": "nf4", "cache": tmp_path / "cache", **options})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=dtype, variant=variant
        )
        assert model.hf_quantizer.cache_state == state
        return model.eval()

    return load_folder


def only_file(cache: Path) -> Path:
    """Return the one file of a cache."""
    (found,) = cache.glob("*.q4prep")
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_second_load_is_the_same_model(
    kind: str, dense: Callable[..., Path], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first load quantised is mapped by the second, which reads no weight: same bits, same packed weights."""
    folder = dense(kind)
    first = load(folder, "written")
    assert torch.equal(logits(first), logits(load(folder, "off", cache="off")))
    monkeypatch.delattr(Q4Quantizer, "_weight")
    again = load(folder, "opened")
    assert torch.equal(logits(again), logits(first))
    assert len(packed(again)) > 4
    assert packed(again) == packed(first)
    for layer, other in ((again.get_submodule(name), first.get_submodule(name)) for name in packed(again)):
        tensors = zip(layer.packed_weight().tensors(), other.packed_weight().tensors(), strict=True)
        assert all(torch.equal(one, two) for (_, one), (_, two) in tensors)
        assert (layer.name, layer.stored_name) == (other.name, other.stored_name)


def test_kernels_take_their_layout_from_the_cache(
    dense: Callable[..., Path], load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of cpu-native, which is not the checkpoint's, is mapped too, and computes the same bits."""
    monkeypatch.setenv("Q4_PLUGINS", "cpu-native,dialects,lm,nn,safetensors")
    q4.reset_registry()
    try:
        folder = dense()
        first = load(folder, "written", format="nvfp4", backend="cpu-native")
        again = load(folder, "opened", format="nvfp4", backend="cpu-native")
        assert torch.equal(logits(again), logits(first))
    finally:
        monkeypatch.undo()
        q4.reset_registry()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_packed_checkpoint_is_stored_and_saved_alike(
    dtype: torch.dtype, dense: Callable[..., Path], load: Callable[..., Any], tmp_path: Path
) -> None:
    """A model from the cache is saved byte for byte as the one that was read; each dtype has a file of its own."""
    load(dense("Qwen2"), "off", cache="off", format="nf4").save_pretrained(tmp_path / "packed")
    first = load(tmp_path / "packed", "written", dtype, format=None)
    again = load(tmp_path / "packed", "opened", dtype, format=None)
    assert torch.equal(logits(first), logits(again))
    again.save_pretrained(tmp_path / "again")
    stored, written = (load_file(tmp_path / name / "model.safetensors") for name in ("packed", "again"))
    assert stored.keys() == written.keys()
    for key, tensor in stored.items():
        is_packed = f"{key.partition('.weight')[0]}.weight.absmax" in stored and not key.endswith(".bias")
        expected = tensor if is_packed else tensor.to(dtype)
        assert written[key].dtype == expected.dtype
        assert torch.equal(written[key], expected)


def test_adapters_train_and_merge_on_mapped_layers(dense: Callable[..., Path], load: Callable[..., Any]) -> None:
    """Gradients, copies, and merging by quantising again or densely, are as on layers that were prepared here."""
    folder = dense()
    load(folder, "written")
    merged = []
    for state, options in (("opened", {}), ("off", {"cache": "off"})):
        prepared = q4_transformers.prepare_for_training(load(folder, state, **options))
        model = with_adapters(prepared, task_type="CAUSAL_LM")
        gradients = [*adapter_gradients(model, IDS).values()]
        plain, _ = q4_transformers.merge(copy.deepcopy(model), exact=True)
        again, _ = q4_transformers.merge(model, requantize=True)
        merged.append([*gradients, logits(plain), logits(again)])
    assert all(torch.equal(one, two) for one, two in zip(*merged, strict=True))


def _newer(folder: Path, _: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(1, 1))


def _other_weights(folder: Path, _: Path) -> None:
    state = load_file(folder / "model.safetensors")
    save_file({key: value * 1.5 for key, value in state.items()}, folder / "model.safetensors", {"format": "pt"})


def _edited(cache: Path, **header: Any) -> None:
    found = Container(only_file(cache))
    tensors = [found.tensor(index).clone() for index in range(len(found))]
    write_container(only_file(cache), {**found.header, **header}, tensors)


def _other_software(_: Path, cache: Path) -> None:
    facts = Container(only_file(cache)).header["facts"]
    _edited(cache, facts={**facts, "software": {**facts["software"], "transformers": "5.0.0rc1"}})


def _other_backend(_: Path, cache: Path) -> None:
    model = Container(only_file(cache)).header["model"]
    kinds = [{**kind, "plan": "elsewhere/0123456789abcdef"} for kind in model["kinds"]]
    _edited(cache, model={**model, "kinds": kinds})


def _truncated(_: Path, cache: Path) -> None:
    os.truncate(only_file(cache), only_file(cache).stat().st_size - 64)


def _foreign(folder: Path, cache: Path) -> None:
    only_file(cache).write_bytes((folder / "model.safetensors").read_bytes())


@pytest.mark.parametrize(
    "change",
    [_newer, _other_weights, _other_software, _other_backend, _truncated, _foreign],
    ids=lambda item: item.__name__,
)
def test_what_does_not_fit_is_made_again_and_reported_once(
    change: Callable[[Path, Path], None], dense: Callable[..., Path], load: Callable[..., Any], tmp_path: Path
) -> None:
    """A stale, foreign or damaged file costs one warning and a new file, and never an answer."""
    folder = dense()
    load(folder, "written")
    change(folder, tmp_path / "cache")
    with pytest.warns(CacheWarning) as caught:
        again = load(folder, "written")
    assert len([item for item in caught if item.category is CacheWarning]) == 1
    assert torch.equal(logits(again), logits(load(folder, "off", cache="off")))
    assert torch.equal(logits(load(folder, "opened")), logits(again))


def test_each_option_has_a_file_of_its_own(
    dense: Callable[..., Path], load: Callable[..., Any], tmp_path: Path
) -> None:
    """Another format, block size, choice of modules or precision is no reason to replace a file."""
    folder = dense()
    choices: list[dict[str, Any]] = [
        {},
        {"format": "fp4"},
        {"block_size": 32},
        {"modules_to_not_convert": ["down_proj"]},
        {"activation_precision": "exact"},
    ]
    plain = [logits(load(folder, "written", **choice)) for choice in choices]
    assert len(list((tmp_path / "cache").glob("*.q4prep"))) == len(choices)
    for choice, expected in zip(choices, plain, strict=True):
        assert torch.equal(logits(load(folder, "opened", **choice)), expected)


def test_each_checkpoint_of_a_folder_has_a_file_of_its_own(
    dense: Callable[..., Path], load: Callable[..., Any]
) -> None:
    """Weights next to the first ones (``variant=``) are neither read instead of these nor stored in their place."""
    folder = dense()
    state = load_file(folder / "model.safetensors")
    save_file({key: value * 1.5 for key, value in state.items()}, folder / "model.other.safetensors", {"format": "pt"})
    first, other = logits(load(folder, "written")), logits(load(folder, "written", variant="other"))
    assert torch.equal(other, logits(load(folder, "off", cache="off", variant="other")))
    assert not torch.equal(other, first)
    assert torch.equal(first, logits(load(folder, "opened")))
    assert torch.equal(other, logits(load(folder, "opened", variant="other")))


def test_fewer_layers_take_what_they_need(dense: Callable[..., Path], load: Callable[..., Any], tmp_path: Path) -> None:
    """A config with more layers than a file has writes it again, and one with fewer opens the file of all."""
    folder, cache = dense(), tmp_path / "cache"
    plain = logits(load(folder, "off", cache="off"))
    for layers, state in ((1, "written"), (2, "written"), (1, "opened"), (2, "opened")):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=Q4Config(format="nf4", cache=cache), num_hidden_layers=layers
        )
        assert model.hf_quantizer.cache_state == state
        assert len(packed(model)) == 7 * layers
    assert torch.equal(logits(model.eval()), plain)


def test_load_names_the_cache(dense: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``load(cache=…)`` goes before the configuration's own, and ``Q4_CACHE`` decides for ``auto``."""
    folder, config = dense(), Q4Config(format="nf4", cache="off")
    for expected in ("written", "opened"):
        model, _ = q4_transformers.load(folder, config, cache=tmp_path / "named")
        assert model.hf_quantizer.cache_state == expected
    assert config.cache == "off"
    assert q4_transformers.load(folder, config)[0].hf_quantizer.cache_state == "off"
    monkeypatch.setenv("Q4_CACHE", str(tmp_path / "named"))
    assert q4_transformers.load(folder, Q4Config(format="nf4"))[0].hf_quantizer.cache_state == "opened"
    for wrong in (3, "", None):
        with pytest.raises(q4.ConfigError, match="cache must be 'auto', 'off' or a folder"):
            Q4Config(cache=wrong)  # type: ignore[arg-type]  # on purpose
    (tmp_path / "model.gguf").touch()
    for path in (folder, tmp_path / "model.gguf"):
        with pytest.raises(q4.ConfigError, match="config must be a Q4Config or None, got 'dict'"):
            q4_transformers.load(path, {"format": "nf4"}, cache="off")  # type: ignore[arg-type]  # on purpose
