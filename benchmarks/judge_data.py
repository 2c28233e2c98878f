"""How many reference solutions of a data set the reward `code` calls right, wrong and invalid.

    python benchmarks/judge_data.py data/humaneval.jsonl data/mbpp.jsonl [--workers 2] [--output FOLDER]

Each row of a file has its tests and, as `answer`, a solution that passes them, so that all are to be right. Rows that
are not are listed with the reason.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _record import RESULTS, write_result

from llamarl.data.sources.jsonl import Jsonl
from llamarl.parts.episodes.rewards.code import Code
from llamarl.types import Outcome, RewardItem

NAMES = {Outcome.SCORE: "right", Outcome.WRONG: "wrong", Outcome.INVALID: "invalid"}
NOTES = ["A row that is not right has its reason under `others`.", "Seconds are those of the whole file."]


def counts(path: Path, reward: Code) -> dict[str, object]:
    """Of one file: rows by what is said of their solution, the time, and who is not right."""
    rows = list(Jsonl(path=str(path)))
    solutions = [RewardItem(prompt="", response=row.answer, answer=row.answer, metadata=row.metadata) for row in rows]
    start_s = time.perf_counter()
    results = reward.score(solutions)
    took_s = time.perf_counter() - start_s
    said = [NAMES[result.outcome] for result in results]
    others = {
        row.problem_id: f"{word}: {result.reason}"
        for row, word, result in zip(rows, said, results, strict=True)
        if word != "right"
    }
    return {"rows": len(rows)} | {word: said.count(word) for word in NAMES.values()} | {"s": took_s, "others": others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON Lines with `answer` and tests")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpu-s", type=int, default=10)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    reward = Code(workers=options.workers, cpu_s=options.cpu_s, batch_s=3600.0)
    try:
        figures = {path.stem: counts(path, reward) for path in options.files}
    finally:
        reward.close()
    for name, figure in figures.items():
        print(name, figure)
    settings = {"files": [path.name for path in options.files], "workers": options.workers, "cpu_s": options.cpu_s}
    print(write_result("judge_data", settings, figures, NOTES, options.output))


if __name__ == "__main__":
    main()
