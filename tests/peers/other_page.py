"""The page that shows what other libraries pass: made from ``verdicts.json`` and the explanations below.

Nothing here imports a library, so that the page can be compared anywhere.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from other_libraries import SUBJECTS, Subject

from q4_conformance import linear_cases

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EXPLANATIONS", "PAGE", "Explanation", "explanation_of", "page_of"]

PAGE = Path(__file__).parents[2] / "docs" / "what-others-pass.md"
_BAD = ("fail", "crash", "timeout")
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
        text="The AVX512-BF16 kernel steps through x by the stride of its rows alone, so that an x whose elements do "
        "not lie side by side gives other numbers, without an error.",
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
        text="On a CPU with AVX512-BF16 the layer computes in bfloat16, also where `compute_dtype` is float16: a few "
        "elements are off by more than roundings to float16 explain.",
    ),
    Explanation(
        subject=_INT4,
        groups=("TC-09/bias", "TC-11/cut", "EX-03", "EX-08", "EX-10/zeros"),
        dtypes=("bfloat16", "float16"),
        text="The bias is added to a product that is already rounded to x's dtype, so that a sum is rounded twice.",
    ),
)
"""What was found by hand, the special before the general."""

_INTRODUCTION = """\
# What other libraries pass

`q4_conformance.check_linear` judges any function `fn(x, weight, bias)`. Here it judges 4-bit layers of other libraries
on the CPU, by the same cases and bounds as our own backends. Each library is given the tensors that its own files have,
loaded as its users' models are, and is held to what it says of itself: the claims stand above each table. What it does
not claim ends as *not declared* and counts neither for nor against it.

- A **pass** means that every element of every draw lies within a bound that follows from float32 arithmetic and from
  the roundings that are claimed, against float64 products of the stored bytes.
- A **failure** is a fact about one version on one CPU, not about a library's worth: most of what fails here is a choice
  for speed (16-bit arithmetic), and each reason was looked into by hand and is shown again without the kit by
  `tests/peers/test_other_libraries.py`.
- In the tables, letters name the reasons below them, each with the dtypes of x that it concerns.
"""


def explanation_of(subject: str, case: str, outcome: str) -> str:
    """Return why a case ended badly.

    Raises:
        LookupError: Nobody has looked into it yet.
    """
    for item in EXPLANATIONS:
        if item.explains(subject, case, outcome):
            return item.text
    raise LookupError(f"{subject}, {case}: {outcome} without an explanation; look into it and enter it in EXPLANATIONS")


def page_of(verdicts: Mapping[str, Any]) -> str:
    """Return the page, as Markdown."""
    parts = [_INTRODUCTION, _facts(verdicts["facts"]), "## At a glance", _overview(verdicts["verdicts"])]
    for subject in SUBJECTS:
        found = verdicts["verdicts"][subject.name]
        parts.append(f"## {subject.name}")
        parts.append(_filled(f"Claims: {subject.told}"))
        if subject.rows != linear_cases([subject.formats[0]])[0].weight_recipe.n:
            parts.append(_filled(f"The cases' usual weight has N = {subject.rows} here, which the layer takes."))
        for name in subject.formats:
            parts.append(f"### {subject.name}: {name}")
            parts.append(_table(subject, name, found[name]))
            parts.append(_undeclared(found[name]))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _facts(facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    has = [name for name, there in facts["kernels"].items() if there]
    sets = f"of the instruction sets that kernels are picked by: {', '.join(has) or 'none'}"
    anew = "`nox -s peers -- --regenerate`; `nox -s peers` compares the verdicts"
    lines = (
        f"- **Versions:** {versions}, Python {facts['python']}",
        f"- **Machine:** {facts['processor']}, {facts['system']}, {facts['threads']} threads; {sets}",
        f"- **Date:** {facts['date']}",
        f"- **Made anew by:** {anew}. Those of bitsandbytes hold for CPUs with these instruction sets.",
    )
    return "\n".join(map(_item, lines))


def _count(results: Mapping[str, Mapping[str, str]], *outcomes: str) -> int:
    return sum(result["outcome"] in outcomes for result in results.values())


def _overview(verdicts: Mapping[str, Any]) -> str:
    lines = ["| library | format | pass | fail | crash | not declared |", "|---|---|--:|--:|--:|--:|"]
    for subject in SUBJECTS:
        for name in subject.formats:
            found = verdicts[subject.name][name]
            counts = [_count(found, "pass"), _count(found, "fail", "timeout"), _count(found, "crash")]
            counts.append(_count(found, "not_declared"))
            lines.append(f"| {subject.name} | {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def _table(subject: Subject, name: str, found: Mapping[str, Mapping[str, str]]) -> str:
    """Return a row for each group of cases, and the reasons of its failures below, by letters."""
    texts = {f"{case.contract}/{case.part}": case.text for case in linear_cases([name])}
    letters: dict[str, str] = {}
    lines = ["| cases | what must hold | pass | fail | crash | not declared | why |", "|---|---|--:|--:|--:|--:|---|"]
    for group, text in texts.items():
        results = {case: result for case, result in found.items() if case.startswith(f"{group}/")}
        reasons: dict[str, list[str]] = {}
        for case, result in results.items():
            if result["outcome"] in _BAD:
                why = explanation_of(subject.name, case, result["outcome"])
                letter = letters.setdefault(why, "abcdefgh"[len(letters)])
                dtypes = reasons.setdefault(letter, [])
                if case.split("/")[3] not in dtypes:
                    dtypes.append(case.split("/")[3])
        counts = [_count(results, *outcomes) for outcomes in (("pass",), ("fail", "timeout"), ("crash",))]
        counts.append(_count(results, "not_declared"))
        whys = "; ".join(f"{letter}: {', '.join(dtypes)}" for letter, dtypes in reasons.items())
        lines.append(f"| {group} | {text} | {' | '.join(map(str, counts))} | {whys} |")
    reasons_below = [_item(f"- **{letter}** {why}") for why, letter in letters.items()]
    return "\n".join([*lines, *([""] if reasons_below else []), *reasons_below])


def _item(line: str) -> str:
    return textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _undeclared(found: Mapping[str, Mapping[str, str]]) -> str:
    counts: dict[str, int] = {}
    for result in found.values():
        if result["outcome"] == "not_declared":
            counts[result["message"]] = counts.get(result["message"], 0) + 1
    return "Not declared:\n\n" + "\n".join(_item(f"- {count} × {message}") for message, count in counts.items())
