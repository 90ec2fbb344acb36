"""One token at a time by a program: the numbers of the modules, and what it refuses."""

from __future__ import annotations

import copy
import io
import os
import pickle
import select
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_decoders import CONFIG, OPTIONS, TOKENS, build

import q4core as q4
from q4_lm import Generation, LanguageModel, Sampler
from q4_lm.generation.decoding import LEAST_PROMPT, DecodingProgram, decoding_program, prompt_program
from q4_nn import RopeScaling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from q4_lm import TransformerDecoder
    from q4_nn import KVCache


def program_of(decoder: TransformerDecoder, cache: KVCache) -> DecodingProgram:
    """Return the program of a decoder, which must be there."""
    program = decoding_program(decoder, cache)
    assert program is not None
    return program


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_give_the_logits_of_one_pass(name: str, packed: bool) -> None:  # a parameter
    """Behind a prompt, token by token, logits and cache are those of the modules to float32 rounding."""
    decoder = build(packed=packed, **OPTIONS[name])
    with torch.inference_mode():
        expected, cache = decoder.make_cache(20), decoder.make_cache(20)
        whole = decoder(torch.tensor([TOKENS]), expected)[0]
        decoder(torch.tensor([TOKENS[:3]]), cache)
    program = program_of(decoder, cache)
    for index, token in enumerate(TOKENS[3:], 3):
        logits = program(token, cache)
        assert float((logits - whole[index]).abs().max() / whole.abs().max()) < 1e-5
        assert program.best() == int(logits.argmax())
    assert cache.length == len(TOKENS)
    following = torch.tensor([[17]])  # what the program left in the cache, windows as well, the modules go on from
    with torch.inference_mode():
        assert torch.allclose(decoder(following, cache), decoder(following, expected), atol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_prompts_have_the_bits_of_their_tokens(name: str) -> None:
    """Chunks of any length give the logits, keys and values of one token at a time, and go on after these."""
    decoder = build(packed=True, **OPTIONS[name])
    alone, chunked = decoder.make_cache(60), decoder.make_cache(60)
    one, many = program_of(decoder, alone), prompt_program(decoder, chunked)
    assert many is not None
    for part in (TOKENS, TOKENS[:1], TOKENS[3:8], TOKENS[::-1], TOKENS[:3]):
        for token in part:
            expected = one(token, alone)
        assert torch.equal(many(part, chunked), expected)
        assert many.best() == int(expected.argmax())
        assert chunked.length == alone.length
    assert torch.equal(chunked.keys[:, :, :, : alone.length], alone.keys[:, :, :, : alone.length])
    decoded = program_of(decoder, chunked)
    assert torch.equal(decoded(7, chunked), one(7, alone))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 2e-3), (torch.int8, 5e-2)])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_narrow_cache(name: str, dtype: torch.dtype, most: float) -> None:
    """Programs and modules differ from a cache of float32 by its rounding alone, and chunks have their tokens' bits."""
    decoder = build(packed=True, **OPTIONS[name])
    with torch.inference_mode():
        exact = decoder(torch.tensor([TOKENS]), decoder.make_cache(20))[0, -1]
        decoder.cache_dtype = dtype
        alone, chunked, by_modules = (decoder.make_cache(20) for _ in range(3))
        assert alone.dtype is dtype
        modules = decoder(torch.tensor([TOKENS]), by_modules)[0, -1]
    many = prompt_program(decoder, chunked)
    assert many is not None
    for token in TOKENS:
        logits = program_of(decoder, alone)(token, alone)
    assert torch.equal(many(TOKENS, chunked), logits)
    assert torch.equal(chunked.keys, alone.keys)
    for found in (logits, modules):
        assert 1e-6 < float((found - exact).abs().max() / exact.abs().max()) < most


def test_a_prompt_makes_no_tensor_of_numbers(tiny_llama: Path) -> None:
    """What a chunk writes is memory that it had before: the logits stay where they are."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        cache = model.decoder.make_cache(48)
        program = prompt_program(model.decoder, cache)
        assert program is not None
        places = {program([1, 2, 3], cache).data_ptr() for _ in range(4)}
        assert len(places) == 1
        assert prompt_program(model.decoder, cache) is program


@pytest.mark.parametrize("token", [-1, 2**40])
def test_a_prompt_with_a_token_outside_the_vocabulary(token: int, tiny_llama: Path) -> None:
    """Nothing is written, not even a chunk before it."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        cache = model.decoder.make_cache(48)
        program = prompt_program(model.decoder, cache)
        assert program is not None
        with pytest.raises(q4.InputError, match="tokens must be from 0 to"):
            program([1] * 20 + [token], cache)
        with pytest.raises(q4.InputError, match="at most 48 more"):
            program([1] * 49, cache)
        assert cache.length == 0
        assert not cache.keys.any()


