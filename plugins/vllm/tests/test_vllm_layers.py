"""Layers of vLLM over packed weights: every rank's part, joined again, is the layer's product."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import vllm_stubs as stubs

import q4core as q4
from q4_vllm.config import Q4Config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

HIDDEN, INNER, VOCABULARY = 128, 352, 100  # 352 / 2 is no multiple of a block of 64
HEAD, HEADS, KV_HEADS = 16, 8, 2
ATTENTION = "model.layers.0.self_attn"
SHAPES = {
    f"{ATTENTION}.q_proj": (HEADS * HEAD, HIDDEN),
    f"{ATTENTION}.k_proj": (KV_HEADS * HEAD, HIDDEN),
    f"{ATTENTION}.v_proj": (KV_HEADS * HEAD, HIDDEN),
    f"{ATTENTION}.o_proj": (HIDDEN, HEADS * HEAD),
    "model.layers.0.mlp.gate_proj": (INNER, HIDDEN),
    "model.layers.0.mlp.up_proj": (INNER, HIDDEN),
    "model.layers.0.mlp.down_proj": (HIDDEN, INNER),
    "lm_head": (VOCABULARY, HIDDEN),
}
FORMATS = {"nf4": "bitsandbytes", "nvfp4": "modelopt-nvfp4", "int4": "compressed-tensors-int4"}


def _save(
    folder: Path, shapes: Mapping[str, tuple[int, int]], format_: str = "nf4", dense: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Save random packed layers as a folder, and return what they mean, in float64."""
    generator = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"block_size": 32, "symmetric": True} if format_ == "int4" else {}
    weights = {
        name: q4.quantize(torch.randn(shape, generator=generator), format_, name=name, **options)
        for name, shape in shapes.items()
    }
    (folder / "config.json").write_text("{}")
    q4.save_checkpoint(folder, weights, dialect=FORMATS[format_], dense=dict(dense or {}), lossy=True)
    with q4.open(folder) as checkpoint:
        return {name: q4.dequantize(checkpoint[name], torch.float64) for name in checkpoint}


def _opened(folder: Path) -> Q4Config:
    """Return a worker's config: what vLLM checked in one process, pickled for another."""
    checked = Q4Config()
    checked.maybe_update_config(str(folder), SimpleNamespace(architectures=["LlamaForCausalLM"]))
    config: Q4Config = pickle.loads(pickle.dumps(checked))  # noqa: S301  # our own
    config.packed_modules_mapping = stubs.Llama.packed_modules_mapping
    return config


def _filled(config: Q4Config, layers: list[Any], dtype: torch.dtype = torch.float32) -> list[Any]:
    """Make the layers of a model as vLLM does: all of them first, then weights; return their methods."""
    methods = [config.get_quant_method(layer, layer.prefix) for layer in layers]
    for layer, method in zip(layers, methods, strict=True):
        columns, sizes = layer.sizes()
        method.create_weights(layer, columns, sizes, columns, sum(sizes), dtype, weight_loader=None)
    for layer, method in zip(layers, methods, strict=True):
        method.process_weights_after_loading(layer)
    return methods


