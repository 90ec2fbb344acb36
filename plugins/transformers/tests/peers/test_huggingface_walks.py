"""Random walks of generations, calls on caches and changes of a model: programs compute what the modules do."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from huggingface_decoders import KINDS, near, pair, prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.peer, pytest.mark.usefixtures("natively", "quiet_transformers")]
STEPS = 40
OFTEN = ("llama", "gemma3")
WALKS = [
    pytest.param(name, seed, marks=[] if name in OFTEN and not seed else [pytest.mark.soak])
    for name in KINDS
    for seed in range(5)
]
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"cache_implementation": "static"},
    {"use_cache": False},
    {"prompt_lookup_num_tokens": 3},
    {"repetition_penalty": 1.3},
    {"output_hidden_states": True},
)
SCORES = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True}


def _generate(draw: random.Random) -> Callable[[Any], Any]:
    """Sequences of which some begin with padding, by one of transformers' ways."""
    options = draw.choice((*OPTIONS, {}, {}))
    batch = 1 if "prompt_lookup_num_tokens" in options else draw.choice((1, 1, 2, 3))
    tokens = prompt(draw.choice((1, 2, 7, 15, 33)), draw.randrange(1000), batch)
    mask = torch.ones_like(tokens)
    for row in range(1, batch):
        mask[row, : draw.randrange(tokens.shape[1])] = 0
    count = draw.choice((1, 2, 5, 20))

    def generate(model: Any) -> Any:
        found = model.generate(tokens * mask, attention_mask=mask, max_new_tokens=count, **SCORES, **options)
        return [*found.scores]

    return generate


def _call(draw: random.Random) -> Callable[[Any], Any]:
    """Parts of sequences, one after another, with something done to their cache in between."""
    batch, is_static = draw.choice((1, 1, 2)), draw.random() < 0.2
    parts = [prompt(draw.choice((1, 1, 2, 5)), draw.randrange(1000), batch) for _ in range(draw.randrange(2, 7))]
    acts = [draw.choice(("", "", "copy", "crop", "hook", "read", "select")) for _ in parts]
    mode = draw.choice((torch.no_grad, torch.no_grad, torch.inference_mode, torch.enable_grad))
    mode = torch.no_grad if is_static else mode  # in which the modules can't write theirs

    def call(model: Any) -> Any:
        kind = transformers.StaticCache if is_static else transformers.DynamicCache
        cache, found = kind(config=model.config, **({"max_cache_len": 64} if is_static else {})), []
        is_plain = not is_static and all(type(layer) is transformers.cache_utils.DynamicLayer for layer in cache.layers)
        with mode():
            for act, part in zip(acts, parts, strict=True):
                hook = model.model.layers[0].register_forward_hook(lambda *_: None) if act == "hook" else None
                if act == "copy" and mode is not torch.enable_grad:
                    cache = copy.deepcopy(cache)
                elif act == "crop" and is_plain and found:
                    cache.crop(-1)
                elif act == "select" and is_plain and found:
                    cache.batch_select_indices(torch.arange(batch))
                elif act == "read":  # of a static window, transformers reads all positions but the first one
                    held = [layer.keys.detach().clone() for layer in cache.layers if layer.is_initialized]
                    found += [] if is_static else held
                found.append(model(part, past_key_values=cache).logits.detach())
                if hook is not None:
                    hook.remove()
        return found

    return call


def _change(draw: random.Random) -> Callable[[Any], Any]:
    """Another model from now on, or other circumstances."""
    what, layer, factor = draw.randrange(5), draw.randrange(2), draw.uniform(0.9, 1.1)

    @torch.no_grad()
    def change(model: Any) -> tuple[()]:
        if what == 0:
            next(model.model.layers[layer].parameters()).mul_(factor)
        elif what == 1:
            model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * factor)
        elif what == 2:
            model.get_input_embeddings().weight[5] *= factor
        elif what == 3:
            model.set_attn_implementation("eager" if layer else "sdpa")
        else:
            torch.set_num_threads(1 + layer)
        return ()

    return change


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "seed"), WALKS)
def test_a_walk(name: str, seed: int, tmp_path: Path) -> None:
    """After each of some random steps, tokens and logits are those of the modules, and threads what they were."""
    draw = random.Random(f"{name} {seed}")
    model, other = pair(tmp_path, *KINDS[name])
    with _threads():
        for _ in range(STEPS):
            make = draw.choices((_generate, _call, _change), (5, 3, 1))[0]
            step = make(draw)
            threads = torch.get_num_threads()
            found, expected = step(model), step(other)
            if make is not _change:
                assert torch.get_num_threads() == threads
            for one, own in zip(found, expected, strict=True):
                near(one, own)
                if make is _generate and not torch.equal(chosen := one.argmax(-1), own.argmax(-1)):
                    near(own.gather(1, chosen[:, None])[:, 0], own.amax(-1))  # a tie, after which texts differ
                    break
    assert model.model.forward.calls["programs"] > STEPS
