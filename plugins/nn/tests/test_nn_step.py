"""One token at a time: the numbers of the general path, and its refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import q4core as q4
from q4_nn import Generation, LanguageModel, build_decoder
from q4_nn.models.metadata import Metadata
from q4_nn.models.step import make_step

if TYPE_CHECKING:
    from pathlib import Path

    from q4_nn import TransformerDecoder

CONFIG = q4.SessionConfig(device="cpu", activation_precision=q4.ActivationPrecision.EXACT)
TOKENS = [5, 100, 267, 0, 33, 33, 7, 250, 1, 64, 12]


def greatest_error(decoder: TransformerDecoder, tokens: list[int]) -> float:
    """Return the greatest difference between steps and one pass over everything, relative to the greatest logit."""
    with torch.inference_mode():
        whole = decoder(torch.tensor([tokens]), decoder.make_cache(16))[0]
    step = make_step(decoder, decoder.make_cache(16))
    assert step is not None
    steps = torch.stack([step(token).clone() for token in tokens])
    return float((steps - whole).abs().max() / whole.abs().max())


@pytest.mark.parametrize("sizes", [{}, {"tied": False}, {"kv_heads": 4}, {"kv_heads": 1}, {"head_dim": 24}])
def test_steps_give_the_logits_of_one_pass(sizes: dict[str, Any], write_llama: Any) -> None:
    """Token by token the logits are those of the general path to float32 rounding, whatever the heads."""
    path = write_llama(**sizes)
    checkpoint = q4.open(path)
    keys = {"llama.attention.key_length": sizes.get("head_dim", 16), "llama.rope.dimension_count": 12}
    keys["llama.attention.value_length"] = keys["llama.attention.key_length"]
    with q4.Session(CONFIG) as session:
        decoder = build_decoder(checkpoint, session, Metadata({**checkpoint.metadata, **keys}, "tiny.gguf"))
        assert greatest_error(decoder, TOKENS) < 1e-5


def test_steps_go_on_behind_a_prompt(tiny_llama: Path) -> None:
    """Steps behind a prompt see its keys and values, and leave in the cache what the general path would."""
    with LanguageModel.open(tiny_llama, CONFIG) as model, torch.inference_mode():
        decoder = model.decoder
        expected, cache = decoder.make_cache(16), decoder.make_cache(16)
        whole = decoder(torch.tensor([TOKENS]), expected)[0]
        decoder(torch.tensor([TOKENS[:6]]), cache)
        step = make_step(decoder, cache)
        assert step is not None
        for index, token in enumerate(TOKENS[6:], 6):
            assert float((step(token) - whole[index]).abs().max() / whole.abs().max()) < 1e-5
        assert cache.length == len(TOKENS)
        for mine, theirs in ((cache.keys, expected.keys), (cache.values, expected.values)):
            assert float((mine - theirs).abs().max() / theirs.abs().max()) < 1e-5


def test_one_matrix_of_a_step_is_one_call(tiny_llama: Path) -> None:
    """The calls of a step are counted as those of the general path are."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        step = make_step(model.decoder, model.decoder.make_cache(4))
        assert step is not None
        step(1)
        step(2)
        assert [sum(record.calls) for record in model.session.report().layers] == [2] * 11


@pytest.mark.parametrize("token", [-1, 268])
def test_token_outside_the_vocabulary(token: int, tiny_llama: Path) -> None:
    """A number that is no token is refused before anything is written."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        cache = model.decoder.make_cache(4)
        step = make_step(model.decoder, cache)
        assert step is not None
        with pytest.raises(q4.InputError, match="tokens must be from 0 to 267"):
            step(token)
        assert cache.length == 0
        assert not cache.keys.any()


def test_full_cache(tiny_llama: Path) -> None:
    """A step into a full cache is refused."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        step = make_step(model.decoder, model.decoder.make_cache(2))
        assert step is not None
        step(1)
        step(2)
        with pytest.raises(q4.InputError, match="at most 0 more"):
            step(3)


def test_closed_model(tiny_llama: Path) -> None:
    """After the model is closed a step refuses to run."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        step = make_step(model.decoder, model.decoder.make_cache(2))
    assert step is not None
    with pytest.raises(q4.LifecycleError):
        step(1)


def test_generation_gives_the_tokens_of_the_general_path(tiny_llama: Path) -> None:
    """Greedy tokens of a run are those that one pass over prompt and answer would choose."""
    with LanguageModel.open(tiny_llama, CONFIG) as model, torch.inference_mode():
        found = list(Generation(model.decoder, TOKENS, max_tokens=20))
        whole = torch.tensor([TOKENS + found])
        logits = model.decoder(whole, model.decoder.make_cache(whole.shape[1]))[0]
    assert len(set(found)) > 1
    assert logits[len(TOKENS) - 1 : -1].argmax(-1).tolist() == found


def test_a_hook_is_run_for_every_token(tiny_llama: Path) -> None:
    """Where somebody looks at a module's results, each token goes through the module as such."""
    seen = []
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        without = list(Generation(model.decoder, TOKENS, max_tokens=5))
        model.decoder.layers[1].self_attn.register_forward_hook(lambda _module, _x, y: seen.append(y.shape[1]))  # type: ignore[union-attr]  # a TransformerBlock
        assert list(Generation(model.decoder, TOKENS, max_tokens=5)) == without
    assert seen == [len(TOKENS), 1, 1, 1, 1]


def test_what_only_the_general_path_serves(tiny_llama: Path) -> None:
    """Batches, other dtypes and modules of other kinds have no step."""
    narrow = q4.SessionConfig(device="cpu", compute_dtype=torch.bfloat16)
    with LanguageModel.open(tiny_llama, narrow) as model:
        assert make_step(model.decoder, model.decoder.make_cache(2)) is None
    with LanguageModel.open(tiny_llama, CONFIG) as model:
        decoder = model.decoder
        assert make_step(decoder, decoder.make_cache(2)) is not None
        assert make_step(decoder, decoder.make_cache(2, batch=2)) is None
        decoder.layers[0].mlp.down_proj = torch.nn.Sequential(torch.nn.Linear(96, 64))  # type: ignore[union-attr]  # as above
        assert make_step(decoder, decoder.make_cache(2)) is None
