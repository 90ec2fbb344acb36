"""Pre-tokenisers of byte-level BPE by the names of GGUF files: the rules that cut a text into words.

Reference:
    ``tokenizer.ggml.pre`` of the GGUF specification; the expressions are those of the models' own ``tokenizer.json``,
    and for ``default`` that of llama.cpp.
"""

from __future__ import annotations

import attrs
from tokenizers import Regex, pre_tokenizers

__all__ = ["RECIPES", "Recipe"]

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_BEFORE, _AFTER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str) -> str:
    """Return the expression of words that end where capitals begin again."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{_BEFORE}*{_AFTER}+{suffix}|{start}{_BEFORE}+{_AFTER}*{suffix}"
    return words + rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _SPACES


_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u30ff]+",
    _SIGNS + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
)
_NORDIC = r" ?[^(\s|.,!?…。，、।۔،)]+"  # noqa: RUF001  # punctuation of several scripts
_SEED = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES


@attrs.frozen
class Recipe:
    """The rules that cut a text into words before merges apply.

    Args:
        splits: Regular expressions; each cuts what those before it left, and what none matches is a word, too.
        nfc: Whether texts are normalised to NFC first.
        ignore_merges: Whether a word that is in the vocabulary stays whole.
        add_bos: Whether a text starts with BOS where the file does not say.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return the rules as the package ``tokenizers`` runs them."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(words), behavior="isolated") for words in self.splits
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_KINDS = (
    (Recipe((_GPT2,)), "gpt-2 phi-2 mpt olmo jais trillion exaone4 a.x-4.0 mellum gigachat granite-docling"),
    (Recipe((r"\p{N}", _GPT2)), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (
        Recipe((_LLAMA3,), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (Recipe((_LLAMA3,)), "dbrx smaug-bpe"),
    (Recipe((_QWEN2,), nfc=True), "qwen2 deepseek-r1-qwen megrez kormo"),
    (Recipe((_QWEN2,)), "stablelm2"),
    (Recipe((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True), "tekken"),
    (Recipe((_cased(f"{_SUFFIX}?", r"\p{N}{1,3}"),)), "gpt-4o llama4 kanana2"),
    (Recipe(_DEEPSEEK3), "deepseek-v3"),
    (Recipe((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")), "deepseek-coder"),
    (Recipe((_SEED,)), "seed-coder"),
    (Recipe((_NORDIC,)), "poro-chat bloom gpt3-finnish"),
    (Recipe((_NORDIC, r"\p{N}")), "viking"),
    (Recipe((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (Recipe((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), "default"),
)
RECIPES = {name: recipe for recipe, names in _KINDS for name in names.split()}
"""Name of a pre-tokeniser → its rules."""
