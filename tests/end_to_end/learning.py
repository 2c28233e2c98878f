"""A small version of the demo: additions with a carry, which the base model mostly forgets."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SFT = """
output = "{folder}/base"
source = {{name = "jsonl", path = "{folder}/worked.jsonl"}}
steps = 180
rows = 4
row_tokens = 128

[shape]
family = {family}
hidden_size = 64
num_layers = 2
intermediate_size = 128
vocab_size = 270
max_position_embeddings = 64
"""

RUN = """
name = "additions"
output = "{folder}/runs"
steps = 40
model = {{path = "{folder}/base", warm_start = "sft.toml"}}

[data]
train = {{name = "jsonl", path = "{folder}/train.jsonl"}}
eval = {{name = "jsonl", path = "{folder}/held_out.jsonl"}}

[rollout]
prompts_per_step = 16
group_size = 8
max_new_tokens = 6
window = 4

[trainer]
learning_rate = 5e-4

[reward]
parts = ["exact"]

[eval]
every_steps = 20

[checkpoint]
every_steps = 25

[cluster]
kind = "inline"

[screen]
kind = "lines"
"""


@dataclass(frozen=True)
class Trained:
    """A finished run of the task."""

    toml: Path
    folder: Path
    out: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())


def write_task(folder: Path, family: str = '"llama"') -> Path:
    """Data, warm start and run; the run's TOML. The held-out problems are not among the others.

    Args:
        family: of the model, as TOML.
    """
    problems = [
        (10 * tens + ones, gain) for tens in range(1, 9) for ones in range(1, 10) for gain in range(10 - ones, 10)
    ]
    random.Random(0).shuffle(problems)
    teacher = random.Random(1)
    files = {"held_out": problems[:60], "train": problems[60:], "worked": problems[60:] * 4}
    for name, rows in files.items():
        with (folder / f"{name}.jsonl").open("w") as file:
            for start, gain in rows:
                said = start + gain - (10 if teacher.random() < 0.6 else 0)
                row = {"question": f"{start}+{gain}", "answer": start + gain, "solution": str(said)}
                file.write(json.dumps(row) + "\n")
    (folder / "sft.toml").write_text(SFT.format(folder=folder, family=family))
    run = folder / "run.toml"
    run.write_text(RUN.format(folder=folder))
    return run
