"""``from_pretrained`` by q4core: the numbers of each library's files, packed layers, saving for that library."""

from __future__ import annotations

import gc
import json
import re
import runpy
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
import torch
import transformers
from huggingface_models import EXACT, IDS, dense_model, error, load, packed, save_by_q4
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import q4_transformers
import q4core as q4
from q4_transformers import Q4Config
from q4_transformers.quantizer import _pattern

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers")]

MODELS = Path(__file__).parents[4] / "conformance/src/q4_conformance/golden/models"
SAVES_NVFP4 = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 8)
"""Whether transformers can read the NVFP4 that it saves by torchao: 5.0 and 5.4 can't."""
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
}


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)


# -- files of the libraries themselves


@pytest.mark.parametrize(
    ("kind", "is_nested", "family"),
    [("nf4", False, "Llama"), ("nf4", True, "Qwen2"), ("fp4", False, "Qwen2"), ("fp4", True, "Llama")],
)
def test_bitsandbytes(kind: str, is_nested: bool, family: str, tmp_path: Path, portable: Callable[..., Any]) -> None:
    """What bitsandbytes quantised loads with bitsandbytes' own numbers, and is saved byte for byte again."""
    dense = dense_model(family, tie_word_embeddings=family == "Qwen2")
    dense.save_pretrained(tmp_path / "dense")
    asked = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=is_nested
    )
    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path / "dense", quantization_config=asked, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert len(packed(ours)) == 14
    for name in packed(ours):
        weight = theirs.get_submodule(name).weight
        dense.get_submodule(name).weight.data = portable(weight.data, weight.quant_state, torch.float32)
    assert error(ours, dense) < 1e-3
    ours.save_pretrained(tmp_path / "ours")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "ours" / file).is_file()
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    again = auto.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert type(again.model.layers[0].mlp.up_proj) is type(theirs.model.layers[0].mlp.up_proj)
    assert error(again, theirs) == 0


def test_torchao(tmp_path: Path, peer: Callable[[str], ModuleType]) -> None:
    """A model that transformers quantised by torchao loads with torchao's numbers, and torchao loads what we save."""
    formats = peer("torchao.prototype.mx_formats")
    dense = dense_model()
    dense.save_pretrained(tmp_path / "dense")
    asked = transformers.TorchAoConfig(formats.NVFP4WeightOnlyConfig())
    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path / "dense", quantization_config=asked, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    for name in packed(ours):
        dense.get_submodule(name).weight.data = theirs.get_submodule(name).weight.dequantize(torch.float32)
    assert packed(ours)
    assert error(ours, dense) < 1e-3
    ours.save_pretrained(tmp_path / "ours")
    if SAVES_NVFP4:
        again = auto.from_pretrained(tmp_path / "ours", dtype=torch.float32)
        assert error(again, theirs) < 1e-6


@pytest.mark.parametrize("name", ["bitsandbytes-nf4", "compressed-tensors-nvfp4", "modelopt-nvfp4", "torchao-nvfp4"])
def test_files_of_the_libraries(name: str, tmp_path: Path) -> None:
    """A model that a library exported has that library's dequantised weights and their logits, and is saved again."""
    folder = MODELS / name
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    dense = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    expected, stored = (load_file(folder / f"{part}.safetensors") for part in ("expected", "model"))
    ours = load(folder)
    assert len(packed(ours)) == 7
    rest = [key for key in dense.state_dict() if key.removesuffix(".weight") not in packed(ours)]
    dense.load_state_dict({key: stored[key].float() for key in rest}, strict=False)
    for module in packed(ours):
        weight = ours.get_submodule(module).packed_weight()
        theirs = expected[module]
        assert torch.equal(q4.dequantize(weight, theirs.dtype), theirs)
        dense.get_submodule(module).weight.data = q4.dequantize(weight, torch.float32)
    assert error(ours, dense) < 1e-3
    ours.save_pretrained(tmp_path)
    again = load_file(tmp_path / "model.safetensors")
    assert again.keys() == stored.keys()
    for key, value in stored.items():
        # dense tensors were loaded in float32
        same = again[key].dtype == value.dtype or any(key.startswith(name) for name in packed(ours))
        assert torch.equal(_bits(again[key]), _bits(value)) if same else torch.equal(again[key], value.float()), key
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written == json.loads((folder / "config.json").read_text())["quantization_config"]


# -- ways to load


