"""The calculator as an environment and as an outside agent, seed by seed; and the synchronous run, repeated.

    python benchmarks/calculator.py [--seeds 0 1 2] [--steps 200] [--ways environment agent] [--more RESULT]

First all runs of the environment, then those of the agent, which are slower; `--more` takes over the runs of a result
that was made before. Each run is a command of its own (`llamarl train`), of `configs/calculator.toml` or
`configs/calculator_agent.toml`, with the same base model, steps and seed, and its figures are those that it reports
itself. With one generator and staleness 0 a run is repeated with the first seed, and what its rollouts hold is compared
bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import write_result

from llamarl.run.rollouts import rollout_rows

ROOT = Path(__file__).parents[1]
WAYS = {"environment": "configs/calculator.toml", "agent": "configs/calculator_agent.toml"}
SYNCHRONOUS = ["--rollout.max_staleness", "0", "--eval.every_steps", "0"]
BARS = {"accuracy_before": 0.3, "accuracy_after": 0.85, "wall_s": 180.0}
NOTES = [
    "load_average: of the machine after a run; the run itself has five processes, an agent's six.",
    "accuracy: greedy on 256 held-out problems before and after the steps; bars: below, above, and at most.",
    (
        "agent_within_spread: the agent's accuracies after training lie within the lowest and the highest of the "
        "environment's, give or take the width of that range."
    ),
    "repeats: prompts, tokens, log-probabilities, versions and rewards of all recorded rollouts are equal.",
]
COMPARED = ("group_id", "index", "token_ids", "behavior_logprobs", "policy_versions", "reward")


def train(config: str, name: str, seed: int, steps: int, output: Path, *more: str) -> Path:
    """The folder of a run."""
    command = [
        sys.executable, "-m", "llamarl", "train", str(ROOT / config), "--name", name, "--output", str(output),
        "--seed", str(seed), "--steps", str(steps), "--screen.kind", "lines", "--checkpoint.every_steps", "0", *more,
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=1800)
    return output / name


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def figures_of(folder: Path, way: str, seed: int) -> dict[str, Any]:
    """Of one run."""
    summary = json.loads((folder / "summary.json").read_text())
    steps = [row for row in rows(folder / "metrics.jsonl") if row["kind"] == "step"]
    names = ("accuracy_before", "accuracy_after", "wall_s", "staleness_max")
    return {"way": way, "seed": seed} | {name: summary[name] for name in names} | {
        "turns_first": steps[0]["extra.turns_mean"],
        "turns_last": steps[-1]["extra.turns_mean"],
        "invalid_share_max": max(row["invalid_share"] for row in steps),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


def repeats(seed: int, steps: int, output: Path) -> bool:
    """Two synchronous runs write the same rollouts."""
    found = [
        [
            {name: row.get(name) for name in COMPARED}
            for row in rollout_rows(train(WAYS["environment"], name, seed, steps, output, *SYNCHRONOUS))
        ]
        for name in ("one", "other")
    ]
    return found[0] == found[1] and len(found[0]) > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--more", type=Path, help="a result whose runs are taken over")
    parser.add_argument("--synchronous-steps", type=int, default=20, help="of the two runs that must be equal; 0: none")
    options = parser.parse_args()
    before: dict[str, Any] = json.loads(options.more.read_text()) if options.more else {"runs": [], "repeats": None}
    runs = list(before["runs"])
    with tempfile.TemporaryDirectory() as folder:
        steps, first = options.synchronous_steps, [*options.seeds, 0][0]
        is_repeated = repeats(first, steps, Path(folder)) if steps else before["repeats"]
        for way in options.ways:
            for seed in options.seeds:
                run = train(WAYS[way], f"{way}-{seed}", seed, options.steps, Path(folder))
                runs.append(figures_of(run, way, seed))
                print(json.dumps(runs[-1]), flush=True)
    after = {way: [run["accuracy_after"] for run in runs if run["way"] == way] for way in WAYS}
    low, high = (pick(after["environment"], default=0.0) for pick in (min, max))
    spread = high - low
    figures = {
        "repeats": is_repeated,
        "agent_within_spread": all(low - spread <= one <= high + spread for one in after["agent"]),
        "accuracy_after": after,
        "bars": BARS,
        "runs": runs,
    }
    print(json.dumps({name: figures[name] for name in ("repeats", "agent_within_spread", "accuracy_after")}))
    print(write_result("calculator", vars(options) | {"more": str(options.more or "")}, figures, NOTES))


if __name__ == "__main__":
    main()
