"""A made-up run: records for screens, sinks and reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamarl.observability.metrics import EvalMetrics, StepMetrics, UpdateMetrics
from llamarl.observability.screen import CompletionView, ExecutorView, RunInfo, RunView

NOW_S = 1_000.0

UPDATE = UpdateMetrics(
    loss=-0.0123,
    grad_norm=0.834,
    learning_rate=3e-4,
    num_loss_tokens=3900,
    importance_ratio_mean=1.01,
    importance_ratio_max=3.91,
    capped_share=0.0012,
    kl_to_behavior=0.0031,
)


def step_metrics(step: int = 43, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "policy_version": step,
        "wall_s": 1.1 * step,
        "step_s": 1.1,
        "samples_per_s": 116.0,
        "generated_tokens_per_s": 3240.0,
        "reward_mean": 0.624,
        "solve_rate": 0.63,
        "invalid_share": 0.0,
        "response_tokens_mean": 31.4,
        "response_tokens_max": 123,
        "truncated_share": 0.02,
        "staleness_mean": 0.82,
        "staleness_max": 1,
        "staleness_limit": 2,
        "waiting_rollouts": 32,
        "running_rollouts": 96,
        "ready_groups": 9,
        "busy_share": {"generator": 0.97, "trainer": 0.58},
        "sync_s": 0.0043,
        "verdict": "generator-bound over steps 34 to 43, 11s: the trainer waits for rollouts 42% of the time",
    }
    updated = {name: changes.pop(name) for name in UpdateMetrics.__slots__ if name in changes}
    return StepMetrics(**(values | {"update": replace(UPDATE, **updated)} | changes))


def eval_metrics(step: int, accuracy: float, k: int = 1) -> EvalMetrics:
    return EvalMetrics(
        step=step,
        policy_version_min=step,
        policy_version_max=step,
        accuracy=accuracy,
        pass_at_k=min(1.0, accuracy + 0.1 * (k - 1)),
        k=k,
        mean_response_tokens=30.1,
        num_prompts=256,
        wall_s=3.2,
    )


def run_view(step: int = 43, **changes: Any) -> RunView:
    executors = [
        ("generator-0", "decoding 96", 0.97),
        ("reward", "idle", 0.02),
        ("trainer", "waits for rollouts", 0.58),
    ]
    values: dict[str, Any] = {
        "step": step,
        "recent_step_s": 2.0,
        "groups_ready": 8,
        "executors": tuple(
            ExecutorView(name=name, state=state, busy_share=busy, heartbeat_s=NOW_S - 0.5)
            for name, state, busy in executors
        ),
        "generated_tokens_per_s": 3240.0,
        "running_rollouts": 96,
        "waiting_rollouts": 32,
        "metrics": step_metrics(step),
        "rewards": tuple(0.01 * value for value in range(step)),
        "evals": (eval_metrics(0, 0.18), eval_metrics(20, 0.3), eval_metrics(40, 0.42)),
        "completions": (CompletionView(prompt="How many?", response="1+1=2\n#### 2", reward=1.0, advantage=0.38),),
    }
    return RunView(**(values | changes))


@pytest.fixture
def make_metrics() -> Callable[..., StepMetrics]:
    return step_metrics


@pytest.fixture
def make_eval() -> Callable[..., EvalMetrics]:
    return eval_metrics


@pytest.fixture
def make_view() -> Callable[..., RunView]:
    return run_view


@pytest.fixture
def now_s() -> float:
    return NOW_S


@pytest.fixture
def info(tmp_path: Path) -> RunInfo:
    return RunInfo(
        name="running-total",
        model="llama 0.63M",
        folder=tmp_path,
        steps=100,
        groups_per_step=16,
        max_staleness=1,
    )
