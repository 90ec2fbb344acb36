"""Batches of transformers by programs: the tokens of the modules, with padding on the left and without."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from huggingface_decoders import KINDS, calls, near, pair, prompt, ran
from transformers import DynamicCache, StaticCache

from q4_transformers.names import CACHE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("quiet_transformers", "natively")]

MODELS = ("llamas", "gemmas")


def padded(length: int, *counts: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return random tokens of sequences that are filled up on the left to a length, and their mask."""
    mask = torch.arange(length) >= length - torch.tensor(counts)[:, None]
    return {"input_ids": prompt(length, seed, len(counts)) * mask, "attention_mask": mask.long()}


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Return positions that do not count padding."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize("name", KINDS)
def test_batches_have_the_tokens_of_the_modules(name: str, tmp_path: Path) -> None:
    """Batches of 2 to 32 sequences of every architecture, with and without padding, greedy."""
    ours, theirs = pair(tmp_path, *KINDS[name])
    for seed, counts in enumerate(((20, 20), (3, 30, 17, 30), (1, 2), tuple(range(5, 37)))):
        given = padded(max(counts), *counts, seed=seed) | {"max_new_tokens": 12, "do_sample": False}
        assert torch.equal(ours.generate(**given), theirs.generate(**given)), seed
    assert ran(ours) == 4 * 12


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("models", MODELS)
def test_caches_of_batches(models: str, static: bool, request: pytest.FixtureRequest) -> None:  # a parameter
    """Greedy and sampled tokens, in dynamic and static caches, beyond a window; one sequence with padding, too."""
    ours, theirs = request.getfixturevalue(models)
    for counts, more in (((40, 9, 23), {}), ((6,), {}), ((18, 7), {"do_sample": True, "top_k": 9, "temperature": 1.5})):
        given = padded(max(counts) + 2, *counts) | {"max_new_tokens": 20, "do_sample": False, **more}
        given |= {"cache_implementation": "static"} if static else {}
        found = []
        for model in (ours, theirs):
            torch.manual_seed(3)
            found.append(model.generate(**given))
        assert torch.equal(*found), counts
    assert ran(ours) == 60


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("models", MODELS)
def test_keys_of_a_batch_are_those_of_the_modules(models: str, static: bool, request: pytest.FixtureRequest) -> None:
    """Several tokens after others, and single ones: logits, and keys and values where there is no padding."""
    ours, theirs = request.getfixturevalue(models)
    given = padded(45, 45, 12, 30)
    results = []
    for model in (ours, theirs):
        cache = StaticCache(model.config, max_cache_len=64) if static else DynamicCache(config=model.config)
        logits, end = [], 0
        for count in (40, 1, 1, 2, 1):
            ids, mask = given["input_ids"][:, end : end + count], given["attention_mask"][:, : end + count]
            called = {"attention_mask": mask, "position_ids": positions(mask)[:, end:], CACHE: cache}
            logits.append(model(ids, **called).logits[:, -1])
            end += count
        results.append((torch.cat(logits), cache))
    assert ran(ours) == 5
    near(results[0][0], results[1][0])
    held = given["attention_mask"].bool()
    for one, other in zip(*(cache.layers for _, cache in results), strict=True):
        assert int(one.get_seq_length()) == int(other.get_seq_length()) == 45
        assert one.keys.shape == other.keys.shape
        for own, wanted in ((one.keys, other.keys), (one.values, other.values)):
            count = min(own.shape[2], 45) - 1  # a full window's first position is rolled out unread
            there = held[:, -count:, None, None]
            last = slice(45 - count, 45) if static and own.shape[2] > 45 else slice(own.shape[2] - count, None)
            near(own[:, :, last].transpose(1, 2) * there, wanted[:, :, last].transpose(1, 2) * there)


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("models", MODELS)
def test_programs_and_modules_by_turns(models: str, static: bool, request: pytest.FixtureRequest) -> None:
    """A batch goes on by programs after modules ran, and by modules after programs."""
    ours, theirs = request.getfixturevalue(models)
    given = padded(40, 40, 28, 30)
    results = []
    for model in (ours, theirs):
        cache = StaticCache(model.config, max_cache_len=64) if static else DynamicCache(config=model.config)
        logits, end = [], 0
        for step, count in enumerate((20, 1, 1, 5, 1, 11, 1)):
            ids, mask = given["input_ids"][:, end : end + count], given["attention_mask"][:, : end + count]
            called = {"attention_mask": mask, "position_ids": positions(mask)[:, end:], CACHE: cache}
            asked = {"output_hidden_states": True} if step in {0, 2, 3} else {}
            logits.append(model(ids, **called, **asked).logits[:, -1])
            end += count
        results.append(torch.cat(logits))
    assert calls(ours)["programs"] == 4
    near(*results)


