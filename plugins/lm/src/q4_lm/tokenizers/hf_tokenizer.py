"""The tokenizer and the chat template of a Hugging Face directory, read with the package ``tokenizers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Engine

from q4_lm.models.read_json import read_json
from q4_lm.tokenizers.tokenizer import Tokenizer
from q4core import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_chat_template", "tokenizer_from_hf"]


def read_engine(folder: Path) -> Engine:
    """Return what ``tokenizer.json`` of a Hugging Face directory holds; padding and truncation are no part of it.

    Raises:
        CheckpointError: There is no ``tokenizer.json``, or it can't be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        hint = "Only fast tokenizers are read; transformers saves one with tokenizer.save_pretrained(FOLDER)."
        raise CheckpointError("model folder", name=path.name, rule="present", where=str(folder), hint=hint)
    try:
        engine = Engine.from_file(str(path))
    except Exception as error:  # the library raises no other kind
        rule = "a file that the package tokenizers reads"
        raise CheckpointError("model folder", name=path.name, rule=rule, value=str(error), where=str(path)) from error
    engine.no_padding()  # which the file may ask for, as MiniLM's does: padding is no text
    engine.no_truncation()
    return engine


def tokenizer_from_hf(folder: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face directory: byte-level BPE, or pieces with spaces written as U+2581.

    Raises:
        CheckpointError: As ``read_engine``.
    """
    engine = read_engine(folder)
    config = read_json(folder / "tokenizer_config.json")
    ends = {
        *_numbers(read_json(folder / "generation_config.json").get("eos_token_id")),
        *_numbers(read_json(folder / "config.json").get("eos_token_id")),
    }
    for name in ("eos_token", "eot_token"):
        number = engine.token_to_id(_text(config.get(name)) or "")
        ends |= set() if number is None else {number}
    bos = engine.token_to_id(_text(config.get("bos_token")) or "")
    return Tokenizer(
        lambda: engine,
        bos=bos,
        add_bos=bos is not None and engine.encode("", add_special_tokens=True).ids[:1] == [bos],
        stops=ends,
    )


def read_chat_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """Return a directory's chat template, or None, and the special tokens that it may name."""
    config = read_json(folder / "tokenizer_config.json")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    special = {name: text for name in names if (text := _text(config.get(name)))}
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), special
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}.get("default")
    return found if isinstance(found, str) else None, special


def _numbers(value: Any) -> list[int]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]


def _text(value: Any) -> str | None:
    """Return a token's text, as a text or as an added token's record has it."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None
