"""A real model learns from environments of other frameworks. `make test-real` in an environment with their packages."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from llamarl.types import OBSERVED
from tests.end_to_end.tiny import llamarl, rows
from tests.nightly import nightly

pytestmark = [nightly("a real model takes minutes"), pytest.mark.timeout(1800)]
TASKSETS = Path(__file__).parents[1] / "parts/episodes/hubs/tasksets"
QUESTIONS = [{"question": f"What is {n} + {n}? End with #### and the number.", "answer": str(2 * n)} for n in range(40)]


TOML = """
name = "hub"
steps = 8
model = {{path = "{model}"}}
data = {{template = "chat", train = {train}}}
rollout = {{environment = {environment}, prompts_per_step = 4, group_size = 4, max_new_tokens = 48}}
generator = {{dtype = "bfloat16"}}
trainer = {{dtype = "bfloat16", learning_rate = 2e-5}}
screen = {{kind = "lines"}}
"""


def trained(folder: Path, **settings: object) -> list[dict]:
    """Rollouts of a run that ended well."""
    (folder / "hub.toml").write_text(TOML.format(**settings))
    done = llamarl("train", folder / "hub.toml", "--output", folder, timeout_s=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    return rows(folder / "hub/rollouts.jsonl")


def is_sampled(row: dict) -> np.ndarray:
    return np.repeat([version != OBSERVED for version, _ in row["policy_versions"]],
                     [count for _, count in row["policy_versions"]])  # fmt: skip


@pytest.mark.skipif(not find_spec("verifiers"), reason="the package verifiers is not installed")
def test_it_learns_on_a_taskset_of_verifiers(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward is the taskset's, and rises."""
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))
    train = '{name = "verifiers", id = "llamarl-sums", count = 3}'
    found = trained(tmp_path, model=smollm2, train=train, environment='"verifiers"')
    assert {row["reward"] for row in found} <= {0.0, 2.0} and all(is_sampled(row).any() for row in found)
    first, last = (np.mean([row["reward"] for row in found if row["step"] in steps]) for steps in ((1, 2), (7, 8)))
    assert last >= first


@pytest.mark.skipif(not find_spec("skyrl_gym"), reason="the package skyrl-gym is not installed")
def test_it_learns_in_an_environment_of_skyrl_gym(smollm2: Path, tmp_path: Path) -> None:
    """Several turns, each with the environment's reward, formatted by the model's own chat template."""
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    environment = '{name = "skyrl_gym", id = "gsm8k_multi_turn", max_turns = 2}'
    train = f'{{name = "jsonl", path = "{data}"}}'
    found = trained(tmp_path, model=smollm2, train=train, environment=environment)
    assert {row["turns"] for row in found} == {1, 2} or {row["turns"] for row in found} == {2}
    assert all(0 <= row["reward"] <= 1.1 for row in found if row["outcome"] != "invalid")
    assert all(is_sampled(row)[-1] for row in found)
