"""Several prompts at once by a program: the tokens and bits of each alone, whatever else is in a run."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_decoders import CONFIG, OPTIONS, TOKENS, build

import q4core as q4
from q4_lm import Generation, LanguageModel, Sampler, generate_batch
from q4_lm.generation.decoding import BatchProgram, batch_program, decoding_program

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from q4_lm import TransformerDecoder
    from q4_nn.blocks.batch_cache import BatchCache

DRAWN = random.Random(5)  # no secret
PROMPTS = [[DRAWN.randrange(128) for _ in range(DRAWN.choice((1, 2, 3, 9, 17, 40)))] for _ in range(20)]


def program_of(decoder: TransformerDecoder, batch: int, capacity: int = 60) -> tuple[BatchProgram, BatchCache]:
    """Return the program of a batch, which must be there, and its cache."""
    cache = decoder.make_batch_cache(capacity, batch)
    program = batch_program(decoder, cache)
    assert program is not None
    return program, cache


def alone(decoder: TransformerDecoder, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Return what each prompt gives by itself."""
    return [[*Generation(decoder, prompt, **options)] for prompt in prompts]


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_are_those_of_each_prompt(name: str) -> None:
    """Twenty prompts of all lengths get the greedy tokens that each gets alone, in any number of slots."""
    decoder = build(packed=True, **OPTIONS[name])
    expected = alone(decoder, PROMPTS, max_tokens=12)
    for batch in (1, 3, 32):
        assert generate_batch(decoder, PROMPTS, max_tokens=12, batch=batch) == expected


def test_a_narrow_cache_is_obeyed(tiny_llama: Path) -> None:
    """No program of a batch has one: the modules run, and the report says why."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        model.decoder.cache_dtype = torch.float16
        expected = alone(model.decoder, PROMPTS[:3], max_tokens=4)
        assert generate_batch(model.decoder, PROMPTS[:3], max_tokens=4) == expected
        assert "a batch's cache is float32, not torch.float16" in str(model.session.report())


@pytest.mark.parametrize("name", OPTIONS)
def test_a_sequence_has_its_bits_in_any_company(name: str) -> None:
    """Logits are those of a token at a time in a cache of one sequence, bit by bit, in any slot and any chunks."""
    decoder = build(packed=True, **OPTIONS[name])
    cache = decoder.make_cache(60)
    one = decoding_program(decoder, cache)
    assert one is not None
    program, _ = program_of(decoder, 5)
    program([(3, TOKENS[:3]), (0, TOKENS[::-1]), (4, TOKENS[:1])])
    for token in TOKENS[:3]:
        expected = one(token, cache).clone()
    for start, others in ((3, [(1, TOKENS)]), (8, []), (13, [(0, TOKENS), (2, TOKENS[2:])])):
        end = start + 5
        for token in TOKENS[start:end]:
            expected = one(token, cache).clone()
        given = [*others, (3, TOKENS[start:end])]
        logits = program(given, range(len(given)))
        assert torch.equal(logits[-1], expected)
        assert program.best()[-1] == int(expected.argmax())
    assert program([(3, [1])], ()).shape[0] == 0


def test_a_prompt_of_many_chunks_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than a run are cut, and answers of others go on meanwhile."""
    decoder = build(packed=True, max_position_embeddings=400)
    prompts = [(TOKENS * 25)[:count] for count in (390, 1, 200, 129, 128)]
    expected = alone(decoder, prompts, max_tokens=9)
    run, runs = BatchProgram.__call__, []

    def counted(self: BatchProgram, parts: Any, wanted: Any) -> torch.Tensor:
        runs.append((sum(len(tokens) for _, tokens in parts), len(wanted)))
        return run(self, parts, wanted)

    monkeypatch.setattr(BatchProgram, "__call__", counted)
    assert generate_batch(decoder, prompts, max_tokens=9) == expected
    assert sum(count for count, _ in runs) == 390 + 1 + 200 + 129 + 128 + 5 * 8
    assert all(count == 128 for count, _ in runs[:6])
    assert [wanted for _, wanted in runs[:2]] == [1, 2]


def test_each_row_has_its_own_context() -> None:
    """A row ends where the context is full for it, and the others go on."""
    decoder = build(packed=True)
    prompts = [TOKENS * 4, TOKENS * 3 + TOKENS[:15], [7]]
    expected = alone(decoder, prompts, max_tokens=30)
    assert [len(row) for row in expected] == [1, 2, 30]
    assert generate_batch(decoder, prompts, max_tokens=30) == expected


