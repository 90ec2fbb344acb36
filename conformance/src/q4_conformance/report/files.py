"""The files of a run: JSON and Markdown."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from q4_conformance.report.certificate import to_text
from q4_conformance.report.markdown import to_markdown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_files(folder: Path, document: Mapping[str, Any]) -> tuple[Path, ...]:
    """Write a document in both forms, and return the files.

    A certificate takes the place of a report. A run that failed, of all cases or of some, takes an older certificate
    away, because it holds no more; one that passed and is partial leaves it alone.

    Args:
        folder: Where to; made where it is not there.
        document: What ``make_certificate`` gave.

    Raises:
        OSError: The folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = document["kind"]
    texts = {"json": to_text(document), "md": to_markdown(document)}
    written = []
    for suffix, text in texts.items():
        name = f"{kind}.{suffix}"
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        temporary.write_text(text, encoding="utf-8")
        written.append(temporary.replace(folder / name))
    if document["standing"] != "partial":
        other = "report" if kind == "certificate" else "certificate"
        for suffix in texts:
            (folder / f"{other}.{suffix}").unlink(missing_ok=True)
    return tuple(written)
