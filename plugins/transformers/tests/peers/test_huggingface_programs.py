"""Decoders of transformers that run by programs: the same tokens as by modules, and one content of every cache."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from huggingface_decoders import KINDS, SLIDING, WIDE, calls, near, pair, prompt, ran
from huggingface_models import dense_model
from transformers import DynamicCache, StaticCache

import q4_transformers
import q4core as q4
from q4_programs import EmissionError
from q4_transformers import HfLinear, Q4Config
from q4_transformers.names import CACHE
from q4_transformers.twin import check_twin, make_twin
from q4core import Q4Linear
from tests.support.frames import functions_entered

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers", "natively")]

OTHERS = {
    "gemma2": ("Gemma2", SLIDING, "capped scores"),
    "cohere": ("Cohere", {}, "model_type"),
    "mixtral": ("Mixtral", {"num_local_experts": 4}, ""),
}


@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_are_those_of_the_modules(name: str, tmp_path: Path) -> None:
    """Twenty prompts of every architecture, short and long, have the tokens that the modules give."""
    ours, theirs = pair(tmp_path, *KINDS[name])
    for seed in range(20):
        ids = prompt(3 + 2 * seed + 40 * (seed % 2), seed)
        found = ours.generate(ids, max_new_tokens=24, do_sample=False)
        assert torch.equal(found, theirs.generate(ids, max_new_tokens=24, do_sample=False)), seed
    assert ran(ours) == 20 * 24


@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_programs_are_proven_in_every_precision(precision: str, tmp_path: Path) -> None:
    """Blocks are compared whatever the grid of their activations, and run."""
    ours, theirs = pair(tmp_path, *KINDS["gemma3"], activation_precision=precision)
    ids = prompt(40)
    assert torch.equal(ours.generate(ids, max_new_tokens=9), theirs.generate(ids, max_new_tokens=9))
    assert ran(ours) == 9


@torch.no_grad()
def test_a_proof_multiplies_no_packed_layer(llamas: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared is what happens between the products: these are those of the same layers."""
    decoder = llamas[0].model
    twin = make_twin(decoder)
    hooks = [dict(module._forward_hooks) for module in decoder.modules()]  # torch has no other way to ask
    monkeypatch.delattr(Q4Linear, "forward")
    with pytest.raises(q4.PackedWeightError):
        decoder.layers[0].mlp.down_proj(torch.zeros(1, 128))
    check_twin(decoder, twin)
    assert hooks == [dict(module._forward_hooks) for module in decoder.modules()]  # as above


