"""Conversations, batches, stop strings and perplexity on the tiny model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import q4core as q4
from q4_lm import Conversation, Generation, LanguageModel, Sampler, generate_batch, measure_perplexity, stream_text
from q4_lm.commands.declared import chat, generate, perplexity
from q4_lm.generation.run import StopReason

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

CONFIG = q4.SessionConfig(device="cpu", activation_precision="exact")
PROMPTS = [[5, 100, 267, 0, 33], [7], [250, 1, 64, 12, 9, 9, 30]]


def invoke(*arguments: str, given: str = "") -> Result:
    """Run a command on an application of its own; an error comes through as it is."""
    app = typer.Typer()
    for command in (generate, chat, perplexity):
        app.command()(command)
    result = CliRunner().invoke(app, arguments, input=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_batch_gives_what_each_prompt_gives(temperature: float, tiny_llama: Path) -> None:
    """Prompts of different lengths get, together, the tokens that each gets alone, greedy or drawn."""

    def sampler(index: int) -> Sampler:
        return Sampler(temperature=temperature, seed=index)

    with LanguageModel.open(tiny_llama, CONFIG) as model:
        alone = [
            [*Generation(model.decoder, prompt, max_tokens=12, sampler=sampler(index))]
            for index, prompt in enumerate(PROMPTS)
        ]
        stops = {alone[0][5]}
        cut = [tokens[: tokens.index(*stops)] if stops & {*tokens} else tokens for tokens in alone]
        assert generate_batch(model.decoder, PROMPTS, max_tokens=12, sampler=sampler) == alone
        assert generate_batch(model.decoder, PROMPTS, max_tokens=12, sampler=sampler, stops=stops) == cut
        assert generate_batch(model.decoder, PROMPTS[:1] * 2, max_tokens=1) == [alone[0][:1]] * 2 or temperature


@pytest.mark.parametrize(
    ("prompts", "options", "rule"),
    [
        ([], {}, "at least one"),
        ([[1], []], {}, "none of them empty"),
        ([[1]], {"max_tokens": 0}, "a positive whole number"),
        ([[1] * 49], {}, "at most 48 tokens long"),
    ],
)
def test_bad_batches(prompts: Any, options: Any, rule: str, tiny_llama: Path) -> None:
    """What is no batch is refused."""
    with LanguageModel.open(tiny_llama, CONFIG) as model, pytest.raises(q4.InputError, match=rule):
        generate_batch(model.decoder, prompts, **options)


def test_stop_strings(tiny_llama: Path) -> None:
    """A text ends before the first stop string, whole or cut over several tokens; without one it is whole."""
    with LanguageModel.open(tiny_llama, CONFIG) as model:

        def run(*stops: str) -> tuple[str, Generation]:
            generation = Generation(model.decoder, PROMPTS[0], max_tokens=20)
            return "".join(stream_text(model, generation, stops)), generation

        whole, generation = run()
        assert whole == model.tokenizer.decode(generation.tokens)
        for stop in (whole[4:9], whole[-1:], whole[:1], whole[3:5]):
            text, generation = run("no such text", stop)
            assert text == whole[: whole.index(stop)]
            assert generation.stop_reason is StopReason.STOP_STRING
        assert run("no such text")[0] == whole
        with pytest.raises(q4.InputError, match="not empty"):
            run("")


def test_a_conversation_remembers(write_llama: Any) -> None:
    """Each answer is the one that the whole conversation gets anew; what was computed is not computed again."""
    with LanguageModel.open(write_llama(context=160), CONFIG) as model:
        talk = Conversation(model, system="a", max_tokens=3)
        lengths = []
        forward = model.decoder.forward

        def counted(tokens: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            lengths.append(tokens.shape[1])
            return forward(tokens, *arguments, **options)

        model.decoder.forward = counted  # type: ignore[method-assign]  # for this test
        for question in ("in", "th"):
            answer = "".join(talk.ask(question))
            tokens = model.chat(talk.messages[:-1])
            fresh = Generation(model.decoder, tokens, max_tokens=3, stops=model.tokenizer.stops)
            assert answer == "".join(stream_text(model, fresh))
            assert talk.messages[-1] == {"role": "assistant", "content": answer}
        with pytest.raises(q4.InputError, match="shorter than the model's context of 160"):
            [*talk.ask("x" * 160)]


def test_perplexity_against_a_plain_sum(tiny_llama: Path) -> None:
    """Loss and divergence are those of a plain sum over one pass; a model does not differ from itself."""
    text = "the thing in a thing " * 3
    with LanguageModel.open(tiny_llama, CONFIG) as model, torch.inference_mode():
        numbers = model.tokenizer.encode(text)[:40]
        text = model.tokenizer.decode(numbers)
        predicted = model.decoder(torch.tensor([numbers]), model.decoder.make_cache(48))[0].double().log_softmax(-1)
        expected = -sum(float(predicted[at, number]) for at, number in enumerate(numbers[1:])) / (len(numbers) - 1)
        found = measure_perplexity(model, text, window=48, reference=model)
        assert found.tokens == len(numbers) - 1
        assert found.loss == pytest.approx(expected, rel=1e-9)
        assert (found.kl_divergence, found.equal_next_tokens) == (0.0, 1.0)
        assert measure_perplexity(model, text).loss == pytest.approx(expected, rel=1e-9)  # of the whole context
        assert measure_perplexity(model, text, window=2).tokens == len(numbers) // 2
        with pytest.raises(q4.InputError, match="from 2 to 48"):
            measure_perplexity(model, text, window=49)
        with pytest.raises(q4.InputError, match="at least two tokens"):
            measure_perplexity(model, "a", window=8)


def test_commands(write_llama: Any, tmp_path: Path) -> None:
    """``q4 chat`` answers each line; ``q4 perplexity`` reports loss and divergence; a file that is no text is named."""
    path = write_llama(context=160)
    with LanguageModel.open(path, CONFIG) as model:
        talk = Conversation(model, max_tokens=4)
        answers = ["".join(talk.ask(question)) for question in ("in", "th")]
    result = invoke("chat", str(path), "--precision", "exact", "--max-tokens", "4", given="in\nth\n")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) >= sum(1 for answer in answers if answer)
    result = invoke("chat", str(path), "--precision", "exact", "--max-tokens", "4", "--json", given="in\nth\n")
    assert json.loads(result.stdout) == {"file": str(path), "messages": talk.messages}
    text = tmp_path / "text.txt"
    text.write_text("the thing in a thing " * 3, encoding="utf-8")
    shown = invoke("perplexity", str(path), str(text), "--against", "exact").stdout  # by a window of 160, not 512
    assert "nats per token" in shown
    assert "KL divergence" in shown
    text.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(q4.InputError, match=r"^q4 perplexity: the text can't be read: .*utf-8.*text\.txt\]"):
        invoke("perplexity", str(path), str(text))
    with pytest.raises(q4.InputError, match=r"the text can't be read: No such file or directory \[none\.txt\]\."):
        invoke("perplexity", str(path), "none.txt")
