"""A run folder as a run with known costs would leave it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

COSTS = {
    "decode_base_s": 1.5e-3,
    "decode_per_rollout_s": 2.5e-5,
    "prefill_token_s": 3e-5,
    "train_base_s": 0.02,
    "train_token_gpu_s": 8e-5,
    "publish_s": 0.002,
    "adopt_s": 0.001,
    "probe_s": 0.002,
    "score_s": 5e-5,
    "call_s": 0.004,
    "controller_call_s": 1e-3,
    "controller_rollout_s": 4e-4,
}
"""What a profile of it should find."""
PROMPTS, GROUP, PROMPT_TOKENS = 4, 8, 26
SHAPE = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "vocab_size": 331,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def write_run(folder: Path, *, steps: int = 30, noise: float = 0.03, outliers: int = 4, **costs: float) -> Path:
    """Writes `folder/run`. The seconds of `outliers` of the steps are six times as long; `costs` replace `COSTS`."""
    known = COSTS | costs
    random = np.random.default_rng(0)
    run, model = folder / "run", folder / "model"
    run.mkdir(parents=True)
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    (run / "config.toml").write_text(
        f'steps = {steps}\n[model]\npath = "{model}"\n[data]\ntrain = {{name = "none"}}\n'
        f"[rollout]\nprompts_per_step = {PROMPTS}\ngroup_size = {GROUP}\nmax_new_tokens = 144\n"
    )
    slow = set(random.choice(np.arange(2, steps + 1), outliers, replace=False).tolist())
    metrics, rollouts, events = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    now_s = 1.0
    for step in range(1, steps + 1):
        lengths = np.clip(np.rint(random.lognormal(3.6, 0.4, PROMPTS)), 5, 144).astype(int)
        rewards = random.integers(0, 2, (PROMPTS, GROUP)).astype(float)
        rewards[0] = 1.0
        factor = (6.0 if step in slow else 1.0) * (1 + noise * random.standard_normal())
        sums = _forwards(known, lengths, random, noise)
        mixed = (rewards != rewards[:, :1]).any(axis=1)
        inputs = int((lengths * GROUP + PROMPT_TOKENS)[mixed].sum())
        train_s = (known["train_base_s"] + known["train_token_gpu_s"] * inputs) * factor
        calls = int(random.integers(10, 30))
        controller_s = known["controller_rollout_s"] * PROMPTS * GROUP + known["controller_call_s"] * calls
        extra = {name: value * (factor if name.endswith("_s") else 1) for name, value in sums.items()} | {
            "num_computed_tokens": int((lengths * GROUP)[mixed].sum()),
            "num_input_tokens": inputs,
            "train_s": train_s,
            "controller_cpu_s": controller_s * factor / 2,
            "background_s": controller_s * factor / 4,
            "trainer_background_s": controller_s * factor / 4,
            "calls": calls,
            "fetch_s": known["adopt_s"],
        }
        metrics.append(
            {"kind": "step", "step": step, "step_s": train_s + 0.2, "num_loss_tokens": int(lengths.sum()) * GROUP}
            | {f"extra.{name}": float(value) for name, value in extra.items()}
        )
        for row in range(PROMPTS):
            rollouts += [
                {"group_id": (step - 1) * PROMPTS + row, "index": index, "token_ids": [1] * int(lengths[row])}
                | {"reward": rewards[row, index], "step": step}
                for index in range(GROUP)
            ]
        now_s = _trace(events, known, now_s, train_s, is_probed=step == 1 or step % 4 == 0)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (run / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    names = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for name, pid in EXECUTORS.items()]
    (run / "trace.json").write_text(json.dumps({"traceEvents": names + events}))
    return run


EXECUTORS = {"trainer": 1, "reward": 2, "generator-0": 3}


def _forwards(
    known: dict[str, float], lengths: np.ndarray, random: np.random.Generator, noise: float
) -> dict[str, float]:
    """The sums over one step's forwards: all rollouts begin together and leave as they end."""
    rows = (np.arange(lengths.max())[:, None] < lengths).sum(axis=1) * GROUP
    seconds = known["decode_base_s"] + known["decode_per_rollout_s"] * rows
    seconds = seconds * (1 + noise * random.standard_normal(len(rows)))
    tokens = PROMPTS * (PROMPT_TOKENS - 1)
    prefill_s = seconds[0] + known["prefill_token_s"] * tokens
    rows, seconds = rows[1:], seconds[1:]
    return {
        "decode_steps": len(rows),
        "decode_rows": rows.sum(),
        "decode_rows_squared": (rows**2).sum(),
        "decode_s": seconds.sum(),
        "decode_rows_s": (rows * seconds).sum(),
        "prefill_steps": 1,
        "prefill_rows": PROMPTS * GROUP,
        "prefill_tokens": tokens,
        "prefill_s": prefill_s,
    }


def _trace(
    events: list[dict[str, Any]], known: dict[str, float], now_s: float, train_s: float, is_probed: bool
) -> float:
    """Adds one step's spans; when the next one starts."""

    def add(executor: str, name: str, start_s: float, length_s: float) -> float:
        event = {"ph": "X", "name": name, "pid": EXECUTORS[executor], "ts": start_s * 1e6, "dur": length_s * 1e6}
        events.append(event)
        return start_s + length_s

    for part in range(4):
        add("reward", "score", now_s + 0.001 * part, known["score_s"] * PROMPTS * GROUP / 4)
    now_s = add("trainer", "train", now_s, train_s)
    now_s = add("trainer", "weight_sync", now_s + known["call_s"], known["publish_s"])
    now_s = add("generator-0", "weight_sync", now_s, 1e-4)
    now_s = add("generator-0", "weight_sync", now_s, known["adopt_s"] - 1e-4)
    if is_probed:
        now_s = add("generator-0", "weight_sync", now_s, known["probe_s"])
    return add("generator-0", "generate", now_s, 0.1)