def test_samplers_of_their_own() -> None:
    """Each row has its own sampler, drawn or any function of logits, and its own stops."""
    decoder = build(packed=True)

    def sampler(index: int) -> Any:
        return (lambda logits: int(logits.argmin())) if index % 2 else Sampler(1.5, seed=index)

    expected = [[*Generation(decoder, row, 8, sampler(index))] for index, row in enumerate(PROMPTS[:6])]
    assert generate_batch(decoder, PROMPTS[:6], max_tokens=8, sampler=sampler, batch=4) == expected
    stops = {expected[2][3], expected[3][0]}
    cut = [next((row[:at] for at, token in enumerate(row) if token in stops), row) for row in expected]
    assert generate_batch(decoder, PROMPTS[:6], max_tokens=8, sampler=sampler, batch=4, stops=stops) == cut


@pytest.mark.parametrize("hooked", [False, True])
def test_a_row_of_nan_changes_no_other(hooked: bool) -> None:  # a parameter
    """The error comes when the other rows are finished, with what they got, by programs and by modules."""
    decoder = build(packed=True)
    prompts = [PROMPTS[0], [5, 99, 7], PROMPTS[3], [99]]
    good = [0, 2]
    expected = alone(decoder, [prompts[index] for index in good], max_tokens=6)
    with torch.no_grad():
        decoder.get_parameter("embed_tokens.weight")[99] = torch.nan
    if hooked:
        decoder.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(q4.InputError, match=r"logits of prompts \[1, 3\] must be finite") as caught:
        generate_batch(decoder, prompts, max_tokens=6)
    rows = caught.value.details["rows"]
    assert [rows[index] for index in good] == expected
    assert [rows[1], rows[3]] == [[], []]


def test_a_step_takes_no_memory() -> None:
    """Once warm, a run asks torch for no tensor's memory."""
    decoder = build(packed=True)
    program, _ = program_of(decoder, 4)
    parts = [(slot, (7,)) for slot in range(4)]
    program(parts, range(4))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        program(parts, range(4))
        program.best()
    assert [item.key for item in profile.key_averages() if item.self_cpu_memory_usage > 0] == []


def test_the_best_token_of_each_row() -> None:
    """It is chosen in the program, for as many rows as are wanted, and is the greatest logit's."""
    decoder = build(packed=True)
    program, _ = program_of(decoder, 5)
    for count in (5, 1, 3):
        logits = program([(slot, (7 + slot,)) for slot in range(5)], range(count))
        assert program.best() == logits.argmax(-1).tolist()
        assert len(program.best()) == count


def test_a_run_that_does_not_fit() -> None:
    """A cache without room, or a number that is no token, is an error before anything is written."""
    decoder = build(packed=True)
    program, cache = program_of(decoder, 2, capacity=4)
    program([(0, [1, 2, 3]), (1, [4])])
    held = cache.of(0, 1).clone()
    with pytest.raises(q4.InputError, match="at most 1 more"):
        program([(1, [5]), (0, [5, 6])])
    with pytest.raises(q4.InputError, match="token, position or clock must be"):
        program([(0, [128])])
    assert cache.lengths == [3, 1]
    assert torch.equal(cache.of(0, 1), held)


def test_modules_where_a_hook_asks_for_them(tiny_llama: Path) -> None:
    """The same tokens come from modules, some prompts at a time, and the report says why."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        expected = generate_batch(model.decoder, PROMPTS[:7], max_tokens=8)
        seen: list[int] = []
        model.decoder.layers[0].register_forward_hook(lambda _module, _x, y: seen.append(len(y)))
        assert generate_batch(model.decoder, PROMPTS[:7], max_tokens=8, batch=3) == expected
        assert {*seen} == {1, 3}
        records = model.session.report().section("programs")
        (reason,) = [record.reasons[0] for record in records if record.backend is None]
        assert "layers.0: it has a hook" in reason


@pytest.mark.parametrize(
    ("prompts", "options", "rule"),
    [
        ([[1]], {"batch": 0}, "batch must be a whole number from 1 to 32, got 0"),
        ([[1]], {"batch": 33}, "batch must be a whole number from 1 to 32, got 33"),
        ([[1]], {"batch": True}, "batch must be a whole number"),
        ([[1]], {"max_tokens": True}, "max_tokens must be a positive whole number"),
        ([[1], [2, -1]], {}, "token numbers from 0 to 127, got -1"),
        ([[1, 128]], {}, "token numbers from 0 to 127, got 128"),
    ],
)
def test_bad_batches(prompts: Any, options: Any, rule: str) -> None:
    """Numbers out of range are refused by name."""
    with pytest.raises(q4.InputError, match=rule):
        generate_batch(build(), prompts, **options)
