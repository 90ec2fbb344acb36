"""``q4 embed``: a vector for each sentence of a file."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

import q4core as q4
from q4_lm.commands.generate import closest_path, config_of
from q4_lm.commands.progress import loading_shown, progress
from q4_lm.generation.sentence_encoder import SentenceEncoder

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["embed"]

_WHAT = "q4 embed"
_SUFFIXES = (".npy", ".jsonl")
_PIECE = 1024
"""Sentences whose vectors are written at once; those of a piece are sorted by length."""


def embed(  # noqa: PLR0913  # one argument per option
    file: str,
    *,
    model: str,
    out: Path | None,
    prompt: str | None,
    batch: int,
    force: bool,
    device: str | None,
    backend: str | None,
    compute_path: str | None,
    precision: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Write a vector for each sentence of a file."""
    started = time.perf_counter()
    source = Path(file)
    sentences = _read(source)
    target = _checked(source.with_suffix(".npy") if out is None else out, source, force=force)
    if not Path(model).exists():
        close = closest_path(model)
        hint = f"Did you mean {close!r}?" if close else "Name a folder with config.json, or a GGUF file of BERT."
        raise q4.CheckpointError("model", name="--model", rule="a folder or a file", value=model, hint=hint)
    config = config_of(device, backend, compute_path, precision, dtype)
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        with loading_shown():
            encoder = stack.enter_context(SentenceEncoder.open(model, config))
        with progress("embedding") as watch, _replaced(target) as written:
            features = 0
            for start in range(0, len(sentences), _PIECE):
                piece = sentences[start : start + _PIECE]
                vectors = encoder.encode(
                    piece,
                    prompt=prompt,
                    batch=batch,
                    watch=lambda done, _, start=start: watch(start + done, len(sentences)),  # type: ignore[misc]
                )
                if not bool(vectors.isfinite().all()):
                    number = start + int((~vectors.isfinite().all(1)).nonzero()[0]) + 1
                    what, rule = f"the vector of line {number}", "finite"
                    raise q4.InputError(_WHAT, name=what, rule=rule, value="NaN or infinity", where=file)
                features = vectors.shape[1]
                if start == 0 and target.suffix == ".npy":
                    written.write(_npy_header(len(sentences), features))
                _write(written, target.suffix, piece, vectors)
    seconds = round(time.perf_counter() - started, 3)
    record: dict[str, Any] = {"file": file, "model": model, "out": str(target), "sentences": len(sentences)}
    record |= {"features": features, "seconds": seconds}
    if as_json:
        typer.echo(json.dumps(record, indent=2))
        return
    typer.echo(f"{len(sentences):,} vectors of {features:,} features in {target} ({seconds:.2f} s)")


def _read(path: Path) -> list[str]:
    """Return the sentences of a file: its lines, or of ``*.jsonl`` the strings, or each object's ``text``."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        why, close = getattr(error, "strerror", None) or str(error), closest_path(str(path))
        hint = f"Did you mean {close!r}?" if close and isinstance(error, FileNotFoundError) else None
        raise q4.InputError(f"{_WHAT}: the texts can't be read: {why}", where=str(path), hint=hint) from error
    lines = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    if path.suffix == ".jsonl":
        lines = [_text_of(line, number, str(path)) for number, line in enumerate(lines, 1)]
    if not lines:
        raise q4.InputError(_WHAT, name="FILE", rule="a file of at least one line", value="none", where=str(path))
    return lines


def _text_of(line: str, number: int, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    text = value.get("text") if isinstance(value, dict) else value
    if isinstance(text, str):
        return text
    rule = 'a string, or an object with the string "text"'
    raise q4.InputError(_WHAT, name=f"line {number}", rule=rule, value=line[:80], where=where)


def _checked(path: Path, source: Path, *, force: bool) -> Path:
    """Return OUT, or raise before any work."""

    def refuse(rule: str, value: object, hint: str | None = None) -> None:
        raise q4.InputError("output", name="--out", rule=rule, value=value, where=str(path), hint=hint)

    if path.suffix not in _SUFFIXES:
        refuse(f"a file named *{' or *'.join(_SUFFIXES)}", path.suffix)
    if not path.absolute().parent.is_dir():
        refuse("in a folder that is there", "a missing folder", f"Make {path.absolute().parent} first.")
    if path.exists():
        if not path.is_file():
            refuse("a file", "something else")
        if source.exists() and path.samefile(source):
            refuse("another file than FILE", "the same")
        if not force:
            refuse("new", "an existing file", "Use --force to replace it.")
    return path


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that becomes the target when the block ends well, and else is removed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise q4.CheckpointError(f"{_WHAT}: the vectors can't be written: {error.strerror}", where=str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _npy_header(rows: int, columns: int) -> bytes:
    """Return the header of a float32 matrix in NumPy's format 1.0: its magic, a length, and a padded literal."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}"
    text += " " * (-(len(text) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def _write(file: BinaryIO, suffix: str, sentences: list[str], vectors: torch.Tensor) -> None:
    if suffix == ".npy":
        file.write(struct.pack(f"<{vectors.numel()}f", *vectors.flatten().tolist()))
        return
    file.writelines(
        json.dumps({"text": text, "vector": vector}, ensure_ascii=False).encode() + b"\n"
        for text, vector in zip(sentences, vectors.tolist(), strict=True)
    )