def test_a_generation_reads_a_long_prompt_by_a_program(tiny_llama: Path) -> None:
    """The report counts its runs, and the tokens are those of a short prompt's way."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        prompt = [1, *range(3, 3 + LEAST_PROMPT)]
        found = list(Generation(model.decoder, prompt, 8))
        programs = {item["name"]: item["calls"] for item in model.session.report().to_dict()["programs"]}
        assert programs["prompt TransformerDecoder"] == programs["prompt TransformerDecoder, head"] == 1
        cache = model.decoder.make_cache(48)
        list(Generation(model.decoder, prompt[:20], 1, cache=cache))
        assert list(Generation(model.decoder, prompt[20:], 8, cache=cache)) == found


def test_programs_are_made_once_for_a_cache(tiny_llama: Path) -> None:
    """Further runs over a cache use its program; one matrix of a token is one call of its layer."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        cache = model.decoder.make_cache(4)
        program = program_of(model.decoder, cache)
        assert decoding_program(model.decoder, cache) is program
        program(1, cache)
        program(2, cache)
        report = model.session.report()
        assert [sum(record.calls) for record in report.layers] == [2] * 11
        assert [(record.name, record.calls) for record in report.section("programs")] == [
            ("decode TransformerDecoder", 2)
        ]


@pytest.mark.parametrize("token", [-1, 268])
def test_token_outside_the_vocabulary(token: int, tiny_llama: Path) -> None:
    """A number that is no token is refused before anything is written."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        cache = model.decoder.make_cache(4)
        program = program_of(model.decoder, cache)
        with pytest.raises(q4.InputError, match="embed_tokens: token, position or clock must be"):
            program(token, cache)
        assert cache.length == 0
        assert not cache.keys.any()


def test_full_cache(tiny_llama: Path) -> None:
    """A token into a full cache is refused."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        cache = model.decoder.make_cache(2)
        program = program_of(model.decoder, cache)
        program(1, cache)
        program(2, cache)
        with pytest.raises(q4.InputError, match="at most 0 more"):
            program(3, cache)


def test_a_token_makes_no_tensor(tiny_llama: Path) -> None:
    """A run asks torch for no memory, and what it writes is aligned for any vector."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        cache = model.decoder.make_cache(4)
        program = program_of(model.decoder, cache)
        program(1, cache)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profile:
            program(2, cache)
        if model.session.report().section("programs")[0].backend == "cpu-native":  # the reference computes with tensors
            assert [item.key for item in profile.key_averages() if item.self_cpu_memory_usage > 0] == []
        written = {view.buffer for step in program.bound.program.steps for view in step.outputs}
        assert all(program.bound.buffers[index].data_ptr() % 64 == 0 for index in written)


def test_closed_model(tiny_llama: Path) -> None:
    """After the model is closed its program refuses to run."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        cache = model.decoder.make_cache(2)
        program = program_of(model.decoder, cache)
    with pytest.raises(q4.LifecycleError, match="is closed"):
        program(1, cache)


def test_a_cache_whose_memory_moved(tiny_llama: Path) -> None:
    """A cache that was resized is an error that names it."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        cache = model.decoder.make_cache(2)
        program = program_of(model.decoder, cache)
        cache._entries.untyped_storage().resize_(0)
        with pytest.raises(q4.LifecycleError, match=r"keys and values' of program .* was resized, moved or freed"):
            program(1, cache)


def test_generation_gives_the_tokens_of_the_modules(tiny_llama: Path) -> None:
    """Greedy tokens of a run are those that one pass over prompt and answer would choose."""
    with LanguageModel.open(tiny_llama, CONFIG) as model, torch.inference_mode():
        found = list(Generation(model.decoder, TOKENS, max_tokens=20))
        whole = torch.tensor([TOKENS + found])
        logits = model.decoder(whole, model.decoder.make_cache(whole.shape[1]))[0]
        drawn = [list(Generation(model.decoder, TOKENS, max_tokens=9, sampler=Sampler(1.0, seed=3))) for _ in range(2)]
    assert len(set(found)) > 1
    assert logits[len(TOKENS) - 1 : -1].argmax(-1).tolist() == found
    assert drawn[0] == drawn[1] != found[:9]


def test_a_hook_is_run_for_every_token(tiny_llama: Path) -> None:
    """Where somebody looks at a module's results, each token goes through the modules, and the report says so."""
    seen: list[int] = []
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        attention: Any = model.decoder.layers[1].self_attn
        without = list(Generation(model.decoder, TOKENS, max_tokens=5))
        run = iter(Generation(model.decoder, TOKENS, max_tokens=5))
        tokens = [next(run), next(run)]
        attention.register_forward_hook(lambda _module, _x, y: seen.append(y.shape[1]))
        assert [*tokens, *run] == without
        assert seen == [1, 1, 1]
        assert list(Generation(model.decoder, TOKENS, max_tokens=5)) == without
        assert seen[3:] == [len(TOKENS), 1, 1, 1, 1]
        record = model.session.report().section("programs")[0]
        assert record.backend is None
        assert "layers.1.self_attn: it has a hook" in record.reasons[0]