CHANGES: dict[str, Callable[[DynamicCache], tuple[DynamicCache, list[int]]]] = {
    "copied": lambda cache: (copy.deepcopy(cache), [0, 1, 2]),
    "reordered": lambda cache: (cache.reorder_cache(torch.tensor([2, 0, 2])) or cache, [2, 0, 2]),
    "repeated": lambda cache: (cache.batch_repeat_interleave(2) or cache, [0, 0, 1, 1, 2, 2]),
    "chosen": lambda cache: (cache.batch_select_indices(torch.tensor([2, 1])) or cache, [2, 1]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("models", MODELS)
@torch.no_grad()
def test_a_changed_batch_goes_on(models: str, change: str, request: pytest.FixtureRequest) -> None:
    """Sequences that were reordered, repeated or chosen go on by programs with their own padding."""
    ours, theirs = request.getfixturevalue(models)
    results = []
    for model in (ours, theirs):
        given = padded(20, 20, 12, 7)
        mask = given["attention_mask"]
        called = {"attention_mask": mask, "position_ids": positions(mask), "use_cache": True}
        cache = model(given["input_ids"], **called)[CACHE]
        cache, rows = CHANGES[change](cache)
        mask = torch.cat((mask[rows], torch.ones(len(rows), 3, dtype=torch.int64)), 1)
        for end in (21, 22, 23):
            called = {"attention_mask": mask[:, :end], "position_ids": positions(mask[:, :end])[:, -1:]}
            logits = model(prompt(1, end, len(rows)), **{CACHE: cache}, **called).logits
        results.append(logits)
    near(*results)
    assert ran(ours) == 4


@pytest.mark.parametrize("models", MODELS)
def test_beams(models: str, request: pytest.FixtureRequest) -> None:
    """Beam search over padded prompts gives the modules' beams, by programs."""
    ours, theirs = request.getfixturevalue(models)
    given = padded(20, 20, 7) | {"num_beams": 3, "max_new_tokens": 12}
    assert torch.equal(ours.generate(**given), theirs.generate(**given))
    assert ran(ours) == 12


@torch.no_grad()
def test_a_cropped_batch(llamas: tuple[Any, Any]) -> None:
    """A batch that is cropped goes on before the tokens that it lost."""
    results = []
    for model in llamas:
        cache = model(prompt(40, batch=3), use_cache=True)[CACHE]
        model(prompt(1, batch=3), **{CACHE: cache})
        cache.crop(-3)
        results.append(model(prompt(2, 5, batch=3), **{CACHE: cache}).logits)
    near(*results)
    assert ran(llamas[0]) == 3


@torch.no_grad()
def test_a_mask_that_hides_more_than_before(llamas: tuple[Any, Any]) -> None:
    """Positions that a cache holds, and a later call hides as if they were padding, are hidden."""
    tokens, mask = prompt(6, batch=2), torch.ones(2, 7, dtype=torch.int64)
    mask[1, :2] = 0
    places, results = mask.sum(1, keepdim=True) - 1, []
    for model in llamas:
        cache = model(tokens, use_cache=True)[CACHE]
        named = {"attention_mask": mask, "position_ids": places, CACHE: cache}
        results.append(model(tokens[:, :1], **named).logits)
    near(*results)


def test_a_batch_grows(tmp_path: Path) -> None:
    """A batch outgrows the memory that it began with, windows and padding included."""
    kind, options = KINDS["gemma3"]
    ours, theirs = pair(tmp_path, kind, {**options, "max_position_embeddings": 700, "sliding_window": 300})
    given = padded(140, 140, 20) | {"max_new_tokens": 480, "do_sample": False}
    found = ours.generate(**given)
    assert torch.equal(found, theirs.generate(**given))
    assert ran(ours) == 480


@torch.no_grad()
def test_padding_is_not_computed(llamas: tuple[Any, Any]) -> None:
    """Features of padding are 0, and those of a row are the same whatever its padding and its batch."""
    model, _ = llamas
    given = padded(30, 30, 11)
    mask = given["attention_mask"]
    found = model.model(**given, position_ids=positions(mask)).last_hidden_state
    alone = model.model(given["input_ids"][1:, 19:]).last_hidden_state
    assert not found[1, :19].any()
    near(found[1, 19:], alone[0])


@torch.no_grad()
def test_nan_in_a_row_changes_no_other(llamas: tuple[Any, Any]) -> None:
    """A row whose numbers are NaN leaves all others as they are, bit by bit."""
    model, _ = llamas
    ids = prompt(8, batch=3).clamp(max=50)
    before = model(ids).logits
    model.model.embed_tokens.weight[60] = torch.nan
    ids[1, 4] = 60
    after = model(ids).logits
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert after[1, 4:].isnan().all()
    assert torch.equal(after[1, :4], before[1, :4])
    assert ran(model) == 2


HOLES = padded(12, 12, 8)
GAP = HOLES["attention_mask"].clone()
GAP[1, 7] = 0
RIGHT = HOLES["attention_mask"].flip(1)
NEVER = HOLES["attention_mask"].clone()
NEVER[1] = 0
CAUSAL = torch.ones(12, 12, dtype=torch.bool).tril()
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "a gap": ({"attention_mask": GAP, "position_ids": positions(GAP)}, "mask"),
    "padding on the right": ({"attention_mask": RIGHT, "position_ids": positions(RIGHT)}, "mask"),
    "a row of padding alone": ({"attention_mask": NEVER, "position_ids": positions(NEVER)}, "mask"),
    "positions that count padding": ({"attention_mask": HOLES["attention_mask"]}, "positions"),
    "other positions": (
        {"attention_mask": HOLES["attention_mask"], "position_ids": positions(HOLES["attention_mask"]) + 1},
        "positions",
    ),
    "a mask of other rows": ({"attention_mask": (CAUSAL & CAUSAL.flip(0))[None, None].expand(2, 1, -1, -1)}, "mask"),
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_batches_that_no_program_computes(way: str, llamas: tuple[Any, Any]) -> None:
    """Masks with gaps, and positions that count padding, go to the modules, with their results."""
    ours, _ = llamas
    options, why = WAYS[way]
    found, expected = (model(HOLES["input_ids"], **options).logits for model in llamas)
    assert torch.equal(found.isnan(), expected.isnan())
    near(found.nan_to_num(), expected.nan_to_num())
    assert [reason for reason in calls(ours) if why in reason], calls(ours)
    assert "programs" not in calls(ours)


@torch.no_grad()
def test_masks_of_four_sizes(llamas: tuple[Any, Any]) -> None:
    """A mask [B, 1, T, S] that says what one of two sizes does runs by programs, with positions or without."""
    ours, _ = llamas
    mask = HOLES["attention_mask"]
    four = (CAUSAL & mask[:, None].bool())[:, None]
    plain = {"attention_mask": CAUSAL[None, None].expand(2, 1, -1, -1)}
    for given in ({"attention_mask": four, "position_ids": positions(mask)}, plain):
        found, expected = (model(HOLES["input_ids"], **given).logits[:, -1] for model in llamas)
        near(found, expected)
    assert ran(ours) == 2
