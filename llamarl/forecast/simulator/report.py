"""A simulation as text for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.forecast.simulator.result import Simulation
from llamarl.observability.files import write_atomically
from llamarl.observability.formats import duration, number, percent

BAR = 40
"""Width of the longest bar, in letters."""


def summary(simulation: Simulation) -> dict[str, Any]:
    """Flat JSON. All but the last four are functions of settings and seed."""
    steps_s, accounts, split = simulation.step_s, simulation.accounts, simulation.split
    known = len(steps_s) > 0
    return {
        "end": simulation.end,
        "gpus": split.gpus,
        "trainer_gpus": split.trainer_gpus,
        "generator_replicas": split.replicas,
        "steps": len(simulation.steps),
        "groups": simulation.num_groups,
        "virtual_s": simulation.virtual_s,
        "step_s_mean": float(steps_s.mean()) if known else None,
        **{f"step_s_p{q}": float(np.percentile(steps_s, q)) if known else None for q in (10, 50, 90, 99, 100)},
        "samples_per_s": sum(simulation.staleness.values()) / simulation.virtual_s if simulation.virtual_s else None,
        "staleness_mean": simulation.staleness_mean,
        "staleness_max": max(simulation.staleness, default=0),
        "staleness_bound": simulation.staleness_bound,
        **{f"staleness.{value}": count for value, count in simulation.staleness.items()},
        **{f"idle_share.{role}": 1 - busy for role, busy in accounts.role_share.items()},
        "overlap_share": accounts.overlap_share,
        "verdict": str(simulation.verdict),
        "deaths": simulation.num_deaths,
        "joins": simulation.num_joins,
        "dropped_rollouts": simulation.num_dropped,
        "resubmitted_groups": simulation.num_resubmitted,
        "resumed_rollouts": simulation.num_resumed,
        "invalid_share": float(np.mean([step.invalid_share for step in simulation.steps])) if known else None,
        "wall_s": simulation.wall_s,
        "cpu_s": simulation.cpu_s,
        "controller_ms_per_group": simulation.controller_s_per_group * 1e3,
        "controller_groups_per_s": 1 / simulation.controller_s_per_group if simulation.num_groups else None,
    }


def write_simulation(path: Path, simulation: Simulation) -> None:
    """`summary` as a file. Raises OSError."""
    write_atomically(path, json.dumps(summary(simulation), indent=2) + "\n")


def render(simulation: Simulation) -> str:
    """What the terminal shows."""
    split, steps_s = simulation.split, simulation.step_s
    invalid = float(np.mean([step.invalid_share for step in simulation.steps])) if simulation.steps else 0.0
    facts = {
        "cluster": f"{split.gpus:,} GPUs: {split.trainer_gpus:,} for the trainer, {split.replicas:,} generators of "
        f"{split.generator_gpus}",
        "end": f"{simulation.end} after {len(simulation.steps)} steps, {simulation.num_groups:,} groups and "
        f"{duration(simulation.virtual_s)} of virtual time",
        "idle": ", ".join(f"{role} {percent(1 - busy)}" for role, busy in simulation.accounts.role_share.items()),
        "verdict": str(simulation.verdict),
        "faults": f"{simulation.num_deaths} deaths, {simulation.num_joins} joins; {simulation.num_dropped:,} rollouts "
        f"dropped, {simulation.num_resubmitted:,} groups generated again; {percent(invalid, 2)} of rewards invalid",
        "resumed": f"{simulation.num_resumed:,} rollouts went on under newer weights than they began with",
        "controller": f"{number(simulation.controller_s_per_group * 1e3)} ms of one core per group, "
        f"{_load(simulation)} of a core at this pace; transport comes on top",
        "simulated": f"in {duration(simulation.wall_s)}",
    }
    if len(steps_s):
        marks = ", ".join(f"{name} {duration(float(np.percentile(steps_s, q)))}" for name, q in _QUANTILES)
        facts["step time"] = "\n".join([f"mean {duration(float(steps_s.mean()))}, {marks}", *_histogram(steps_s)])
    stale = f"mean {simulation.staleness_mean:.2f}, proved bound {simulation.staleness_bound}"
    bars = _bars({f"{value} steps": count for value, count in simulation.staleness.items()})
    facts["staleness"] = "\n".join([stale, *bars])
    return "\n".join(f"{name:<12} {text}" for name, text in facts.items())


_QUANTILES = (("p10", 10), ("p50", 50), ("p90", 90), ("p99", 99), ("max", 100))


def _load(simulation: Simulation) -> str:
    """Share of one core that the controller needs when the run takes its virtual time."""
    used_s = simulation.controller_s_per_group * simulation.num_groups
    return percent(used_s / simulation.virtual_s, 1) if simulation.virtual_s else "–"


def _histogram(steps_s: np.ndarray) -> list[str]:
    if steps_s.max() - steps_s.min() < 1e-9 * steps_s.max():
        return []
    counts, edges = np.histogram(steps_s, bins=8)
    return _bars({f"{duration(low)}": int(count) for low, count in zip(edges, counts, strict=False)})


def _bars(counts: dict[str, int]) -> list[str]:
    most = max(counts.values(), default=1)
    return [f"  {name:>9}  {'█' * math.ceil(BAR * count / most):<{BAR}}  {count:,}" for name, count in counts.items()]