def test_config_for_needs_no_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' public API alone loads a folder, and ``load`` brings the model of the class that it names."""
    auto = transformers.quantizers.auto.AutoHfQuantizer
    original = auto.merge_quantization_configs.__func__.__wrapped__
    monkeypatch.setattr(auto, "merge_quantization_configs", original)
    dense = save_by_q4(tmp_path, "bitsandbytes", "nf4")
    config = q4_transformers.config_for(tmp_path, Q4Config(**EXACT))
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32)
    assert error(ours, dense) < 1e-3
    model, tokenizer = q4_transformers.load(tmp_path, Q4Config(**EXACT), dtype=torch.float32)
    assert type(model) is transformers.LlamaForCausalLM
    assert tokenizer is None
    assert error(model, ours) == 0


def test_modelopt_without_asking(tmp_path: Path) -> None:
    """transformers can't load ModelOpt's files; with this package imported, it does, without an argument."""
    dense = save_by_q4(tmp_path, "modelopt-nvfp4", "nvfp4")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert packed(ours)
    with q4.using(q4.SessionConfig(activation_precision="exact")):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert error(again, dense) < 1e-3


def test_taking_over(tmp_path: Path) -> None:
    """Programs that can't be edited load by q4core once names are taken over, and as usual once they are released."""
    save_by_q4(tmp_path, "bitsandbytes", "nf4")
    auto = transformers.AutoModelForCausalLM
    try:
        assert q4_transformers.take_over("bitsandbytes") == ("bitsandbytes",)
        assert packed(auto.from_pretrained(tmp_path))
    finally:
        q4_transformers.give_back()
    assert not packed(auto.from_pretrained(tmp_path))
    with pytest.raises(q4.ConfigError, match="bitsandbytes"):
        q4_transformers.take_over("hqq")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device_map", [None, "cpu", "auto"])
