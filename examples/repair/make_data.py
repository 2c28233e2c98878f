"""Writes the problems of this example: small repositories, each with a wrong operator and a test that fails.

    python examples/repair/make_data.py

`solutions.jsonl` has commands that often repair another way than the test wants. The base model learns from them how a
command looks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path("runs/examples/repair")
ROWS = {"train": 4000, "test": 128, "solutions": 4000}
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
MODULES = ("cash", "cart", "area", "tax")
RIGHT_SHARE = 0.4
"""Share of solutions that repair what the test wants. The others choose an operator without a look at the test."""


def problem(chance: random.Random) -> tuple[dict[str, Any], str]:
    """Returns a row, and the operator that repairs it."""
    module, function = chance.sample(MODULES, 2)
    wrong, right = chance.sample(sorted(OPERATORS), 2)
    while True:
        a, b, c, d = (chance.randint(2, 9) for _ in range(4))
        expected = OPERATORS[right](a, b)
        if [name for name, operator in OPERATORS.items() if operator(a, b) == expected] == [right]:
            break
    code = f"def {function}(a, b):\n    return a {wrong} b\n"
    test = (
        f"import unittest\nfrom {module} import {function}\n\n\nclass Test(unittest.TestCase):\n"
        f"    def test(self):\n        self.assertEqual({function}({a}, {b}), {expected})\n"
    )
    hidden = [f"{module}:{function}", [c, d], OPERATORS[right](c, d)]
    row = {
        "question": f"{module}.py: a {wrong} b\n{a} ? {b} = {expected}",
        "answer": "",
        "files": {f"{module}.py": code, f"test_{module}.py": test},
        "answer_files": [f"{module}.py"],
        "check": {"calls": [[f"{module}:{function}", [a, b], expected], hidden]},
    }
    return row, right


def command(row: dict[str, Any], operator: str) -> str:
    """Returns what repairs a row if the operator is right."""
    return f"sed -i 's/ . b/ {operator} b/' {row['answer_files'][0]}"


def rows(name: str, count: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file, the same ones each time."""
    chance = random.Random(name)
    for _ in range(count):
        row, right = problem(chance)
        if name == "solutions":
            operator = right if chance.random() < RIGHT_SHARE else chance.choice(sorted(OPERATORS))
            row = {"question": row["question"], "answer": "", "solution": f" {command(row, operator)}\n$ exit\n"}
        yield row


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, count in ROWS.items():
        path = FOLDER / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(name, count)), encoding="utf-8")
        print(f"{path}: {count} rows")


if __name__ == "__main__":
    main()