DIFFERENCES: dict[str, Callable[[Any, Any], Any]] = {
    "scale": lambda theirs, _: setattr(theirs.self_attn, "scaling", 1.02 * theirs.self_attn.scaling),
    "activation": lambda theirs, _: setattr(theirs.mlp, "act_fn", torch.nn.GELU()),
    "epsilon": lambda theirs, _: setattr(theirs.post_attention_layernorm, "variance_epsilon", 0.02),
    "gate and up": lambda _, ours: vars(ours.mlp)["_modules"].update(
        gate_proj=ours.mlp.up_proj, up_proj=ours.mlp.gate_proj
    ),
    "keys and values": lambda _, ours: vars(ours.self_attn)["_modules"].update(
        k_proj=ours.self_attn.v_proj, v_proj=ours.self_attn.k_proj
    ),
    "norms": lambda theirs, _: theirs.input_layernorm.register_parameter(
        "weight", torch.nn.Parameter(theirs.input_layernorm.weight.flip(0))
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
@torch.no_grad()
def test_a_difference_in_one_block_is_found(name: str, llamas: tuple[Any, Any]) -> None:
    """Two layers in each other's places, and another number or function between them, refuse the programs."""
    decoder = llamas[0].model
    twin: Any = make_twin(decoder)
    norm = decoder.layers[1].input_layernorm.weight
    norm.copy_(1 + torch.arange(len(norm)) / len(norm))
    check_twin(decoder, twin)
    DIFFERENCES[name](decoder.layers[1], twin.layers[1])
    with pytest.raises(EmissionError, match="block 1 differs"):
        check_twin(decoder, twin)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_run_by_modules(name: str, tmp_path: Path) -> None:
    """A decoder that no program computes runs by its modules, and the report says why."""
    kind, options, why = OTHERS[name]
    ours, theirs = pair(tmp_path, kind, options)
    ids = prompt(40)
    assert torch.equal(ours.generate(ids, max_new_tokens=6), theirs.generate(ids, max_new_tokens=6))
    assert "programs" not in calls(ours)
    lines = q4_transformers.explain(ours).programs
    assert "none, " in lines[0]
    assert why in lines[0]


@torch.no_grad()
def test_the_report_counts_the_calls(llamas: tuple[Any, Any]) -> None:
    """``explain`` tells calls by programs from those by modules, with the reason; q4core's has the program itself."""
    ours, theirs = llamas
    ours.generate(prompt(40), max_new_tokens=5)
    ours(prompt(40), output_hidden_states=True)
    found = q4_transformers.explain(ours)
    assert found.programs == (
        "programs of model: ran 5 calls",
        "programs of model: modules ran 1 call, output_hidden_states asked for",
    )
    assert str(found).endswith(found.programs[-1])
    assert found.to_dict()["programs"] == list(found.programs)
    assert "decode in transformers" in str(q4.explain(ours))
    assert q4_transformers.explain(theirs).programs == ()


def test_sampling_draws_the_same_tokens(llamas: tuple[Any, Any]) -> None:
    """Sampled tokens of a seed are those of the modules."""
    drawn = []
    for model in llamas:
        torch.manual_seed(3)
        drawn.append(model.generate(prompt(33), max_new_tokens=20, do_sample=True, top_k=20, temperature=1.5))
    assert torch.equal(*drawn)
    assert ran(llamas[0]) == 20


@pytest.mark.parametrize("models", ["llamas", "gemmas"])
def test_static_caches_run_by_programs(models: str, request: pytest.FixtureRequest) -> None:
    """A static cache gives the tokens of a dynamic one, also beyond a window, and holds them for whoever reads it."""
    ours, theirs = request.getfixturevalue(models)
    for length in (3, 40):
        found, expected = (
            model.generate(prompt(length), max_new_tokens=20, cache_implementation="static") for model in (ours, theirs)
        )
        assert torch.equal(found, expected)
    assert ran(ours) == 40
    held = []
    for model in (ours, theirs):
        cache = StaticCache(model.config, max_cache_len=64)
        with torch.no_grad():
            for part in prompt(45).split((40, 1, 1, 1, 2), 1):
                model(part, **{CACHE: cache})
        held.append(cache)
    for one, other in zip(*(cache.layers for cache in held), strict=True):
        assert int(one.get_seq_length()) == int(other.get_seq_length()) == 45
        near(one.keys[:, :, 1:], other.keys[:, :, 1:])  # a full window's first position is rolled out unread
        near(one.values[:, :, 1:], other.values[:, :, 1:])


CHANGES: dict[str, Callable[[DynamicCache], DynamicCache]] = {
    "copied": copy.deepcopy,
    "pickled": lambda cache: pickle.loads(pickle.dumps(cache)),  # noqa: S301  # our own bytes
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([0])) or cache,
    "read": lambda cache: [layer.keys for layer in cache.layers[:1]] and cache,
    "set": lambda cache: setattr(cache.layers[1], "values", cache.layers[1].values.clone()) or cache,
    "repeated": lambda cache: cache.batch_repeat_interleave(1) or cache,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("models", ["llamas", "gemmas"])
@torch.no_grad()
def test_a_cache_goes_on_from_what_it_holds(models: str, change: str, request: pytest.FixtureRequest) -> None:
    """A cache that was copied, read or set between two tokens goes on, by programs as by modules, window or not."""
    ours, theirs = request.getfixturevalue(models)
    results = []
    for model in (ours, theirs):
        cache, logits = DynamicCache(config=model.config), []
        for step, part in enumerate(prompt(60).split((40, 1, 1, 5, 1, 1, 11), 1)):
            logits.append(model(part, **{CACHE: cache}).logits[:, -1])
            cache = CHANGES[change](cache) if step in {1, 3, 5} else cache
        results.append((torch.cat(logits), cache))
    near(results[0][0], results[1][0])
    for one, other in zip(*(cache.layers for _, cache in results), strict=True):
        assert one.keys.shape == other.keys.shape
        assert type(one) is type(other)  # once it was read
        near(one.keys, other.keys)
        near(one.values, other.values)


@torch.no_grad()
def test_cropping_drops_the_last_tokens(llamas: tuple[Any, Any]) -> None:
    """A cache that is cropped after a program goes on before the tokens that it lost."""
    results = []
    for model in llamas:
        cache = model(prompt(40), use_cache=True)[CACHE]
        model(prompt(1), **{CACHE: cache})
        cache.crop(-3)
        results.append(model(prompt(1, 5), **{CACHE: cache}).logits)
        assert cache.get_seq_length() == 39
    near(*results)


@torch.no_grad()
def test_tensors_that_were_read_never_change(llamas: tuple[Any, Any]) -> None:
    """Keys and features that somebody holds stay as they were, though the memory of a dropped cache is used again."""
    model, _ = llamas
    first = model.model(prompt(40), use_cache=True)
    features, keys = first.last_hidden_state, first[CACHE].layers[0].keys
    before = features.clone(), keys.clone()
    model(prompt(1), **{CACHE: first[CACHE]})
    del first
    model.generate(prompt(50, 9), max_new_tokens=5)
    assert torch.equal(features, before[0])
    assert torch.equal(keys, before[1])


@torch.no_grad()
def test_two_sequences_by_turns_do_not_mix(llamas: tuple[Any, Any]) -> None:
    """Each cache has its own memory as long as it is there."""
    results = []
    for model in llamas:
        caches = [model(prompt(40, seed), use_cache=True)[CACHE] for seed in (0, 1)]
        results.append([model(prompt(1, step), **{CACHE: caches[step % 2]}).logits for step in range(6)])
    near(torch.cat(results[0]), torch.cat(results[1]))
    assert ran(llamas[0]) == 8


@torch.no_grad()
def test_a_cache_of_another_model_runs_by_the_own_program(llamas: tuple[Any, Any]) -> None:
    """A cache that two models of one kind go on with by turns is computed by the one that is called."""
    results = []
    for model in llamas:
        other = copy.deepcopy(model)
        other.model.norm.weight.data.mul_(-1)
        cache = model(prompt(40), use_cache=True)[CACHE]
        results.append([one(prompt(1), **{CACHE: cache}).logits for one in (other, model, other)])
    near(torch.cat(results[0]), torch.cat(results[1]))
    assert ran(llamas[0]) == 2


MOVED: dict[str, Callable[[DynamicCache], object]] = {
    "swapped": lambda cache: cache.layers.reverse(),
    "of another sequence": lambda cache: cache.layers.__setitem__(0, copy.deepcopy(cache.layers[0])),
    "recording": lambda cache: setattr(cache.layers[0], "record_past", True),
}


@pytest.mark.parametrize("change", MOVED)
@torch.no_grad()
def test_layers_of_a_cache_that_changed_places_hold_what_they_held(change: str, gemmas: tuple[Any, Any]) -> None:
    """Layers that were put elsewhere between two tokens go on with their own content, as the modules do."""
    results = []
    for model in gemmas:
        cache = model(prompt(6), use_cache=True)[CACHE]
        MOVED[change](cache)
        results.append(torch.cat([model(prompt(1, seed), **{CACHE: cache}).logits for seed in (0, 1)]))
    near(*results)
    assert len(calls(gemmas[0])) == 1 + (change == "recording"), calls(gemmas[0])  # which no program does


@torch.no_grad()
def test_weights_that_were_loaded_again_count(llamas: tuple[Any, Any]) -> None:
    """A packed layer that adopts another weight, or a norm with other memory, counts from the next token on."""
    results = []
    for model in llamas:
        cache = model(prompt(40), use_cache=True)[CACHE]
        block = model.model.layers[1]
        other = q4.quantize(q4.dequantize(block.mlp.up_proj.packed_weight()).flip(0), "nf4")
        logits = [model(prompt(1), **{CACHE: cache}).logits]
        block.mlp.up_proj.adopt(other)
        logits.append(model(prompt(1), **{CACHE: cache}).logits)
        block.input_layernorm.weight.data = -block.input_layernorm.weight
        logits.append(model(prompt(1), **{CACHE: cache}).logits)
        results.append(torch.cat(logits))
    near(*results)
    assert ran(llamas[0]) == 4


@torch.no_grad()
def test_a_token_takes_no_step_of_python_for_each_block(tmp_path: Path) -> None:
    """A token enters as many Python functions of ours for six blocks as for two, and no more than it did."""
    found = []
    for count in (2, 6):
        model, _ = pair(tmp_path / str(count), "Llama", {"num_hidden_layers": count})
        cache = model(prompt(40), use_cache=True)[CACHE]
        model(prompt(1), **{CACHE: cache})
        mask = torch.ones(1, 42, dtype=torch.int64)
        found.append(functions_entered(lambda: model(prompt(1), attention_mask=mask, **{CACHE: cache}), "q4"))  # noqa: B023  # called at once
        assert ran(model) == 3
    assert found[0] == found[1]
    assert len(found[0]) <= 31, found[0]


@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 64)])
@torch.no_grad()
def test_a_packed_layer_enters_one_function_more_than_a_dense_one(shape: tuple[int, ...]) -> None:
    """A token's call of a packed layer goes by a question of torch and the fast path to the backend."""
    packed, dense = HfLinear(q4.quantize(torch.randn(64, 64), "nf4")), torch.nn.Linear(64, 64)
    x = torch.randn(shape)
    packed(x)  # what is the same in each call is made in the first
    ours, theirs = functions_entered(lambda: packed(x)), functions_entered(lambda: dense(x))
    assert [name.rpartition(".")[2] for name in ours[-4:]] == ["forward", "is_dynamo_compiling", "fast", "linear"]
    assert len(ours) <= len(theirs) + 1


