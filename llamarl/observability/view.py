"""Snapshot for the screen, which the controller replaces whenever something changed. Screens only read it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from llamarl.observability.metrics import EvalMetrics, StepMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """Facts that stay the same for a whole run."""

    name: str
    """Name of the run."""
    model: str
    """Model that is trained, in a few words, for example `llama 0.63M`."""
    folder: Path
    """The run's folder; while a live screen is drawn, foreign output goes to `output.log` in it."""
    steps: int
    """Optimizer steps in all."""
    groups_per_step: int
    """P: groups that one step consumes."""
    max_staleness: int
    """S: `rollout.max_staleness`, to which the bound adds what the window lets pass."""
    watch: str = ""
    """Address of the page that shows the run in a browser; empty means that there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorView:
    """One executor, now."""

    name: str
    """`generator-0`, `reward`, `trainer`."""
    state: str
    """State of the executor now, in a few words: `decoding`, `waits for rollouts`."""
    busy_share: float
    """`StepMetrics.busy_share` of the last step; NaN when not known yet."""
    heartbeat_s: float
    """When it was last heard of, on the clock of `spans.now_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionView:
    """One response, for people to judge."""

    prompt: str
    """Rendered prompt; its head is shown."""
    response: str
    """Decoded response; its tail is shown."""
    reward: float
    """The reward; NaN for an invalid one."""
    advantage: float
    """Its advantage in its group."""
    turns: int = 1
    """Turns of the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """The loop, now."""

    step: int
    """Optimizer steps completed."""
    recent_step_s: float = math.nan
    """Mean seconds of the last steps, for the ETA; NaN before the first."""
    groups_ready: int = 0
    """Scored groups for the next step, 0 to P (more when the trainer is behind)."""
    executors: tuple[ExecutorView, ...] = ()
    """All executors, in the order to show them."""
    generated_tokens_per_s: float = 0.0
    """Tokens that all generators sample per second, now."""
    running_rollouts: int = 0
    """Rollouts being decoded."""
    waiting_rollouts: int = 0
    """Rollouts queued at the generators."""
    metrics: StepMetrics | None = None
    """The last step; None before the first."""
    rewards: tuple[float, ...] = ()
    """Mean reward of each step so far."""
    evals: tuple[EvalMetrics, ...] = ()
    """Evaluations so far, oldest first."""
    completions: tuple[CompletionView, ...] = ()
    """A few responses of the last step."""