def test_shards_and_devices(tied: bool, device_map: str | None, tmp_path: Path) -> None:
    """Sharded checkpoints load on the device that a map finds, with tied embeddings, too."""
    dense = save_by_q4(tmp_path / "one", "bitsandbytes", "nf4", tie_word_embeddings=tied)
    load(tmp_path / "one").save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    ours = load(tmp_path / "many", device_map=device_map)
    assert error(ours, dense) < 1e-3
    assert ours.lm_head.weight is ours.model.embed_tokens.weight or not tied
    assert not any("room" in name for name, _ in ours.named_buffers())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Layers take the dtype that is asked for, whatever is stored, and float32 activations, too."""
    dense = save_by_q4(tmp_path, "bitsandbytes", "nf4")
    ours = load(tmp_path, dtype=dtype)
    assert {ours.get_submodule(name).weight.dtype for name in packed(ours)} == {dtype}
    # two layers' worth of roundings to 8 bits
    assert error(ours, dense) < 0.05
    layer = ours.get_submodule(packed(ours)[0])
    assert layer(torch.randn(2, 64)).dtype is torch.float32
    assert isinstance(layer, torch.nn.Linear)


def test_another_family_and_biases(tmp_path: Path) -> None:
    """Biases, norms of q and k, and buffers that are not stored survive, in a model with a prefix of its own."""
    for kind, options in FAMILIES.items():
        folder = tmp_path / kind
        dense = save_by_q4(folder, "compressed-tensors-nvfp4", "nvfp4", kind, **options)
        ours = load(folder)
        assert error(ours, dense) < 1e-3
        ours.save_pretrained(tmp_path / "again")
        assert error(load(tmp_path / "again"), dense) < 1e-3


def test_base_model_of_a_head(tmp_path: Path) -> None:
    """The base of a model loads from the checkpoint of the whole, as transformers lets it."""
    dense = save_by_q4(tmp_path, "bitsandbytes", "nf4")
    base = load(tmp_path, kind=transformers.AutoModel)
    with torch.no_grad():
        found, expected = base(IDS).last_hidden_state, dense.model(IDS).last_hidden_state
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-3


# -- dense checkpoints


@pytest.mark.parametrize("format_", ["nf4", "nvfp4", "mxfp4", "int4"])
def test_quantises_while_loading(format_: str, tmp_path: Path) -> None:
    """A dense checkpoint is quantised as q4core quantises it, but for the head, and its library loads what is saved."""
    dense = dense_model()
    dense.save_pretrained(tmp_path / "dense")
    config = {"format": format_, "modules_to_not_convert": ["lm_head", "layers.1"]}
    ours = load(tmp_path / "dense", config=config)
    assert packed(ours) == [name for name in packed(ours) if name.startswith("model.layers.0.")]
    for name in packed(ours):
        weight = dense.get_submodule(name).weight
        weight.data = q4.dequantize(q4.quantize(weight.data, format_, symmetric=format_ == "int4"), torch.float32)
    assert error(ours, dense) < 1e-3
    rows = {row.name: row for row in q4_transformers.explain(ours).rows}
    assert rows["lm_head"].reason == "in modules_to_not_convert as 'lm_head'"
    assert rows["model.layers.0.mlp.up_proj"].bytes_after < rows["model.layers.0.mlp.up_proj"].bytes_before
    ours.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert error(again, ours) == 0
    if format_ == "mxfp4" or (format_ == "nvfp4" and not SAVES_NVFP4):  # torchao can't run weights alone in MXFP4
        return
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    # bitsandbytes multiplies in bfloat16 where the CPU has it
    assert error(again, ours) < 2e-2


def test_zero_points(tmp_path: Path) -> None:
    """INT4 is symmetric, which its library can load, unless zero points are asked for, which are nearer."""
    dense = dense_model()
    dense.save_pretrained(tmp_path)
    configs: list[dict[str, Any]] = [{"format": "int4"}, {"format": "int4", "zero_points": True}]
    plain, finer = (load(tmp_path, config=config) for config in configs)
    weights = [model.get_submodule(packed(model)[0]).packed_weight() for model in (plain, finer)]
    assert [weight.zero is None for weight in weights] == [True, False]
    assert error(finer, dense) < error(plain, dense)


def test_another_dialect(tmp_path: Path) -> None:
    """A model is saved in another dialect than its own, with that dialect's entry in config.json."""
    dense = save_by_q4(tmp_path / "one", "compressed-tensors-nvfp4", "nvfp4")
    with pytest.raises(q4.DialectError, match="lossy=True"):
        load(tmp_path / "one", config={"dialect": "modelopt-nvfp4"}).save_pretrained(tmp_path / "two")
    ours = load(tmp_path / "one", config={"dialect": "modelopt-nvfp4", "lossy": True})
    ours.save_pretrained(tmp_path / "two")
    ours.config.quantization_config.dialect = None
    ours.save_pretrained(tmp_path / "three")
    one, three = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "three"))
    assert three["quantization_config"] == one["quantization_config"]
    entry = json.loads((tmp_path / "two" / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == "modelopt"
    assert error(load(tmp_path / "two"), dense) < 1e-3


def test_releases_that_do_not_name_the_model(tmp_path: Path) -> None:
    """transformers 5.8 to 5.19 ask for conversions of weights without the model."""
    save_by_q4(tmp_path, "bitsandbytes", "nf4")
    conversions = [object()]
    assert load(tmp_path).hf_quantizer.update_weight_conversions(conversions) is conversions


def test_packed_weights_are_counted(tmp_path: Path) -> None:
    """``num_parameters`` counts a packed weight as the dense one, and none of them as trainable."""
    dense = dense_model()
    dense.save_pretrained(tmp_path)
    ours = load(tmp_path, config={"format": "nf4"})
    assert packed(ours)
    assert ours.num_parameters() == dense.num_parameters()
    assert ours.num_parameters(exclude_embeddings=True) == dense.num_parameters(exclude_embeddings=True)
    left = sum(parameter.numel() for parameter in ours.parameters() if parameter.requires_grad)
    assert ours.num_parameters(only_trainable=True) == left


def test_transposed_layers(tmp_path: Path) -> None:
    """GPT-2 keeps its linear layers transposed; they are quantised the right way round, and saved so."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4, n_positions=64)
    dense = transformers.GPT2LMHeadModel(config).eval()
    dense.save_pretrained(tmp_path / "dense")
    ours = load(tmp_path / "dense", config={"format": "nf4"})
    assert len(packed(ours)) == 4
    for name in packed(ours):
        weight = q4.quantize(dense.get_submodule(name).weight.detach().T.contiguous(), "nf4")
        dense.get_submodule(name).weight.data = q4.dequantize(weight, torch.float32).T.contiguous()
    assert error(ours, dense) < 1e-3
    ours.save_pretrained(tmp_path / "ours")
    assert error(load(tmp_path / "ours"), dense) < 1e-3


def test_attention_of_torch_stays_dense(tmp_path: Path) -> None:
    """A layer whose weight is read by its parent, torch's ``MultiheadAttention``, is left dense and listed."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    dense = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, image_size=32, patch_size=16))
    dense.eval().save_pretrained(tmp_path)
    ours = load(tmp_path, config={"format": "q8_0"}, kind=transformers.SiglipVisionModel)
    pixels = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(ours(pixels).pooler_output, dense(pixels).pooler_output, atol=0.05)
    reasons = {row.name: row.reason for row in q4_transformers.explain(ours).dense}
    (name,) = [name for name in reasons if name.endswith("attention.out_proj")]
    assert "no plain linear layer" in reasons[name]


# -- running


def test_generates_and_compiles(tmp_path: Path) -> None:
    """Generation, a static cache, gradients and a compiled forward pass give what the dense model gives."""
    dense = save_by_q4(tmp_path, "bitsandbytes", "nf4")
    ours = load(tmp_path)
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = dense.generate(IDS, **asked)
    assert torch.equal(ours.generate(IDS, **asked), expected)
    assert torch.equal(ours.generate(IDS, cache_implementation="static", disable_compile=True, **asked), expected)
    embedded = ours.get_input_embeddings()(IDS).detach().requires_grad_()
    theirs = embedded.detach().clone().requires_grad_()
    ours(inputs_embeds=embedded).logits.sum().backward()
    dense(inputs_embeds=theirs).logits.sum().backward()
    assert float((embedded.grad - theirs.grad).abs().max() / theirs.grad.abs().max()) < 1e-4
    with torch.compiler.set_stance("default"):
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        assert error(compiled, ours) < 1e-5


# -- memory


class _Watch(TorchDispatchMode):
    """Notes the bytes of every new storage of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = (0, "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {item.untyped_storage().data_ptr() for item in tree_leaves((args, kwargs)) if _is_float(item)}
        for item in tree_leaves(out):
            if _is_float(item) and not item.is_meta and item.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, (item.untyped_storage().nbytes(), str(func)))
        return out


def _is_float(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.is_floating_point()


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_memory(tmp_path: Path) -> None:
    """While a model is loaded nothing dense is made, and at most two tensors are there besides what is prepared."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
    save_by_q4(tmp_path, "bitsandbytes", "nf4", **sizes)
    load(tmp_path)  # what is made once in a process
    gc.collect()
    before, peak, done = _anonymous_bytes(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], _anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        with _Watch() as watch:
            ours = load(tmp_path)
    finally:
        done.set()
        thread.join()
    rows = q4_transformers.explain(ours).rows
    largest = max(row.bytes_after for row in rows)
    assert watch.largest[0] <= largest, watch.largest
    assert largest < 512 * 1024  # a quarter of the dense one
    assert 0 < peak[0] - before <= sum(row.bytes_after for row in rows) + 2 * largest


# -- the page, and programs


def test_page(tmp_path: Path) -> None:
    """What docs/huggingface.md shows runs, one snippet after the other; those of adapters are tested with PEFT."""
    page = (Path(__file__).parents[4] / "docs/huggingface.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(snippets) == 5
    save_by_q4(tmp_path / "packed", "bitsandbytes", "nf4")
    dense_model().save_pretrained(tmp_path / "dense")
    given = {"folder": tmp_path / "packed", "dense_folder": tmp_path / "dense", "out": tmp_path / "out"}
    exec("\n".join(snippets[:3]), given)  # noqa: S102  # our own page
    assert packed(given["model"])
    assert packed(load(tmp_path / "out"))


def test_program_that_is_not_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script runs under ``python -m q4_transformers`` with its arguments, and loads packed layers."""
    save_by_q4(tmp_path / "model", "bitsandbytes", "nf4")
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "assert __name__ == '__main__'\n"
        "print(type(model.model.layers[0].mlp.up_proj).__name__)\n"
    )
    shown = []
    monkeypatch.setattr("builtins.print", lambda *words: shown.append(words))
    monkeypatch.setattr("sys.argv", ["q4_transformers", str(script), str(tmp_path / "model")])
    try:
        runpy.run_module("q4_transformers", run_name="__main__")
    finally:
        q4_transformers.give_back()
    assert shown == [("HfLinear",)]


def test_pipeline(tmp_path: Path) -> None:
    """A pipeline generates text with a model loaded so."""
    save_by_q4(tmp_path, "bitsandbytes", "nf4")
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number + 3 for number in range(93)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))  # noqa: S106  # no secret
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path)  # noqa: S106
    model, own = q4_transformers.load(tmp_path)
    assert own.encode("w1 w2") == [4, 5]
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=own)
    [answer] = pipe("w1 w2 w3", max_new_tokens=3, do_sample=False)
    assert answer["generated_text"].startswith("w1 w2 w3")


def test_names_that_are_hidden() -> None:
    """The pattern of packed tensors has these names alone, though blocks are in it once."""
    layers = ["self_attn.q_proj", "mlp.down_proj"]
    keys = [f"{layer}.{key}" for layer in layers for key in ("a", "b.c")]
    names = [f"model.layers.{number}.{key}" for number in (0, 1, 10) for key in keys]
    pattern = re.compile(_pattern([*names, "lm_head.a", "model.layers.1.extra.2.a"]))
    assert all(map(pattern.search, [*names, "lm_head.a", "model.layers.1.extra.2.a"]))
    others = ["model.layers.2.mlp.down_proj.a", "model.layers.0.extra.2.a", "lm_head.ab", "x.lm_head.a", "lm_headxa"]
    assert not any(map(pattern.search, others))