def test_inference_mode_and_no_grad_go_on_with_one_cache(llamas: tuple[Any, Any]) -> None:
    """A cache that began in inference mode goes on outside it, and back."""
    results = []
    for model in llamas:
        with torch.inference_mode():
            cache = model(prompt(40), use_cache=True)[CACHE]
        with torch.no_grad():
            logits = [model(prompt(1), **{CACHE: cache}).logits, model(prompt(5), **{CACHE: cache}).logits]
        with torch.inference_mode():
            logits.append(model(prompt(1), **{CACHE: cache}).logits)
        results.append(torch.cat([item[:, -1] for item in logits]))
    near(*results)


def test_threads_generate_at_once(llamas: tuple[Any, Any]) -> None:
    """Threads that generate at once get the tokens that each gets alone."""
    ours, theirs = llamas
    found: dict[int, torch.Tensor] = {}

    def generate(seed: int) -> None:
        found[seed] = ours.generate(prompt(40, seed), max_new_tokens=12, do_sample=False)

    threads = [threading.Thread(target=generate, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert torch.equal(found[seed], theirs.generate(prompt(40, seed), max_new_tokens=12, do_sample=False))


def test_a_cache_grows_with_its_sequence(tmp_path: Path) -> None:
    """A sequence outgrows the memory that it began with, windows included; beyond the context the modules run."""
    kind, options = KINDS["gemma3"]
    ours, theirs = pair(tmp_path, kind, {**options, "max_position_embeddings": 600, "sliding_window": 300})
    given = {"max_new_tokens": 585, "do_sample": False}
    found = ours.generate(prompt(40), **given)
    assert torch.equal(found, theirs.generate(prompt(40), **given))
    assert calls(ours)["programs"] == 561
    assert "positions beyond the context" in calls(ours)


WAYS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hidden states": (lambda model: model(prompt(40), output_hidden_states=True), "output_hidden_states"),
    "attentions": (lambda model: model(prompt(40), output_attentions=True), "output_attentions"),
    "embeddings": (lambda model: model(inputs_embeds=model.model.embed_tokens(prompt(40))), "other arguments"),
    "no cache": (lambda model: model(prompt(40), use_cache=False), "without a cache"),
    "positions": (lambda model: model(prompt(40), position_ids=torch.arange(1, 41)[None]), "positions"),
    "a mask": (lambda model: model(prompt(40), attention_mask=torch.ones(1, 40).tril(-1)[:, :40]), "mask"),
    "a large batch": (lambda model: model(prompt(2, batch=33)), "more than 32 sequences"),
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_calls_that_no_program_computes_go_to_the_modules(way: str, llamas: tuple[Any, Any]) -> None:
    """What a program can't do exactly is done by the modules, with their results."""
    ours, theirs = llamas
    call, why = WAYS[way]
    near(call(ours).logits, call(theirs).logits)
    assert [reason for reason in calls(ours) if why in reason], calls(ours)


def test_gradients_and_training_go_to_the_modules(llamas: tuple[Any, Any]) -> None:
    """A call that records gradients has them, and a model in training mode runs its modules."""
    ours, _ = llamas
    ours.model.norm.weight.requires_grad_()
    ours(prompt(40), labels=prompt(40)).loss.backward()
    assert ours.model.norm.weight.grad is not None
    with torch.no_grad():
        ours.train()(prompt(40))
        ours.eval()(prompt(40))
    assert set(calls(ours)) == {"gradients are recorded", "training mode", "programs"}


@torch.no_grad()
def test_a_hook_is_run_and_a_changed_module_counts(llamas: tuple[Any, Any]) -> None:
    """A hook on a block is called; a replaced module and a changed forward pass change the result."""
    ours, theirs = llamas
    expected = theirs(prompt(40)).logits
    near(ours(prompt(40)).logits, expected)
    assert ran(ours) == 1
    seen: list[int] = []
    handle = ours.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    near(ours(prompt(40)).logits, expected)
    assert seen == [1]
    handle.remove()
    calls_before = ours.model.forward.calls["programs"]
    ours(prompt(40))
    assert ours.model.forward.calls["programs"] == calls_before + 1
    for model in llamas:
        model.model.layers[1].self_attn.o_proj = torch.nn.Linear(64, 64, bias=False)
        torch.nn.init.eye_(model.model.layers[1].self_attn.o_proj.weight)
    near(ours(prompt(40)).logits, theirs(prompt(40)).logits)
    for model in llamas:
        model.model.layers[0].mlp.forward = lambda x: 0.5 * x
    near(ours(prompt(40)).logits, theirs(prompt(40)).logits)
    for model in llamas:
        with torch.no_grad():
            del model.model.layers[0].mlp.forward
            model.model.layers[0].input_layernorm.weight.mul_(2)
            model.model.layers[0].mlp.down_proj.float()
    near(ours(prompt(40)).logits, theirs(prompt(40)).logits)


@torch.no_grad()
def test_a_model_that_is_copied_or_saved_runs_by_its_own_program(llamas: tuple[Any, Any], tmp_path: Path) -> None:
    """A copy runs its own weights; what is saved does not have the forward pass in it."""
    ours, _ = llamas
    before = ours(prompt(40)).logits
    twin = copy.deepcopy(ours)
    twin.model.norm.weight.data.mul_(-1)
    near(twin(prompt(40)).logits, -before)
    near(ours(prompt(40)).logits, before)
    assert calls(twin) == {"programs": 1}
    ours.save_pretrained(tmp_path / "saved")
    config = Q4Config(programs=False, cache="off")
    again = type(ours).from_pretrained(tmp_path / "saved", quantization_config=config, dtype=torch.float32)
    near(again(prompt(40)).logits, before)
    assert "forward" not in vars(again.model)


def test_another_dtype_runs_by_modules(tmp_path: Path) -> None:
    """Programs are of float32; a model in bfloat16 says so in its report."""
    model = dense_model("Llama", **WIDE)
    model.save_pretrained(tmp_path)
    config = Q4Config(format="nf4", cache="off")
    found = type(model).from_pretrained(tmp_path, quantization_config=config, dtype=torch.bfloat16)
    found.generate(prompt(40), max_new_tokens=3)
    assert "bfloat16" in q4_transformers.explain(found).programs[0]


def test_an_option_that_is_no_bool_is_refused() -> None:
    """``programs`` takes a bool, and is in the options' dict where it is off."""
    with pytest.raises(q4.ConfigError, match="programs"):
        Q4Config(programs="no")
    assert "programs" not in Q4Config().to_dict()
    assert Q4Config.from_dict(Q4Config(programs=False).to_dict()).programs is False
