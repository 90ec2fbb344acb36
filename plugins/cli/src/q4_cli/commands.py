"""The command line of our commands: arguments, options and help. What runs them is imported when one runs."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from q4_cli import options  # noqa: TC001  # typer reads annotations at run time

__all__ = ["COMMANDS"]


def _run(name: str, arguments: dict[str, Any]) -> None:
    """Call a command's own function, which imports torch, with the arguments of its declaration."""
    getattr(importlib.import_module(f"q4_cli.{name}"), name)(**arguments)


def doctor(
    *,
    device: options.Device = None,
    dtype: options.Dtype = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 when a plugin is broken.")] = False,
    proofs: Annotated[bool, typer.Option("--proofs", help="List the proofs that are remembered on disk.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show what is installed, what this machine has, and what each backend can do with each format here.

    For example:

        q4 doctor --device cpu
    """
    _run("doctor", locals())


def inspect(file: options.File, *, dialect: options.Dialect = None, as_json: options.Json = False) -> None:
    """Show what a checkpoint holds, layer by layer. Only headers are read, however large the file.

    For example:

        q4 inspect model.safetensors
    """
    _run("inspect", locals())


def explain(  # noqa: PLR0913  # one argument per option
    file: options.File,
    *,
    device: options.Device = None,
    compute_path: options.ComputePath = None,
    backend: options.Backend = None,
    m: Annotated[str, typer.Option("--m", metavar="LOW:HIGH", help="Rows of x to serve; LOW: has no end.")] = "1:",
    dtype: options.Dtype = None,
    precision: options.Precision = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="Ask for gradients to the input too.")] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Prepare one layer of each kind, so that its paths prove themselves anew.")
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Repeat equal answers, layer by layer.")] = False,
    dialect: options.Dialect = None,
    as_json: options.Json = False,
) -> None:
    """Show which backend and paths would run each layer here, and why each other one would not.

    Ends with 1 where a layer has no backend or can't be read. For example:

        q4 explain model.gguf --m 1:8 --prove
    """
    _run("explain", locals())


def quantize(  # noqa: PLR0913  # one argument per option
    source: Annotated[str, typer.Argument(metavar="IN", help="A dense checkpoint: a file, an index or a folder.")],
    out: options.Out,
    *,
    format: Annotated[  # noqa: A002  # the option's name
        str,
        typer.Option("--format", metavar="FORMAT", help="nf4, fp4, nvfp4, mxfp4, or another that a dialect writes."),
    ],
    dialect: Annotated[
        str | None,
        typer.Option("--dialect", metavar="NAME", help="How to store it. Defaults to the format's usual one."),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="GLOB", help="Leave these dense; may be repeated.")
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="GLOB", help="Pack these embeddings, or lm_head, too; may be repeated."),
    ] = None,
    block_size: Annotated[int | None, typer.Option("--block-size", metavar="N", help="In-features per scale.")] = None,
    scale_kind: Annotated[
        str | None, typer.Option("--scale-kind", metavar="KIND", help="plain, double_quant, e4m3, e4m3_mul, …")
    ] = None,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="int4 without zero points.")] = False,
    shard_size: options.ShardSize = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail where a tensor can't be packed.")] = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Pack the 2-D weights of a dense checkpoint; biases, norms, embeddings and the head stay as they are.

    For example:

        q4 quantize Qwen3-0.6B Qwen3-nf4 --format nf4
    """
    _run("quantize", locals())


def convert(  # noqa: PLR0913  # one argument per option
    source: Annotated[
        str, typer.Argument(metavar="IN", help="A packed checkpoint of any dialect: a file, shards, a folder or GGUF.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A file named *.safetensors or *.gguf, or a folder.")],
    *,
    dialect: Annotated[str, typer.Option("--dialect", metavar="NAME", help="The dialect to write, or gguf.")],
    read_as: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="How to read keys that several dialects use.")
    ] = None,
    requantize: Annotated[
        bool,
        typer.Option("--requantize", help="Allow the nearest values where exact ones can't be written, and list them."),
    ] = False,
    format: Annotated[  # noqa: A002  # the option's name
        str | None,
        typer.Option("--format", metavar="FORMAT", help="What --requantize packs layers of other formats into."),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="GLOB", help="Write these layers dense; may be repeated.")
    ] = None,
    shard_size: options.ShardSize = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Store a packed checkpoint in another dialect; codes and scales stay exactly what they are.

    A run that was killed resumes where it ended. For example:

        q4 convert Qwen3-AWQ qwen3.gguf --dialect gguf
    """
    _run("convert", locals())


def bench(  # noqa: PLR0913  # one argument per option
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="A checkpoint, or use --shape.")] = None,
    *,
    shape: Annotated[str | None, typer.Option("--shape", metavar="NxK", help="A made-up weight of this shape.")] = None,
    format: Annotated[  # noqa: A002  # the option's name
        str | None, typer.Option("--format", metavar="FORMAT", help="With --shape: nf4, nvfp4, q4_0, …")
    ] = None,
    layer: Annotated[str | None, typer.Option("--layer", metavar="NAME", help="Only this layer of FILE.")] = None,
    m: Annotated[str, typer.Option("--m", metavar="LIST", help="Rows of x, with commas between.")] = "1,8,64",
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="For each measurement.")] = 1.0,
    warm: Annotated[bool, typer.Option("--warm", help="Read the weight from caches, not from memory.")] = False,
    device: options.Device = None,
    backend: options.Backend = None,
    compute_path: options.ComputePath = None,
    dtype: options.Dtype = None,
    precision: options.Precision = None,
    dialect: options.Dialect = None,
    as_json: options.Json = False,
) -> None:
    """Time the paths that would serve, after checking what they compute.

    For example:

        q4 bench --shape 4096x4096 --format nf4
    """
    _run("bench", locals())


COMMANDS = (doctor, inspect, explain, quantize, convert, bench)
"""In the order of the help."""
