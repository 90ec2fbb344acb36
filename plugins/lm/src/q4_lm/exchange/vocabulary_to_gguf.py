"""``tokenizer.json`` as the vocabulary of a GGUF file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from q4_lm.models.read_json import read_json
from q4_lm.tokenizers.hf_tokenizer import read_chat_template, read_engine
from q4_lm.tokenizers.words import RECIPES
from q4core import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["vocabulary_keys"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_HEAD = "tokenizer.ggml"
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def vocabulary_keys(home: Path, size: int) -> dict[str, Any]:
    """Return the vocabulary of a folder as metadata; none where the folder has no tokenizer.

    Args:
        home: The folder.
        size: Rows of the embedding; numbers without a token become unused ones.

    Raises:
        CheckpointError: The tokenizer is of a kind that GGUF does not have.
    """
    if not (home / "tokenizer.json").is_file():
        return {}
    engine, facts = read_engine(home), read_json(home / "tokenizer.json")
    numbers: dict[str, int] = engine.get_vocab(with_added_tokens=True)
    size = max(size, *numbers.values()) + (max(numbers.values()) >= size)
    texts = {number: text for text, number in numbers.items()}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(size)]
    model = facts.get("model") or {}
    is_pieces = model.get("byte_fallback") is True
    types = [_NORMAL if number in texts else _UNUSED for number in range(size)]
    for item in facts.get("added_tokens") or []:
        types[item["id"]] = _CONTROL if item.get("special") else _USER_DEFINED
    pairs = [tuple(item.split(" ", 1)) if isinstance(item, str) else tuple(item) for item in model.get("merges") or []]
    keys: dict[str, Any] = {f"{_HEAD}.tokens": tokens, f"{_HEAD}.token_type": types}
    if model.get("type") != "BPE":
        _fail(home, "model.type", "BPE, of bytes or of pieces", model.get("type"))
    if is_pieces:
        for place, text in enumerate(tokens):
            if len(text) == len("<0x00>") and text.startswith("<0x") and text.endswith(">"):
                types[place] = _BYTE
        keys |= {f"{_HEAD}.model": "llama", f"{_HEAD}.scores": _scores(tokens, pairs)}
        keys[f"{_HEAD}.add_space_prefix"] = "Prepend" in json.dumps(
            [facts.get("normalizer"), facts.get("pre_tokenizer")]
        )
    else:
        keys |= {f"{_HEAD}.model": "gpt2", f"{_HEAD}.pre": _pre(home, facts)}
        keys[f"{_HEAD}.merges"] = [" ".join(pair) for pair in pairs]
    config = read_json(home / "tokenizer_config.json")
    own = read_json(home / "generation_config.json") or read_json(home / "config.json")
    for role, name in _ROLES.items():
        said = config.get(name)
        number: int | None = numbers.get(str(said.get("content") if isinstance(said, dict) else said))
        ids = own.get(f"{role}_token_id")
        if role == "eos" and isinstance(ids, (int, list)):
            number = ids if isinstance(ids, int) else next(iter(ids), number)
        if number is not None:
            keys[f"{_HEAD}.{role}_token_id"] = number
            types[number] = _UNKNOWN if role == "unknown" and is_pieces else types[number]
    bos = keys.get(f"{_HEAD}.bos_token_id")
    keys[f"{_HEAD}.add_bos_token"] = bos is not None and engine.encode("", add_special_tokens=True).ids[:1] == [bos]
    template, _ = read_chat_template(home)
    return keys if template is None else {**keys, "tokenizer.chat_template": template}


def _fail(home: Path, name: str, rule: str, value: object) -> NoReturn:
    hint = "Its weights alone can be written as a .safetensors file."
    where = str(home / "tokenizer.json")
    raise CheckpointError("q4 convert", name=name, rule=rule, value=value, where=where, hint=hint)


def _scores(tokens: list[str], pairs: list[tuple[str, ...]]) -> list[float]:
    """Return scores by which pieces join in the order of the merges; the others have the least."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    least = -float(len(pairs) + 1)
    return [-float(ranks[text]) if text in ranks else least for text in tokens]


def _pre(home: Path, facts: dict[str, Any]) -> str:
    """Return the name of the rules that cut a text into words.

    Raises:
        CheckpointError: None of those that are known has them.
    """
    model = facts["model"]
    has_nfc = "NFC" in json.dumps(facts.get("normalizer"))
    for name, recipe in RECIPES.items():
        rules = json.loads(_written(recipe))
        is_same = _plain(facts.get("pre_tokenizer")) == _plain(rules)
        if is_same and recipe.nfc == has_nfc and recipe.ignore_merges == bool(model.get("ignore_merges")):
            return name
    return _fail(home, "pre_tokenizer", f"that of {', '.join(sorted(RECIPES))}", "another")


def _written(recipe: Any) -> str:
    from tokenizers import Tokenizer, models  # noqa: PLC0415  # as the package writes such rules

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = recipe.pre_tokenizer()
    return json.dumps(json.loads(engine.to_str())["pre_tokenizer"])


def _plain(rules: Any) -> Any:
    """Return rules as what they do: expressions in order, and GPT-2's own where the byte level has it built in."""
    steps = (rules or {}).get("pretokenizers") or [rules or {}]
    found = []
    for step in steps:
        if step.get("type") == "Split":
            found.append(step["pattern"].get("Regex", step["pattern"].get("String")))
        elif step.get("type") == "Digits":
            found.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif step.get("type") == "ByteLevel":
            found += [_GPT2] if step.get("use_regex", True) else []
        else:
            found.append(json.dumps(step, sort_keys=True))
    return found


_GPT2 = RECIPES["gpt-2"].splits[0]
