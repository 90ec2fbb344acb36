"""The ruler of lines: decision 0024 and the table that it reads agree, and a passed budget is an error."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tools.lines import BUDGETS, count_lines, problems

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "decisions" / "0024-rooms-packages-and-what-stays.md"


def test_the_record_of_budgets_is_true() -> None:
    """Each folder has the budget of decision 0024."""
    rows = re.findall(r"^\| `([\w/-]+)` \| ([\d,]+) \| ?([\w ]*?) \|$", RECORD.read_text("utf-8"), re.MULTILINE)
    said = {folder: (int(budget.replace(",", "")), state) for folder, budget, state in rows}
    assert len(said) == 10
    wrong = []
    for folder, (budget, state) in said.items():
        today = BUDGETS.get(folder)
        right = "to come" if today is None else "" if today == budget else f"{today} in the table"
        if state != right or (ROOT / folder).is_dir() == (state == "to come"):
            wrong.append(f"{folder}: {state or 'as written'}, but {right or 'as written'}")
    assert wrong == []


def test_a_passed_budget_is_a_problem() -> None:
    """Source of every language counts, tests do not; a folder over its budget and a stray file are named."""
    files = {"q4core/a.py": 7, "q4core/b.cuh": 5, "plugins/snn/src/c.hpp": 3, "tests/d.py": 9, "other/e.py": 1}
    totals, unlisted = count_lines(files)
    assert (totals["q4core"], totals["plugins/snn"], unlisted) == (12, 3, ["other/e.py"])
    over = Counter({"plugins/snn": (BUDGETS["plugins/snn"] or 0) + 1})
    assert [sentence.partition(" ")[0] for sentence in problems(over, unlisted)] == ["plugins/snn", "other/e.py"]
