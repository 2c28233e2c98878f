"""Writes the problems of this example: functions on lists, each with tests that a program must pass.

    python examples/code/make_data.py

A row of your own file looks the same: `question` is the prompt, `test_list` has assertions that call the
function, and `answer` is empty.
"""

from __future__ import annotations

import json
from pathlib import Path

from llamarl.data.sources.list_functions import ListFunctions

FOLDER = Path("runs/examples/code")
PARTS = {"train": ListFunctions(count=8000, first=9000), "test": ListFunctions(count=256)}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, source in PARTS.items():
        problems = (source[i] for i in range(len(source)))
        rows = ({"question": one.question, "answer": "", "test_list": one.metadata["test_list"]} for one in problems)
        path = FOLDER / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(source)} rows")


if __name__ == "__main__":
    main()