def test_replaced_modules_and_parameters(tiny_llama: Path) -> None:
    """A block, layer or parameter that was replaced is seen: the next program is made of the new one."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        decoder: Any = model.decoder
        cache = decoder.make_cache(4)
        for change in (
            lambda: setattr(decoder.layers[0].mlp, "down_proj", torch.nn.Linear(96, 64).eval()),
            lambda: setattr(decoder.norm, "weight", torch.nn.Parameter(torch.ones(64))),
            lambda: decoder.layers.__setitem__(0, decoder.layers[1]),
        ):
            program = program_of(decoder, cache)
            change()
            assert program.change() == "a module or parameter was added, replaced or removed"
            assert program_of(decoder, cache) is not program


def test_what_only_the_modules_serve(tiny_llama: Path) -> None:
    """Batches, other dtypes, training and modules of other kinds have no program, and the report says why."""

    def reason(model: LanguageModel, cache: KVCache) -> str:
        assert decoding_program(model.decoder, cache) is None
        return str(model.session.report().section("programs")[0].reasons[0])

    class Odd(torch.nn.Linear):
        """Of which nobody knows what it computes."""

    narrow = q4.SessionConfig(device="cpu", compute_dtype=torch.bfloat16)
    with LanguageModel.open(tiny_llama, narrow) as model:
        assert "torch.bfloat16" in reason(model, model.decoder.make_cache(2))
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        decoder: Any = model.decoder
        assert "several sequences" in reason(model, decoder.make_cache(2, batch=2))
        decoder.layers[0].mlp.down_proj = Odd(96, 64).eval()
        assert "layers.0.mlp.down_proj: Odd emits nothing" in reason(model, decoder.make_cache(2))
        decoder.train()
        assert "training mode" in reason(model, decoder.make_cache(2))


def test_changing_frequencies_are_not_emitted() -> None:
    """Where frequencies depend on the length of a sequence, the modules run."""
    scaling = RopeScaling(kind="longrope", short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, original_context=32)
    decoder = build(rope_scaling=scaling)
    assert decoding_program(decoder, decoder.make_cache(33)) is None
    assert decoding_program(decoder, decoder.make_cache(32)) is not None


def test_a_cache_goes_on_after_a_parameter_moved(tiny_llama: Path) -> None:
    """The next generation over the cache makes a program of its own."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        cache = model.decoder.make_cache(16)
        before = list(Generation(model.decoder, [1, 2], max_tokens=4, cache=cache))
        weight = dict(model.decoder.named_parameters())["norm.weight"]
        weight.data = weight.data.clone()
        cache.clear()
        assert list(Generation(model.decoder, [1, 2], max_tokens=4, cache=cache)) == before


def saved_and_loaded(cache: Any) -> Any:
    """Return a cache that went through a file of torch's."""
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),  # noqa: S301  # our own
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("options", ["llama", "gemma 3"])
@pytest.mark.parametrize("kind", COPIES)
def test_a_used_cache_is_copied(kind: str, options: str) -> None:
    """A copy holds the keys and values, goes on by itself over a prompt and tokens, and leaves the first one alone."""
    decoder = build(**OPTIONS[options])
    cache = decoder.make_cache(len(TOKENS) + 20)
    list(Generation(decoder, TOKENS, max_tokens=5, cache=cache))
    twin = COPIES[kind](cache)
    ends = [list(Generation(decoder, TOKENS[:6], max_tokens=8, cache=one)) for one in (twin, cache)]
    assert ends[0] == ends[1]
    assert twin.keys.untyped_storage().data_ptr() == twin.values.untyped_storage().data_ptr()
    assert twin.keys.data_ptr() != cache.keys.data_ptr()


def test_any_function_may_choose_tokens(tiny_llama: Path) -> None:
    """A sampler of the caller's takes logits alone."""

    def least(logits: torch.Tensor) -> int:
        return int(logits.argmin())

    with LanguageModel.open(tiny_llama, CONFIG) as model:
        chosen = list(Generation(model.decoder, [1, 2], max_tokens=4, sampler=least))
    assert len(chosen) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_process_that_is_killed_inside_a_run_breaks_nothing() -> None:
    """Others that share the weights and the cache's memory with it go on, with the same bits."""
    decoder = build(packed=True)
    cache = decoder.make_cache(len(TOKENS))
    cache.keys.untyped_storage().share_memory_()
    decode = program_of(decoder, cache)

    def logits() -> list[torch.Tensor]:
        cache.clear()
        return [decode(token, cache).clone() for token in TOKENS]

    wanted = logits()
    for pause in (0.0, 0.002, 0.01, 0.03):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                while True:
                    logits()
                    os.write(writing, b"1")
            finally:
                os._exit(1)
        os.close(writing)
        try:
            assert select.select([reading], [], [], 60)[0], "the child does not run"
            time.sleep(pause)
        finally:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            os.close(reading)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the child ended by itself"
        assert all(map(torch.equal, logits(), wanted))
