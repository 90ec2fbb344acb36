"""Options that several commands share, as typer reads them; nothing here needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Backend",
    "ComputePath",
    "Device",
    "Dialect",
    "Dtype",
    "File",
    "Force",
    "Json",
    "Out",
    "Precision",
    "ShardSize",
]

COMPUTE_PATHS = ("auto", "kernel_only", "kernel_or_fallback", "dequant_matmul_only")
PRECISIONS = ("auto", "exact", "int16", "int8", "fp4")
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")


def _one_of(names: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return a completion of some names; the library says what is legal, and refuses the rest."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


File = Annotated[str, typer.Argument(metavar="FILE", help="A checkpoint: a file, an index of shards or a folder.")]
Out = Annotated[str, typer.Argument(metavar="OUT", help="A file named *.safetensors, or a folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:<index>.", autocompletion=_one_of(DEVICES)
    ),
]
Backend = Annotated[str | None, typer.Option("--backend", metavar="NAME", help="This backend or none.")]
ComputePath = Annotated[
    str | None,
    typer.Option(
        "--compute-path",
        metavar="POLICY",
        help=f"Which kinds of path may run: {', '.join(COMPUTE_PATHS)}.",
        autocompletion=_one_of(COMPUTE_PATHS),
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="KIND",
        help=f"How x may be rounded: {', '.join(PRECISIONS)}.",
        autocompletion=_one_of(PRECISIONS),
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help=f"dtype of x: {', '.join(DTYPES)}.", autocompletion=_one_of(DTYPES)),
]
Dialect = Annotated[
    str | None, typer.Option("--dialect", metavar="NAME", help="How to read keys that several dialects use.")
]
ShardSize = Annotated[
    str | None, typer.Option("--shard-size", metavar="SIZE", help="Split a folder's weights, such as 5GB.")
]
