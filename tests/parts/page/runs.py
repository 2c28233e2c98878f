"""Run folders that are made up: what a run would have written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from llamarl.parts.page.run_data import RunData

BEGAN_S = 1.7e9
CONFIG = """
name = "made"
steps = {steps}
model = {{path = "no/such/model"}}

[data]
train = {{name = "running_total", count = 300}}

[trainer]
learning_rate = {rate}
"""
NASTY = '<script>window.hacked = 1</script><img src=x onerror="window.hacked=1">\u202e\u0007</script>@DATA@'


def read(folder: Path) -> RunData:
    """All that is in the folder of a run."""
    data = RunData(folder)
    data.read_all()
    return data


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def step_row(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "step", "step": step, "wall_s": 2.0 * step, "step_s": 2.0, "samples_per_s": 4.0,
        "reward_mean": 0.2 + 0.005 * step + 0.02 * math.sin(step), "solve_rate": 0.3, "invalid_share": 0.0,
        "response_tokens_mean": 30.0, "response_tokens_max": 60, "truncated_share": 0.0, "staleness_mean": 1.0,
        "staleness_max": 1, "staleness_limit": 2, "grad_norm": 0.1, "loss": -0.1, "kl_to_behavior": 0.001,
        "importance_ratio_mean": 1.0, "importance_ratio_max": 1.5, "capped_share": 0.0,
        "busy_share.trainer": 0.6, "busy_share.generator-0": 0.7, "verdict": "balanced over steps 1 to 2, 4s: equal",
        "extra.entropy_mean": 0.5, "fingerprint": "ab",
    } | changes  # fmt: skip


def rollout_row(step: int, group_id: int, index: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step, "group_id": group_id, "index": index, "prompt_id": "p", "prompt": f"question {group_id}?",
        "answer": "4", "response": "2 + 2 = 4", "outcome": "score", "right": index > 0,
        "reward": float(index), "reason": "",
        "advantage": index - 0.5, "staleness": 1, "finish_reason": "stop", "error": "", "turns": 2,
        "policy_versions": [[step - 2, 2], [-1, 1], [step - 1, 1]], "token_ids": [5, 6, 7, 8],
        "behavior_logprobs": [-0.1, -2.0, 0.0, -0.3], "trainer_logprobs": [-0.2, -1.0, 0.0, None],
    } | changes  # fmt: skip


def flow_row(step: int) -> dict[str, Any]:
    ended_s = BEGAN_S + 2.0 * step
    groups = [[2 * step + one, ended_s - 3, ended_s - 2, ended_s - 1.9, ended_s - 1] for one in range(2)]
    return {
        "kind": "flow", "at_s": ended_s, "step": step, "groups": groups, "trained_s": ended_s,
        "published_s": ended_s + 0.1, "adopted_s": ended_s + 0.2,
    }  # fmt: skip


def span_rows(step: int) -> dict[str, Any]:
    at_s = BEGAN_S + 2.0 * step
    spans = {
        "generator-0": [["generate", at_s - 2, at_s - 0.5]],
        "reward": [["score", at_s - 0.5, at_s - 0.4]],
        "trainer": [["train", at_s - 1, at_s]],
    }
    return {"kind": "spans", "at_s": at_s, "spans": spans}


def eval_row(step: int, accuracy: float, num_prompts: int = 100) -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": step,
        "accuracy": accuracy,
        "num_prompts": num_prompts,
        "pass_at_k": accuracy,
        "k": 1,
    }


def make_run(
    folder: Path, steps: int = 20, *, end: str | None = "finished", rate: float = 1e-5, **changes: Any
) -> Path:
    """A whole run; `changes` go into the metrics of each step."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(steps=steps, rate=rate))
    machine = {"processor": "pretended", "cores": 2, "versions": {"torch": "2.13"}}
    write_rows(folder / "events.jsonl", [{"kind": "start", "at_s": BEGAN_S, "machine": machine, "model": "llama 1M"}])
    if steps:
        write_rows(folder / "metrics.jsonl", [eval_row(0, 0.2)])
        write_rows(folder / "rollouts.jsonl", [{**rollout_row(1, 2, 0, prompt=NASTY, response=NASTY)}])
    for step in range(1, steps + 1):
        add_step(folder, step, **changes)
    if end:
        write_rows(folder / "metrics.jsonl", [eval_row(steps, 0.6)])
        reason = "" if end == "finished" else "trainer died"
        write_rows(folder / "events.jsonl", [{"kind": "end", "at_s": BEGAN_S + 99, "end": end, "reason": reason}])
    return folder


def add_step(folder: Path, step: int, **changes: Any) -> None:
    write_rows(
        folder / "rollouts.jsonl", [rollout_row(step, 2 * step + one, index) for one in (0, 1) for index in (0, 1)]
    )
    write_rows(folder / "events.jsonl", [span_rows(step), flow_row(step)])
    write_rows(folder / "metrics.jsonl", [step_row(step, **changes)])
