"""The tokenizer of a Hugging Face folder as ``tokenizer.ggml.*`` keys: byte-level BPE, and SentencePiece's BPE.

Reference:
    Keys of the GGUF specification. The score of a piece is minus the rank of the first merge that makes it, as
    SentencePiece's are; what comes out is compared with the folder's own tokenizer on some texts.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, NoReturn

from q4_lm.models.metadata import Metadata
from q4_lm.models.read_json import read_json
from q4_lm.tokenizers.hf_tokenizer import read_chat_template, read_engine, tokenizer_from_hf
from q4_lm.tokenizers.vocabulary import build_tokenizer
from q4_lm.tokenizers.words import RECIPES
from q4core import CheckpointError
from q4core.plugin_api import emit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from q4_lm.tokenizers.words import Recipe

__all__ = ["vocabulary_keys"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ROLES = {"bos": "bos_token", "unknown": "unk_token", "padding": "pad_token"}
_ENDS = ("eos", "eot", "eom")
_OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
"""Vocabularies in other files."""
_DIGITS = r"\p{N}"
_PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\n\n\tlines & tabs\r\n",
    "naïve façade — ÅÉîøü €5.99 ½ 你好世界 こんにちは привет مرحبا 👩‍👩‍👧",
    "def f(x): return x**2 + 1000000 - 3.14159 # it's we'll I'M",
    "A",
    " ",
    "",
)
"""Texts that both tokenizers must cut alike."""


def vocabulary_keys(folder: Path, count: int) -> dict[str, Any]:
    """Return the metadata of a folder's vocabulary; nothing where the folder has none.

    Args:
        folder: The folder.
        count: Rows of the embedding; numbers without a token get an unused one.

    Raises:
        CheckpointError: The kind of vocabulary or its pre-tokeniser has no name in GGUF files, the texts would be
            cut otherwise, or the folder has a vocabulary and no ``tokenizer.json``.
    """
    if not (folder / "tokenizer.json").is_file():
        for name in _OTHERS:
            if (folder / name).is_file():
                make = "transformers.AutoTokenizer.from_pretrained(folder, use_fast=True).save_pretrained(folder)"
                rule, where = "next to tokenizer.json, which alone is read", str(folder / name)
                raise CheckpointError(
                    "GGUF metadata", name=name, rule=rule, value="alone", where=where, hint=f"Make one: {make}."
                )
        emit("q4.vocabulary", level=logging.WARNING, state="none", where=str(folder))
        return {}
    return _Vocabulary(folder, count).metadata()


class _Vocabulary:
    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._where = str(folder / "tokenizer.json")
        self._engine = read_engine(folder)
        self._facts = json.loads(self._engine.to_str())
        self._added: list[dict[str, Any]] = self._facts["added_tokens"]
        self._tokens = self._texts(count)
        self._numbers = {text: number for number, text in enumerate(self._tokens)}

    def _fail(self, name: str, rule: str, value: object) -> NoReturn:
        hint = "Leave tokenizer.json out of the folder to write the model without a vocabulary."
        raise CheckpointError("GGUF metadata", name=name, rule=rule, value=value, where=self._where, hint=hint)

    def _texts(self, count: int) -> list[str]:
        """Return a text for each row of the embedding; of added tokens beyond them, no model knows anything."""
        by_number = {number: text for text, number in self._engine.get_vocab(with_added_tokens=True).items()}
        beyond = sorted({number for number in by_number if number >= count} - {item["id"] for item in self._added})
        if beyond:
            self._fail("tokens", f"numbered below {count}, the rows of the embedding", beyond[-1])
        return [by_number.get(number, f"[PAD{number}]") for number in range(count)]

    def metadata(self) -> dict[str, Any]:
        """Return the keys, checked against the folder's own tokenizer."""
        model = self._facts["model"]
        if model["type"] != "BPE":
            self._fail("model.type", "BPE, byte-level or with byte_fallback", model["type"])
        merges = [item.split(" ", 1) if isinstance(item, str) else item for item in model["merges"]]
        steps = [*_steps(self._facts.get("pre_tokenizer"))]
        if any(step["type"] == "ByteLevel" for step in steps):
            special: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": self._pre(steps)}
            special["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
        elif model.get("byte_fallback"):
            special = {"tokenizer.ggml.model": "llama", **self._scored(merges, steps)}
        else:
            self._fail("pre_tokenizer", "ByteLevel, or byte_fallback in the model", "neither")
        found: dict[str, Any] = {
            **special,
            "tokenizer.ggml.tokens": self._tokens,
            "tokenizer.ggml.token_type": self._types(),
            **self._roles(),
        }
        template, _ = read_chat_template(self._folder)
        if template is not None:
            found["tokenizer.chat_template"] = template
        self._compare(found)
        return found

    def _types(self) -> list[int]:
        known = self._engine.get_vocab(with_added_tokens=True)
        types = [_NORMAL if text in known else _UNUSED for text in self._tokens]
        if self._facts["model"].get("byte_fallback"):
            for byte in range(256):
                if (number := self._numbers.get(f"<0x{byte:02X}>")) is not None:
                    types[number] = _BYTE
        for item in self._added:
            if item["id"] >= len(types):
                continue
            types[item["id"]] = _CONTROL if item["special"] else _USER_DEFINED
        unknown = self._numbers.get(self._facts["model"].get("unk_token") or "")
        if unknown is not None and self._facts["model"].get("byte_fallback"):
            types[unknown] = _UNKNOWN
        return types

    def _pre(self, steps: list[dict[str, Any]]) -> str:
        """Return the name of the pre-tokeniser: the first of those that cut by the same expressions."""
        splits: list[str] = []
        for step in steps:
            if step["type"] == "Split" and "Regex" in step["pattern"] and step["behavior"] != "Removed":
                splits.append(step["pattern"]["Regex"])
            elif step["type"] == "Digits" and step["individual_digits"]:
                splits.append(_DIGITS)
            elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
                splits += list(RECIPES["gpt-2"].splits) if step["use_regex"] else []
            else:
                self._fail("pre_tokenizer", "steps of regular expressions, digits and bytes", step["type"])
        normalizers = [step["type"] for step in _steps(self._facts.get("normalizer"))]
        if normalizers not in ([], ["NFC"]):
            self._fail("normalizer", "none, or NFC", ", ".join(normalizers))
        wanted = (tuple(splits), bool(normalizers), bool(self._facts["model"].get("ignore_merges")))
        alike = [name for name, recipe in RECIPES.items() if _facts_of(recipe) == wanted]
        if not alike:
            self._fail("pre_tokenizer", "that of a model whose name GGUF files have", splits)
        return alike[0]

    def _scored(self, merges: list[list[str]], steps: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what scored pieces have more."""
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            ranks.setdefault("".join(pair), rank)
        scores = [-float(ranks.get(text, len(merges))) for text in self._tokens]
        has_prefix = any(step["type"] == "Prepend" for step in _steps(self._facts.get("normalizer")))
        has_prefix |= any(step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in steps)
        return {"tokenizer.ggml.scores": scores, "tokenizer.ggml.add_space_prefix": has_prefix}

    def _roles(self) -> dict[str, Any]:
        """Return the numbers of tokens by their role, and whether a text begins with one."""
        own = tokenizer_from_hf(self._folder)
        texts = read_json(self._folder / "tokenizer_config.json")
        found: dict[str, Any] = {"tokenizer.ggml.add_bos_token": own.add_bos}
        for role, key in _ROLES.items():
            text = texts.get(key)
            text = text.get("content") if isinstance(text, dict) else text
            number = own.bos if role == "bos" else self._numbers.get(text) if isinstance(text, str) else None
            if number is None and role == "unknown":
                number = self._numbers.get(self._facts["model"].get("unk_token") or "")
            if number is not None:
                found[f"tokenizer.ggml.{role}_token_id"] = number
        main = texts.get("eos_token")
        main = self._numbers.get((main.get("content") if isinstance(main, dict) else main) or "")
        stops = sorted(own.stops, key=lambda number: (number != main, number))
        found |= {f"tokenizer.ggml.{role}_token_id": number for role, number in zip(_ENDS, stops, strict=False)}
        return found

    def _compare(self, found: dict[str, Any]) -> None:
        """Refuse a vocabulary that cuts a text otherwise than the folder's own."""
        again = build_tokenizer(Metadata(found, self._where))
        specials = [item["content"] for item in self._added if item["id"] < len(self._tokens)][:3]
        for text in (*_PROBES, *(f"a {special} b{special}c" for special in specials)):
            wanted = self._engine.encode(text, add_special_tokens=False).ids
            if (ids := again.encode(text, add_bos=False)) != wanted:
                self._fail("tokens", f"such that {text!r} is cut into {wanted[:8]} …", f"{ids[:8]} …")


def _facts_of(recipe: Recipe) -> tuple[tuple[str, ...], bool, bool]:
    return recipe.splits, recipe.nfc, recipe.ignore_merges


def _steps(entry: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normaliser or pre-tokeniser, those of sequences one by one."""
    if entry is None:
        return
    inner = entry.get("pretokenizers") or entry.get("normalizers")
    if entry["type"] != "Sequence":
        yield entry
    for item in inner or ():
        yield from _steps(item)