def _model() -> dict[str, Any]:
    return {
        "qkv": stubs.QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, prefix=f"{ATTENTION}.qkv_proj"),
        "o": stubs.RowParallelLinear(HEADS * HEAD, HIDDEN, prefix=f"{ATTENTION}.o_proj"),
        "gate_up": stubs.MergedColumnParallelLinear(HIDDEN, [INNER, INNER], prefix="model.layers.0.mlp.gate_up_proj"),
        "down": stubs.RowParallelLinear(INNER, HIDDEN, prefix="model.layers.0.mlp.down_proj"),
        "head": stubs.ParallelLMHead(VOCABULARY, HIDDEN, prefix="lm_head"),
    }


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round no activations: errors of cuts are then far above those of float32."""
    monkeypatch.setenv("Q4_PRECISION", "exact")
    monkeypatch.setattr("q4_vllm.checks._installed", lambda: "0.32.0")  # no release is installed here
    monkeypatch.setenv("Q4_CACHE", "off")


def _close(y: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that float32 sums are right: to 1e-5 of the greatest result, where a wrong cut is off by its size."""
    assert y.shape == expected.shape
    assert float((y.double() - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("format_", FORMATS)
def test_ranks_make_the_whole(format_: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused, row- and column-parallel layers and a padded head are whole over 1 to 8 ranks, also within blocks."""
    dense = _save(tmp_path, SHAPES, format_)
    x = {width: torch.randn(3, width, generator=torch.Generator().manual_seed(2)) for width in (HIDDEN, INNER)}
    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(size):
        stubs.parallel(monkeypatch, rank, size)
        model = _model()
        methods = _filled(_opened(tmp_path), list(model.values()))
        for (name, layer), method in zip(model.items(), methods, strict=True):
            whole = INNER if name == "down" else HIDDEN
            width = layer.sizes()[0]
            start = rank * width if isinstance(layer, stubs.RowParallelLinear) else 0
            parts.setdefault(name, []).append(method.apply(layer, x[whole][:, start : start + width]))
    joined = {name: dense[f"{ATTENTION}.{name}_proj"] for name in "qkv"}
    heads = max(1, KV_HEADS // size) * HEAD
    for rank, y in enumerate(parts["qkv"]):
        key = rank * KV_HEADS // size * HEAD
        rows = [joined["q"][rank * HIDDEN // size :][: HIDDEN // size]]
        rows += [joined[name][key : key + heads] for name in "kv"]
        _close(y, x[HIDDEN].double() @ torch.cat(rows).T)
    half = INNER // size
    for rank, y in enumerate(parts["gate_up"]):
        rows = [dense[f"model.layers.0.mlp.{name}_proj"][rank * half :][:half] for name in ("gate", "up")]
        _close(y, x[HIDDEN].double() @ torch.cat(rows).T)
    _close(sum(parts["o"], torch.zeros(())), x[HIDDEN].double() @ dense[f"{ATTENTION}.o_proj"].T)
    _close(sum(parts["down"], torch.zeros(())), x[INNER].double() @ dense["model.layers.0.mlp.down_proj"].T)
    head = torch.cat(parts["head"], -1)
    _close(head[:, :VOCABULARY], x[HIDDEN].double() @ dense["lm_head"].T)
    assert not bool(head[:, VOCABULARY:].any())


def test_matrices_that_are_stored_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stored matrix of queries, keys and values is cut in each of its three parts, as Phi-3's is."""
    total = (HEADS + 2 * KV_HEADS) * HEAD
    dense = _save(tmp_path, {f"{ATTENTION}.qkv_proj": (total, HIDDEN)})[f"{ATTENTION}.qkv_proj"]
    stubs.parallel(monkeypatch, 1, 2)
    layer = stubs.QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, prefix=f"{ATTENTION}.qkv_proj")
    x = torch.randn(2, HIDDEN)
    (method,) = _filled(_opened(tmp_path), [layer])
    rows = torch.cat([dense[64:128], dense[128 + 16 : 160], dense[160 + 16 :]])
    _close(method.apply(layer, x, torch.ones(len(rows))), x.double() @ rows.T + 1)


def test_parts_of_two_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fusion of weights that can't be joined runs them one by one, as GGUF's Q4_K and Q6_K."""
    dense = _save(tmp_path, {name: shape for name, shape in SHAPES.items() if "mlp.gate" in name or "mlp.up" in name})
    config = _opened(tmp_path)
    checkpoint: Any = config.checkpoint
    up = checkpoint["model.layers.0.mlp.up_proj"]
    other = q4.quantize(q4.dequantize(up, torch.float32), "nvfp4")
    monkeypatch.setitem(checkpoint._alive, "model.layers.0.mlp.up_proj", other)
    layer: Any = stubs.MergedColumnParallelLinear(HIDDEN, [INNER, INNER], prefix="model.layers.0.mlp.gate_up_proj")
    x = torch.randn(2, HIDDEN)
    (method,) = _filled(config, [layer])
    rows = torch.cat([dense["model.layers.0.mlp.gate_proj"], q4.dequantize(other, torch.float64)])
    _close(method.apply(layer, x), x.double() @ rows.T)
    assert len(layer.q4.pieces) == 2


@pytest.mark.parametrize("form", ["{prefix}.{number}.{part}", "{prefix}.{part}.{number}"])
@pytest.mark.parametrize("size", [1, 2])
def test_experts(form: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's experts are weighted and summed, over ranks that have a part of each."""
    prefix, inner, count = "model.layers.0.mlp.experts", 96, 3
    shapes = {"gate_proj": (inner, HIDDEN), "up_proj": (inner, HIDDEN), "down_proj": (HIDDEN, inner)}
    names = {
        (number, part): form.format(prefix=prefix, number=number, part=part)
        for number in range(count)
        for part in shapes
    }
    dense = _save(tmp_path, {name: shapes[part] for (_, part), name in names.items()})
    x, ids = torch.randn(4, HIDDEN), torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0]])
    weights = torch.rand(4, 2)
    total = torch.zeros(4, HIDDEN)
    for rank in range(size):
        stubs.parallel(monkeypatch, rank, size)
        layer = stubs.RoutedExperts(stubs.moe_config(count), prefix)
        config = _opened(tmp_path)
        method = config.get_quant_method(layer, prefix)
        method.create_weights(layer, count, HIDDEN, inner // size, torch.float32, weight_loader=None)
        method.process_weights_after_loading(layer)
        total += method.apply(layer, x, weights, ids, None, None)
    expected = torch.zeros(4, HIDDEN, dtype=torch.float64)
    for token in range(4):
        for place, expert in enumerate(ids[token].tolist()):
            gate, up = (x[token].double() @ dense[names[expert, part]].T for part in ("gate_proj", "up_proj"))
            product = (torch.nn.functional.silu(gate) * up) @ dense[names[expert, "down_proj"]].T
            expected[token] += weights[token, place].double() * product
    _close(total, expected)


def test_experts_of_gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up in one matrix, row by row, with biases that the ranks add once, and gpt-oss's bounded gate."""
    prefix, inner, count = "model.layers.0.mlp.experts", 64, 2
    shapes = {"gate_up_proj": (2 * inner, HIDDEN), "down_proj": (HIDDEN, inner)}
    dense = _save(tmp_path, {f"{prefix}.{part}.{n}": shape for n in range(count) for part, shape in shapes.items()})
    generator = torch.Generator().manual_seed(3)
    b13, b2 = torch.randn(count, 2 * inner, generator=generator), torch.randn(count, HIDDEN, generator=generator)
    x, ids, weights = torch.randn(3, HIDDEN), torch.tensor([[0, 1], [1, 0], [0, 1]]), torch.rand(3, 2)
    total = torch.zeros(3, HIDDEN)
    for rank in range(2):
        stubs.parallel(monkeypatch, rank, 2)
        moe = stubs.moe_config(count, has_bias=True, activation=stubs.MoEActivation.SWIGLUOAI)
        layer: Any = stubs.RoutedExperts(moe, prefix)
        config = _opened(tmp_path)
        method = config.get_quant_method(layer, prefix)
        method.create_weights(layer, count, HIDDEN, inner // 2, torch.float32, weight_loader=None)
        layer.w13_bias.data.copy_(b13[:, rank * inner : (rank + 1) * inner])
        layer.w2_bias.data.copy_(b2)
        method.process_weights_after_loading(layer)
        total += method.apply(layer, x, weights, ids, None, None)
    expected = torch.zeros(3, HIDDEN, dtype=torch.float64)
    for token in range(3):
        for place, expert in enumerate(ids[token].tolist()):
            y = x[token].double() @ dense[f"{prefix}.gate_up_proj.{expert}"].T + b13[expert].double()
            gate, up = y[::2].clamp(max=7), y[1::2].clamp(-7, 7)
            product = ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ dense[f"{prefix}.down_proj.{expert}"].T
            expected[token] += weights[token, place].double() * (product + b2[expert].double())
    _close(total, expected)


def test_packed_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding that is stored packed fills this rank's rows of vLLM's own, and the padding with zeros."""
    dense = _save(tmp_path, {"model.embed_tokens": (VOCABULARY, HIDDEN)})["model.embed_tokens"]
    stubs.parallel(monkeypatch, 1, 2)
    layer = stubs.VocabParallelEmbedding(VOCABULARY, HIDDEN, prefix="model.embed_tokens")
    method = _opened(tmp_path).get_quant_method(layer, layer.prefix)
    layer.weight = torch.nn.Parameter(torch.full((64, HIDDEN), float("nan")), requires_grad=False)
    method.process_weights_after_loading(layer)
    assert torch.equal(layer.weight[: VOCABULARY - 64], dense[64:].float())
    assert not bool(layer.weight[VOCABULARY - 64 :].any())


def test_dense_layers_stay_the_engines(tmp_path: Path) -> None:
    """What the checkpoint has dense runs by vLLM's own methods."""
    _save(tmp_path, {"model.layers.0.mlp.down_proj": (HIDDEN, INNER)})
    config = _opened(tmp_path)
    layer = stubs.RowParallelLinear(HIDDEN, HIDDEN, prefix=f"{ATTENTION}.o_proj")
    assert isinstance(config.get_quant_method(layer, layer.prefix), stubs.UnquantizedLinearMethod)
    words = stubs.VocabParallelEmbedding(VOCABULARY, HIDDEN)
    assert type(config.get_quant_method(words, "model.embed_tokens")) is stubs.UnquantizedEmbeddingMethod
    assert config.get_quant_method(stubs.RoutedExperts(stubs.moe_config(2)), "model.layers.0.mlp.experts") is None
    assert config.get_quant_method(torch.nn.Identity(), f"{ATTENTION}.attn") is None


def test_names_of_the_engine(tmp_path: Path) -> None:
    """Layers are found by the engine's names, fused or not, and their tensors are dropped from its weights."""
    _save(tmp_path, {"language_model.layers.0.mlp.down_proj": (HIDDEN, INNER)}, dense={"norm.weight": torch.ones(4)})
    config = _opened(tmp_path)
    config.apply_vllm_mapper(stubs.WeightsMapper(orig_to_new_prefix={"language_model.": "model."}))
    assert config.parts_of("model.layers.0.mlp.down_proj") == ["language_model.layers.0.mlp.down_proj"]
    mapper = config.get_checkpoint_weight_mapper()
    with q4.open(tmp_path) as checkpoint:
        keys = [key for layer in checkpoint.schema.layers.values() for key in layer.keys.values()]
    assert len(keys) > 1
    assert [mapper.map_name(key) for key in keys] == [None] * len(keys)
    assert mapper.map_name("norm.weight") == "norm.weight"


def test_one_report_of_a_worker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last prepared layer closes the file, and logs what runs the layers, once."""
    _save(tmp_path, SHAPES)
    config = _opened(tmp_path)
    with caplog.at_level("INFO"):
        _filled(config, list(_model().values()))
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("q4.vllm.layer ") for line in lines) == 5
    (worker,) = [line for line in lines if line.startswith("q4.vllm.worker ")]
    assert "layers=5" in worker
    assert sum(line.startswith("q4: rank 0 has 5 packed layers") for line in lines) == 1
    assert "checkpoint" not in vars(config)


@pytest.mark.parametrize("has_cache", [True, False])
def test_workers_share_what_is_prepared(has_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker of a rank writes a file, later ones map it and prepare nothing; no rank takes another's part.

    Without q4-lm there is no cache, and every worker prepares its layers.
    """
    if not has_cache:
        monkeypatch.setitem(sys.modules, "q4_lm.prepared.opening", None)
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("Q4_CACHE", str(cache))
    _save(folder, SHAPES)
    x = torch.randn(3, HIDDEN)
    found = []
    for rank in (0, 0, 1, 0):
        stubs.parallel(monkeypatch, rank, 2)
        layers = _model()
        config = _opened(folder)
        methods = dict(zip(layers, _filled(config, list(layers.values())), strict=True))
        y = torch.cat([methods[part].apply(layers[part], x) for part in ("qkv", "gate_up", "head")], 1)
        (made,) = config._layers.values()
        found.append((y, len(made._made)))
    assert [count for _, count in found] == ([5, 0, 5, 0] if has_cache else [5] * 4)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][0], found[3][0])
    assert not torch.equal(found[0][0], found[2][0])
    assert cache.exists() is has_cache


def test_compiled_graphs_have_names_alone(tmp_path: Path) -> None:
    """A compiled layer computes the same, and its graph holds the layer's name and no weight."""
    _save(tmp_path, {"model.layers.0.mlp.down_proj": (HIDDEN, INNER)})
    layer = stubs.RowParallelLinear(INNER, HIDDEN, prefix="model.layers.0.mlp.down_proj")
    (method,) = _filled(_opened(tmp_path), [layer])
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    x = torch.randn(3, INNER)
    with torch.no_grad():
        y = torch.compile(lambda x: method.apply(layer, x) + 1, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(y, method.apply(layer, x) + 1)
    (graph,) = graphs
    assert "model.layers.0.mlp.down_proj" in str(graph.graph)
    assert not [node for node in graph.graph.nodes if node.op == "get_attr"]
    assert len([node for node in graph.graph.nodes if node.op == "placeholder"]) == 1
