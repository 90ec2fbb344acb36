"""Opens what a command names."""

from __future__ import annotations

import q4core as q4

__all__ = ["open_file", "require_readable"]


def open_file(file: str, *, dialect: str | None = None) -> q4.Checkpoint:
    """Open a checkpoint by what the user typed.

    Raises:
        CheckpointError: It is standard input, or see ``q4core.open``.
        SchemaError, DialectError: See ``q4core.open``.
    """
    if file == "-":
        hint = "A checkpoint is mapped into memory, which a pipe can't be; save it to a file first."
        raise q4.CheckpointError("checkpoint", name="FILE", rule="a file or a folder", value=file, hint=hint)
    return q4.open(file, dialect=dialect)


def require_readable(checkpoint: q4.Checkpoint, what: str) -> None:
    """Refuse to rewrite a checkpoint of which a part can't be read.

    Raises:
        CheckpointError: There is such a part.
    """
    for problem in checkpoint.schema.unsupported:
        hint = f"{problem}, for example; it could not be copied."
        raise q4.CheckpointError(what, name="IN", rule="readable as a whole", where=str(checkpoint.path), hint=hint)
