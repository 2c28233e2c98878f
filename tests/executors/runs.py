"""Small runs with models beside the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llamarl.config import RunConfig
from llamarl.run.folder import RunFolder, prepare_run_folder
from llamarl.run.prepare import prepare
from llamarl.run.train import run
from tests.end_to_end.tiny import rows


def tiny_config(model: Path, output: Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "name": "models",
        "output": str(output),
        "seed": 3,
        "steps": 3,
        "model": {"path": str(model)},
        "data": {"train": {"name": "running_total", "count": 7}},
        "rollout": {
            "prompts_per_step": 3, "group_size": 4, "max_staleness": 0, "max_new_tokens": 16, "temperature": 0.8,
        },
        "trainer": {"learning_rate": 0.01, "microbatch_tokens": 128, "advantage": "gae", "loss": "ppo_clip"},
        "reference": {"kl_coefficient": 0.05, "kl_in": "reward", "kl_estimator": "k1"},
        "critic": {"learning_rate_scale": 1.0},
        "reward": {"parts": [{"name": "tests.executors.rewards:EvenLength"}]},
        "checkpoint": {},
        "cluster": {"kind": "inline"},
        "screen": {"kind": "none"},
    }  # fmt: skip
    for section, change in changes.items():
        values[section] = values.get(section, {}) | change if isinstance(change, dict) else change
    return RunConfig.model_validate(values)


def train(config: RunConfig, *, resume: bool = False) -> RunFolder:
    folder = prepare_run_folder(config, resume=resume, overwrite=not resume)
    run(config, prepare(config), folder, resume=resume, command_started_s=0.0)
    return folder


def learnt(folder: RunFolder) -> list[dict[str, Any]]:
    """What does not depend on time."""
    names = ("step", "reward_mean", "loss", "grad_norm", "extra.value_loss", "extra.critic_grad_norm",
             "extra.explained_variance", "extra.kl_to_reference")  # fmt: skip
    return [{name: row[name] for name in names} for row in rows(folder.metrics) if row["kind"] == "step"]
