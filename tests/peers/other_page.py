"""The page of what other libraries pass, from the counts in ``verdicts.json`` and the explanations below.

Nothing here imports a library, so that the page can be compared anywhere.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from other_libraries import SUBJECTS

from q4_conformance import linear_cases

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from q4_conformance import CaseResult

__all__ = ["BAD", "EXPLANATIONS", "PAGE", "Explanation", "explanation_of", "page_of", "summary_of"]

PAGE = Path(__file__).parents[2] / "docs" / "what-others-pass.md"
BAD = ("fail", "crash", "timeout")
_LETTERS = "abcdefgh"
_WIDTH = 120


@attrs.frozen(kw_only=True)
class Explanation:
    """Why cases fail, found by looking at the library; ``test_other_libraries`` shows each one without the kit.

    Args:
        subject: Whose failures.
        groups: Of which groups, as their ids begin; every group where empty.
        dtypes: Of which dtypes of x.
        outcome: Of which outcome.
        text: The reason.
    """

    subject: str
    groups: tuple[str, ...] = ()
    dtypes: tuple[str, ...]
    outcome: str = "fail"
    text: str

    def explains(self, subject: str, case: str, outcome: str) -> bool:
        """Return whether this is the reason of a result."""
        is_group = not self.groups or case.startswith(self.groups)
        return subject == self.subject and is_group and case.split("/")[3] in self.dtypes and outcome == self.outcome


_LAYER = "bitsandbytes `Linear4bit`, eval mode"
_INT4 = "torchao `Int4OpaqueTensor`, weight only"
EXPLANATIONS = (
    Explanation(
        subject=_LAYER,
        groups=("TC-11/strided",),
        dtypes=("bfloat16", "float16"),
        text="The AVX512-BF16 kernel steps through x by the stride of its rows alone. An x whose elements do not lie "
        "side by side gives other numbers, without an error.",
    ),
    Explanation(
        subject=_LAYER,
        dtypes=("bfloat16",),
        outcome="crash",
        text="An empty x (M = 0) ends the process with a floating-point exception in the AVX512-BF16 kernel.",
    ),
    Explanation(
        subject=_LAYER,
        dtypes=("float32",),
        text="On a CPU with AVX512-BF16 the layer computes in bfloat16, also where `compute_dtype` is float32.",
    ),
    Explanation(
        subject=_LAYER,
        dtypes=("float16",),
        text="On a CPU with AVX512-BF16 the layer computes in bfloat16, also where `compute_dtype` is float16. A few "
        "elements are off by more than roundings to float16 explain.",
    ),
    Explanation(
        subject=_INT4,
        groups=("TC-09/bias", "TC-11/cut", "EX-03", "EX-08", "EX-10/zeros"),
        dtypes=("bfloat16", "float16"),
        text="The bias is added to a product that is already rounded to x's dtype. So a sum is rounded twice.",
    ),
)
"""What was found by hand, the special before the general."""

_INTRODUCTION = """\
# What other libraries pass

`q4_conformance.check_linear` judges any function `fn(x, weight, bias)`. Here it judges 4-bit layers of other libraries
on the CPU, by the same cases and bounds as our own backends. Each library is given the tensors that its own files have,
loaded as its users' models are. It is judged by its own claims, which are below the table. What it does
not claim ends as *not declared* and counts neither for nor against it.

- A **pass** means that every element of every draw lies within a bound, against float64 products of the stored bytes.
  The bound follows from float32 arithmetic and from the roundings that are claimed.
- A **failure** is a fact about one version on one CPU, not about a library's worth. Most failures here are a choice
  for speed (16-bit arithmetic). Each reason was found by hand, and `tests/peers/test_other_libraries.py` shows it
  again without the kit.
"""


def explanation_of(subject: str, case: str, outcome: str) -> str:
    """Return the letter of the reason why a case ended badly.

    Raises:
        LookupError: Nobody has looked into it yet.
    """
    for letter, item in zip(_LETTERS, EXPLANATIONS, strict=False):
        if item.explains(subject, case, outcome):
            return letter
    raise LookupError(f"{subject}, {case}: {outcome} without an explanation; look into it and enter it in EXPLANATIONS")


def summary_of(subject: str, results: Iterable[CaseResult]) -> dict[str, dict[str, int]]:
    """Return what is stored of a run: outcome → number of cases, and letter of a reason → cases that failed for it."""
    found = [(result.case, result.outcome.value) for result in results]
    outcomes = [outcome for _, outcome in found]
    whys = [explanation_of(subject, case, outcome) for case, outcome in found if outcome in BAD]
    return {
        name: {key: keys.count(key) for key in sorted({*keys})} for name, keys in (("ends", outcomes), ("why", whys))
    }


def page_of(verdicts: Mapping[str, Any]) -> str:
    """Return the page, as Markdown."""
    usual = linear_cases([SUBJECTS[0].formats[0]])[0].weight_recipe.n
    claims = [
        f"- **{subject.name}:** {subject.in_words}"
        + ("" if subject.rows == usual else f" The cases' usual weight has N = {subject.rows} here, which it takes.")
        for subject in SUBJECTS
    ]
    reasons = [f"- **{letter}** {item.text}" for letter, item in zip(_LETTERS, EXPLANATIONS, strict=False)]
    parts = [_INTRODUCTION, _facts(verdicts["facts"]), _table(verdicts["verdicts"])]
    parts += ["## Reasons", "\n".join(map(_item, reasons)), "## Claims", "\n".join(map(_item, claims))]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _facts(facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    has = [name for name, there in facts["kernels"].items() if there]
    sets = f"Of the instruction sets that kernels are picked by it has: {', '.join(has) or 'none'}"
    maker = "`nox -s others`; `nox -s peers` compares the counts"
    lines = (
        f"- **Versions:** {versions}, Python {facts['python']}",
        f"- **Machine:** {facts['processor']}, {facts['system']}, {facts['threads']} threads. {sets}",
        f"- **Date:** {facts['date']}",
        f"- **Made by:** {maker}. Those of bitsandbytes hold for CPUs with these instruction sets.",
    )
    return "\n".join(map(_item, lines))


def _table(verdicts: Mapping[str, Any]) -> str:
    """Return a row for each library and format, with the letters of the reasons of its failures."""
    lines = ["| library | format | pass | fail | crash | not declared | why |", "|---|---|--:|--:|--:|--:|---|"]
    for subject in SUBJECTS:
        for name in subject.formats:
            ends, why = (verdicts[subject.name][name][key] for key in ("ends", "why"))
            counts = (ends.get("pass", 0), ends.get("fail", 0) + ends.get("timeout", 0), ends.get("crash", 0))
            row = (subject.name, name, *counts, ends.get("not_declared", 0))
            whys = ", ".join(f"{letter}: {number}" for letter, number in why.items())
            lines.append(f"| {' | '.join(map(str, row))} | {whys} |")
    return "\n".join(lines)


def _item(line: str) -> str:
    return textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
